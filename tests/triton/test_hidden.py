"""What may not be chosen, what is hardly chosen, and what cannot be: NaN, the lowest numbers, -inf, odd candidates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.backends.triton import choice
from convnn.functional import aggregate, nearest
from convnn.functional import convnn as operator
from convnn.neighbors import Neighbors
from convnn.similarity import Bilinear, Mahalanobis
from tests.agreement.test_backends import BUDGETS
from tests.triton.runner import DEVICE, Case, assert_agrees

BACKENDS: dict[str, Any] = {"reference": "reference", "triton": "triton", **BUDGETS}
SIMILARITIES: dict[str, Any] = {
    "dot": "dot",
    "cosine": "cosine",
    "pearson": "pearson",
    "euclidean": "euclidean",
    "sqeuclidean": "sqeuclidean",
    "bilinear": Bilinear(12),
    "mahalanobis": Mahalanobis(torch.eye(12) + 0.1, learned=True),
}


# The interpreter's own.
NUMPY = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def gradients(leaves: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The output, and the gradients of everything there is."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    module = options["similarity"]
    parameters = list(module.parameters()) if isinstance(module, torch.nn.Module) else []
    output = operator(*leaves, **options, backend="triton")
    pull = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output, *torch.autograd.grad(output, [*leaves, *parameters], pull)]


@NUMPY
@pytest.mark.parametrize("hidden", ["mask", "padding", "candidates"])
@pytest.mark.parametrize(
    ("name", "spoilt"),
    [*((name, torch.nan) for name in SIMILARITIES), *((name, torch.inf) for name in list(SIMILARITIES)[:5])],
)
def test_what_nobody_may_choose_is_in_no_gradient(name: str, hidden: str, spoilt: float) -> None:
    similarity = SIMILARITIES[name]
    similarity = similarity if isinstance(similarity, str) else similarity.to(DEVICE)
    clean = Case("", (7, 15, 12, 5), k=3, lead=(2,), kernel=False).leaves()
    dirty = [leaf.clone() for leaf in clean]
    dirty[1][:, 4, 2:5], dirty[2][:, 4] = spoilt, spoilt
    shown = torch.arange(15, device=DEVICE) != 4
    options: dict[str, Any] = {"k": 3, "similarity": similarity}
    if hidden == "candidates":
        options["candidates"] = shown.nonzero()[:, 0]
    elif hidden == "padding":
        options["mask"] = shown[None, :]
    else:
        options["mask"] = shown.expand(7, -1).clone()
        options["mask"][2] = False
        dirty[0][:, 2, 1] = spoilt
    ours, theirs = gradients(dirty, options), gradients(clean, options)
    torch.testing.assert_close(ours, theirs)
    assert (ours[2][:, 4] == 0).all()
    assert (ours[3][:, 4] == 0).all()


@pytest.mark.parametrize("name", ["cosine", "pearson", "bilinear", "mahalanobis"])
def test_what_may_be_chosen_still_reaches_its_rows_behind_a_mask(name: str) -> None:
    similarity = SIMILARITIES[name]
    similarity = similarity if isinstance(similarity, str) else similarity.to(DEVICE)
    query, key, value = Case("", (7, 15, 12, 5), lead=(), kernel=False).leaves()
    key[4, 3], query[6, 0] = torch.nan, torch.nan
    mask = torch.ones(7, 15, dtype=torch.bool, device=DEVICE)
    mask[2:, 4] = False
    output, into_query, into_key, _ = gradients([query, key, value], {"k": 3, "mask": mask, "similarity": similarity})[
        :4
    ]
    lost = torch.tensor([True, True, False, False, False, False, True], device=DEVICE)
    assert torch.equal(output.isnan().any(-1), lost)
    assert torch.equal(into_query.isnan().any(-1), lost)
    assert into_key[4].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [15, 300])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_lowest_finite_number_forbids_nothing(backend: str, m: int, dtype: torch.dtype) -> None:
    """What may hardly be chosen comes last, and is chosen where there is nothing better."""
    query, key, value = (x.to(dtype) for x in Case("", (6, m, 12, 5), lead=(2,), kernel=False).leaves())
    mask = torch.full((6, m), torch.finfo(dtype).min, dtype=dtype, device=DEVICE)
    mask[:, [1, m - 2]] = 0.0
    mask[3] = torch.finfo(dtype).min
    mask[4, 2:] = -torch.inf
    for similarity in ("scaled_dot", "sqeuclidean", "euclidean"):
        found = nearest(query, key, k=5, mask=mask, similarity=similarity, backend=BACKENDS[backend])
        assert torch.equal((found.index >= 0).sum(-1), torch.tensor([5, 5, 5, 5, 2, 5], device=DEVICE).expand(2, -1))
        first = found.index[:, [0, 1, 2, 5], :2].sort(-1).values
        assert (first == torch.tensor([1, m - 2], device=DEVICE)).all()
        assert (found.index[:, 4, 0] == 1).all()
    whole: Any = {"weighting": "uniform", "k": m, "mask": mask}
    ours = operator(query, key, value, **whole, backend=BACKENDS[backend]) if m == 15 else None
    if ours is not None:
        theirs = operator(query.double(), key.double(), value.double(), **{**whole, "mask": mask.double()})
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("k", [4, 15, "all"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_lowest_numbers_counts_all_alike(backend: str, k: Any) -> None:
    query, key, value = Case("", (6, 15, 12, 5), lead=(2,), kernel=False).leaves()
    mask = torch.full((6, 15), torch.finfo(torch.float32).min, device=DEVICE)
    mask[:3, 2:6] = 0.0
    ours = operator(query, key, value, k=k, mask=mask, backend=BACKENDS[backend])
    few = operator(query[:, :3], key[:, 2:6], value[:, 2:6], k=4, backend="reference")
    torch.testing.assert_close(ours[:, :3], few)
    if k != 4:  # which four of equals are chosen is nobody's promise
        torch.testing.assert_close(ours[:, 3:], value.mean(-2, keepdim=True).expand(2, 3, -1))


@NUMPY
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_score_of_minus_infinity_forbids_without_a_mask(backend: str) -> None:
    query, key, value = Case("", (6, 15, 12, 5), lead=(2,), kernel=False).leaves()
    query = query.abs() + 0.1
    key[:, 2:6] = -torch.inf
    key[1] = -torch.inf  # nobody is left
    options: dict[str, Any] = {"similarity": "dot", "backend": BACKENDS[backend]}
    scores, index = nearest(query, key, k=13, **options)
    assert torch.equal((index >= 0).sum(-1), torch.tensor([[11], [0]], device=DEVICE).expand(2, 6))
    assert torch.equal(scores == -torch.inf, index < 0)
    assert not ((index >= 2) & (index < 6)).any()
    assert all(len(set(row[:11])) == 11 for row in index[0].tolist())
    rest = [*range(2), *range(6, 15)]
    for weighting in ("softmax", "uniform"):
        ours = operator(query, key, value, k=13, weighting=weighting, **options)
        theirs = operator(query[0], key[0, rest], value[0, rest], k=11, weighting=weighting, similarity="dot")
        torch.testing.assert_close(ours[0], theirs)
        assert (ours[1] == 0).all()


@pytest.mark.parametrize("backend", ["reference", "chunked", "triton"])
def test_keys_may_be_candidates_more_often_than_there_are_keys(backend: str) -> None:
    key = torch.zeros(6, 12, device=DEVICE)
    key[2], key[5] = 1.0, 2.0
    for count in (40, 300, 33_000):
        among = torch.zeros(count, dtype=torch.int64, device=DEVICE)
        among[3], among[-2:] = -1, torch.tensor([2, 5])
        found = nearest(torch.ones(2, 12, device=DEVICE), key, k=3, candidates=among, backend=backend)
        assert found.index.tolist() == [[5, 2, 0]] * 2


@pytest.mark.parametrize(
    "options", [{}, {"mask": "causal", "order": "key"}, {"candidates": torch.arange(1, 30)}], ids=str
)
def test_more_neighbours_than_a_program_holds_are_found_elsewhere(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "FUSED", 5)
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    assert_agrees(Case("", (9, 31, 12, 7), k=8, options=options))


@pytest.mark.parametrize("weighting", ["softmax", "uniform"])
def test_everything_may_be_dropped(weighting: str) -> None:
    leaves: Any = [x.requires_grad_() for x in Case("", (6, 15, 12, 5), k=4).leaves()]
    options: list[Any] = [{"k": 4}, {"k": "all"}]
    for option, given in zip(options, (leaves, leaves[:3]), strict=True):
        output = operator(*given, **option, dropout_p=1.0, weighting=weighting, backend="triton")
        assert (output == 0).all()
        into = torch.autograd.grad(output.sum(), given, materialize_grads=True, allow_unused=True)
        assert all((grad == 0).all() for grad in into)


@pytest.mark.skipif(DEVICE != "cpu", reason="a CUDA device would stop")
def test_neighbours_that_are_no_keys_are_refused() -> None:
    value, index = torch.randn(5, 4), torch.tensor([[0, 5]])
    for backend in ("reference", "chunked", "triton"):
        with pytest.raises(ValueError, match=r"neighbors.index must be below the number of keys, 5, got 5"):
            aggregate(value, Neighbors(torch.zeros(1, 2), index), backend=backend)
