"""ConvNN in the place of torch's multi-head attention, alone and inside torch's transformer layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convnn import MultiheadConvNN, recipes
from convnn.candidates import grid
from convnn.masks import neighborhood

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "other sizes": {"kdim": 10, "vdim": 14, "batch_first": True},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
}


def pair(k: Any = "all", **options: Any) -> tuple[nn.MultiheadAttention, MultiheadConvNN]:
    peer = nn.MultiheadAttention(12, 3, **options).double()
    for parameter in peer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return peer, recipes.from_attention(peer, k=k)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("need_weights", [True, False])
def test_all_keys_are_torchs_layer(name: str, need_weights: bool) -> None:
    options = OPTIONS[name]
    peer, layer = pair(**options)
    n, m = 7, 9
    shapes = [(2, n, 12), (2, m, options.get("kdim", 12)), (2, m, options.get("vdim", 12))]
    tokens = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    if not options.get("batch_first"):
        tokens = [t.detach().transpose(0, 1).requires_grad_() for t in tokens]
    forbidden, padding = torch.rand(n, m) < 0.3, torch.arange(m) >= torch.tensor([[6], [9]])
    forbidden[:, 0] = False
    by_head = torch.randn(6, n, m, dtype=torch.float64)
    float_padding = torch.zeros(2, m, dtype=torch.float64).masked_fill(padding, -torch.inf)
    for masks in (
        {},
        {"attn_mask": forbidden},
        {"attn_mask": by_head},
        {"key_padding_mask": padding},
        {"attn_mask": forbidden, "key_padding_mask": padding},
        {"attn_mask": by_head, "key_padding_mask": float_padding},
    ):
        given: Any = {**masks, "need_weights": need_weights}
        theirs, ours = peer(*tokens, **given), layer(*tokens, **given)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=1e-12)
        if need_weights:
            torch.testing.assert_close(ours[1], theirs[1], rtol=1e-12, atol=1e-12)
            apart = layer(*tokens, **given, average_attn_weights=False)[1]
            torch.testing.assert_close(apart, peer(*tokens, **given, average_attn_weights=False)[1])
        else:
            assert ours[1] is None
        pull = torch.randn_like(ours[0])
        grads = [
            torch.autograd.grad(y[0], [*tokens, *m.parameters()], pull) for y, m in ((ours, layer), (theirs, peer))
        ]
        names = [name for name, _ in layer.named_parameters()]
        assert names == [name for name, _ in peer.named_parameters()]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_without_a_batch() -> None:
    peer, layer = pair()
    x = torch.randn(7, 12, dtype=torch.float64)
    padding = torch.arange(7) >= 5
    for given in ({}, {"key_padding_mask": padding}, {"attn_mask": torch.ones(7, 7).triu(1).bool()}):
        ours, theirs = layer(x, x, x, **given), peer(x, x, x, **given)
        torch.testing.assert_close(ours, theirs)


def nearest_only(layer: nn.MultiheadAttention, x: Tensor, k: int) -> Tensor:
    """A mask for torch's layer that leaves each query its k nearest keys, ``(B * H, N, N)``, True is forbidden."""
    assert layer.in_proj_weight is not None
    q, key, _ = (x @ w.mT + b for w, b in zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True))
    q, key = (t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in (q, key))
    scores = q @ key.mT
    return (scores < scores.sort(-1, descending=True).values[..., k - 1, None]).flatten(0, 1)


@pytest.mark.parametrize("need_weights", [True, False])
def test_k_nearest_is_torchs_layer_with_the_rest_forbidden(need_weights: bool) -> None:
    peer, layer = pair(k=4, batch_first=True)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    theirs = peer(x, x, x, attn_mask=nearest_only(peer, x, 4), need_weights=need_weights)
    torch.testing.assert_close(layer(x, x, x, need_weights=need_weights), theirs)


class Once(nn.Module):
    """An encoder layer as it should be, with its attention called in the open."""

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        layer = self.layer
        attention: Any = layer.self_attn
        x = layer.norm1(x + attention(x, x, x, key_padding_mask=padding)[0])
        return layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))


@pytest.mark.parametrize("padded", [True, False])
def test_torchs_encoder_does_not_go_round_the_layer(padded: bool) -> None:
    """In eval mode without gradients torch's fast path computes plain attention from the weights alone."""
    encoder = nn.TransformerEncoderLayer(12, 4, 20, 0.0, batch_first=True)
    encoder.self_attn = recipes.from_attention(encoder.self_attn, k=3)
    stack = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 9, 12)
    padding = torch.arange(9) >= torch.tensor([[6], [9]]) if padded else None
    with torch.no_grad():
        ours = stack(x, src_key_padding_mask=padding)
        expected = x
        for layer in stack.layers:
            expected = Once(layer).eval()(expected, padding)
        full = copy.deepcopy(stack)
        for layer in full.layers:
            layer.self_attn.k = "all"
        keep = slice(None) if padding is None else ~padding
        torch.testing.assert_close(ours[keep], expected[keep])
        assert not torch.allclose(ours[keep], full(x, src_key_padding_mask=padding)[keep], atol=1e-3)


