"""Computing the inside of blocks again in backward, instead of keeping it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as again


@contextmanager
def _unmoved(block: nn.Module) -> Iterator[None]:
    """Inside, running statistics stay where they are: they have seen this batch."""
    norms = [module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked


def compute_again(model: nn.Module, *, compiled: bool = False) -> None:
    """Keep nothing inside the blocks of a model but what comes in.

    Args:
        compiled: whether the inside is compiled; what computes it again is not, since no compiler follows it.
    """
    blocks = [module for module in model.modules() if type(module).__name__ in ("Block", "Basic", "Bottleneck")]
    blocks = blocks or [module for module in model.modules() if type(module).__name__ in ("HybridConv2d", "ConvNN2d")]
    inside = {part for block in blocks for part in block.modules() if part is not block}
    blocks = [block for block in blocks if block not in inside]
    if not blocks:
        raise ValueError(f"--checkpoint-activations knows no blocks in a {type(model).__name__} of these layers")
    for block in blocks:
        inner = torch.compile(block.forward) if compiled else block.forward

        def forward(*inputs: Any, inner: Any = inner, block: nn.Module = block) -> Any:
            return again(inner, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), _unmoved(block)))

        block.forward = forward
