"""Moving layers along the spectrum: schedules, fewer neighbours under one kernel, shares of heads, selections."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import ConvNN2d, ConvNNAttention, HybridConv2d, MultiheadConvNN, functional, morph
from convnn.blend import Blend, cells
from convnn.descriptor import pixels
from convnn.selection import soft, straight_through
from convnn.similarity import chebyshev, cosine, scaled_dot
from convnn.weighting import softmax_at
from tests.definition.test_operator import randn


def test_schedules_keep_their_ends() -> None:
    for make in (morph.line, morph.decay):
        told = make(2.0, 0.5, over=3, after=1)
        assert [told(time) for time in (0, 1, 4, 50)] == [2.0, 2.0, 0.5, 0.5]
        between = [told(1 + part / 7) for part in range(22)]
        assert between == sorted(between, reverse=True)
        assert len(set(between)) == 22
    assert morph.line(2.0, 0.5, over=3)(1.5) == 1.25
    assert morph.decay(2.0, 0.5, over=2)(1) == pytest.approx(1.0)
    k = morph.stages({0: 50, 1.5: 25, 3: 9})
    assert [k(time) for time in (0, 1.49, 1.5, 2.9, 3, 1e6)] == [50, 50, 25, 25, 9, 9]


def test_schedules_refuse_what_they_cannot_be() -> None:
    for make in (morph.line, morph.decay):
        for over, after in ((0, 0), (-1, 0), (float("inf"), 0), (1, -1)):
            with pytest.raises(ValueError, match="over must be more than 0 epochs"):
                make(1.0, 0.5, over=over, after=after)
    with pytest.raises(ValueError, match="both ends must be greater than 0"):
        morph.decay(1.0, 0.0, over=2)
    for values in ({}, {1: 9}):
        with pytest.raises(ValueError, match="the first stage must begin at 0"):
            morph.stages(values)


KERNELS: dict[str, Any] = {
    "depthwise": {},
    "separable": {"kernel": "separable"},
    "standard": {"kernel": "standard"},
    "by head": {"shared_kernel": False},
}


@pytest.mark.parametrize("name", KERNELS)
def test_fewer_neighbours_take_the_first_taps(name: str) -> None:
    layer = ConvNNAttention(12, 3, k=7, **KERNELS[name]).double()
    assert isinstance(layer.kernel, nn.Module)
    nn.init.normal_(layer.kernel.weight)
    small = ConvNNAttention(12, 3, k=4, **KERNELS[name]).double()
    state = layer.state_dict()
    small.load_state_dict({**state, "kernel.weight": state["kernel.weight"][..., :4]})
    x = randn(2, 9, 12)
    before = layer(x)
    assert morph.apply(layer, k=4) == [""]
    torch.testing.assert_close(layer(x), small(x), rtol=1e-12, atol=1e-12)
    layer(x).sum().backward()
    assert layer.kernel.weight.grad is not None
    assert layer.kernel.weight.grad[..., 4:].eq(0).all()
    assert layer.kernel.weight.grad[..., :4].ne(0).all()
    morph.apply(layer, k=7)
    assert torch.equal(layer(x), before)


def test_fewer_neighbours_on_maps_and_in_torchs_call() -> None:
    x, tokens = randn(2, 4, 5, 6), randn(2, 9, 12)
    layer = ConvNN2d(4, 6, 3, padding=1, similarity="cosine").double()
    small = ConvNN2d(4, 6, 3, padding=1, similarity="cosine", k=5).double()
    small.load_state_dict({"weight": layer.weight.flatten(2)[..., :5], "bias": layer.bias})
    morph.apply(layer, k=5)
    torch.testing.assert_close(layer(x), small(x), rtol=1e-12, atol=1e-12)
    attention = MultiheadConvNN(12, 3, k=7, kernel="depthwise", batch_first=True).double()
    morph.apply(attention, k=3)
    plain = MultiheadConvNN(12, 3, k=3, batch_first=True).double()
    plain.load_state_dict(attention.state_dict(), strict=False)
    for mine, theirs in zip(attention(tokens, tokens, tokens), plain(tokens, tokens, tokens), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_attention_shrinks_to_the_nearest_and_comes_back() -> None:
    layer = ConvNNAttention(12, 3, k="all", kernel=None)
    x = torch.randn(2, 9, 12)
    before = layer(x)
    morph.apply(layer, k=9)
    torch.testing.assert_close(layer(x), before)
    morph.apply(layer, k=2)
    assert not torch.allclose(layer(x), before)
    morph.apply(layer, k="all")
    assert torch.equal(layer(x), before)


def test_an_optimiser_goes_on_when_k_shrinks() -> None:
    """Its state has the kernel's shape throughout; taps that rest have no gradient and move by their momentum only."""
    layer = ConvNNAttention(8, 2, k=6)
    step, x = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.0), torch.randn(4, 10, 8)
    for k in (6, 6, 3, 3):
        morph.apply(layer, k=k)
        step.zero_grad()
        (layer(x) - x).square().mean().backward()
        step.step()
    assert layer.kernel is not None
    state = step.state[layer.kernel.weight]
    assert state["exp_avg"].shape == layer.kernel.weight.shape == (4, 1, 6)
    assert state["step"] == 4
    moved = ConvNNAttention(8, 2, k=6)
    moved.load_state_dict(layer.state_dict())


