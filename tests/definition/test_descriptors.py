"""Descriptors, positions and blends: each against loops over Python numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convnn.backends.chunked import with_budget
from convnn.blend import Blend
from convnn.descriptor import (
    COORDINATES,
    ConditionalEncoding,
    Fourier,
    between,
    concatenated,
    coordinates,
    features,
    pixels,
    scaled_concat,
    sinusoidal,
)
from convnn.functional import convnn, nearest
from convnn.masks import Lookup
from convnn.relative import RelativeBias
from tests import oracle
from tests.definition.test_operator import randn

BACKENDS: dict[str, Any] = {"reference": "reference", "chunked": "chunked", "blocks": with_budget(60)}
SIZES = [(7,), (3, 5), (2, 3, 4)]


@pytest.mark.parametrize("size", [*SIZES, (1,), (1, 4), (300, 2)])
def test_coordinates_are_their_formulas(size: tuple[int, ...]) -> None:
    for low, high, make in (
        (0, None, COORDINATES["pixels"]),
        (0, 1, COORDINATES["0..1"]),
        (-1, 1, COORDINATES["-1..1"]),
        (2, 5, between(2, 5)),
    ):
        made = make(size)
        assert made.shape == (*size, len(size))
        assert made.dtype == torch.float32
        for place in itertools.product(*map(range, size)):
            if high is None:
                by_hand = list(map(float, place))
            else:
                by_hand = [low + (high - low) * i / (n - 1) if n > 1 else low for i, n in zip(place, size, strict=True)]
            assert made[place].tolist() == pytest.approx(by_hand, abs=1e-6)


def by_hand(name: str, x: list[list[float]], p: list[list[float]]) -> list[list[float]]:
    """Descriptors of one sample, number by number."""
    if name == "features":
        return x
    if name == "coordinates":
        return p
    if name == "concatenated":
        return [row + place for row, place in zip(x, p, strict=True)]
    if name == "scaled_concat":
        numbers = [number for row in x for number in row]
        mean = math.fsum(numbers) / len(numbers)
        spread = math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1))
        return [[0.3 * v / spread for v in row] + [0.7 * c for c in place] for row, place in zip(x, p, strict=True)]
    axes, channels = len(p[0]), len(x[0])
    per = channels // axes
    waves = [math.sin, math.cos]
    return [
        [v + waves[c % per % 2](place[c // per] / 10000 ** (2 * (c % per // 2) / per)) for c, v in enumerate(row)]
        for row, place in zip(x, p, strict=True)
    ]


DESCRIPTORS: dict[str, Any] = {
    "features": features,
    "coordinates": coordinates,
    "concatenated": concatenated,
    "scaled_concat": scaled_concat(0.3),
    "sinusoidal": sinusoidal,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", DESCRIPTORS)
def test_descriptors_are_their_formulas(name: str, size: tuple[int, ...]) -> None:
    coords = pixels(size)
    n, channels = math.prod(size), 6
    tokens = randn(2, n, channels)
    made = DESCRIPTORS[name](tokens, coords)
    assert torch.equal(DESCRIPTORS[name](tokens, coords.flatten(0, -2)), made)
    for sample in range(2):
        expected = by_hand(name, tokens[sample].tolist(), coords.flatten(0, -2).tolist())
        row = made.expand(2, n, -1)[sample]
        torch.testing.assert_close(row.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_descriptors_pass_gradients_and_lift_half_types(name: str) -> None:
    coords = pixels((3, 5))
    leaf = randn(2, 15, 6).requires_grad_()
    if name != "coordinates":
        assert torch.autograd.gradcheck(lambda x: DESCRIPTORS[name](x, coords), (leaf,))
    wide = DESCRIPTORS[name](leaf.detach().bfloat16(), coords)
    assert wide.dtype == (torch.bfloat16 if name == "features" else torch.float32)
    exact = DESCRIPTORS[name](leaf.detach().bfloat16().float(), coords)
    torch.testing.assert_close(wide.float(), exact)


def test_scaled_concat_of_constants_and_of_one_number_is_finite() -> None:
    for tokens in (torch.ones(2, 5, 3), torch.ones(1, 1)):
        made = scaled_concat(0.5)(tokens, pixels((tokens.shape[-2],)))
        torch.testing.assert_close(made[..., :-1], 0.5 * tokens)
    leaf = torch.zeros(5, 3, requires_grad=True)
    scaled_concat(0.5)(leaf, pixels((5,))).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_a_sample_is_described_without_regard_to_the_others() -> None:
    tokens = randn(3, 15, 6)
    for descriptor in DESCRIPTORS.values():
        whole = descriptor(tokens, pixels((3, 5))).expand(3, 15, -1)
        alone = descriptor(tokens[1], pixels((3, 5)))
        torch.testing.assert_close(whole[1], alone.to(whole.dtype))


def test_fourier_features_are_their_formula_and_never_learned() -> None:
    fourier = Fourier(2, 5, sigma=3.0)
    coords, tokens = between(-1, 1)((3, 4)), randn(2, 12, 6)
    made = fourier(tokens, coords)
    assert made.shape == (2, 12, 16)
    for place, row in zip(coords.flatten(0, 1).tolist(), made[1].tolist(), strict=True):
        angles = [2 * math.pi * sum(f * p for f, p in zip(b, place, strict=True)) for b in fourier.frequencies.tolist()]
        assert row[6:] == pytest.approx([*map(math.sin, angles), *map(math.cos, angles)], abs=1e-4)
    assert torch.equal(made[..., :6], tokens)
    assert not list(fourier.parameters())
    again = Fourier(2, 5)
    again.load_state_dict(fourier.state_dict())
    assert torch.equal(again(tokens, coords), made)
    spread = Fourier(3, 20000, sigma=2.5).frequencies.std().item()
    assert spread == pytest.approx(2.5, rel=0.05)


@pytest.mark.parametrize("size", [(9,), (5, 6), (3, 4, 5)])
def test_conditional_encoding_adds_a_depthwise_convolution(size: tuple[int, ...]) -> None:
    encoding = ConditionalEncoding(4, axes=len(size), dtype=torch.float64)
    tokens = randn(2, 3, math.prod(size), 4).requires_grad_()
    cells = tokens.mT.flatten(0, 1).unflatten(2, size)
    peer: Any = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
    theirs = cells + peer(cells, encoding.conv.weight, encoding.conv.bias, padding=1, groups=4)
    torch.testing.assert_close(encoding(tokens, pixels(size)), theirs.flatten(2).mT.unflatten(0, (2, 3)))
    torch.testing.assert_close(encoding.map(cells), theirs)
    small = (4, 2, 3)[: len(size)]
    leaf = randn(1, math.prod(small), 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: encoding(x, pixels(small)), (leaf,))


def blended(share: float, x: Tensor, size: tuple[int, ...], k: int) -> Tensor:
    """The blend's scores, looped."""
    coords = list(itertools.product(*map(range, size)))
    space, alike = oracle.SIMILARITIES["chebyshev"], oracle.SIMILARITIES["cosine"]
    rows = []
    for q, here in zip(x.tolist(), coords, strict=True):
        scores = [
            (1 - share) * space(here, there) + share * alike(q, y) for y, there in zip(x.tolist(), coords, strict=True)
        ]
        rows.append(sorted(scores, reverse=True)[:k])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_a_blend_is_a_share_of_each(size: tuple[int, ...], share: float, backend: str) -> None:
    x = randn(math.prod(size), 10)
    for learned in (False, True):
        blend = Blend(share, axes=len(size), learned=learned)
        described = blend.descriptor(x, pixels(size))
        found = nearest(described, described, k=5, similarity=blend, backend=BACKENDS[backend])
        torch.testing.assert_close(found.scores, blended(share, x, size, 5), rtol=1e-6, atol=1e-6)


