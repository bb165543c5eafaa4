"""Attentions whose projections somebody changed, and attentions that say little of themselves."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import timm
import torch
from timm.layers.attention import Attention
from torch import Tensor, nn
from torchvision.models.swin_transformer import ShiftedWindowAttention  # type: ignore[import-untyped]
from transformers import (
    BertConfig,
    BertModel,
    DeepseekV3Config,
    DeepseekV3Model,
    DeepseekV32Config,
    DeepseekV32Model,
    SegformerConfig,
    SegformerModel,
)

import convnn
from convnn import ConvNNAttention
from convnn.integrations.transformers import attend

CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 0}
TEXT: dict[str, Any] = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 30}
LATENT: dict[str, Any] = {
    "q_lora_rank": 6, "kv_lora_rank": 7, "qk_rope_head_dim": 4, "qk_nope_head_dim": 5, "v_head_dim": 10,
    "num_attention_heads": 3, "num_key_value_heads": 3, "first_k_dense_replace": 1,
}  # fmt: skip


class Adapted(nn.Module):
    """A linear layer and what was learned beside it."""

    def __init__(self, linear: nn.Linear, sized: bool) -> None:
        super().__init__()
        self.linear, self.beside = linear, nn.Linear(linear.in_features, linear.out_features)
        if sized:
            self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.beside(x)


def quantised(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})


@pytest.mark.parametrize("name", ["qkv", "proj"])
def test_timms_projections_are_called_whoever_made_them(name: str) -> None:
    module, x = Attention(24, 3).eval(), torch.randn(2, 11, 24)
    setattr(module, name, Adapted(getattr(module, name), sized=True))
    twin, report = convnn.convert(module)
    assert report.exact
    torch.testing.assert_close(twin(x), module(x), **CLOSE)
    assert type(convnn.revert(twin)[0]) is Attention
    setattr(module, name, Adapted(getattr(module, name), sized=False))
    report = convnn.convert(module)[1]
    assert report[""].note.startswith(f"its {name} is Adapted, which has no in_features")


def test_what_somebody_put_into_timms_attention_is_not_lost() -> None:
    module = Attention(24, 3)
    module.adapter = nn.Linear(24, 24)
    assert convnn.convert(module)[1][""].note == "somebody put adapter into it, which its twin would lose"
    module = Attention(24, 3)
    module.register_buffer("seen", torch.zeros(()))
    assert convnn.convert(module)[1][""].note.startswith("it has seen")


def test_networks_with_quantised_projections_are_converted_around_them() -> None:
    vit, x = quantised(timm.create_model("test_vit", img_size=32).eval()), torch.randn(2, 3, 32, 32)
    twin, report = convnn.convert(vit)
    assert sum(entry.before == "Attention" for entry in report.replaced) > 0
    torch.testing.assert_close(twin(x), vit(x), **CLOSE)
    bert, words = quantised(BertModel(BertConfig(**TEXT, num_attention_heads=3)).eval()), torch.randint(50, (2, 9))
    twin, report = convnn.convert(bert)
    assert [entry.before for entry in report.replaced] == ["BertSelfAttention"]
    torch.testing.assert_close(twin(words).last_hidden_state, bert(words).last_hidden_state, **CLOSE)


def test_what_torchvision_would_not_call_is_refused() -> None:
    module = ShiftedWindowAttention(12, [3, 4], [0, 0], 2)
    module.proj.register_forward_hook(lambda *_: None)
    assert "its proj is Linear or has hooks" in convnn.convert(module)[1][""].note
    module = ShiftedWindowAttention(12, [3, 4], [0, 0], 2)
    module.qkv = Adapted(module.qkv, sized=True)
    assert "its qkv is Adapted or has hooks" in convnn.convert(module)[1][""].note
    small = quantised(ShiftedWindowAttention(8, [2, 2], [0, 0], 2))
    assert "its qkv is Linear or has hooks" in convnn.convert(small)[1][""].note


def test_a_network_whose_stages_differ_in_width_is_converted() -> None:
    sizes: dict[str, Any] = {"hidden_sizes": [8, 12], "depths": [1, 1], "num_attention_heads": [2, 3]}
    sizes["num_encoder_blocks"] = 2
    stages: dict[str, Any] = {"sr_ratios": [2, 1], "strides": [4, 2], "patch_sizes": [7, 3], "mlp_ratios": [2, 2]}
    model, x = SegformerModel(SegformerConfig(**sizes, **stages)).eval(), torch.randn(1, 3, 32, 32)
    twin, report = convnn.convert(model)
    assert report.exact
    torch.testing.assert_close(twin(x).last_hidden_state, model(x).last_hidden_state, **CLOSE)
    learning, _ = convnn.convert(model, {"*attention": ConvNNAttention.using(k=3)})
    kernels = [tuple(p.shape) for name, p in learning.named_parameters() if name.endswith("kernel.weight")]
    assert kernels == [(4, 1, 3), (4, 1, 3)]
    assert learning(x).last_hidden_state.shape == twin(x).last_hidden_state.shape


def test_a_kernel_has_the_channels_of_the_values() -> None:
    model, words = DeepseekV3Model(DeepseekV3Config(**TEXT, **LATENT)).eval(), torch.randint(50, (2, 9))
    learning, _ = convnn.convert(model, {"*attn": ConvNNAttention.using(k=3)})
    plain, _ = convnn.convert(model, {"*attn": ConvNNAttention.using(k=3, kernel=None)})
    assert learning.layers[0].self_attn.convnn.kernel.weight.shape == (10, 1, 3)
    torch.testing.assert_close(learning(words).last_hidden_state, plain(words).last_hidden_state, **CLOSE)


def test_an_attention_that_hands_over_whom_to_attend_to_is_left() -> None:
    sparse: dict[str, Any] = {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 8}
    model = DeepseekV32Model(DeepseekV32Config(**TEXT, **LATENT, **sparse)).eval()
    note = convnn.convert(model)[1]["layers.0.self_attn"].note
    assert note == "it asks its attention for indices, which the operator does not know"


def test_a_sliding_window_without_its_mask_is_refused() -> None:
    module, tokens = nn.Module(), torch.randn(1, 3, 7, 8)
    module.config = BertConfig(**TEXT)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the mask of a sliding window, got a window of 4 for 7 keys"):
        attend(None, module, tokens, tokens, tokens, sliding_window=4)
    assert attend(None, module, tokens, tokens, tokens, sliding_window=7)[0].shape == (1, 7, 3, 8)


def test_the_choice_between_fused_and_plain_attention_comes_back() -> None:
    for fused in (False, True):
        module = Attention(24, 3)
        module.fused_attn = fused  # type: ignore[misc]
        assert convnn.revert(convnn.convert(module)[0])[0].fused_attn is fused


def test_dropout_a_rule_adds_is_no_longer_the_attention() -> None:
    layer = ConvNNAttention.using(k="all", kernel=None, kernel_drop=0.2)
    twin, report = convnn.convert(Attention(24, 3), {"": layer})
    assert report[""].note == "its output is dropped out before the projection"
    with pytest.raises(ValueError, match="dropped out before the projection"):
        convnn.revert(twin)
