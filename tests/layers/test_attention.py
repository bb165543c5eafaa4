"""ConvNN attention against torch's own, and against loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import ConvNNAttention, LinearAttention, recipes
from convnn.candidates import grid, random
from convnn.masks import window
from convnn.relative import RelativeBias
from tests import oracle


def attended(layer: ConvNNAttention, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
    """What torch's attention makes of a layer's projections; all heads together."""
    heads = layer.num_heads
    sizes = [layer.qk_dim, layer.qk_dim, layer.v_dim]
    weights, tokens = layer.qkv.weight.split(sizes), x if context is None else context
    parts = [x @ weights[0].mT, tokens @ weights[1].mT, tokens @ weights[2].mT]
    if layer.qkv.bias is not None:
        parts = [part + bias for part, bias in zip(parts, layer.qkv.bias.split(sizes), strict=True)]
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(-2, -3) for part in parts)
    q, k = layer.q_norm(q), layer.k_norm(k)
    mixed = F.scaled_dot_product_attention(q, k, v, **options)
    return layer.proj(mixed.transpose(-2, -3).flatten(-2))


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_all_keys_without_a_kernel_are_self_attention(qkv_bias: bool, qk_norm: bool) -> None:
    layer = recipes.self_attention(24, 4, qkv_bias=qkv_bias, qk_norm=qk_norm).double()
    x = torch.randn(2, 11, 24, dtype=torch.float64, requires_grad=True)
    ours, theirs = layer(x), attended(layer, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    pull = torch.randn_like(ours)
    inputs = [x, *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, pull), torch.autograd.grad(theirs, inputs, pull), rtol=1e-10, atol=1e-10
    )


def test_sizes_of_heads_values_and_outputs_are_free() -> None:
    x = torch.randn(3, 2, 11, 24, dtype=torch.float64)
    for options in ({"qk_dim": 8, "v_dim": 20, "out_dim": 5}, {"attn_head_dim": 7}, {"proj_bias": False}):
        layer = recipes.self_attention(24, 4, **options).double()
        torch.testing.assert_close(layer(x), attended(layer, x))
        assert layer(x).shape == (3, 2, 11, options.get("out_dim", 24))
        torch.testing.assert_close(layer(x)[1, 1], layer(x[1, 1]))


def test_it_starts_as_attention_to_the_nearest() -> None:
    layer = ConvNNAttention(24, 4, k=5).double()
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    q, k, _ = (part.unflatten(-1, (4, -1)).transpose(-2, -3) for part in layer.qkv(x).chunk(3, -1))
    scores = q @ k.mT
    kept = scores >= scores.sort(-1, descending=True).values[..., 4, None]
    torch.testing.assert_close(layer(x), attended(layer, x, attn_mask=kept))
    kvt = recipes.kvt(24, 4, k=5).double()
    kvt.load_state_dict({name: w for name, w in layer.state_dict().items() if name != "kernel.weight"})
    torch.testing.assert_close(kvt(x), layer(x))


@pytest.mark.parametrize("kind", ["depthwise", "separable", "standard"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_kernel_weighs_every_rank(kind: Any, shared: bool) -> None:
    layer = ConvNNAttention(12, 3, k=4, kernel=kind, shared_kernel=shared, proj_bias=False).double()
    assert layer.kernel is not None
    if kind == "depthwise":
        nn.init.normal_(layer.kernel.weight)
    x = torch.randn(7, 12, dtype=torch.float64)
    q, k, v = (part.unflatten(-1, (3, -1)).transpose(-2, -3) for part in layer.qkv(x).chunk(3, -1))
    parts = []
    for head in range(3):
        weight = layer.kernel.weight if shared else layer.kernel.weight[head]
        found = oracle.neighbors(q[head], k[head], 4, "scaled_dot")
        made = oracle.aggregate(v[head], *found, "softmax", weight, None)
        if kind == "separable":
            assert layer.kernel.pointwise is not None
            mix = layer.kernel.pointwise.weight
            made = made @ (mix if shared else mix[head]).mT
        parts.append(made)
    torch.testing.assert_close(layer(x), torch.cat(parts, -1) @ layer.proj.weight.mT, rtol=1e-10, atol=1e-10)
    lead = () if shared else (3,)
    assert layer.kernel.weight.shape == (*lead, 4, 4 if kind == "standard" else 1, 4)


@pytest.mark.parametrize("kind", ["separable", "standard"])
def test_kernels_can_start_where_they_change_nothing(kind: Any) -> None:
    layer = ConvNNAttention(12, 3, k=4, kernel=kind, kernel_init="preserving").double()
    plain = recipes.kvt(12, 3, k=4).double()
    plain.load_state_dict({name: w for name, w in layer.state_dict().items() if "kernel" not in name})
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x))
    default = ConvNNAttention(12, 3, k=4, kernel=kind)
    assert default.kernel is not None
    assert not torch.allclose(default.kernel.weight, torch.ones(1))
    peer = nn.Conv1d(4, 4, 4, groups=4 if kind == "separable" else 1)
    assert default.kernel.weight.shape == peer.weight.shape
    assert default.kernel.weight.abs().max() <= peer.weight[0].numel() ** -0.5


def test_published_counts_of_the_kernels() -> None:
    """ViT-Tiny with one head of 192 channels and k = 9: what each kernel adds to a layer."""
    bare = sum(p.numel() for p in ConvNNAttention(192, 1, k=9, kernel=None, proj_bias=False).parameters())
    assert bare == 4 * 192 * 192
    for kind, added in (("depthwise", 192 * 9), ("separable", 192 * 9 + 192 * 192), ("standard", 192 * 192 * 9)):
        layer = ConvNNAttention(192, 1, k=9, kernel=kind, proj_bias=False)  # type: ignore[arg-type]
        assert sum(p.numel() for p in layer.parameters()) - bare == added
    shared = ConvNNAttention(768, 12, k=9)
    assert shared.kernel is not None
    assert shared.kernel.weight.numel() == 64 * 9


def test_masks_mean_what_they_mean_in_torch() -> None:
    layer = recipes.self_attention(24, 4).double()
    x, context = torch.randn(2, 11, 24, dtype=torch.float64), torch.randn(2, 13, 24, dtype=torch.float64)
    allowed = torch.rand(2, 4, 11, 11) < 0.6
    allowed[..., 0] = True
    torch.testing.assert_close(layer(x, attn_mask=allowed), attended(layer, x, attn_mask=allowed))
    bias = torch.randn(11, 11, dtype=torch.float64)
    torch.testing.assert_close(layer(x, attn_mask=bias), attended(layer, x, attn_mask=bias))
    torch.testing.assert_close(layer(x, is_causal=True), attended(layer, x, is_causal=True))
    near = (torch.arange(11)[:, None] - torch.arange(11)).abs() <= 2
    torch.testing.assert_close(layer(x, attn_mask=window(2)), attended(layer, x, attn_mask=near))
    both = layer(x, attn_mask=[window(2), "causal"])
    torch.testing.assert_close(both, attended(layer, x, attn_mask=near.tril()))
    padding = torch.arange(13) >= torch.tensor([[5], [13]])
    ours = layer(x, context, key_padding_mask=padding)
    torch.testing.assert_close(ours, attended(layer, x, context, attn_mask=~padding[:, None, None]))
    torch.testing.assert_close(layer(x, context), attended(layer, x, context))


def test_candidates_let_a_token_find_itself_first() -> None:
    layer = ConvNNAttention(12, 3, k=4, candidates=grid(6), proj_bias=False).double()
    x = torch.randn(2, 11, 12, dtype=torch.float64)
    chosen = torch.linspace(0, 10, 6).long().tolist()
    q, k, v = (part.unflatten(-1, (3, -1)).transpose(-2, -3) for part in layer.qkv(x).chunk(3, -1))
    for score, option in ((None, "true"), (1.0, "one")):
        layer.self_score = option  # type: ignore[assignment]
        parts = [
            oracle.aggregate(
                v[1, h],
                *oracle.neighbors(q[1, h], k[1, h], 4, "scaled_dot", candidates=chosen, own=range(11), own_score=score),
                "softmax",
                None,
                None,
            )
            for h in range(3)
        ]
        theirs = torch.cat(parts, -1) @ layer.proj.weight.mT
        torch.testing.assert_close(layer(x)[1], theirs, rtol=1e-10, atol=1e-10)
    # There is no self in a context.
    crossed = layer(x, torch.randn(2, 11, 12, dtype=torch.float64))
    assert crossed.shape == x.shape


def test_candidates_before_or_after_projection_give_the_same() -> None:
    options: Any = {"k": 4, "self_score": "one", "candidates": random(6, seed=1), "qkv_bias": True}
    after = ConvNNAttention(12, 3, **options).double().eval()
    before = ConvNNAttention(12, 3, **options, subset="before").double().eval()
    before.load_state_dict(after.state_dict())
    x = torch.randn(2, 11, 12, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(before(x), after(x))
    for layer in (before, after):
        layer.zero_grad()
    grads = [torch.autograd.grad(m(x).square().sum(), [x, m.qkv.weight, m.qkv.bias]) for m in (before, after)]
    torch.testing.assert_close(*grads)
    with pytest.raises(ValueError, match="subset='before' needs candidates, and self_score='one'"):
        ConvNNAttention(12, 3, k=4, subset="before", candidates=random(6))
    each = ConvNNAttention(12, 3, k=4, subset="before", self_score="one", candidates=random(6, per="head"))
    with pytest.raises(ValueError, match=r"the same for the whole batch, got an index of shape \(2, 3, 6\)"):
        each(torch.randn(2, 11, 12))


def test_positions_turn_or_bias_the_scores() -> None:
    x = torch.randn(2, 24, 16, dtype=torch.float64)
    bias = RelativeBias((4, 6), heads=4)
    nn.init.normal_(bias.table)
    layer = recipes.self_attention(16, 4, position=bias).double()
    rows = torch.arange(24)
    torch.testing.assert_close(layer(x), attended(layer, x, attn_mask=bias(rows[:, None], rows)))
    assert "position.table" in dict(layer.named_parameters())
    # Turned by place, scores depend on offsets alone: moving a sequence moves its output.
    turned = recipes.self_attention(16, 4, position="rotary").double()
    padded = torch.cat([torch.zeros(2, 5, 16, dtype=torch.float64), x], 1)
    hidden = torch.arange(29) < 5
    moved = turned(padded, key_padding_mask=hidden.expand(2, -1))[:, 5:]
    torch.testing.assert_close(moved, turned(x))
    assert not torch.allclose(turned(x), attended(turned, x))


def test_dropouts_act_in_training_only() -> None:
    x = torch.randn(2, 11, 12)
    for name in ("attn_drop", "kernel_drop", "proj_drop"):
        layer = ConvNNAttention(12, 3, k=4, **{name: 0.5})  # type: ignore[arg-type]
        assert not torch.equal(layer(x), layer(x)), name
        layer.eval()
        assert torch.equal(layer(x), layer(x)), name


def by_pairs(n: int, pair: Any) -> Tensor:
    return torch.tensor([[bool(pair(i, j)) for j in range(n)] for i in range(n)])


def test_baselines_are_attention_under_their_masks() -> None:
    x = torch.randn(2, 24, 16, dtype=torch.float64)
    cells = [(a, b) for a in range(4) for b in range(6)]

    def near(i: int, j: int) -> bool:
        first = [min(max(c - 1, 0), n - 3) for c, n in zip(cells[i], (4, 6), strict=True)]
        return all(f <= c < f + 3 for c, f in zip(cells[j], first, strict=True))

    cases: list[tuple[ConvNNAttention, Any]] = [
        (recipes.causal(16, 4), lambda i, j: j <= i),
        (recipes.sparse(16, 4, pattern="band", stride=3), lambda i, j: abs(i - j) <= 3),
        (recipes.sparse(16, 4, stride=5), lambda i, j: j <= i and (i - j <= 5 or (i - j) % 5 == 0)),
        (recipes.sparse(16, 4, pattern="fixed", stride=5), lambda i, j: j <= i and (i // 5 == j // 5 or j % 5 == 4)),
        (
            recipes.bigbird(16, 4, window=2, globals=1, random=0, keys=24),
            lambda i, j: abs(i - j) <= 2 or not i or not j,
        ),
        (recipes.neighborhood(16, 4, size=(4, 6), kernel_size=3), near),
    ]
    for layer, pair in cases:
        layer.double()
        torch.testing.assert_close(layer(x), attended(layer, x, attn_mask=by_pairs(24, pair)))
    local = recipes.local(16, window=5)
    assert local.qkv.weight.shape == (192, 16)
    assert local.proj.weight.shape == (16, 64)
    assert sum(p.numel() for p in recipes.local(192).parameters()) == 192 * 192 + 64 * 192
    with pytest.raises(ValueError, match="pattern must be one of 'strided', 'fixed', 'band', got 'wild'"):
        recipes.sparse(16, 4, pattern="wild", stride=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [7, 300])
def test_linear_attention_is_its_formula(causal: bool, n: int) -> None:
    layer = LinearAttention(8, 2, causal=causal).double()
    x = torch.randn(2, n, 8, dtype=torch.float64)
    padding = torch.arange(n) >= torch.tensor([[n - 2], [n]])
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(-2, -3) for part in layer.qkv(x).chunk(3, -1))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    scores = (q @ k.mT).masked_fill(padding[:, None, None], 0.0)
    scores = scores.tril() if causal else scores
    theirs = layer.proj((scores / scores.sum(-1, keepdim=True) @ v).transpose(-2, -3).flatten(-2))
    torch.testing.assert_close(layer(x, key_padding_mask=padding), theirs, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="takes no mask of pairs"):
        layer(x, attn_mask=torch.ones(n, n))


def test_the_impossible_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a kernel has a size and k='all' has none"):
        ConvNNAttention(12, 3, k="all")
    with pytest.raises(ValueError, match="the channels of values must be a multiple of the heads, 3, got 10"):
        ConvNNAttention(12, 3, k=4, v_dim=10)
    with pytest.raises(ValueError, match=r"x must have shape \(..., tokens, 12\), got \(2, 5, 13\)"):
        ConvNNAttention(12, 3, k=4)(torch.randn(2, 5, 13))
    with pytest.raises(ValueError, match=r"key_padding_mask must be bool, True for padding, got torch.float32"):
        ConvNNAttention(12, 3, k=4)(torch.randn(2, 5, 12), key_padding_mask=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="k must be from 1 to the number of keys, 5, got 9"):
        ConvNNAttention(12, 3, k=9)(torch.randn(2, 5, 12))


def test_somebody_elses_projection_is_called_and_never_taken_apart() -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.added = base, nn.Linear(base.in_features, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.added(x)

    layer = ConvNNAttention(12, 3, k=4).double()
    adapted: Any = Adapted(layer.qkv).double()
    layer.qkv = adapted
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x, context=x), layer(x))
    layer(x, context=x).sum().backward()
    assert adapted.added.weight.grad is not None
    sparse = ConvNNAttention(12, 3, k=4, candidates=grid(5), self_score="one", subset="before").double()
    plain = sparse(x)
    sparse.qkv.register_forward_hook(lambda module, given, output: 2 * output)  # noqa: ARG005
    doubled = ConvNNAttention(12, 3, k=4, candidates=grid(5), self_score="one").double()
    doubled.load_state_dict(sparse.state_dict())
    with torch.no_grad():
        doubled.qkv.weight.mul_(2)
    torch.testing.assert_close(sparse(x), doubled(x))
    assert not torch.allclose(sparse(x), plain)


def test_a_token_is_its_own_first_neighbour_also_where_all_are_candidates() -> None:
    drawn = ConvNNAttention(12, 3, k=1, candidates=random(9)).double()
    given = ConvNNAttention(12, 3, k=1, candidates=torch.arange(9)).double()
    given.load_state_dict(drawn.state_dict())
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    torch.testing.assert_close(drawn(x), given(x))


def test_linear_attention_keeps_its_range_in_half_types() -> None:
    layer = LinearAttention(64, 2)
    x = torch.randn(1, 4096, 64)
    for dtype in (torch.float16, torch.bfloat16):
        ours = LinearAttention(64, 2, dtype=dtype)
        ours.load_state_dict(layer.state_dict())
        exact = layer(x)
        assert (ours(x.to(dtype)).float() - exact).abs().mean() < 0.05 * exact.std()
    padding = torch.arange(10) > 6
    broken = torch.randn(1, 10, 64).masked_fill(padding[:, None], torch.nan)
    assert layer(broken, key_padding_mask=padding[None])[:, :7].isfinite().all()


def test_a_mask_for_a_map_is_not_laid_over_other_tokens() -> None:
    layer = recipes.neighborhood(16, 4, size=(3, 3), kernel_size=3)
    with pytest.raises(ValueError, match=r"the mask is for \(9, 9\) queries and keys, got \(10, 10\)"):
        layer(torch.randn(1, 10, 16))
    both = recipes.neighborhood(16, 4, size=(3, 3), kernel_size=3, mask="causal")
    assert both(torch.randn(1, 9, 16)).shape == (1, 9, 16)


def test_norms_need_take_no_device_and_a_mask_may_be_a_parameter() -> None:
    class Norm(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.dim = dim

        def forward(self, x: Tensor) -> Tensor:
            return x

    layer = ConvNNAttention(12, 3, k=4, qk_norm=True, norm_layer=Norm, mask=nn.Parameter(torch.zeros(9, 9)))
    layer(torch.randn(1, 9, 12)).sum().backward()
    assert dict(layer.named_parameters())["mask.mask0"].grad is not None
    empty = ConvNNAttention(12, 3, k=4, kernel="separable", device="meta").to_empty(device="cpu")
    for parameter in empty.parameters():
        parameter.data.fill_(777.0)
    for module in empty.modules():
        getattr(module, "reset_parameters", lambda: None)()
    assert not any((parameter == 777.0).any() for parameter in empty.parameters())
    for options in ({"qk_dim": 0}, {"v_dim": -3}, {"out_dim": 0}):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            ConvNNAttention(12, 3, k=4, **options)  # type: ignore[arg-type]