def test_shares_temperatures_and_selections_are_set() -> None:
    model = nn.Sequential(
        ConvNN2d(4, 6, 3, padding=1, blend=0.0),
        ConvNN2d(6, 6, 3, padding=1, blend=0.0, weighting="softmax", selection=soft(1.0)),
        HybridConv2d(6, 8, 3, ratio=0.5),
    ).double()
    x = randn(2, 4, 5, 6)
    conv: Any = model[0]
    torch.testing.assert_close(conv(x), F.conv2d(x, conv.weight, conv.bias, padding=1))
    assert morph.apply(model, "[01]", share=0.9) == ["0", "1"]
    assert morph.dial(model) == {"0": [0.9], "1": [0.9]}
    built = ConvNN2d(4, 6, 3, padding=1, blend=0.9).double()
    built.load_state_dict(conv.state_dict())
    assert torch.equal(built(x), conv(x))
    assert not torch.allclose(conv(x), F.conv2d(x, conv.weight, conv.bias, padding=1))
    second: Any = model[1]
    morph.apply(model, "1", temperature=0.5, selection=0.0)
    assert second.weighting == softmax_at(0.5)
    assert second.selection == soft(0.0)
    assert morph.apply(model, "2.*", k=4) == ["2.convnn"]
    assert model(x).shape == (2, 8, 5, 6)


def test_what_cannot_be_set_is_refused_and_nothing_changes() -> None:
    model = nn.Sequential(ConvNNAttention(8, 2, k=6), ConvNNAttention(8, 2, k="all", kernel=None), ConvNN2d(4, 6, 3))
    learned = ConvNN2d(4, 6, 3, blend=Blend(0.4, learned=True), weighting="softmax")
    refused: list[tuple[nn.Module, dict[str, Any], str]] = [
        (model[:2], {"k": 7}, "at most the number of taps of the layer's kernel, 6, got 7"),
        (model[:2], {"k": "all"}, "or 'all' in a layer without a kernel"),
        (model[:2], {"k": 0}, "k must be a whole number of at least 1, got 0"),
        (model[:2], {"k": 2.5}, "k must be a whole number"),
        (model[2:], {"k": 4}, "the taps of a search in space are places and not ranks: k stays 9, got 4"),
        (model, {"share": 0.5}, "a share needs a layer built with a blend, got ConvNNAttention"),
        (learned, {"share": 0.5}, "a learned share moves by itself"),
        (ConvNN2d(4, 6, 3, blend=0.5), {"share": 1.5}, "share must be from 0"),
        (model[2:], {"temperature": 0.5}, "weighs by softmax, got uniform"),
        (model[:1], {"temperature": 0.0}, "temperature must be greater than 0"),
        (model[:1], {"selection": 0.5}, r"must be built with selection=soft\(T\) or straight_through\(T\), got hard"),
        (nn.ReLU(), {"k": 3}, "there is none in this model"),
        (model, {"pattern": "head*", "k": 3}, r"no layer .* has a name like 'head\*'; there are 0, 1, 2"),
    ]
    for module, given, said in refused:
        with pytest.raises(ValueError, match=said):
            morph.apply(module, **given)
    assert [layer.k for _, layer in morph.layers(model)] == [6, "all", 9]


