"""ConvNN layers on maps away from the convolution: every option against an independent definition."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convnn import ConvNN1d, ConvNN2d, ConvNN3d
from convnn.blend import Blend
from convnn.candidates import grid, random
from convnn.descriptor import concatenated, scaled_concat
from convnn.relative import RelativeBias
from tests import oracle

LAYERS: dict[int, Any] = {1: ConvNN1d, 2: ConvNN2d, 3: ConvNN3d}
SIZES = {1: (9,), 2: (4, 6), 3: (3, 4, 2)}


def cells_of(size: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, size)))


def by_hand(layer: Any, x: Tensor, allowed: Tensor | None = None, features: Any = None) -> Tensor:
    """One sample through a feature search of the zero-padded map, number by number."""
    padded = F.pad(x, [p for end in reversed(layer.ends) for p in end])
    tokens = padded.flatten(1).mT
    numbers = {cell: number for number, cell in enumerate(cells_of(padded.shape[1:]))}
    reach = [d * (r - 1) for d, r in zip(layer.dilation, layer.kernel_size, strict=True)]
    outputs = tuple((n - q - 1) // s + 1 for n, q, s in zip(padded.shape[1:], reach, layer.stride, strict=True))
    own = [
        numbers[tuple(o * s + q // 2 for o, s, q in zip(place, layer.stride, reach, strict=True))]
        for place in cells_of(outputs)
    ]
    compared = tokens if features is None else features(tokens, padded.shape[1:])
    scores, index = oracle.neighbors(compared[own], compared, layer.k, "cosine", allowed, own=own)
    made = oracle.aggregate(tokens, scores, index, "uniform", layer.weight.flatten(2), layer.bias)
    return made.mT.unflatten(1, outputs)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("k", [None, 4])
def test_a_feature_search_is_the_double_loop(axes: int, k: int | None, backend: str) -> None:
    # Queries inside the map: a padding cell is as near to every other cell, and equals have no order.
    kernel, last = (2, 1) if axes == 3 else (3, 2)
    for stride, padding, dilation, groups in ((1, kernel // 3, 1, 1), (2, 0, 1, 2), (2, last, 2, 1)):
        layer = LAYERS[axes](
            4, 6, kernel, stride, padding, dilation, groups, similarity="cosine", k=k, backend=backend
        ).double()
        size = SIZES[axes] if dilation == 1 else tuple(n + 2 for n in SIZES[axes])
        x = torch.randn(2, 4, *size, dtype=torch.float64)
        y = layer(x)
        for sample in range(2):
            torch.testing.assert_close(y[sample], by_hand(layer, x[sample]), rtol=1e-10, atol=1e-10)


def test_padding_is_left_out_where_asked() -> None:
    layer = ConvNN2d(4, 6, 3, padding=1, similarity="cosine", include_padding=False).double()
    x = torch.randn(1, 4, 4, 6, dtype=torch.float64) + 2.0
    inside = F.pad(torch.ones(4, 6, dtype=torch.bool), [1] * 4).flatten().expand(24, -1)
    torch.testing.assert_close(layer(x)[0], by_hand(layer, x[0], inside), rtol=1e-10, atol=1e-10)


def test_candidates_see_the_map_and_its_padding() -> None:
    x = torch.randn(2, 4, 5, 7, dtype=torch.float64)
    index = torch.tensor([(1 + a) * 9 + 1 + b for a in (0, 2, 4) for b in (0, 3, 6)])
    spatial = ConvNN2d(4, 6, 3, padding=1, similarity="cosine", k=4, candidates=grid(9), include_padding=False).double()
    given = ConvNN2d(4, 6, 3, padding=1, similarity="cosine", k=4, candidates=index, include_padding=False).double()
    given.load_state_dict(spatial.state_dict())
    torch.testing.assert_close(spatial(x), given(x))
    assert "candidates.index" not in given.state_dict()
    drawn = ConvNN2d(4, 6, 3, padding=1, similarity="cosine", k=4, candidates=random(12)).double()
    assert not torch.equal(drawn(x), drawn(x))
    assert torch.equal(drawn.eval()(x), drawn(x))


@pytest.mark.parametrize("descriptor", [concatenated, scaled_concat(0.5)])
def test_positions_stand_beside_features(descriptor: Any) -> None:
    layer = ConvNN2d(4, 6, 3, padding=1, similarity="cosine", position=descriptor).double()
    x = torch.randn(1, 4, 4, 6, dtype=torch.float64)

    def features(tokens: Tensor, size: tuple[int, ...]) -> Tensor:
        places = [[-1 + 2 * i / (n - 1) for i, n in zip(cell, size, strict=True)] for cell in cells_of(size)]
        coords = torch.tensor(places, dtype=torch.float64)
        if descriptor is concatenated:
            return torch.cat([tokens, coords], -1)
        return torch.cat([0.5 * tokens / tokens.std(), 0.5 * coords], -1)

    torch.testing.assert_close(layer(x)[0], by_hand(layer, x[0], None, features), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_blend_runs_from_the_convolution_to_the_features(axes: int) -> None:
    peer: Any = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    x = torch.randn(2, 4, *SIZES[axes], dtype=torch.float64)
    for stride, dilation in ((1, 1), (2, 2)):
        options: Any = {"padding": dilation, "stride": stride, "dilation": dilation, "dtype": torch.float64}
        space = LAYERS[axes](4, 6, 3, blend=0.0, **options)
        theirs = peer(x, space.weight, space.bias, stride, dilation, dilation)
        torch.testing.assert_close(space(x), theirs, rtol=1e-12, atol=1e-12)
    between = LAYERS[axes](4, 6, 3, padding=1, blend=0.5, dtype=torch.float64)
    between.load_state_dict(space.state_dict())
    assert not torch.allclose(between(x), peer(x, space.weight, space.bias, padding=1))


def test_a_learned_blend_learns_and_needs_scores() -> None:
    layer = ConvNN2d(4, 6, 3, padding=1, blend=Blend(0.3, learned=True), weighting="softmax")
    layer(torch.randn(2, 4, 5, 7)).square().sum().backward()
    assert layer.blend is not None
    assert layer.blend.raw is not None
    assert layer.blend.raw.grad is not None
    assert layer.blend.raw.grad != 0
    with pytest.raises(ValueError, match="a learned share needs a weighting that depends on scores"):
        ConvNN2d(4, 6, 3, blend=Blend(0.3, learned=True))


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("similarity", ["space", "cosine"])
def test_patches_are_unshuffled_searched_and_shuffled(axes: int, similarity: str) -> None:
    size = tuple(2 * n for n in SIZES[axes])
    layer = LAYERS[axes](3, 5, 3, padding=1, patch=2, similarity=similarity).double()
    inner = LAYERS[axes](3 * 2**axes, 5 * 2**axes, 3, padding=1, similarity=similarity).double()
    inner.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (2, 5, *size)
    if axes == 2:
        theirs = F.pixel_shuffle(inner(F.pixel_unshuffle(x, 2)), 2)
        torch.testing.assert_close(y, theirs)


@pytest.mark.parametrize("similarity", ["space", "cosine"])
def test_heads_search_and_combine_their_own_channels(similarity: str) -> None:
    layer = ConvNN2d(6, 8, 3, padding=1, heads=2, similarity=similarity).double()
    x = torch.randn(2, 6, 4, 6, dtype=torch.float64)
    parts = []
    for head in range(2):
        alone = ConvNN2d(3, 4, 3, padding=1, similarity=similarity).double()
        own = slice(4 * head, 4 * head + 4)
        alone.load_state_dict({name: layer.state_dict()[name][own] for name in ("weight", "bias")})
        parts.append(alone(x[:, 3 * head : 3 * head + 3]))
    assert layer.mix is not None
    torch.testing.assert_close(layer(x), layer.mix(torch.cat(parts, 1)))


def test_projections_are_compared_and_combined() -> None:
    layer = ConvNN2d(4, 6, 3, padding=1, projection="linear", qk_dim=5, v_dim=8, similarity="dot", groups=2).double()
    x = torch.randn(2, 4, 4, 6, dtype=torch.float64)
    tokens = F.pad(x, [1] * 4).flatten(2).mT
    inside = F.pad(torch.ones(4, 6), [1] * 4).flatten().nonzero()[:, 0]
    query, key, value = layer.to_query(tokens)[:, inside], layer.to_key(tokens), layer.to_value(tokens)
    for sample in range(2):
        scores, index = oracle.neighbors(query[sample], key[sample], 9, "dot", own=inside.tolist())
        made = oracle.aggregate(value[sample], scores, index, "uniform", layer.weight.flatten(2), layer.bias)
        torch.testing.assert_close(layer(x)[sample].flatten(1).mT, made, rtol=1e-9, atol=1e-9)
    in_space = ConvNN2d(4, 6, 3, padding=1, projection="linear", v_dim=8)
    assert [name for name, _ in in_space.named_parameters()] == ["weight", "bias", "to_value.weight"]
    searched = ConvNN2d(4, 6, 3, padding=1, projection="linear", v_dim=8, backend="chunked")
    searched.load_state_dict(in_space.state_dict())
    torch.testing.assert_close(in_space(x.float()), searched(x.float()), rtol=1e-4, atol=1e-5)


def test_a_relative_bias_and_masks_work_on_maps() -> None:
    bias = RelativeBias((4, 6), dtype=torch.float64)
    torch.nn.init.normal_(bias.table)
    layer = ConvNN2d(4, 6, 3, padding=1, similarity="cosine", mask=[bias, "causal"], weighting="softmax").double()
    x = torch.randn(1, 4, 4, 6, dtype=torch.float64)
    assert "mask.mask0.table" in dict(layer.named_parameters())
    cells = cells_of((6, 8))
    own = [number for number, (a, b) in enumerate(cells) if 1 <= a <= 4 and 1 <= b <= 6]
    shift = torch.full((24, 48), -torch.inf, dtype=torch.float64)
    for i, number in enumerate(own):
        for j in range(i + 1):
            down, right = (there - here for here, there in zip(cells[number], cells[j], strict=True))
            shift[i, j] = bias.table[min(max(down, -3), 3) + 3, min(max(right, -5), 5) + 5]
    tokens = F.pad(x[0], [1] * 4).flatten(1).mT
    found = oracle.neighbors(tokens[own], tokens, 9, "cosine", shift, own=own)
    made = oracle.aggregate(tokens, *found, "softmax", layer.weight.flatten(2), layer.bias)
    torch.testing.assert_close(layer(x)[0].flatten(1).mT, made, rtol=1e-9, atol=1e-9)
    layer(x).square().sum().backward()
    assert bias.table.grad is not None


def test_a_mask_tensor_goes_where_the_layer_goes() -> None:
    layer = ConvNN1d(2, 3, 3, similarity="cosine", mask=torch.ones(7, 9).tril().bool())
    assert layer.to("meta")(torch.randn(1, 2, 9, device="meta")).shape == (1, 3, 7)
    assert not [name for name in layer.state_dict() if "mask" in name]


REFUSED: dict[str, tuple[Any, str]] = {
    "dimensions": (lambda: ConvNN2d(3, 4, 3)(torch.randn(2, 3, 9)), r"\(B, 3, \*size\) or \(3, \*size\) with 2 sides"),
    "channels": (lambda: ConvNN2d(3, 4, 3)(torch.randn(2, 4, 9, 9)), r"got \(2, 4, 9, 9\)"),
    "too small": (lambda: ConvNN1d(3, 4, 5)(torch.randn(2, 3, 4)), r"a window must fit into the map, got \(4,\)"),
    "groups": (lambda: ConvNN2d(4, 6, 3, groups=4), "the output channels must be a multiple of groups times heads, 4"),
    "same": (lambda: ConvNN2d(4, 6, 3, 2, "same"), r"padding='same' is for a stride of 1, got \(2, 2\)"),
    "padding": (lambda: ConvNN2d(4, 6, 3, padding="some"), "padding must be one of 'same', 'valid', got 'some'"),
    "sides": (lambda: ConvNN2d(4, 6, (3, 3, 3)), r"kernel_size must be a number or 2 of them, got \(3, 3, 3\)"),
    "mode": (lambda: ConvNN2d(4, 6, 3, padding_mode="zero"), "padding_mode must be one of 'zeros'"),
    "similarity": (lambda: ConvNN2d(4, 6, 3, similarity="cosin"), "unknown similarity 'cosin'; known are 'chebyshev'"),
    "k": (lambda: ConvNN2d(4, 6, 3, k=0), "k must be a whole number of at least 1, got 0"),
    "k beyond": (lambda: ConvNN1d(4, 6, 3, k=99, similarity="dot")(torch.randn(1, 4, 9)), "keys, 9, got 99"),
    "shift": (lambda: ConvNN2d(4, 6, 3, padding=1, boundary="shift"), "instead of padding, got padding=1"),
    "position": (lambda: ConvNN2d(4, 6, 3, position="concatenated"), "needs a similarity of features"),
    "projection": (lambda: ConvNN2d(4, 6, 3, qk_dim=3), "need projection='linear'"),
    "heads": (lambda: ConvNN2d(4, 6, 3, heads=4, similarity="dot"), "multiple of groups times heads, 4, got 6"),
    "patch": (lambda: ConvNN2d(4, 6, 3, patch=2)(torch.randn(1, 4, 5, 6)), r"multiples of it, got \(5, 6\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_impossible_is_refused(case: str) -> None:
    run, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.parametrize(
    "options", [{"k": 5}, {"k": 12}, {"include_padding": False}, {"include_padding": False, "k": 4}]
)
def test_a_search_in_space_has_one_answer_everywhere(options: dict[str, Any]) -> None:
    """No two cells of a window are equally near, so that backends agree and moving the map moves the answer."""
    layers = [ConvNN2d(4, 5, 3, padding=1, **options, backend=backend).double() for backend in ("reference", "chunked")]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(1, 4, 10, 12, dtype=torch.float64)
    torch.testing.assert_close(layers[0](x), layers[1](x))
    if "k" in options:
        moved = layers[1](x.roll(1, -1))
        torch.testing.assert_close(layers[1](x)[..., 3:-4, 3:-4], moved[..., 3:-4, 4:-3])


def test_whole_numbers_may_be_numpys() -> None:
    three: Any = np.int64(3)
    layer = ConvNN2d(4, 5, three, padding=[three - 2, 1])
    assert layer.kernel_size == (3, 3)
    assert layer(torch.randn(1, 4, 6, 7)).shape == (1, 5, 6, 7)
    with pytest.raises(ValueError, match=r"kernel_size must be a whole number of at least 1, got 3.0"):
        ConvNN2d(4, 5, 3.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give it as mask, not as position"):
        ConvNN2d(4, 5, 3, similarity="cosine", position=RelativeBias((4, 5)))
