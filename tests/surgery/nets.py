"""Small models of the kinds people have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        plain = stride == 1 and inputs == outputs
        self.downsample = None if plain else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class ResNet(nn.Module):
    """torchvision's names, at a size of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 5, 2, 2)
        self.layer1 = nn.Sequential(Block(4, 4, 1), Block(4, 4, 1))
        self.layer2 = nn.Sequential(Block(4, 6, 2), Block(6, 6, 1))
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.conv1(x).relu())).mean((-2, -1)))


class Branches(nn.Module):
    """Everything on maps at once: one, two and three axes, groups, dilation, and a module at two names."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Conv1d(6, 6, 3, padding="same", padding_mode="circular", dilation=2)
        self.again = self.line
        self.depthwise = nn.Conv2d(3, 6, (3, 2), padding=(1, 0), groups=3)
        self.volume = nn.Conv3d(1, 2, (1, 2, 3), stride=(1, 1, 2), padding=(0, 1, 1), padding_mode="replicate")

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x)  # (B, 6, H, W - 1)
        lines = self.again(self.line(y.flatten(2)))
        return self.volume(lines.unflatten(2, y.shape[2:])[:, None])


class Scaled(nn.Conv2d):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Transformer(nn.Module):
    """torch's own, called with all its masks."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": batch_first}
        self.inner = nn.Transformer(16, 4, 2, 2, **sizes)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        source, target = x, x[:, :5] * 2
        padding = torch.zeros(x.shape[0], x.shape[1], dtype=torch.bool)
        padding[1, -2:] = True
        mask = nn.Transformer.generate_square_subsequent_mask(5).isinf()
        if not self.batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding, "tgt_mask": mask}
        y = self.inner(source, target, **masks, tgt_is_causal=True)
        return y if self.batch_first else y.transpose(0, 1)


class Cross(nn.Module):
    """Attention of everything torch's layer can do, and its weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        keys = x[:, :7, : self.attn.kdim] * 1.5
        values = x[:, :7, : self.attn.vdim] - 1
        tokens = (x, keys, values) if self.attn.batch_first else tuple(t.transpose(0, 1) for t in (x, keys, values))
        output, weights = self.attn(*tokens, average_attn_weights=False)
        return torch.cat([output.flatten(), weights.flatten()])


MAPS, TOKENS = (2, 3, 12, 9), (2, 9, 16)
MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "resnet": (ResNet, MAPS),
    "branches": (Branches, MAPS),
    "transformer": (lambda: Transformer(True), TOKENS),
    "transformer, batch second": (lambda: Transformer(False), TOKENS),
    "cross": (lambda: Cross(kdim=12, vdim=10, batch_first=True), TOKENS),
    "cross, added keys": (lambda: Cross(add_bias_kv=True, add_zero_attn=True), TOKENS),
    "cross, no bias": (lambda: Cross(bias=False, batch_first=True), TOKENS),
}