def test_a_blend_of_space_alone_is_the_convolution() -> None:
    image, kernel = randn(2, 6, 9, 14), randn(4, 6, 3, 3)
    padded = F.pad(image, [1] * 4)
    blend = Blend(0.0)
    key = blend.descriptor(padded.flatten(2).mT, pixels((11, 16)))
    query = key.unflatten(1, (11, 16))[:, 1:-1, 1:-1].flatten(1, 2)
    value = padded.flatten(2).mT
    for backend in BACKENDS.values():
        ours = convnn(
            query,
            key,
            value,
            kernel.flatten(2),
            k=9,
            similarity=blend,
            weighting="uniform",
            order="key",
            backend=backend,
        )
        theirs = F.conv2d(image, kernel, padding=1).flatten(2).mT
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [4, "all"])
def test_a_learned_share_gets_its_gradient(backend: str, k: Any) -> None:
    size, x = (3, 5), randn(15, 6)
    blend = Blend(0.4, learned=True).double()
    described = blend.descriptor(x, pixels(size))

    def run(raw: Tensor) -> Tensor:
        moved = Blend(0.4, learned=True)
        del moved.raw
        moved.raw = raw  # type: ignore[assignment]
        return convnn(described, described, x, k=k, similarity=moved, backend=BACKENDS[backend])

    assert torch.autograd.gradcheck(run, (torch.tensor(0.4, dtype=torch.float64, requires_grad=True),))
    convnn(described, described, x, k=k, similarity=blend, backend=BACKENDS[backend]).square().sum().backward()
    assert blend.raw is not None
    assert blend.raw.grad is not None
    assert blend.raw.grad != 0