def test_every_head_has_its_share() -> None:
    heads, n, channels = 3, 10, 5
    blend = Blend(0.5, learned=True, heads=heads, coordinates=cells((3, 3), 1), features="scaled_dot").double()
    shares = torch.tensor([0.0, 0.3, 1.0]).double()
    with torch.no_grad():
        blend.raw.copy_(shares[:, None, None])  # type: ignore[union-attr]
    assert blend.shares == shares.tolist()
    q, x, v = randn(2, heads, n, channels), randn(2, heads, n, channels), randn(2, heads, n, 4)
    places = cells((3, 3), 1)((n,)).double()
    assert places[0].tolist() == [1.0, 1.0]
    for backend in ("reference", "chunked"):
        query, key = (blend.descriptor(tokens, places) for tokens in (q, x))
        ours = functional.convnn(query, key, v, k=4, similarity=blend, backend=backend)
        for head, share in enumerate(shares):
            scores = (1 - share) * chebyshev(places, places) + share * scaled_dot(q[:, head], x[:, head])
            best = scores.topk(4)
            taken = v[:, head].gather(1, best.indices.flatten(1)[..., None].expand(-1, -1, 4)).unflatten(1, (n, 4))
            theirs = (best.values.softmax(-1)[..., None] * taken).sum(-2)
            if share > 0:  # of places alone, many are equally near
                torch.testing.assert_close(ours[:, head], theirs, rtol=1e-10, atol=1e-10)
    ours.square().sum().backward()
    assert blend.raw is not None
    assert blend.raw.grad is not None
    assert blend.raw.grad.shape == (heads, 1, 1)
    assert blend.raw.grad.ne(0).all()


def dialled(**options: Any) -> ConvNNAttention:
    blend = Blend(0.5, learned=True, heads=2, coordinates=cells((3, 4), 1), features="scaled_dot")
    return ConvNNAttention(8, 2, k=5, blend=blend, **options)


def test_an_attention_learns_where_its_heads_stand() -> None:
    layer, x = dialled(), torch.randn(3, 13, 8)
    assert morph.dial(nn.Sequential(layer)) == {"0": [0.5, 0.5]}
    step = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(3):
        step.zero_grad()
        (layer(x) - x).square().mean().backward()
        step.step()
    (shares,) = morph.dial(layer).values()
    assert all(0 <= share <= 1 and share != 0.5 for share in shares)
    assert shares[0] != shares[1]
    again = dialled()
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
    with pytest.raises(ValueError, match="there must be a place for every token, got 12 tokens for 12 cells and 1"):
        layer(x[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_dial_in_other_types(dtype: torch.dtype) -> None:
    layer, x = dialled(), torch.randn(3, 13, 8)
    exact = layer(x)
    turned = copy.deepcopy(layer).to(dtype)
    ours = turned(x.to(dtype))
    assert ours.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(ours, exact.double(), rtol=1e-5, atol=1e-5)
    (ours.float() ** 2).sum().backward()
    assert turned.blend is not None
    assert turned.blend.raw is not None
    assert turned.blend.raw.grad is not None
    assert turned.blend.raw.grad.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x).float(), exact, rtol=0.1, atol=0.1)


def test_a_dial_and_fewer_neighbours_compile() -> None:
    torch.compiler.reset()
    layer: Any = dialled()
    x = torch.randn(3, 13, 8)
    run: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(run(x).square().sum(), layer.blend.raw)
    (theirs,) = torch.autograd.grad(layer(x).square().sum(), layer.blend.raw)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    morph.apply(layer, k=3)
    with torch.no_grad():
        torch.testing.assert_close(run(x), layer(x))


