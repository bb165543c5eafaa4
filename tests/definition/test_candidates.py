"""Candidates and selves: against a double loop, and where candidates may stand."""

from __future__ import annotations

import pickle
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from convnn.backends.chunked import with_budget
from convnn.blend import Blend
from convnn.candidates import Cells, Random, grid, random
from convnn.descriptor import between, pixels, scaled_concat
from convnn.functional import convnn, explain, nearest
from convnn.masks import bigbird, causal, fixed, neighborhood, strided, window
from convnn.similarity import minkowski
from convnn.weighting import on_exp, softmax, softmax_at
from tests import oracle
from tests.definition.test_operator import MASKS, randn

BACKENDS: dict[str, Any] = {"reference": "reference", "chunked": "chunked", "blocks": with_budget(20)}
CPU = torch.device("cpu")
CANDIDATES = [1, 2, 5, 6, 9]
SELVES = [3, 5, -1, 0, 2, 9, 10]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["score", "key"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("own", ["none", "true", "one"])
@pytest.mark.parametrize("narrowed", [True, False])
def test_a_narrowed_search_is_the_double_loop(narrowed: bool, own: str, mask: str, order: Any, backend: str) -> None:
    query, key, laid = randn(7, 5), randn(11, 5), MASKS[mask](7, 11)
    given: Any = {"k": 4, "mask": laid, "order": order, "similarity": "cosine", "backend": BACKENDS[backend]}
    chosen: Any = {"candidates": CANDIDATES} if narrowed else {}
    if own != "none":
        given |= {"self_index": torch.tensor(SELVES), "self_score": own}
        chosen |= {"own": SELVES, "own_score": 1.0 if own == "one" else None}
    given |= {"candidates": torch.tensor(CANDIDATES) if narrowed else None}
    found = nearest(query, key, **given)
    scores, index = oracle.neighbors(query, key, 4, "cosine", laid, order, **chosen)
    assert torch.equal(found.index, index)
    torch.testing.assert_close(found.scores, scores, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("weighting", ["softmax", "uniform"])
def test_all_candidates_are_the_double_loop(weighting: Any, own: bool, backend: str) -> None:
    query, key, value, mask = randn(7, 5), randn(11, 5), randn(11, 3), MASKS["float"](7, 11)
    given: Any = {"self_index": torch.tensor(SELVES)} if own else {}
    chosen: Any = {"own": SELVES} if own else {}
    ours = convnn(
        query,
        key,
        value,
        k="all",
        candidates=torch.tensor(CANDIDATES),
        mask=mask,
        weighting=weighting,
        backend=BACKENDS[backend],
        **given,
    )
    found = oracle.neighbors(query, key, 6, "scaled_dot", mask, candidates=CANDIDATES, **chosen)
    torch.testing.assert_close(ours, oracle.aggregate(value, *found, weighting, None, None), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [3, "all"])
@pytest.mark.parametrize("own", ["none", "true", "one"])
def test_gradients_are_those_of_finite_differences(own: str, k: Any, backend: str) -> None:
    query, key, value = (randn(*size).requires_grad_() for size in ((4, 5), (6, 5), (6, 2)))
    bend = randn(4, 6).requires_grad_()
    forbid = torch.zeros(4, 6, dtype=torch.float64)
    forbid[0], forbid[1, 2:] = -torch.inf, -torch.inf
    options: Any = {} if own == "none" else {"self_index": torch.tensor([4, 0, -1, 2]), "self_score": own}

    def run(q: Tensor, x: Tensor, v: Tensor, m: Tensor) -> Tensor:
        among = torch.tensor([0, 1, 3, 5])
        return convnn(q, x, v, k=k, candidates=among, mask=m + forbid, backend=BACKENDS[backend], **options)

    assert torch.autograd.gradcheck(run, (query, key, value, bend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_oneself_comes_first_and_once(backend: str) -> None:
    x = randn(3, 9, 5)
    x[:, 2:5] = 0.0  # cosine 0 with everyone, oneself included
    among = random(6)
    oneself = torch.arange(9)
    for _ in range(20):
        found = nearest(x, x, k=4, similarity="cosine", candidates=among, self_index=oneself, backend=BACKENDS[backend])
        assert (found.index[..., 0] == oneself).all()
        assert (found.index[..., 1:] != oneself[:, None]).all()
        assert found.filled.all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_wins_over_oneself(backend: str) -> None:
    x = randn(9, 5)
    mask = ~torch.eye(9, dtype=torch.bool)
    mask[4] = False
    found = nearest(x, x, k=3, mask=mask, self_index=torch.arange(9), backend=BACKENDS[backend])
    without = nearest(x, x, k=3, mask=mask, backend=BACKENDS[backend])
    assert torch.equal(found.index, without.index)
    assert found.index[4].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nobody_sees_a_key_that_is_no_candidate(backend: str) -> None:
    query, key, value = randn(7, 5), randn(11, 5), randn(11, 3)
    among = torch.tensor(CANDIDATES)
    key[0], value[0] = torch.nan, torch.nan
    counts: list[Any] = [3, "all"]
    for k in counts:
        ours = convnn(query, key, value, k=k, candidates=among, backend=BACKENDS[backend])
        alone = convnn(query, key[among], value[among], k=k)
        torch.testing.assert_close(ours, alone)


def test_rules_see_the_numbers_of_the_whole() -> None:
    x = randn(9, 5)
    seen = []

    def rule(i: Tensor, j: Tensor) -> Tensor:
        seen.append(j.unique().tolist())
        return j <= i

    found = nearest(x, x, k=3, candidates=torch.tensor([8, 3, 0]), mask=rule, backend="reference")
    assert seen[0] == [0, 3, 8]
    assert (found.index <= torch.arange(9)[:, None]).all()
    assert sorted(found.index[8].tolist()) == [0, 3, 8]
    assert sorted(found.index[4].tolist()) == [-1, 0, 3]


SIZES = [(17,), (16,), (5, 9), (9, 5), (14, 14), (3, 200), (5, 6, 7), (1, 4), (2, 2)]


@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("margin", [0, 1])
@pytest.mark.parametrize("placement", ["linspace", "stride"])
@pytest.mark.parametrize("size", SIZES)
def test_a_grid_stands_inside_the_map(size: tuple[int, ...], placement: Any, margin: int, padding: int) -> None:
    axes = len(size)
    if min(size) <= 2 * margin:
        with pytest.raises(ValueError, match="leaves nothing"):
            grid(4**axes, margin=margin)(torch.Size(), Cells(size), CPU)
        return
    padded = tuple(side + 2 * padding for side in size)
    for side in (1, 2, 3, 4):
        options: Any = {"size": padded, "padding": padding, "margin": margin, "placement": placement}
        index = grid(side**axes, **options)(torch.Size(), Cells((prod(padded),)), CPU)
        expected = []
        whole = side**axes >= prod(n - 2 * margin for n in size)
        for n in size:
            left = n - 2 * margin
            if whole or left <= side:
                places = list(range(left))
            elif placement == "stride":
                places = [i * left // side for i in range(side)]
            else:
                places = [int(i * (left - 1) / max(1, side - 1)) for i in range(side)]
            expected.append([padding + margin + place for place in places])
        cells = [torch.stack(torch.meshgrid(*map(torch.tensor, expected), indexing="ij"), -1).reshape(-1, axes)]
        strides = torch.tensor([prod(padded[a + 1 :]) for a in range(axes)])
        by_hand = (cells[0] * strides).sum(-1)
        if index is None:
            index = torch.arange(prod(padded))
        assert torch.equal(index, by_hand)
        assert len(set(index.tolist())) == len(index)


def test_a_grid_in_one_dimension_is_as_published() -> None:
    for n, r, margin in ((16, 4, 0), (197, 32, 0), (197, 25, 2), (33, 7, 3)):
        index = grid(r, margin=margin)(torch.Size(), Cells((n,)), CPU)
        assert index is not None
        assert torch.equal(index, torch.linspace(margin, n - 1 - margin, r).long())
    strided = grid(4, placement="stride")(torch.Size(), Cells((16,)), CPU)
    assert strided is not None
    assert strided.tolist() == [0, 4, 8, 12]


def test_a_layers_map_reaches_the_grid() -> None:
    index = grid(4)(torch.Size(), Cells((6, 9), ((1, 2), (0, 1))), CPU)
    assert index is not None
    assert index.tolist() == [9, 16, 27, 34]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("padding", [0, 1])
def test_a_random_draw_takes_different_cells_inside_the_map(size: tuple[int, ...], padding: int) -> None:
    padded = tuple(side + 2 * padding for side in size)
    inside = torch.zeros(padded, dtype=torch.bool)
    inside[tuple(slice(padding, padding + side) for side in size)] = True
    for mode in (True, False):
        among = random(5, size=padded, padding=padding, per="head").train(mode)
        index = among(torch.Size((2, 3)), Cells((prod(padded),)), CPU)
        if prod(size) <= 5:
            found = torch.arange(prod(padded)) if index is None else index
            assert torch.equal(found, inside.flatten().nonzero()[:, 0])
            continue
        assert index is not None
        assert index.shape == (2, 3, 5)
        assert inside.flatten()[index].all()
        assert (index.diff(dim=-1) > 0).all()


def draw(among: Random, lead: tuple[int, ...] = (4, 3), n: int = 100) -> Tensor:
    index = among(torch.Size(lead), Cells((n,)), CPU)
    assert index is not None
    return index


def test_a_draw_is_repeated_by_its_seed() -> None:
    fixed = random(8, seed=3).eval()
    assert torch.equal(draw(fixed), draw(fixed))
    assert torch.equal(draw(fixed), draw(random(8, seed=3).eval()))
    assert not torch.equal(draw(fixed), draw(random(8, seed=4).eval()))
    training = random(8)
    torch.manual_seed(5)
    first, second = draw(training), draw(training)
    torch.manual_seed(5)
    assert torch.equal(draw(training), first)
    assert not torch.equal(first, second)
    published = random(8, eval="redraw").eval()
    assert not torch.equal(draw(published), draw(published))


def test_a_draw_is_for_the_batch_a_sample_or_a_head() -> None:
    for mode in (True, False):
        assert draw(random(8).train(mode)).shape == (8,)
        by_sample = draw(random(8, per="sample").train(mode))
        assert by_sample.shape == (4, 1, 8)
        assert len({tuple(row) for row in by_sample.flatten(0, 1).tolist()}) == 4
        by_head = draw(random(8, per="head").train(mode))
        assert by_head.shape == (4, 3, 8)
        assert len({tuple(row) for row in by_head.flatten(0, 1).tolist()}) == 12


def test_every_key_is_drawn_as_often_as_any_other() -> None:
    for among in (random(10, per="head"), random(10, per="head").eval()):
        counts = draw(among, (20000,), 40).flatten().bincount(minlength=40)
        assert (counts - 5000).abs().max() < 5 * (20000 * 0.25 * 0.75) ** 0.5


def test_evaluation_of_a_module_fixes_its_draw() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.among = random(5)

        def forward(self, x: Tensor) -> Tensor:
            return convnn(x, x, x, k=3, candidates=self.among)

    layer, x = Layer(), randn(2, 30, 4)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))
    assert not layer.state_dict()


def test_as_many_candidates_as_keys_are_all_of_them() -> None:
    x = randn(9, 5)
    everything = convnn(x, x, x, k=4)
    for among in (random(9), random(50), grid(9), grid(81)):
        assert torch.equal(convnn(x, x, x, k=4, candidates=among), everything)
    explicit = convnn(x, x, x, k=4, candidates=torch.arange(9))
    torch.testing.assert_close(explicit, everything)


def test_impossible_candidates_are_refused() -> None:
    x = randn(9, 5)
    with pytest.raises(ValueError, match="from 1 to the number of candidates, 3, got 4"):
        convnn(x, x, x, k=4, candidates=random(3))
    with pytest.raises(TypeError, match="candidates must be None, an index or a callable, got 5"):
        convnn(x, x, x, k=4, candidates=5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="count must be a whole number of at least 1, got 0"):
        random(0)
    with pytest.raises(ValueError, match="eval must be one of 'fixed', 'redraw', got 'maybe'"):
        random(3, eval="maybe")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs the size of the map, got padding 1 and no size"):
        grid(4, padding=1)
    with pytest.raises(ValueError, match=r"leave cells on every side of a map of \(4, 9\), got 2"):
        random(4, size=(4, 9), padding=2)
    for r, size in ((5, (5, 5)), (16, (5, 5, 5))):
        with pytest.raises(ValueError, match=f"a whole number to the {len(size)}, got {r}"):
            grid(r)(torch.Size(), Cells(size), CPU)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [3, "all"])
@pytest.mark.parametrize("score", ["true", "one"])
def test_selves_of_several_samples_give_as_many_outputs(score: Any, k: Any, backend: str) -> None:
    query, key, value = randn(3, 4), randn(5, 4), randn(5, 2)
    own = torch.randint(-1, 5, (2, 1, 3))
    ours = convnn(query, key, value, k=k, self_index=own, self_score=score, backend=BACKENDS[backend])
    assert ours.shape == (2, 1, 3, 2)
    for sample in range(2):
        alone = convnn(query, key, value, k=k, self_index=own[sample, 0], self_score=score, backend="reference")
        torch.testing.assert_close(ours[sample, 0], alone)


def test_ties_go_to_the_smaller_number_beside_oneself_and_among_candidates() -> None:
    x = torch.zeros(5, 3)
    for own in range(5):
        found = nearest(x[:1], x, k=3, similarity="euclidean", self_index=torch.tensor([own]), backend="reference")
        assert found.index.tolist() == [[own, *[j for j in range(5) if j != own][:2]]]
    shuffled = torch.tensor([4, 3, 1, 0])
    found = nearest(x[:1], x, k=2, similarity="euclidean", candidates=shuffled, backend="reference")
    assert found.index.tolist() == [[0, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_candidate_given_twice_counts_twice_beside_oneself_too(backend: str) -> None:
    query, key, value = torch.zeros(1, 2), torch.zeros(3, 2), torch.eye(3)
    twice = torch.tensor([0, 0, 1, 1])
    for own, expected in ((-1, [2.0, 2.0, 0.0]), (2, [2.0, 2.0, 1.0]), (0, [1.0, 2.0, 0.0])):
        output = convnn(
            query,
            key,
            value,
            k="all",
            weighting="uniform",
            candidates=twice,
            self_index=torch.tensor([own]),
            backend=BACKENDS[backend],
        )
        assert output.tolist() == [expected]


@pytest.mark.parametrize("backend", BACKENDS)
def test_oneself_comes_first_even_beside_infinite_scores(backend: str) -> None:
    x = torch.full((5, 2), 1e20)
    found = nearest(x, x, k=2, similarity="dot", self_index=torch.arange(5), backend=BACKENDS[backend])
    assert found.index[:, 0].tolist() == list(range(5))
    broken = randn(4, 2)
    broken[1] = torch.nan
    output = convnn(
        randn(1, 2), broken, randn(4, 3), k=2, self_index=torch.tensor([1]), self_score="one", backend=BACKENDS[backend]
    )
    assert output.isnan().all()


def test_candidates_with_a_map_of_their_own_keep_to_the_layers() -> None:
    padded = Cells((6, 9), ((1, 1), (1, 1)))
    assert grid(4, size=(6, 9))(torch.Size(), padded, CPU).tolist() == [10, 16, 37, 43]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"for a map of \(9, 6\) were given a map of \(6, 9\)"):
        grid(4, size=(9, 6))(torch.Size(), padded, CPU)
    for size, message in ((5, "sides of a map, got 5"), ((5, 0), "at least 1, got 0")):
        with pytest.raises(ValueError, match=message):
            random(3, size=size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one candidate, got none"):
        nearest(randn(3, 2), randn(4, 2), k="all", candidates=torch.zeros(0).long())
    assert draw(random(3, seed=2**70).eval()).shape == (3,)


def test_explaining_draws_nothing_and_selves_can_be_traced() -> None:
    x = torch.randn(9, 4)
    before = torch.get_rng_state()
    explain(x, x, x, k=2, candidates=random(3))
    assert torch.equal(torch.get_rng_state(), before)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        own = mode.from_tensor(torch.arange(9))
        assert nearest(fake, fake, k=2, self_index=own, candidates=own, backend="reference").index.shape == (9, 2)


def test_strategies_can_be_pickled() -> None:
    made: list[Any] = [
        grid(9), random(9), scaled_concat(0.5), between(-1, 1), causal, window(3) & ~strided(4) | fixed(5),
        bigbird(2, 1, 3, keys=20), neighborhood((4, 5), 3), minkowski(3), softmax_at(0.5), on_exp(softmax),
        Blend(0.3, space=minkowski(3)),
    ]  # fmt: skip
    again = pickle.loads(pickle.dumps(made))
    i, j = torch.arange(20)[:, None], torch.arange(20)
    for one, other in zip(made[4:8], again[4:8], strict=True):
        assert torch.equal(one(i, j), other(i, j))
    x = randn(20, 4)
    assert torch.equal(made[2](x, pixels((4, 5))), again[2](x, pixels((4, 5))))
    assert torch.equal(convnn(x, x, x, k=5, similarity=again[8], weighting=again[9]), convnn(
        x, x, x, k=5, similarity=made[8], weighting=made[9]
    ))  # fmt: skip