def test_a_learned_share_stays_a_share_and_can_come_back() -> None:
    blend: Any = Blend(1.0, learned=True)
    step = torch.optim.SGD(blend.parameters(), lr=1.0)
    (-blend.share).backward()
    step.step()
    assert blend.raw.item() == 2.0
    assert blend.share.item() == 1.0
    step.zero_grad()
    (3 * blend.share).backward()
    step.step()
    assert blend.share.item() == 0.0
    blend.reset_parameters()
    assert blend.share.item() == 1.0


def test_a_learned_share_needs_scores_that_matter() -> None:
    blend = Blend(0.4, learned=True)
    x = blend.descriptor(torch.randn(15, 6), pixels((3, 5)))
    with pytest.raises(ValueError, match="a learned share needs a weighting that depends on scores"):
        convnn(x, x, x, k=4, similarity=blend, weighting="uniform")
    assert convnn(x, x, x, k=4, similarity=Blend(0.4), weighting="uniform").isfinite().all()


def by_offset(bias: RelativeBias, size: tuple[int, ...], head: int | None) -> Tensor:
    """The bias of every pair of tokens, one at a time."""
    places = [None] * bias.class_tokens + list(itertools.product(*map(range, size)))
    table: Any = bias.table if head is None else bias.table[head]
    classes: Any = None if bias.class_table is None else bias.class_table if head is None else bias.class_table[head]
    rows = []
    for here in places:
        row = []
        for there in places:
            if here is None or there is None:
                row.append(classes[0 if there is not None else 1 if here is not None else 2])
            else:
                deltas = [b - a for a, b in zip(here, there, strict=True)]
                kept = [min(max(d, 1 - n), n - 1) + n - 1 for d, n in zip(deltas, bias.size, strict=True)]
                row.append(table[tuple(kept)])
        rows.append(torch.stack(row))
    return torch.stack(rows)


