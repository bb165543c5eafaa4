"""A small vision transformer for MNIST, with timm's attention in it.

Weights: researchase/vit-mnist-explorations, MIT. Pixels are scaled to [0, 1], then normalised by ``MEAN`` and ``STD``.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention
from torch import Tensor, nn

from convnn_lab.pretrained.files import filled, tensors

MEAN, STD = (0.1307,), (0.3081,)

# What the file calls a thing, and what it is called here.
NAMES = (
    (r"to_patch_embedding\.1\.", "embed."),
    (r"transformer\.layers\.(\d+)\.0\.norm\.", r"blocks.\1.norm1."),
    (r"transformer\.layers\.(\d+)\.0\.fn\.to_qkv\.", r"blocks.\1.attn.qkv."),
    (r"transformer\.layers\.(\d+)\.0\.fn\.to_out\.0\.", r"blocks.\1.attn.proj."),
    (r"transformer\.layers\.(\d+)\.1\.norm\.", r"blocks.\1.norm2."),
    (r"transformer\.layers\.(\d+)\.1\.fn\.net\.0\.", r"blocks.\1.fc1."),
    (r"transformer\.layers\.(\d+)\.1\.fn\.net\.3\.", r"blocks.\1.fc2."),
    (r"mlp_head\.0\.", "norm."),
    (r"mlp_head\.1\.", "head."),
)


class Block(nn.Module):
    """Attention in heads of their own size, then two linear maps with a ReLU between them; each after a norm."""

    def __init__(self, width: int, heads: int, head_width: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, attn_head_dim=head_width, qkv_bias=False)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.relu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """Patches of 4 by 4 pixels, a class token, learned positions, blocks, and a classifier on the class token.

    Shape:
        ``(B, 1, 28, 28)`` to ``(B, 10)``.
    """

    def __init__(self, width: int = 64, depth: int = 6, heads: int = 4, head_width: int = 64, inner: int = 128) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.zeros(1, 50, width))
        self.blocks = nn.Sequential(*(Block(width, heads, head_width, inner) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        patches = F.unfold(images, 4, stride=4).mT  # (B, 49, 16)
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), self.embed(patches)], 1)
        return self.head(self.norm(self.blocks(tokens + self.pos_embedding)[:, 0]))


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The file's tensors under the names they have here."""
    names = {}
    for name in state:
        new = name
        for pattern, ours in NAMES:
            new = re.sub(f"^{pattern}", ours, new)
        names[name] = new
    return {names[name]: tensor for name, tensor in state.items()}


def vit_mnist(path: Path) -> nn.Module:
    """Read the vision transformer out of a safetensors file."""
    return filled(ViT(), renamed(tensors(path)))
