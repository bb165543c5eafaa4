"""Similarities and weightings with something to set or to learn, each against plain numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convnn.backends.chunked import with_budget
from convnn.functional import convnn, nearest
from convnn.similarity import Bilinear, Mahalanobis, Similarity, euclidean, minkowski
from convnn.weighting import LearnedTemperature, on_exp, softmax, softmax_at, sparsemax, uniform
from tests.definition.test_operator import SIMILARITIES, randn
from tests.oracle import SIMILARITIES as PLAIN


def positive(channels: int) -> Tensor:
    root = randn(channels, channels)
    return root @ root.mT + torch.eye(channels, dtype=torch.float64)


def bent_bilinear(channels: int) -> Bilinear:
    similarity = Bilinear(channels, dtype=torch.float64)
    nn.init.normal_(similarity.weight)
    return similarity


def by_loop(query: Tensor, key: Tensor, score: Any) -> Tensor:
    pairs = itertools.product(query, key)
    return torch.tensor([float(score(q, k)) for q, k in pairs], dtype=torch.float64).reshape(len(query), len(key))


def made(name: str, channels: int) -> tuple[Similarity, Any]:
    """A similarity, and the score of one pair written out."""
    matrix, bent = positive(channels), bent_bilinear(channels)
    made: dict[str, tuple[Similarity, Any]] = {
        "minkowski(1.5)": (minkowski(1.5), lambda q, k: -(((q - k).abs() ** 1.5).sum() ** (1 / 1.5))),
        "minkowski(3)": (minkowski(3), lambda q, k: -(((q - k).abs() ** 3).sum() ** (1 / 3))),
        "Mahalanobis": (Mahalanobis(matrix), lambda q, k: -((q - k) @ matrix @ (q - k)).sqrt()),
        "Bilinear": (bent, lambda q, k: q @ bent.weight.detach() @ k),
    }
    return made[name]


MADE = ["minkowski(1.5)", "minkowski(3)", "Mahalanobis", "Bilinear"]


@pytest.mark.parametrize("channels", [5, 12])
@pytest.mark.parametrize("name", MADE)
def test_made_similarities_are_their_formulas(name: str, channels: int) -> None:
    similarity, score = made(name, channels)
    query, key = randn(4, channels), randn(6, channels)
    expected = by_loop(query, key, score)
    torch.testing.assert_close(similarity(query, key).detach(), expected, rtol=1e-10, atol=1e-10)
    for backend in ("reference", "chunked"):
        found = nearest(query, key, k=3, similarity=similarity, backend=backend)
        torch.testing.assert_close(
            found.scores.detach(), expected.sort(descending=True).values[:, :3], rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("name", SIMILARITIES)
def test_named_similarities_are_their_formulas_in_many_channels(name: str) -> None:
    query, key = randn(4, 12), randn(6, 12)
    expected = by_loop(query, key, lambda q, k: PLAIN[name](q.tolist(), k.tolist()))
    found = nearest(query, key, k="all", similarity=name, order="key")
    torch.testing.assert_close(found.scores, expected, rtol=1e-10, atol=1e-10)
    value = randn(6, 3)
    whole = convnn(query, key, value, k="all", similarity=name)
    torch.testing.assert_close(whole, expected.softmax(-1) @ value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("channels", [4, 10])
@pytest.mark.parametrize("name", [*SIMILARITIES, *MADE])
def test_gradients_are_those_of_finite_differences(name: str, channels: int) -> None:
    similarity: Any = made(name, channels)[0] if name in MADE else name
    query, key, value = (randn(*size).requires_grad_() for size in ((3, channels), (5, channels), (5, 2)))
    for k in (2, "all"):
        for backend in ("reference", with_budget(30)):

            def run(q: Tensor, x: Tensor, v: Tensor, k: Any = k, backend: Any = backend) -> Tensor:
                return convnn(q, x, v, k=k, similarity=similarity, backend=backend)

            assert torch.autograd.gradcheck(run, (query, key, value))


@pytest.mark.parametrize("channels", [4, 10])
@pytest.mark.parametrize("name", [*SIMILARITIES, *MADE])
@pytest.mark.parametrize("k", [3, "all"])
def test_gradients_are_finite_where_query_and_key_meet(name: str, channels: int, k: Any) -> None:
    similarity: Any = made(name, channels)[0] if name in MADE else name
    key = randn(6, channels)
    key[0], key[1] = 0.0, 1.0
    query = key[:4].clone().requires_grad_()
    key.requires_grad_()
    output = convnn(query, key, randn(6, 2), k=k, similarity=similarity)
    for gradient in torch.autograd.grad(output.square().sum(), (query, key)):
        assert gradient.isfinite().all()
        assert gradient.abs().max() < 100


def test_large_and_tiny_numbers_keep_their_distance() -> None:
    query, key = torch.randn(4, 3), torch.randn(6, 3)
    for scale in (1e-20, 1e20):
        ours = minkowski(3)(query * scale, key * scale) / scale
        torch.testing.assert_close(ours, minkowski(3)(query, key), rtol=1e-4, atol=1e-5)


def test_learned_similarities_learn() -> None:
    query, key, value = randn(4, 5), randn(6, 5), randn(6, 2)
    for similarity in (bent_bilinear(5), Mahalanobis(positive(5), learned=True)):
        (parameter,) = similarity.parameters()

        def run(weight: Tensor, similarity: Any = similarity) -> Tensor:
            scores = torch.func.functional_call(
                similarity, {name: weight for name, _ in similarity.named_parameters()}, (query, key)
            )
            return scores.softmax(-1) @ value

        for k in (6, "all"):
            for backend in ("reference", with_budget(20)):
                output = convnn(query, key, value, k=k, similarity=similarity, backend=backend)
                (ours,) = torch.autograd.grad(output.square().sum(), parameter)
                (theirs,) = torch.autograd.grad(run(parameter).square().sum(), parameter)
                torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_mahalanobis_is_estimated_from_data() -> None:
    torch.manual_seed(1)
    spread = torch.tensor([[2.0, 0.0, 0.0], [1.5, 0.5, 0.0], [0.0, 0.0, 0.1]], dtype=torch.float64)
    data = randn(4, 5000, 3) @ spread.mT
    covariance = spread @ spread.mT
    fitted = Mahalanobis.fit(data, shrinkage=0.0)
    assert not list(fitted.parameters())
    torch.testing.assert_close(fitted.factor @ fitted.factor.mT, torch.linalg.inv(covariance), rtol=0.1, atol=0.1)
    query, key = randn(3, 3), randn(4, 3)
    # Whitening and Euclidean distance are the same thing.
    whitened = euclidean(query @ fitted.factor, key @ fitted.factor)
    torch.testing.assert_close(fitted(query, key), whitened)
    flat = Mahalanobis.fit(data[..., :1].expand(4, 5000, 3), learned=True)  # no inverse without shrinkage
    assert flat(query, key).isfinite().all()
    assert [name for name, _ in flat.named_parameters()] == ["factor"]


def test_impossible_choices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"minkowski needs a p of at least 1, .* got 0.5"):
        minkowski(0.5)
    with pytest.raises(ValueError, match=r"shape \(E, E\), got \(2, 3\) of torch.float32"):
        Mahalanobis(torch.randn(2, 3))
    with pytest.raises(ValueError, match="must be symmetric"):
        Mahalanobis(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    with pytest.raises(ValueError, match=r"positive semi-definite, got an eigenvalue of -1"):
        Mahalanobis(torch.diag(torch.tensor([1.0, -1.0])))
    with pytest.raises(ValueError, match=r"at least two rows of data, got 1"):
        Mahalanobis.fit(torch.randn(1, 3))
    for make in (softmax_at, LearnedTemperature):
        with pytest.raises(ValueError, match=r"the temperature must be greater than 0, got 0"):
            make(0)


SCORES = [1.0, 0.2, -0.5, 0.9]


def weights(weighting: Any, scores: list[float] = SCORES) -> list[float]:
    given = torch.tensor(scores, dtype=torch.float64)
    return weighting(given, given.isfinite()).tolist()


def test_made_weightings_are_their_formulas() -> None:
    def plain(scores: list[float]) -> list[float]:
        powers = [math.exp(s) for s in scores]
        return [p / sum(powers) for p in powers]

    assert weights(softmax_at(0.3)) == pytest.approx(plain([s / 0.3 for s in SCORES]))
    assert weights(LearnedTemperature(0.3)) == pytest.approx(plain([s / 0.3 for s in SCORES]), rel=1e-6)
    assert weights(on_exp(softmax)) == pytest.approx(plain([math.exp(s) for s in SCORES]))
    assert weights(on_exp(uniform)) == [1.0] * 4
    assert weights(sparsemax, [0.5, 0.4, -3.0]) == pytest.approx([0.55, 0.45, 0.0])


@pytest.mark.parametrize("k", [4, "all"])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_made_weightings_leave_empty_slots_out(backend: str, k: Any) -> None:
    x, value = randn(7, 5), randn(7, 3)
    mask = torch.ones(7, 7).tril().bool()
    for weighting in (softmax_at(0.2), LearnedTemperature(0.2), on_exp(softmax), on_exp(sparsemax), "sparsemax"):
        ours = convnn(x, x, value, k=k, mask="causal", weighting=weighting, backend=backend)
        for i in range(7):
            k_here = "all" if k == "all" else min(k, i + 1)
            alone = convnn(x[i : i + 1], x[: i + 1], value[: i + 1], k=k_here, weighting=weighting)  # type: ignore[arg-type]
            torch.testing.assert_close(ours[i : i + 1], alone)
    assert mask[0].sum() == 1


def test_a_learned_temperature_learns_and_can_be_reset() -> None:
    x = randn(6, 4)
    weighting = LearnedTemperature(0.5)
    output = convnn(x, x, x, k=3, mask="causal", weighting=weighting)
    output.square().sum().backward()
    assert weighting.log_temperature.grad is not None
    assert weighting.log_temperature.grad.isfinite()
    assert weighting.log_temperature.grad != 0
    with torch.no_grad():
        weighting.log_temperature.add_(1.0)
    weighting.reset_parameters()
    assert weighting.temperature.item() == pytest.approx(0.5)