def test_counting_all_alike_a_dial_learns_through_who_is_chosen() -> None:
    x = torch.randn(2, 4, 5, 6)
    for selection in (straight_through(0.5), soft(0.5)):
        blend = Blend(0.5, learned=True)
        layer = ConvNN2d(4, 6, 3, padding=1, blend=blend, selection=selection)
        layer(x).square().sum().backward()
        assert blend.raw is not None
        assert blend.raw.grad is not None
        assert blend.raw.grad != 0
    with pytest.raises(ValueError, match="or a selection with a gradient, such as straight_through"):
        ConvNN2d(4, 6, 3, padding=1, blend=Blend(0.5, learned=True))
    same = ConvNN2d(4, 6, 3, padding=1, blend=0.5, selection=straight_through(0.5))
    hard = ConvNN2d(4, 6, 3, padding=1, blend=0.5)
    hard.load_state_dict(same.state_dict())
    torch.testing.assert_close(same(x), hard(x), rtol=1e-4, atol=1e-5)


def test_a_layer_passes_its_selection_on() -> None:
    x, tokens = randn(2, 4, 5, 6), randn(2, 9, 12)
    layer = ConvNNAttention(12, 3, k=4, selection=soft(0.6)).double()
    q, key, v = layer.qkv(tokens).unflatten(-1, (3, 3, 4)).movedim(2, 0).transpose(-2, -3)
    mixed = functional.convnn(q, key, v, layer.kernel.weight, k=4, selection=soft(0.6))  # type: ignore[union-attr]
    torch.testing.assert_close(layer(tokens), layer.proj(mixed.transpose(-2, -3).flatten(-2)), rtol=1e-12, atol=1e-12)
    hybrid: Any = HybridConv2d(4, 8, 3, selection=soft(0.3))
    assert hybrid.convnn.selection == soft(0.3)
    projected = ConvNN2d(4, 6, 3, padding=1, similarity=cosine, projection="linear", selection=straight_through(0.2))
    projected.double()(x).sum().backward()
    assert projected.to_query.weight.grad is not None
    assert projected.to_query.weight.grad.ne(0).any()
    blurred = ConvNN2d(4, 6, 3, padding=1, selection=soft(0.3)).double()
    assert not torch.allclose(blurred(x), F.conv2d(x, blurred.weight, blurred.bias, padding=1))


def test_selections_of_layers_are_refused_where_heads_part() -> None:
    with pytest.raises(ValueError, match="needs heads=1, got 2"):
        ConvNN2d(4, 6, 3, heads=2, similarity="cosine", selection=soft(1.0))
    layer = ConvNNAttention(8, 2, k=3, shared_kernel=False, selection=soft(1.0))
    with pytest.raises(ValueError, match="needs one kernel for all heads"):
        layer(torch.randn(5, 8))
    with pytest.raises(ValueError, match="a blend has places and a similarity of features of its own"):
        ConvNNAttention(8, 2, k=3, similarity="cosine", blend=Blend(0.5, axes=1))
    with pytest.raises(ValueError, match="a share for every head is a learned one"):
        Blend(0.5, heads=3)
    with pytest.raises(ValueError, match=r"must have shape \(\.\.\., 3, N, C\), got \(2, 4, 5\)"):
        Blend(0.5, heads=3, learned=True, axes=1).descriptor(torch.randn(2, 4, 5), pixels((4,)))


def test_a_blend_along_a_line_is_a_window_at_0() -> None:
    layer = ConvNNAttention(8, 2, k=3, kernel=None, blend=Blend(0.0, axes=1))
    tokens = torch.randn(2, 7, 8)
    grads: list[Tensor] = []
    for place in range(7):
        x = tokens.clone().requires_grad_()
        layer(x)[0, place].sum().backward()
        assert x.grad is not None
        grads.append(x.grad[0].abs().sum(-1) > 0)
    expected = [{0, 1, 2}, {0, 1, 2}, {1, 2, 3}, {2, 3, 4}, {3, 4, 5}, {4, 5, 6}]
    assert [set(seen.nonzero()[:, 0].tolist()) for seen in grads[:6]] == expected
