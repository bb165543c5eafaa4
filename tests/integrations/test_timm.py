"""timm's layers: what they become, what they refuse, and that a rule does what it says."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers.attention import Attention
from timm.layers.conv2d_same import Conv2dSame
from timm.layers.std_conv import ScaledStdConv2dSame, StdConv2d
from torch import Tensor, nn

import convnn
from convnn import ConvNN2d, ConvNNAttention, HybridConv2d, MultiheadConvNN


def nearest_only(module: Any, x: Tensor, k: int) -> Tensor:
    """timm's attention with all scores but the k largest of a row removed, written down plainly."""
    queries, keys, values = module.qkv(x).reshape(*x.shape[:2], 3, module.num_heads, -1).permute(2, 0, 3, 1, 4)
    scores = module.q_norm(queries) @ module.k_norm(keys).mT * queries.shape[-1] ** -0.5
    least = scores.topk(k, -1).values[..., -1:]
    weights = scores.masked_fill(scores < least, -torch.inf).softmax(-1)
    return module.proj(module.norm((weights @ values).transpose(1, 2).flatten(2)))


def attention(**options: Any) -> Attention:
    return Attention(24, 3, norm_layer=nn.LayerNorm, **options).eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": True, "qk_norm": True},
        {"scale_norm": True},
        {"proj_bias": False},
        {"attn_head_dim": 5},
        {"dim_out": 7},
    ],
    ids=str,
)
def test_every_form_of_the_attention_has_a_twin(options: dict[str, Any]) -> None:
    module, x = attention(**options), torch.randn(2, 11, 24)
    for norm in (module.q_norm, module.k_norm, module.norm):
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
    twin, report = convnn.convert(module)
    assert isinstance(twin, ConvNNAttention)
    assert report.exact
    masks: list[dict[str, Any]] = [
        {},
        {"is_causal": True},
        {"attn_mask": torch.rand(11, 11) < 0.7},
        {"attn_mask": torch.randn(2, 1, 11, 11)},
    ]
    for mask in masks:
        torch.testing.assert_close(twin(x, **mask), module(x, **mask), atol=1e-5, rtol=0)
    nearest, report = convnn.convert(module, {Attention: ConvNNAttention.using(k=4, kernel=None)})
    assert not report.exact
    torch.testing.assert_close(nearest(x), nearest_only(module, x, 4), atol=1e-5, rtol=0)
    again, _ = convnn.revert(twin)
    assert {**vars(again), "training": None}.keys() == {**vars(module), "training": None}.keys()
    torch.testing.assert_close(again(x), module(x))


@pytest.mark.parametrize("kernel", ["depthwise", "separable", "standard"])
def test_a_kernel_starts_where_it_changes_nothing(kernel: str) -> None:
    module, x = attention(), torch.randn(2, 11, 24)
    twin, _ = convnn.convert(module, {"": ConvNNAttention.using(k=4, kernel=kernel)})
    torch.testing.assert_close(twin(x), nearest_only(module, x, 4), atol=1e-5, rtol=0)
    assert set(twin.state_dict()) - set(module.state_dict()) >= {"kernel.weight"}
    with pytest.raises(ValueError, match="attends to the 4 nearest keys"):
        convnn.revert(twin)


def test_a_converted_model_is_copied_and_pickled() -> None:
    model = timm.create_model("test_vit", img_size=32).eval()
    twin, _ = convnn.convert(model, {Attention: ConvNNAttention.using(k=3), nn.Conv2d: ConvNN2d})
    x = torch.randn(1, 3, 32, 32)
    for again in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        torch.testing.assert_close(again(x), twin(x))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (MultiheadConvNN.using(k=4), "ConvNNAttention can stand for timm's Attention, MultiheadConvNN cannot"),
        (ConvNNAttention.using(k=4, qk_dim=12), "qk_dim of the rule's layer: the attention decides that itself"),
        (ConvNNAttention, "missing 1 required keyword-only argument: 'k'"),
    ],
)
def test_a_rule_that_cannot_be_says_why(layer: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        convnn.convert(attention(), {Attention: layer})


def test_what_has_no_twin_is_left_with_a_reason() -> None:
    model = nn.ModuleDict(
        {
            "gated": Attention(24, 3, gated=True),
            "standardised": StdConv2d(3, 4, 3),
            "scaled": ScaledStdConv2dSame(3, 4, 3),
        }
    )
    report = convnn.convert(model)[1]
    assert "gated" in report["gated"].note
    assert all("standardises its kernel" in report[name].note for name in ("standardised", "scaled"))
    assert not report.replaced


@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), ((3, 2), 1), (1, 2)])
@pytest.mark.parametrize("size", [(9, 12), (10, 7)])
def test_tensorflows_padding_is_exact_at_every_size(stride: Any, dilation: int, size: tuple[int, int]) -> None:
    module, x = Conv2dSame(3, 4, (3, 4), stride, dilation=dilation), torch.randn(2, 3, *size)
    twin, report = convnn.convert(nn.Sequential(module))
    assert report.exact
    torch.testing.assert_close(twin(x), module(x))
    searched, _ = convnn.convert(nn.Sequential(module), {"0": ConvNN2d.using(backend="reference")})
    torch.testing.assert_close(searched(x), module(x), atol=1e-5, rtol=0)
    alike, report = convnn.convert(nn.Sequential(module), {"0": ConvNN2d.using(similarity="cosine")})
    assert not report.exact
    assert alike(x).shape == module(x).shape
    assert type(convnn.revert(twin)[0][0]) is Conv2dSame
    with pytest.raises(ValueError, match="ConvNN2d can stand for Conv2dSame, HybridConv2d cannot"):
        convnn.convert(nn.Sequential(module), {"0": HybridConv2d})


def test_an_attention_factory_of_timm_takes_the_layer() -> None:
    layer = ConvNNAttention.using(k="all", kernel=None)
    plain = timm.create_model("test_vit", img_size=32).eval()
    ours = timm.create_model("test_vit", img_size=32, attn_layer=layer).eval()
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), plain(x), atol=1e-5, rtol=0)


def test_training_mode_and_frozen_parameters_go_over() -> None:
    model: Any = timm.create_model("test_vit", img_size=32, attn_drop_rate=0.3)
    model.blocks.requires_grad_(False)
    twin, report = convnn.convert(model, {Attention: ConvNNAttention.using(k=3)})
    assert all(module.training for module in twin.modules())
    assert not any(parameter.requires_grad for parameter in twin.blocks.parameters())
    assert all("dropout draws other numbers" in entry.note for entry in report.replaced)
    x = torch.randn(1, 3, 32, 32)
    assert not torch.equal(twin(x), twin(x))
    assert F.mse_loss(twin.eval()(x), twin(x)) == 0
