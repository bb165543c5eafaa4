"""ViT: patches as tokens, blocks of attention and two linear layers, a class token for the answer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import checks
from convnn.descriptor import sinusoids
from convnn.layers import shapes
from convnn.models.factories import Attention, attention_of, head, placed

# Channels, blocks, heads, patch.
CONFIGURATIONS: dict[str, tuple[int, int, int, int]] = {
    "vit_tiny": (192, 12, 3, 16),
    "vit_small": (384, 12, 6, 16),
    "vit_base": (768, 12, 12, 16),
    "vit_large": (1024, 24, 16, 16),
    "vit_huge": (1280, 32, 16, 14),
}


class Mlp(nn.Module):
    """Two linear layers on each token."""

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, dim)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


class Block(nn.Module):
    """Attention, then the linear layers, each normalised before and added to what came in."""

    def __init__(self, dim: int, attn: nn.Module, hidden: int, norm: Any, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attn, self.drop = norm(dim), attn, nn.Dropout(dropout)
        self.norm2, self.mlp = norm(dim), Mlp(dim, hidden, dropout)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """A linear map of every patch."""

    def __init__(self, patch: int, in_channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, patch, patch)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.proj(x)


class ViT(nn.Module):
    """A vision transformer whose attention may be any layer; names and shapes are timm's.

    Args:
        layer: what stands where the attention stood: a name of :mod:`convnn.models.factories` or a factory
            ``(dim, num_heads)``.
        image_size: the size positions are learned for; any multiple of the patch can be given to ``forward``.
        positions: ``"learned"``, resized for other sizes, or ``"sinusoidal"``, counted along the sequence.
        norm: ``"final"``, after the last block, or ``"patch"``, after the patch embedding.
        qkv_bias: whether the attention's first projection has a bias, where the layer is given by name.
        dropout: after attention and in the linear layers.
        eps: of the LayerNorms.
        init: how it starts: as timm's do, or as torch's layers do by themselves. Layers of a factory start as they were
            made.
        options: of the layer, where it is given by name.

    Shape:
        ``(B, C, H, W)`` with sides that are multiples of the patch to ``(B, num_classes)``.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        patch: int,
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 224,
        layer: str | Attention = "attention",
        positions: Literal["learned", "sinusoidal"] = "learned",
        norm: Literal["final", "patch"] = "final",
        qkv_bias: bool = True,
        dropout: float = 0.0,
        eps: float = 1e-6,
        init: Literal["timm", "torch"] = "timm",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        checks.one_of("positions", positions, ("learned", "sinusoidal"))
        checks.one_of("norm", norm, ("final", "patch"))
        checks.whole("num_classes", num_classes, 0)
        checks.whole("in_channels", in_channels, 1)
        checks.whole("patch", patch, 1)
        checks.one_of("init", init, ("timm", "torch"))
        size = shapes.each("image_size", image_size, 2)
        self.patch, self.grid = patch, tuple(side // patch for side in self._divided(size, patch))
        options = {"qkv_bias": qkv_bias, **options} if isinstance(layer, str) else options
        make, normal = attention_of(layer, options), partial(nn.LayerNorm, eps=eps)
        with placed(device):
            self.patch_embed = PatchEmbed(patch, in_channels, dim)
            self.norm_pre = normal(dim) if norm == "patch" else nn.Identity()
            self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
            tokens = self.grid[0] * self.grid[1] + 1
            learned = torch.empty(1, tokens, dim) if positions == "learned" else None
            self.pos_embed = None if learned is None else nn.Parameter(learned)
            blocks = [Block(dim, make(dim, heads), 4 * dim, normal, dropout) for _ in range(depth)]
            self.blocks = nn.Sequential(*blocks)
            self.norm = normal(dim) if norm == "final" else nn.Identity()
            self.head = head(dim, num_classes)
        self.num_classes, self.num_features, self.head_hidden_size = num_classes, dim, dim
        nn.init.normal_(self.cls_token, std=1e-6)
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        if init == "timm":
            kept = set() if isinstance(layer, str) else {id(m) for b in blocks for m in b.attn.modules()}
            _initialise(module for module in self.modules() if id(module) not in kept)
        self.to(dtype=dtype)

    def _divided(self, size: tuple[int, ...], patch: int) -> tuple[int, ...]:
        if any(side % patch or not side for side in size):
            raise ValueError(f"the sides of an image must be multiples of the patch, {patch}, got {tuple(size)}")
        return size

    def _positions(self, grid: tuple[int, ...], device: torch.device) -> Tensor:
        """What is added to the class token and the cells of a grid, ``(1, 1 + N, dim)``."""
        if self.pos_embed is None:
            return sinusoids(torch.arange(1.0 + grid[0] * grid[1], device=device), self.cls_token.shape[-1])[None]
        # What is exported is for every size; resized to their own, positions stay what they are.
        if not torch.compiler._is_exporting_flag and grid == self.grid:
            return self.pos_embed
        first, cells = self.pos_embed[:, :1], self.pos_embed[:, 1:]
        cells = cells.mT.unflatten(2, self.grid)
        resized = F.interpolate(cells.float(), size=grid, mode="bicubic", antialias=True, align_corners=False)
        return torch.cat([first, resized.to(first.dtype).flatten(2).mT], 1)

    def embedded(self, x: Tensor) -> Tensor:
        """The tokens that enter the first block, ``(B, 1 + N, dim)``."""
        self._divided(tuple(x.shape[-2:]), self.patch)
        cells = self.patch_embed(x)
        tokens = self.norm_pre(cells.flatten(2).mT)
        tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1).to(tokens.dtype), tokens], 1)
        return tokens + self._positions(tuple(cells.shape[-2:]), x.device).to(tokens.dtype)

    def forward_features(self, x: Tensor) -> Tensor:
        """The tokens after the last block."""
        return self.norm(self.blocks(self.embedded(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Classify by the class token."""
        return x[:, 0] if pre_logits else self.head(x[:, 0])

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:  # noqa: ARG002
        """Put a new last layer for so many classes, or none for 0."""
        self.num_classes = num_classes
        self.head = head(self.num_features, num_classes).to(self.cls_token)


def _initialise(modules: Iterable[nn.Module]) -> None:
    """Start linear layers small, and their biases at 0."""
    for module in modules:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