def filled(*arguments: Any, **options: Any) -> RelativeBias:
    bias = RelativeBias(*arguments, **options, dtype=torch.float64)
    for table in bias.parameters():
        torch.nn.init.normal_(table)
    return bias


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [4, "all"])
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("class_tokens", [0, 2])
@pytest.mark.parametrize("size", SIZES)
def test_a_relative_bias_is_a_number_per_offset(
    size: tuple[int, ...], class_tokens: int, heads: int | None, k: Any, backend: str
) -> None:
    bias = filled(size, heads=heads, class_tokens=class_tokens)
    n = math.prod(size) + class_tokens
    x = randn(2, 3, n, 5)
    whole = by_offset(bias, size, None) if heads is None else torch.stack([by_offset(bias, size, h) for h in range(3)])
    pull = randn(2, 3, n, 5)
    results = []
    for mask in (bias, whole):
        output = convnn(x, x, x, k=k, mask=mask, backend=BACKENDS[backend] if mask is bias else "reference")
        results.append([output, *torch.autograd.grad(output, list(bias.parameters()), pull, retain_graph=True)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    rows, keys = torch.arange(n)[:, None], torch.arange(n)
    torch.testing.assert_close(bias(rows, keys), whole)


@pytest.mark.parametrize("size", [(3, 4), (6, 9), (2, 11)])
@pytest.mark.parametrize("class_tokens", [0, 1])
def test_a_relative_bias_is_defined_on_other_maps(size: tuple[int, ...], class_tokens: int) -> None:
    bias = filled((4, 6), class_tokens=class_tokens)
    x = randn(math.prod(size) + class_tokens, 5)
    ours = convnn(x, x, x, k=4, mask=bias.on(size))
    torch.testing.assert_close(ours, convnn(x, x, x, k=4, mask=by_offset(bias, size, None)))
    if size != bias.size:
        with pytest.raises(ValueError, match=r"the mask is for .* queries and keys, got"):
            convnn(x, x, x, k=4, mask=bias)


def test_a_relative_bias_knows_where_fewer_queries_stand() -> None:
    bias, x = filled((4, 6)), randn(24, 5)
    chosen = torch.tensor([3, 17, 8])
    ours = convnn(x[chosen], x, x, k=4, mask=bias.on((4, 6), chosen))
    torch.testing.assert_close(ours, convnn(x, x, x, k=4, mask=bias)[chosen])


def test_a_relative_bias_goes_with_rules_and_candidates() -> None:
    bias, x = filled((4, 6), heads=3), randn(2, 3, 24, 5)
    whole = torch.stack([by_offset(bias, (4, 6), h) for h in range(3)])
    for options in ({"candidates": torch.tensor([0, 5, 6, 12, 20])}, {"self_index": torch.arange(24)}):
        for backend in BACKENDS.values():
            ours = convnn(x, x, x, k=4, mask=["causal", bias], backend=backend, **options)  # type: ignore[call-overload]
            theirs = convnn(x, x, x, k=4, mask=["causal", whole], backend="reference", **options)  # type: ignore[call-overload]
            torch.testing.assert_close(ours, theirs)


def test_the_impossible_is_refused() -> None:
    x = torch.randn(15, 6)
    with pytest.raises(ValueError, match="coordinates for every token, got 15 tokens and 12 coordinates"):
        concatenated(x, pixels((3, 4)))
    with pytest.raises(ValueError, match=r"share must be from 0, coordinates only, to 1, features only, got 1.5"):
        scaled_concat(1.5)
    with pytest.raises(ValueError, match="4 axes need a multiple of as many channels, got 6"):
        sinusoidal(x, torch.randn(15, 4))
    with pytest.raises(ValueError, match="sigma must be greater than 0 and finite, got 0"):
        Fourier(2, 5, sigma=0)
    with pytest.raises(ValueError, match="kernel_size must be odd, so that a cell is in the middle, got 4"):
        ConditionalEncoding(6, kernel_size=4)
    with pytest.raises(ValueError, match=r"a map of 2 axes, got 15 tokens with coordinates of shape \(15, 2\)"):
        ConditionalEncoding(6)(x, pixels((3, 5)).flatten(0, 1))
    with pytest.raises(ValueError, match="share must be from 0, space only, to 1, features only, got -1"):
        Blend(-1)
    with pytest.raises(ValueError, match=r"coordinates must have shape \(\*size, 2\), got \(15, 1\)"):
        Blend(0.5).descriptor(x, pixels((15,)))
    with pytest.raises(ValueError, match="compares 2 coordinates and features, got 2 channels"):
        nearest(x[:, :2], x[:, :2], k=3, similarity=Blend(0.5))
    with pytest.raises(ValueError, match=r"a bias for maps of 2 sides was given one of \(9,\)"):
        RelativeBias((3, 3)).on((9,))
    with pytest.raises(ValueError, match="a side of the map must be a whole number of at least 1, got 0"):
        RelativeBias((3, 0))


def test_a_share_is_a_share_however_far_its_parameter_went() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        blend: Any = Blend(0.5, learned=True).to(dtype)
        for raw, share in ((5e4, 1.0), (-5e4, 0.0), (258.0, 1.0), (259.0, 1.0), (-3.0, 0.0), (0.25, 0.25)):
            blend.raw.data.fill_(raw)
            assert blend.share.item() == share
            (gradient,) = torch.autograd.grad(blend.share, blend.raw)
            assert gradient == 1


def test_a_blend_does_not_see_what_does_not_count() -> None:
    x = torch.full((12, 4), 1e20)
    for share, part in ((0.0, "chebyshev"), (1.0, "cosine")):
        blend = Blend(share, features="dot" if share == 0 else "cosine")
        described = blend.descriptor(x, pixels((3, 4)))
        found = nearest(described, described, k=5, similarity=blend, backend="reference")
        alone = described[:, :2] if part == "chebyshev" else described[:, 2:]
        assert torch.equal(found.scores, nearest(alone, alone, k=5, similarity=part, backend="reference").scores)
    nested = Blend(0.5, axes=1, features=Blend(0.5, axes=1, learned=True))
    with pytest.raises(ValueError, match="a learned share needs a weighting"):
        convnn(x, x, x, k=3, similarity=nested, weighting="uniform")


def test_places_keep_their_digits_under_autocast_and_as_whole_numbers() -> None:
    fourier, coords, tokens = Fourier(2, 16, sigma=10.0), between(-1, 1)((14, 14)), torch.randn(196, 8)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = fourier(tokens, coords)
    torch.testing.assert_close(rounded, fourier(tokens, coords))
    whole = torch.arange(6).reshape(3, 2)
    torch.testing.assert_close(fourier.encoded(whole), fourier.encoded(whole.float()))
    assert fourier.encoded(coords.bfloat16()).dtype == torch.float32
    assert concatenated(torch.randn(3, 4), whole).dtype == torch.float32
    with pytest.raises(ValueError, match=r"floating point of shape \(..., N, C\), got \(3, 4\) of torch.int32"):
        concatenated(torch.ones(3, 4).int(), whole)
    with pytest.raises(ValueError, match=r"coordinates must have shape \(\*size, D\), got \(3,\)"):
        coordinates(torch.randn(3, 4), torch.arange(3))
    with pytest.raises(ValueError, match=r"coordinates must have shape \(\*size, 1\), got \(1, 3, 2\)"):
        Fourier(1, 3)(torch.randn(3, 4), pixels((1, 3)))
    with pytest.raises(ValueError, match=r"a side of the map must be a whole number of at least 0, got 2.5"):
        pixels((2.5, 2))  # type: ignore[arg-type]
    fresh = Fourier(2, 5, device="meta").to_empty(device="cpu")
    fresh.reset_parameters()
    assert fresh.frequencies.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [0.1, 0.3, 1.0, 1e-20, 1e20])
def test_constant_tokens_are_left_as_they_are(constant: float, dtype: torch.dtype) -> None:
    tokens = torch.full((49, 64), constant, dtype=dtype)
    made = scaled_concat(0.5)(tokens, pixels((7, 7)))
    torch.testing.assert_close(made[:, :64], 0.5 * tokens)
    assert scaled_concat(0.5)(tokens[:0], pixels((0,))).shape == (0, 65)


def test_a_bias_is_not_looked_up_where_it_has_no_place() -> None:
    bias, x = filled((2, 3)), randn(6, 4)
    for queries, message in (
        (torch.tensor([50]), "queries must be below the number of keys, 6, got 50"),
        (torch.tensor([-7]), "queries must not be negative, got -7"),
        (torch.ones(2), "type torch.int64, got"),
        (torch.zeros(1, 2).long(), r"shape \(N,\) and type torch.int64, got \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            bias.on((2, 3), queries)
    for size in ((), (-2, 3)):
        with pytest.raises(ValueError, match="side"):
            RelativeBias(size)
    with pytest.raises(ValueError, match="heads must be a whole number of at least 1, got 0"):
        RelativeBias((2, 3), heads=0)
    for table in (torch.randn(3, 11), torch.randn(11), torch.ones(3, 1, 11).int()):
        with pytest.raises(ValueError, match=r"floating point of shape \(..., 1, T\), got"):
            convnn(x, x, x, k=3, mask=Lookup(lambda i, j: j - i + 5, table, (6, 6)))


@pytest.mark.parametrize("k", [20, "all"])
def test_half_biases_add_their_gradients_in_float32(k: Any) -> None:
    bias = RelativeBias((12, 12), dtype=torch.bfloat16)
    padding = torch.zeros(144, dtype=torch.bfloat16, requires_grad=True)
    x, value = torch.randn(144, 4), torch.ones(144, 1)

    def alike(scores: Tensor, filled: Tensor) -> Tensor:
        return (0.01 * scores + 1) * filled

    gradients = []
    for backend in ("reference", with_budget(1000)):
        output = convnn(x, x, value, k=k, mask=[bias, padding], weighting=alike, backend=backend)
        gradients.append(torch.autograd.grad(output.sum(), [bias.table, padding]))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-3)
