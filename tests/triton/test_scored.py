"""Scores of chosen pairs, and cosine among half types: against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.functional import convnn, nearest
from convnn.masks import causal
from tests.triton.runner import DEVICE, Case, assert_agrees

HALF, BRAIN = torch.float16, torch.bfloat16
PADDING = torch.arange(300) % 3 != 1
SHIFT = torch.randn(21, 300, generator=torch.Generator().manual_seed(3))


def mixing(case: Case, outputs: int, groups: int = 1) -> list[Tensor]:
    """The leaves of a case with a kernel that mixes channels."""
    *leaves, _ = case.leaves()
    kernel = torch.randn(outputs, case.sizes[3] // groups, case.k, generator=torch.Generator().manual_seed(2))
    return [*leaves, kernel.to(DEVICE, case.dtype)]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"similarity": "cosine"},
        {"similarity": "pearson", "order": "key"},
        {"similarity": "euclidean"},
        {"weighting": "sparsemax", "similarity": "dot"},
        {"mask": causal, "self_index": torch.arange(21)},
        {"mask": SHIFT},
        {"candidates": torch.arange(3, 250, 2), "similarity": "cosine"},
    ],
    ids=lambda options: ", ".join(options) or "softmax",
)
def test_kernels_that_mix_channels_learn_through_scores(options: dict[str, Any], groups: int) -> None:
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    case = Case("", (21, 300, 12, 6), k=4, options=options)
    assert_agrees(case, mixing(case, 10, groups))


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("weighting", ["softmax", "uniform"])
def test_half_types_mix_by_cosine(dtype: torch.dtype, weighting: str) -> None:
    case = Case("", (21, 300, 12, 6), k=4, dtype=dtype, options={"similarity": "cosine", "weighting": weighting})
    assert_agrees(case, mixing(case, 10))


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("mask", [None, PADDING, causal], ids=["all", "padding", "causal"])
@pytest.mark.parametrize("keys", [40, 300])
def test_half_types_are_ranked_by_cosine(dtype: torch.dtype, mask: Any, keys: int) -> None:
    mask = mask[:keys].to(DEVICE) if isinstance(mask, Tensor) else mask
    query, key, *_ = Case("", (21, keys, 12, 6), dtype=dtype).leaves()
    # Of very different lengths, up to where squares leave the range of their type.
    spread = 100.0 if dtype == BRAIN else 12.0
    key = key * torch.exp2(torch.linspace(-spread, spread / 2, keys, device=DEVICE))[:, None].to(dtype)
    key[:, 5] = 0.0
    options: Any = {"k": 5, "similarity": "cosine", "mask": mask}
    ours = nearest(query, key, backend="triton", **options)
    theirs = nearest(query.double(), key.double(), backend="reference", **options)
    assert torch.equal(ours.filled, theirs.filled)
    torch.testing.assert_close(ours.scores.double(), theirs.scores, rtol=2**-15, atol=2**-15)


def test_a_nan_among_half_types_reaches_its_rows_and_no_others() -> None:
    query, key, value = (torch.randn(2, *shape, device=DEVICE).bfloat16() for shape in ((7, 12), (300, 12), (300, 6)))
    kernel = torch.randn(8, 6, 3, device=DEVICE).bfloat16()
    query[0, 2, 1], query[1, 3, 0], key[1, 4, 0] = torch.nan, torch.inf, torch.nan
    for weighting in ("uniform", "softmax"):
        options: Any = {"k": 3, "similarity": "cosine", "weighting": weighting}
        lost = [convnn(query, key, value, kernel, backend=b, **options).isnan() for b in ("triton", "reference")]
        assert torch.equal(*lost)
        assert lost[0].any()
        shown = torch.arange(300, device=DEVICE) != 4
        output = convnn(query, key, value, kernel, backend="triton", mask=shown, **options)
        assert torch.equal(output.isnan().any(-1).nonzero().cpu(), torch.tensor([[0, 2], [1, 3]]))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_accepts_the_operators() -> None:
    from convnn.backends.triton.mix import levels  # noqa: PLC0415
    from convnn.backends.triton.scored import score  # noqa: PLC0415

    query, key = (torch.randn(1, 2, n, 8, device=DEVICE).requires_grad_() for n in (9, 11))
    index = torch.randint(-1, 11, (1, 2, 9, 3), device=DEVICE)
    torch.library.opcheck(score.overload, (query, key, index))
    torch.library.opcheck(levels.overload, (query.detach().bfloat16(),))


def test_what_is_scored_compiles() -> None:
    leaves = [leaf.requires_grad_() for leaf in mixing(Case("", (9, 30, 12, 6), k=4), 10)]

    def run(*tensors: Tensor) -> Tensor:
        return convnn(*tensors, k=4, similarity="cosine", backend="triton")

    ours, theirs = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves), run(*leaves)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), leaves) for out in (ours, theirs)))
