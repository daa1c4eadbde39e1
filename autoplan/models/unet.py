"""A U-Net (Ronneberger et al., 2015) with padded convolutions and group norms: skips cross several stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _double_conv(in_channels: int, out_channels: int, num_groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1),
        nn.GroupNorm(num_groups, out_channels),
        nn.SiLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1),
        nn.GroupNorm(num_groups, out_channels),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Images (n, in_channels, h, w) -> (n, out_channels, h, w), h and w multiples of 2**depth.

    With `target` of the output's shape the result is the mean squared error, a scalar.
    """

    def __init__(self, in_channels: int, out_channels: int, width: int = 64, depth: int = 4, num_groups: int = 4) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(_double_conv(a, b, num_groups) for a, b in zip([in_channels, *widths[:-2]], widths[:-1], strict=True))
        self.middle = _double_conv(widths[-2], widths[-1], num_groups)
        self.upsample = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True))
        self.up = nn.ModuleList(_double_conv(2 * a, a, num_groups) for a in widths[-2::-1])
        self.head = nn.Conv2d(width, out_channels, 1)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for upsample, block in zip(self.upsample, self.up, strict=True):
            x = block(torch.cat([skips.pop(), upsample(x)], dim=1))
        y = self.head(x)
        return y if target is None else F.mse_loss(y, target)
