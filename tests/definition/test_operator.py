"""Each function against a double loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.functional import aggregate, convnn, nearest
from convnn.neighbors import Neighbors
from tests import oracle

BACKENDS = ("reference", "chunked")
SIMILARITIES = tuple(oracle.SIMILARITIES)
WEIGHTINGS = tuple(oracle.WEIGHTINGS)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def forbidding(n: int, m: int) -> Tensor:
    """Forbid half of the pairs, everything in row 0, all but two in row 1."""
    mask = torch.rand(n, m) < 0.5
    mask[0] = False
    mask[1] = torch.arange(m) < 2
    return mask


MASKS = {
    "none": lambda n, m: None,  # noqa: ARG005
    "bool": forbidding,
    "float": lambda n, m: randn(n, m).masked_fill(~forbidding(n, m), -torch.inf),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["score", "key"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_nearest_is_the_double_loop(similarity: str, mask: str, order: Any, backend: str) -> None:
    query, key, laid = randn(7, 5), randn(11, 5), MASKS[mask](7, 11)
    found = nearest(query, key, k=4, similarity=similarity, mask=laid, order=order, backend=backend)
    scores, index = oracle.neighbors(query, key, 4, similarity, laid, order)
    assert torch.equal(found.index, index)
    torch.testing.assert_close(found.scores, scores, rtol=1e-12, atol=1e-12)


KERNELS = {  # (O, C/groups) for C = 6
    "sum": None,
    "standard": (4, 6),
    "grouped": (8, 3),
    "depthwise": (6, 1),
    "depthwise with a multiplier": (12, 1),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("kind", KERNELS)
def test_aggregate_is_the_double_loop(kind: str, weighting: str, backend: str) -> None:
    value, sizes = randn(11, 6), KERNELS[kind]
    kernel = None if sizes is None else randn(*sizes, 4)
    bias = randn(6 if sizes is None else sizes[0])
    scores, index = oracle.neighbors(randn(7, 5), randn(11, 5), 4, "dot", forbidding(7, 11))
    ours = aggregate(value, Neighbors(scores, index), kernel, bias, weighting=weighting, backend=backend)
    theirs = oracle.aggregate(value, scores, index, weighting, kernel, bias)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_operator_is_the_double_loop_over_every_leading_index(backend: str) -> None:
    query, key, value = randn(3, 1, 7, 5), randn(2, 11, 5), randn(3, 2, 11, 6)
    mask, kernel, bias = torch.rand(3, 1, 7, 11) < 0.6, randn(4, 3, 3).repeat_interleave(2, 0), randn(8)

    def slow(q: Tensor, x: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return oracle.aggregate(v, *oracle.neighbors(q, x, 3, "cosine", m), "softmax", kernel, bias)

    ours = convnn(query, key, value, kernel, bias, k=3, similarity="cosine", mask=mask, backend=backend)
    theirs = oracle.over_leading(slow, query, key, value, mask)
    assert ours.shape == (3, 2, 7, 8)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_keys_without_a_kernel_is_the_double_loop(backend: str) -> None:
    query, key, value, mask = randn(7, 5), randn(11, 5), randn(11, 3), forbidding(7, 11)
    for similarity in SIMILARITIES:
        ours = convnn(query, key, value, k="all", similarity=similarity, mask=mask, backend=backend)
        found = oracle.neighbors(query, key, 11, similarity, mask)
        theirs = oracle.aggregate(value, *found, "softmax", None, None)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [3, "all"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_gradients_are_those_of_finite_differences(similarity: str, weighting: str, backend: str, k: Any) -> None:
    query, key, value = (randn(*size).requires_grad_() for size in ((4, 5), (6, 5), (6, 2)))
    kernel: Any = None if k == "all" else randn(4, 1, 3).requires_grad_()
    bias, bend = randn(2 if kernel is None else 4).requires_grad_(), randn(4, 6).requires_grad_()
    forbid = torch.zeros(4, 6, dtype=torch.float64)
    forbid[0], forbid[1, 2:] = -torch.inf, -torch.inf  # nothing to choose, and too little

    def run(q: Tensor, x: Tensor, v: Tensor, w: Tensor | None, b: Tensor, m: Tensor) -> Tensor:
        return convnn(q, x, v, w, b, k=k, similarity=similarity, weighting=weighting, mask=m + forbid, backend=backend)

    assert torch.autograd.gradcheck(run, (query, key, value, kernel, bias, bend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [3, "all"])
@pytest.mark.parametrize("similarity", ["euclidean", "sqeuclidean", "cosine"])
def test_gradients_are_finite_at_distance_and_length_zero(similarity: str, k: Any, backend: str) -> None:
    key = randn(6, 5)
    key[0] = 0.0
    query = torch.cat([key[:4], torch.zeros(1, 5, dtype=torch.float64)]).requires_grad_()
    key.requires_grad_()
    output = convnn(query, key, randn(6, 2), k=k, similarity=similarity, backend=backend)
    gradients = torch.autograd.grad(output.square().sum(), (query, key))
    assert output.isfinite().all()
    assert all(g.isfinite().all() for g in gradients)
    assert all(g.abs().max() < 100 for g in gradients)


@pytest.mark.parametrize("similarity", ["euclidean", "sqeuclidean"])
@pytest.mark.parametrize("channels", [5, 12])
def test_distances_survive_a_large_common_offset(similarity: str, channels: int) -> None:
    query, key = randn(7, channels), randn(11, channels)
    far = nearest((query + 1e6).float(), (key + 1e6).float(), k=4, similarity=similarity, backend="reference")
    exact = (query + 1e6).float().double(), (key + 1e6).float().double()
    scores, index = oracle.neighbors(*exact, 4, similarity)
    assert torch.equal(far.index, index)
    torch.testing.assert_close(far.scores.double(), scores, rtol=1e-6, atol=1e-6)


def test_cosine_knows_no_length() -> None:
    query, key = randn(7, 5).float(), randn(11, 5).float()
    plain = nearest(query, key, k=4, similarity="cosine")
    scaled = nearest(query * 1e-30, key * 1e30, k=4, similarity="cosine")
    torch.testing.assert_close(scaled.scores, plain.scores)


def test_ties_go_to_the_smaller_index_in_the_reference() -> None:
    key = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 5.0], [2.0, 7.0], [1.0, 1.0]])
    found = nearest(torch.tensor([[1.0, 0.0]]), key, k=4, similarity="dot", backend="reference")
    assert found.index.tolist() == [[1, 3, 0, 2]]


@pytest.mark.parametrize("similarity", ["dot", "sqeuclidean", "euclidean"])
@pytest.mark.parametrize("channels", [2, 12])
def test_whole_numbers_tie_exactly(similarity: str, channels: int) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        query, key = torch.randint(-1, 2, (5, channels)).float(), torch.randint(-1, 2, (30, channels)).float()
        found = nearest(query, key, k=4, similarity=similarity, backend="reference")
        assert torch.equal(found.index, oracle.neighbors(query.double(), key.double(), 4, similarity)[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_coordinates_are_told_apart_at_any_length(backend: str) -> None:
    n = 20_000
    place = torch.arange(float(n))[:, None] / (n - 1)  # not even whole numbers
    rows = torch.randint(1, n - 1, (50,))
    found = nearest(place[rows], place, k=3, similarity="euclidean", order="key", backend=backend)
    assert torch.equal(found.index, rows[:, None] + torch.tensor([-1, 0, 1]))


@pytest.mark.parametrize("similarity", ["euclidean", "sqeuclidean"])
@pytest.mark.parametrize("channels", [3, 12])
def test_a_distance_beyond_the_range_is_far_and_not_forbidden(similarity: str, channels: int) -> None:
    x = torch.randn(5, channels) * 1e25
    found = nearest(x, -x, k=5, similarity=similarity)
    assert found.filled.all()
    assert found.scores.isfinite().all()
