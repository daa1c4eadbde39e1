"""Architectures of our own: small, plain torch, for demonstrations and tests."""

from autoplan.models.mlp import MLP
from autoplan.models.resnet import ResNet, resnet50
from autoplan.models.unet import UNet

__all__ = ["MLP", "ResNet", "UNet", "resnet50"]
