"""The small ResNets for CIFAR-10 with shortcuts that have no parameters.

Weights: akamaster/pytorch_resnet_cifar10, BSD-2-Clause. Images are scaled to [0, 1], then normalised with ``MEAN`` and
``STD``.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from convnn_lab.pretrained.files import filled, tensors

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut: every second pixel, and channels of zeros on both sides."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.added = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        around = (0, 0, 0, 0, self.added, self.added)
        return F.relu(y + F.pad(x[..., :: self.stride, :: self.stride], around))


class ResNet(nn.Module):
    """Three stages of n blocks with 16, 32 and 64 channels: 6n + 2 layers.

    Shape:
        ``(B, 3, 32, 32)`` to ``(B, classes)``.
    """

    layer1: nn.Module
    layer2: nn.Module
    layer3: nn.Module

    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        widths = (16, 16, 32, 64)
        for stage in (1, 2, 3):
            first = Block(widths[stage - 1], widths[stage], 1 if stage == 1 else 2)
            others = (Block(widths[stage], widths[stage], 1) for _ in range(blocks - 1))
            setattr(self, f"layer{stage}", nn.Sequential(first, *others))
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.layer3(self.layer2(self.layer1(y)))
        return self.linear(y.mean((-2, -1)))


def resnet_cifar(path: Path) -> nn.Module:
    """Read a ResNet of any depth out of a safetensors file; it has as many blocks as there are in the file."""
    state = tensors(path)
    numbers = [int(found[1]) for name in state if (found := re.match(r"layer1\.(\d+)\.", name))]
    if not numbers or "linear.bias" not in state:
        raise ValueError(
            f"{path} must hold layer1.0.conv1.weight ... and linear.bias, got {', '.join(sorted(state)[:4])}"
        )
    return filled(ResNet(1 + max(numbers), state["linear.bias"].shape[0]), state)
