"""Residual networks of bottleneck blocks (He et al., Deep Residual Learning, 2015, table 1)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

EXPANSION = 4  # a block's output channels over its inner channels


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut: (n, in, h, w) -> (n, 4 * inner, h / stride, w / stride)."""

    def __init__(self, in_channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out_channels = inner * EXPANSION
        self.conv1 = nn.Conv2d(in_channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Images (n, 3, h, w) -> logits (n, num_classes); with `labels` (n,) the mean cross entropy, a scalar."""

    def __init__(self, depths: Sequence[int], width: int = 64, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = width
        for i, depth in enumerate(depths):
            inner = width * 2**i
            blocks = []
            for j in range(depth):
                blocks.append(Bottleneck(channels, inner, stride=2 if i > 0 and j == 0 else 1))
                channels = inner * EXPANSION
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        self.num_stages = len(depths)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for i in range(self.num_stages):
            x = self.get_submodule(f"layer{i + 1}")(x)
        logits = self.fc(self.avgpool(x).flatten(1))
        return logits if labels is None else F.cross_entropy(logits, labels)


def resnet50(width: int = 64, num_classes: int = 1000) -> ResNet:
    """ResNet-50; a `width` below 64 narrows every layer alike."""
    return ResNet((3, 4, 6, 3), width, num_classes)
