"""Run a problem on the Triton backend and on the reference in float64, and compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from convnn.functional import convnn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The largest error allowed, relative to the norm of what is compared.
ERROR = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    """Sizes and choices of a problem with random numbers."""

    name: str
    sizes: tuple[int, int, int, int] = (40, 300, 12, 7)  # N, M, E, C
    k: int = 5
    dtype: torch.dtype = torch.float32
    lead: tuple[int, ...] = (2,)
    kernel: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> list[Tensor]:
        """Make the tensors, the same ones every time."""
        generator = torch.Generator().manual_seed(0)
        n, m, e, c = self.sizes
        shapes = [(*self.lead, n, e), (*self.lead, m, e), (*self.lead, m, c)]
        shapes += [(c, 1, self.k)] if self.kernel else []
        return [torch.randn(shape, generator=generator).to(DEVICE, self.dtype) for shape in shapes]


def step(leaves: list[Tensor], k: int, options: dict[str, Any], backend: Any) -> list[Tensor]:
    """The output, and the gradients of all leaves and of a float mask."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    mask = options.get("mask")
    if isinstance(mask, Tensor) and mask.is_floating_point():
        mask = mask.to(leaves[0].dtype).requires_grad_()
        leaves, options = [*leaves, mask], {**options, "mask": mask}
    given = leaves[:4] if mask is None or not isinstance(mask, Tensor) or mask.dtype == torch.bool else leaves[:-1]
    output = convnn(*given, k=k, backend=backend, **options)
    pull = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    grads = torch.autograd.grad(output, leaves, pull, allow_unused=True, materialize_grads=True)
    return [output.detach(), *grads]


def assert_agrees(case: Case, leaves: list[Tensor] | None = None) -> None:
    """Compare with the reference on the same numbers in float64."""
    leaves = case.leaves() if leaves is None else leaves
    ours = step(leaves, case.k, case.options, "triton")
    theirs = step([leaf.double() for leaf in leaves], case.k, case.options, "reference")
    for number, (mine, exact) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.isfinite().all()
        error = (mine.double() - exact).norm() / exact.norm().clamp(min=1e-2)
        assert error < ERROR[case.dtype], f"result {number} is off by {error:.1e}"


def one_bin(keys: int, bins: int, first: int = 3) -> Tensor:
    """The keys a search of so many bins puts into one of them, tile after tile."""
    tile = torch.arange(keys // bins)
    return tile * bins + (first + 13 * tile) % bins