def test_it_works_in_encoder_and_decoder_layers_as_torchs_own() -> None:
    encoder = nn.TransformerEncoderLayer(12, 4, 20, 0.0, batch_first=True).double()
    decoder = nn.TransformerDecoderLayer(12, 4, 20, 0.0, batch_first=True).double()
    swapped_encoder, swapped_decoder = copy.deepcopy(encoder), copy.deepcopy(decoder)
    swapped_encoder.self_attn = recipes.from_attention(encoder.self_attn)
    swapped_decoder.self_attn = recipes.from_attention(decoder.self_attn)
    swapped_decoder.multihead_attn = recipes.from_attention(decoder.multihead_attn)
    x, y = torch.randn(2, 9, 12, dtype=torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    padding = torch.arange(9) >= torch.tensor([[6], [9]])
    for mode in (True, False):
        for module in (encoder, decoder, swapped_encoder, swapped_decoder):
            module.train(mode)
        memory = encoder(x)
        torch.testing.assert_close(swapped_encoder(x), memory)
        given: Any = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": padding}
        torch.testing.assert_close(swapped_decoder(y, memory, **given), decoder(y, memory, **given))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_built_before_the_swap_says_what_to_do_about_nested_tensors() -> None:
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 20, 0.0, batch_first=True), 1).eval()
    stack.layers[0].self_attn = recipes.from_attention(stack.layers[0].self_attn, k=3)
    padding = torch.arange(9) >= torch.tensor([[6], [9]])
    with torch.no_grad(), pytest.raises(ValueError, match="build the encoder with enable_nested_tensor=False"):
        stack(torch.randn(2, 9, 12), src_key_padding_mask=padding)


def test_causal_is_a_mask_or_a_hint() -> None:
    _, layer = pair(k=3, batch_first=True)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    mask = torch.ones(9, 9).triu(1).bool()
    torch.testing.assert_close(layer(x, x, x, is_causal=True), layer(x, x, x, attn_mask=mask))
    torch.testing.assert_close(layer(x, x, x, attn_mask=mask, is_causal=True), layer(x, x, x, attn_mask=mask))


def test_state_dicts_load_both_ways() -> None:
    peer, layer = pair()
    back = nn.MultiheadAttention(12, 3).double()
    back.load_state_dict(layer.state_dict())
    again = MultiheadConvNN(12, 3, k=4).double()
    again.load_state_dict(back.state_dict())
    assert torch.equal(again.in_proj_weight, peer.in_proj_weight)
    torch.manual_seed(2)
    first = nn.MultiheadAttention(12, 3)
    torch.manual_seed(2)
    second = MultiheadConvNN(12, 3)
    for name, weight in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], weight)


@pytest.mark.parametrize("kind", ["depthwise", "separable", "standard"])
def test_a_kernel_is_the_same_with_and_without_weights(kind: Any) -> None:
    layer = MultiheadConvNN(12, 3, k=4, kernel=kind, batch_first=True).double()
    assert layer.kernel is not None
    nn.init.normal_(layer.kernel.weight)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    output, weights = layer(x, x, x)
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], output)
    assert weights is not None
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 9, dtype=torch.float64))


def test_candidates_find_oneself_where_query_is_key() -> None:
    layer = MultiheadConvNN(12, 3, k=1, candidates=grid(3), batch_first=True)
    x = torch.randn(2, 9, 12)
    _, weights = layer(x, x, x)
    assert torch.equal(weights, torch.eye(9).expand(2, 9, 9))
    _, crossed = layer(x, x.clone(), x)
    assert crossed is not None
    assert set(crossed.nonzero()[:, 2].tolist()) <= {0, 4, 8}


def test_dropout_acts_in_training_only_and_empty_rows_are_defined() -> None:
    layer = MultiheadConvNN(12, 3, dropout=0.5, k=4, batch_first=True)
    x = torch.randn(2, 9, 12)
    assert not torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    layer.eval()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    everything = torch.ones(2, 9, dtype=torch.bool)
    output, _ = layer(x, x, x, key_padding_mask=everything)
    torch.testing.assert_close(output, layer.out_proj.bias.expand(2, 9, 12))


