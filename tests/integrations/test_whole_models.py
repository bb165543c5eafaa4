"""Whole models of other libraries keep their answers, their gradients and their state dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision  # type: ignore[import-untyped]
from torch import Tensor, nn
from torchvision.models import swin_transformer as swin  # type: ignore[import-untyped]
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, ViTConfig, ViTModel

import convnn

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 60,
}
EAGER: dict[str, Any] = {"attn_implementation": "eager"}


def image() -> dict[str, Any]:
    return {"args": (torch.randn(1, 3, 64, 64),)}


def text() -> dict[str, Any]:
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 7:] = 0
    return {"args": (torch.randint(50, (2, 11)),), "kwargs": {"attention_mask": mask}}


def torchvision_vit() -> nn.Module:
    model = torchvision.models.vit_b_16(image_size=64, weights=None)
    nn.init.normal_(model.heads.head.weight, std=0.02)  # torchvision's starts at 0, which hides everything
    return model


def torchvision_vgg() -> nn.Module:
    with torch.device("meta"):
        model = torchvision.models.vgg11_bn(init_weights=False)
    model.classifier = nn.Linear(
        512 * 7 * 7, 7, device="meta"
    )  # a hundred million weights less, none of them converted
    model = model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)):
            module.reset_parameters()
    return model


def windows(version: str) -> nn.Module:
    sizes = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "num_classes": 7}
    if version == "1":
        return swin.SwinTransformer(**sizes, window_size=[3, 5])
    second = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    return swin.SwinTransformer(**sizes, window_size=[4, 3], **second)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], dict[str, int]]] = {
    "timm vit_tiny": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=64),
        image,
        {"Attention": 12, "Conv2d": 1},
    ),
    "timm deit_tiny": (
        lambda: timm.create_model("deit_tiny_patch16_224", img_size=64),
        image,
        {"Attention": 12, "Conv2d": 1},
    ),
    "timm norms": (lambda: timm.create_model("test_vit2", img_size=64, qk_norm=True), image, {"Attention": 8}),
    "timm convnext_atto": (lambda: timm.create_model("convnext_atto"), image, {"Conv2d": 40}),
    "timm resnet18": (lambda: timm.create_model("resnet18"), image, {"Conv2d": 20}),
    "timm same": (lambda: timm.create_model("tf_mobilenetv3_small_minimal_100"), image, {"Conv2dSame": 5}),
    "torchvision resnet50": (lambda: torchvision.models.resnet50(weights=None), image, {"Conv2d": 53}),
    "torchvision vit_b_16": (torchvision_vit, image, {"MultiheadAttention": 12, "Conv2d": 1}),
    "torchvision vgg11_bn": (torchvision_vgg, image, {"Conv2d": 8}),
    "torchvision swin": (
        lambda: windows("1"),
        lambda: {"args": (torch.randn(2, 3, 44, 52),)},
        {"ShiftedWindowAttention": 4},
    ),
    "torchvision swin v2": (
        lambda: windows("2"),
        lambda: {"args": (torch.randn(2, 3, 44, 52),)},
        {"ShiftedWindowAttentionV2": 4},
    ),
    "transformers ViT": (
        lambda: ViTModel(ViTConfig(image_size=64, **SMALL)),
        image,
        {"ViTAttention": 2, "Conv2d": 1},
    ),
    "transformers BERT": (
        lambda: BertModel(BertConfig(vocab_size=50, **SMALL)),
        text,
        {"BertSelfAttention": 2},
    ),
    "transformers BERT, eager": (
        lambda: BertModel(BertConfig(vocab_size=50, **SMALL, **EAGER)),
        text,
        {"BertSelfAttention": 2},
    ),
    "transformers Llama": (
        lambda: LlamaModel(LlamaConfig(vocab_size=50, num_key_value_heads=1, **SMALL)),
        text,
        {"LlamaAttention": 2},
    ),
    "nn.Transformer": (
        lambda: nn.Transformer(32, 4, 2, 2, 48, batch_first=True),
        lambda: {"args": (torch.randn(2, 7, 32), torch.randn(2, 5, 32))},
        {"MultiheadAttention": 6},
    ),
}


def answer(model: nn.Module, given: dict[str, Any]) -> Tensor:
    said = model(*given["args"], **given.get("kwargs", {}))
    return said if isinstance(said, Tensor) else said.last_hidden_state


def gradients(model: nn.Module, given: dict[str, Any], towards: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    output = answer(model, given)
    (output * towards).mean().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_is_the_same_model(name: str) -> None:
    make, inputs, counts = MODELS[name]
    model, given = make().eval(), inputs()
    twin, report = convnn.convert(model)
    assert report.exact
    for kind, count in counts.items():
        assert [entry.after is not None for entry in report if entry.before == kind] == [True] * count
    assert list(twin.state_dict()) == list(model.state_dict())

    towards = torch.randn_like(answer(model, given).detach())
    before, wanted = gradients(model, given, towards)
    after, got = gradients(twin, given, towards)
    assert before.abs().max() > 1e-3
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    assert got.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        assert (got[parameter] - gradient).abs().max() <= 1e-4, parameter


@pytest.mark.parametrize("name", MODELS)
def test_what_a_twin_learned_travels_back(name: str) -> None:
    make, inputs, _ = MODELS[name]
    model, given = make().eval(), inputs()
    twin, _ = convnn.convert(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        learned = answer(twin, given)
        again, report = convnn.revert(twin)
        assert {entry.after for entry in report} == {entry.before for entry in convnn.convert(model)[1].replaced}
        assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]
        torch.testing.assert_close(answer(again, given), learned, atol=1e-5, rtol=0)
        model.load_state_dict(twin.state_dict())
        torch.testing.assert_close(answer(model, given), learned, atol=1e-5, rtol=0)
