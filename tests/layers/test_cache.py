"""Attention part by part, with a cache, is attention to the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from convnn import ConvNNAttention, recipes
from convnn.candidates import random
from convnn.layers import Cache
from convnn.masks import neighborhood, strided, window
from convnn.relative import RelativeBias

N, DIM = 17, 24


def biased(**options: Any) -> RelativeBias:
    bias = RelativeBias((N,), dtype=torch.float64, **options)
    for table in bias.parameters():
        torch.nn.init.normal_(table)
    return bias


def slope(i: Tensor, j: Tensor) -> Tensor:
    return -0.3 * (i - j).abs().double()


LAYERS: dict[str, Any] = {
    "kernel": lambda: ConvNNAttention(DIM, 4, k=5),
    "a kernel per head": lambda: ConvNNAttention(DIM, 4, k=5, shared_kernel=False),
    "separable": lambda: ConvNNAttention(DIM, 4, k=5, kernel="separable", qkv_bias=True, qk_norm=True),
    "standard": lambda: ConvNNAttention(DIM, 4, k=5, kernel="standard"),
    "uniform": lambda: ConvNNAttention(DIM, 4, k=5, weighting="uniform", similarity="cosine"),
    "as many as tokens": lambda: ConvNNAttention(DIM, 4, k=N),
    "one": lambda: ConvNNAttention(DIM, 4, k=1),
    "kvt": lambda: recipes.kvt(DIM, 4, k=5),
    "all": lambda: recipes.self_attention(DIM, 4),
    "causal": lambda: recipes.causal(DIM, 4),
    "sizes": lambda: ConvNNAttention(DIM, 2, k=5, qk_dim=6, v_dim=10, out_dim=7, scale_norm=True),
    "rotary": lambda: ConvNNAttention(DIM, 4, k=5, position="rotary"),
    "sinusoidal": lambda: ConvNNAttention(DIM, 4, k=5, position="sinusoidal"),
    "nearest in time": lambda: ConvNNAttention(DIM, 4, k=5, position="coordinates", similarity="euclidean"),
    "relative": lambda: ConvNNAttention(DIM, 4, k=5, position=biased(heads=4)),
    "relative with classes": lambda: ConvNNAttention(
        DIM, 4, k=5, position=RelativeBias((N - 2,), heads=4, class_tokens=2)
    ),
    "relative mask": lambda: ConvNNAttention(DIM, 4, k=5, mask=biased()),
    "window": lambda: ConvNNAttention(DIM, 4, k=5, mask=window(3)),
    "strided": lambda: recipes.self_attention(DIM, 4, mask=strided(4)),
    "float rule": lambda: ConvNNAttention(DIM, 4, k=5, mask=[slope, window(6)]),
    "tensor": lambda: ConvNNAttention(DIM, 4, k=5, mask=torch.randn(N, N, dtype=torch.float64)),
    "keys of a tensor": lambda: ConvNNAttention(DIM, 4, k=5, mask=torch.arange(N) % 3 != 1),
    "chunked": lambda: ConvNNAttention(DIM, 4, k=5, backend="chunked"),
    "reference": lambda: ConvNNAttention(DIM, 4, k=5, backend="reference"),
}


def made(name: str) -> ConvNNAttention:
    layer = LAYERS[name]().double().eval()
    if layer.kernel is not None:
        torch.nn.init.normal_(layer.kernel.weight)
    if isinstance(layer.position, RelativeBias):
        torch.nn.init.normal_(layer.position.table)
    return layer


def in_parts(layer: ConvNNAttention, x: Tensor, parts: list[int], room: int) -> Tensor:
    cache, outputs = Cache(room), []
    for part in x.split(parts, -2):
        output, cache = layer.step(part, cache)
        outputs.append(output)
    assert cache.length == x.shape[-2]
    return torch.cat(outputs, -2)


@pytest.mark.parametrize("parts", [[1] * N, [3, 1, 6, 1, 6], [N]], ids=["token by token", "in parts", "at once"])
@pytest.mark.parametrize("name", LAYERS)
def test_steps_give_what_the_whole_gives(name: str, parts: list[int]) -> None:
    layer, x = made(name), torch.randn(2, N, DIM, dtype=torch.float64)
    expected = layer(x, is_causal=True)
    torch.testing.assert_close(in_parts(layer, x, parts, N), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_leading_dimensions_are_free(lead: tuple[int, ...]) -> None:
    layer, x = made("kernel"), torch.randn(*lead, N, DIM, dtype=torch.float64)
    torch.testing.assert_close(in_parts(layer, x, [4, 1, 12], 20), layer(x, is_causal=True), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["kernel", "uniform", "kvt", "rotary", "relative", "window"])
def test_fewer_tokens_than_k_are_the_first_of_a_longer_sequence(name: str) -> None:
    layer, x = made(name), torch.randn(2, N, DIM, dtype=torch.float64)
    expected = layer(x, is_causal=True)[:, :3]
    for parts in ([1, 1, 1], [3]):
        torch.testing.assert_close(in_parts(layer, x[:, :3], parts, 3), expected, rtol=1e-10, atol=1e-10)


def test_a_token_sees_the_nearest_of_those_before_by_a_loop() -> None:
    layer = ConvNNAttention(6, 1, k=3, kernel=None).double()
    x = torch.randn(N, 6, dtype=torch.float64)
    query, key, value = layer.qkv(x).detach().split(6, -1)
    cache = Cache(N)
    for place in range(N):
        ours, cache = layer.step(x[place : place + 1], cache)
        scores = [float(query[place] @ key[other]) / 6**0.5 for other in range(place + 1)]
        chosen = sorted(range(place + 1), key=lambda other: -scores[other])[:3]
        weights = torch.tensor([scores[other] for other in chosen], dtype=torch.float64).softmax(0)
        mixed = sum((w * value[other] for w, other in zip(weights, chosen, strict=True)), torch.zeros(6).double())
        torch.testing.assert_close(ours[0], layer.proj(mixed), rtol=1e-10, atol=1e-10)


def test_times_that_are_not_steps_are_given_with_the_tokens() -> None:
    layer, x = made("nearest in time"), torch.randn(2, N, DIM, dtype=torch.float64)
    times = torch.rand(2, N, 1, dtype=torch.float64).cumsum(1)
    cache, outputs = Cache(N), []
    for part, when in zip(x.split([4, 1, 12], 1), times.split([4, 1, 12], 1), strict=True):
        output, cache = layer.step(part, cache, coords=when)
        outputs.append(output)
    expected = layer(x, coords=times, is_causal=True)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-10, atol=1e-10)


def test_buffers_are_made_once() -> None:
    layer, x = made("kernel"), torch.randn(2, N, DIM, dtype=torch.float64)
    _, first = layer.step(x[:, :3], Cache(50))
    places = [each.data_ptr() for each in (first.key, first.value) if each is not None]
    cache = first
    for place in range(3, N):
        _, cache = layer.step(x[:, place : place + 1], cache)
    assert [each.data_ptr() for each in (cache.key, cache.value) if each is not None] == places
    assert cache.key is not None
    assert cache.key.shape == (2, 4, 50, 6)


def test_an_earlier_record_is_gone_back_to_and_a_copy_goes_on_by_itself() -> None:
    layer, x = made("kernel"), torch.randn(2, N, DIM, dtype=torch.float64)
    _, start = layer.step(x[:, :6], Cache(N))
    apart = start.copy()
    other, _ = layer.step(torch.randn(2, 4, DIM, dtype=torch.float64), start)
    again, _ = layer.step(x[:, 6:], start)
    expected = layer(x, is_causal=True)[:, 6:]
    assert not torch.allclose(other, expected[:, :4])
    torch.testing.assert_close(again, expected, rtol=1e-10, atol=1e-10)
    layer.step(torch.randn(2, 4, DIM, dtype=torch.float64), start)
    torch.testing.assert_close(layer.step(x[:, 6:], apart)[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["kernel", "rotary", "all"])
def test_half_types_and_autocast_give_what_the_whole_gives(name: str) -> None:
    layer, x = made(name).float(), torch.randn(2, N, DIM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(in_parts(layer, x, [4, 1, 12], N), layer(x, is_causal=True).detach())
    layer, x = layer.bfloat16(), x.bfloat16()
    torch.testing.assert_close(in_parts(layer, x, [4, 1, 12], N), layer(x, is_causal=True).detach())


def test_a_bias_of_a_sequence_follows_its_length() -> None:
    layer, x = made("relative"), torch.randn(2, N, DIM, dtype=torch.float64)
    torch.testing.assert_close(layer(x[:, :9], is_causal=True), layer(x, is_causal=True)[:, :9])
    longer = torch.randn(2, N + 4, DIM, dtype=torch.float64)
    torch.testing.assert_close(in_parts(layer, longer, [N, 4], N + 4), layer(longer, is_causal=True))


def test_what_cannot_be_run_in_steps_says_why() -> None:
    x = torch.randn(2, 3, DIM)
    for options, said in (
        ({"candidates": random(8)}, "candidates are chosen among all tokens"),
        ({"position": "concatenated"}, "must be counted in pixels.*got concatenated"),
        ({"position": RelativeBias((4, 5))}, "a bias of one side"),
        ({"mask": neighborhood((4, 5), 3)}, r"a mask for \(20, 20\) queries and keys"),
    ):
        with pytest.raises(ValueError, match=said):
            ConvNNAttention(DIM, 4, k=5, **options).step(x, Cache(20))
    layer = ConvNNAttention(DIM, 4, k=2)
    with pytest.raises(ValueError, match="room for 4 tokens, got 3 and 2 more"):
        layer.step(x[:, :2], layer.step(x, Cache(4))[1])
    with pytest.raises(ValueError, match="like those in the cache"):
        layer.step(x[:1], layer.step(x, Cache(9))[1])
    with pytest.raises(ValueError, match="room must be a whole number"):
        Cache(0)