def test_the_impossible_is_refused() -> None:
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads, 5, got 12"):
        MultiheadConvNN(12, 5)
    with pytest.raises(ValueError, match="a kernel has a size and k='all' has none"):
        MultiheadConvNN(12, 3, kernel="depthwise")
    with pytest.raises(
        ValueError, match=r"must all have 3 dimensions, or 2 without a batch, got \(2, 9, 12\), \(9, 12\)"
    ):
        MultiheadConvNN(12, 3)(torch.randn(2, 9, 12), torch.randn(9, 12), torch.randn(9, 12))
    with pytest.raises(TypeError, match=r"from_attention takes nn.MultiheadAttention, got Linear"):
        recipes.from_attention(nn.Linear(2, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"True where a key may not be chosen, or float, got torch.int64"):
        MultiheadConvNN(12, 3)(*[torch.randn(9, 12)] * 3, attn_mask=torch.ones(9, 9).long())


@pytest.mark.parametrize("added", [{"add_zero_attn": True}, {"add_bias_kv": True}])
def test_added_keys_are_open_to_all_under_every_mask(added: dict[str, Any]) -> None:
    layer = MultiheadConvNN(12, 3, batch_first=True, **added).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    theirs = layer(x, x, x, attn_mask=torch.ones(9, 9).triu(1).bool())
    torch.testing.assert_close(layer(x, x, x, is_causal=True), theirs)
    for mask in ("causal", torch.ones(9, 9).tril().bool(), lambda i, j: torch.where(j <= i, 0.0, -torch.inf)):
        ruled = MultiheadConvNN(12, 3, batch_first=True, mask=mask, **added).double()
        ruled.load_state_dict(layer.state_dict())
        torch.testing.assert_close(ruled(x, x, x), theirs)
    torch.testing.assert_close(layer(x, x, x, attn_mask="causal"), theirs)


WRONG: dict[str, tuple[Any, str]] = {
    "padding of another width": ({"key_padding_mask": torch.ones(2, 5).bool()}, r"shape \(2, 9\), got \(2, 5\)"),
    "padding of one": ({"key_padding_mask": torch.ones(1, 9).bool()}, r"shape \(2, 9\), got \(1, 9\)"),
    "padding without a batch": ({"key_padding_mask": torch.ones(9).bool()}, r"shape \(2, 9\), got \(9,\)"),
    "mask of another width": ({"attn_mask": torch.ones(9, 5).bool()}, r"\(9, 9\) or \(6, 9, 9\), got \(9, 5\)"),
    "mask of other heads": ({"attn_mask": torch.ones(7, 9, 9).bool()}, r"\(6, 9, 9\), got \(7, 9, 9\)"),
    "values": ({"value": torch.randn(2, 12, 12)}, "a value for every key"),
    "batches": ({"key": torch.randn(1, 9, 12), "value": torch.randn(1, 9, 12)}, "of one batch"),
    "channels": ({"query": torch.randn(2, 9, 10)}, r"must have \(12, 12, 12\) channels"),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("case", WRONG)
def test_what_torch_refuses_is_refused(case: str, need_weights: bool) -> None:
    changed, message = WRONG[case]
    x = torch.randn(2, 9, 12)
    given = {"query": x, "key": x, "value": x, "need_weights": need_weights, **changed}
    with pytest.raises(ValueError, match=message):
        MultiheadConvNN(12, 3, batch_first=True)(**given)


def test_an_impossible_k_is_refused_when_it_is_given() -> None:
    for k in (0, 2.5, "al"):
        with pytest.raises(ValueError, match="k must be a whole number"):
            MultiheadConvNN(12, 3, k=k)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_heads must be a whole number of at least 1, got 0"):
        MultiheadConvNN(12, 0)


def test_a_single_key_is_masked_and_the_added_one_is_not() -> None:
    peer, layer = pair(add_zero_attn=True, batch_first=True)
    query, key = torch.randn(1, 2, 12, dtype=torch.float64), torch.randn(1, 1, 12, dtype=torch.float64)
    for mask in (torch.tensor([[1.0], [2.0]], dtype=torch.float64), torch.tensor([[True], [False]])):
        torch.testing.assert_close(layer(query, key, key, attn_mask=mask), peer(query, key, key, attn_mask=mask))


@pytest.mark.parametrize("added", [False, True])
def test_a_rule_for_a_map_stays_one_beside_added_keys(added: bool) -> None:
    layer = MultiheadConvNN(12, 3, batch_first=True, add_zero_attn=added, mask=neighborhood((3, 3), 3))
    assert layer(*[torch.randn(1, 9, 12)] * 3)[0].shape == (1, 9, 12)
    with pytest.raises(ValueError, match=r"the mask is for \(9, (9|10)\) queries and keys, got \(8, (8|9)\)"):
        layer(*[torch.randn(1, 8, 12)] * 3)


def test_it_is_compiled_as_a_whole_for_every_length() -> None:
    layer = MultiheadConvNN(16, 4, k=5, batch_first=True).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (14, 21, 33):
        x = torch.randn(2, tokens, 16)
        torch.testing.assert_close(compiled(x, x, x)[0], layer(x, x, x)[0])
