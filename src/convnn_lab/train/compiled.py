"""Compiling a model: block by block where it has blocks, since one compiled block serves all that are alike."""

from __future__ import annotations

from torch import nn


def compile_parts(model: nn.Module) -> None:
    """Compile the blocks of a model, or all of it; its modules and the names of its weights stay what they are."""
    blocks = getattr(model, "blocks", None)
    for part in [model] if blocks is None else blocks:
        part.compile()
