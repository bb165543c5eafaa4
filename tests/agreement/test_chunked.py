"""What the chunked backend does its own way, where it does it, against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.backends import chunked, combine
from convnn.backends.chunked import with_budget
from convnn.backends.largest import largest
from convnn.functional import convnn


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("width", [448, 451, 600])
@pytest.mark.parametrize("values", ["distinct", "tied", "some NaN", "mostly forbidden"])
def test_the_largest_of_columns_are_the_largest(values: str, width: int, k: int) -> None:
    scores = torch.randn(2, 5, width)
    if values == "tied":
        scores = scores.round()
    if values == "some NaN":
        scores[torch.rand(scores.shape) < 0.01] = torch.nan
    if values == "mostly forbidden":
        scores[torch.rand(scores.shape) < 0.99] = -torch.inf
    best, place = largest(scores, k, ordered=True)
    assert torch.equal(best.nan_to_num(9.0), scores.topk(k).values.nan_to_num(9.0))
    assert torch.equal(scores.gather(-1, place).nan_to_num(9.0), best.nan_to_num(9.0))
    assert all(len(set(row)) == k for row in place.flatten(0, 1).tolist())


def compare(leaves: list[Tensor], backend: Any = "chunked", **options: Any) -> None:
    results = []
    for each in (backend, "reference"):
        output = convnn(*leaves, **options, backend=each)
        given = [leaf for leaf in leaves if leaf.requires_grad]
        pull = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
        gradients = torch.autograd.grad(output, given, pull, allow_unused=True)
        results.append([output, *(g for g in gradients if g is not None)])
    assert len(results[0]) == len(results[1])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("weighting", ["softmax", "uniform"])
@pytest.mark.parametrize(("early", "outputs"), [(True, 3), (False, 12)])
def test_taps_come_before_or_after_the_gather(
    early: bool, outputs: int, weighting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, asked = [], combine._mixes_early
    monkeypatch.setattr(combine, "_mixes_early", lambda *given: said.append(asked(*given)) or said[-1])  # type: ignore[func-returns-value]
    compare(leaves((2, 17, 5), (2, 13, 5), (2, 13, 8), (outputs, 8, 4)), k=4, weighting=weighting)
    assert said == [early, early]


@pytest.mark.parametrize("budget", [60, 2**20])
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("selves", [False, True])
@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_scores_nobody_weighs_by_still_order_the_slots(similarity: str, selves: bool, mask: Any, budget: int) -> None:
    """Whole numbers, so that a product is exact; all keys, and each twice: ties are broken by key."""
    given = [torch.randint(-2, 3, (2, n, 4)).double() for n in (11, 6)]
    query, key = given[0], torch.cat([given[1]] * 2, -2)
    own = torch.arange(-1, 10) if selves else None
    value, kernel = leaves((2, 12, 6), (5, 6, 12))
    if similarity == "cosine":  # directions with few digits
        query, key = (x.sign() * torch.tensor([1.0, 0, 0, 0]) + torch.tensor([0, 1.0, 0, 0]) for x in (query, key))
    options = {"k": 12, "similarity": similarity, "weighting": "uniform", "mask": mask, "self_index": own}
    compare([query, key, value, kernel], with_budget(budget), **options)


def test_a_nan_of_oneself_is_seen_though_scores_do_not_weigh() -> None:
    x, value = torch.randn(9, 4), torch.randn(9, 3)
    x[2] = torch.nan
    for similarity in ("cosine", "dot"):
        options: Any = {"k": 2, "similarity": similarity, "weighting": "uniform", "self_index": torch.arange(9)}
        assert convnn(x, x, value, **options, backend="chunked").isnan().all()
        assert convnn(x, x, value, **options, backend="reference").isnan().all()


def test_scores_of_somebody_else_are_not_written_to() -> None:
    x, laid = torch.randn(7, 4), torch.randn(7, 7)
    before = laid.clone()

    def looked_up(query: Tensor, key: Tensor) -> Tensor:
        return laid if query.shape[-2] == 7 else torch.zeros(7, 1, key.shape[-2])

    convnn(x, x, x, k=3, similarity=looked_up, self_index=torch.arange(7), weighting="uniform", backend=chunked.BACKEND)
    assert torch.equal(laid, before)
