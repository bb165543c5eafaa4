"""Models: the published counts, the names of torchvision and timm, every layer family, other sizes, compilation."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision  # type: ignore[import-untyped]
from timm.data.config import resolve_data_config
from torch import nn

import convnn.integrations.timm as registered
from convnn import ConvNN2d, ConvNNAttention, models
from convnn.candidates import random
from convnn.models import VGG, ResNet, ViT
from convnn.models.factories import MapAttention


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


COUNTS = {
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16c": 133_638_952,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    # With 1x1 convolutions in the shortcuts, and a thousand classes.
    "resnet8": 142_392,
    "resnet14": 239_608,
    "resnet20": 336_824,
    "resnet32": 531_256,
    "resnet44": 725_688,
    "resnet56": 920_120,
    "resnet110": 1_795_064,
    "vit_tiny": 5_717_416,
    "vit_small": 22_050_664,
    "vit_base": 86_567_656,
    "vit_large": 304_326_632,
    "vit_huge": 632_045_800,
    # For 256 tokens in 256 places, without a bias in front of the attention.
    "gpt_tiny": 890_112,
    "gpt_mini": 10_935_552,
    "gpt_small": 85_618_176,
}


def test_every_model_has_its_published_count() -> None:
    assert list(COUNTS) == models.names()
    for name, count in COUNTS.items():
        assert parameters(models.create(name, device="meta")) == count, name


@pytest.mark.parametrize("name", ["vgg11", "vgg16", "resnet18", "resnet50"])
def test_names_and_shapes_are_torchvisions(name: str) -> None:
    with torch.device("meta"):
        theirs = getattr(torchvision.models, name)().state_dict()
    ours = models.create(name, device="meta").state_dict()
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}


@pytest.mark.parametrize("side", [32, 40, 64])
def test_a_vgg_answers_and_learns_as_torchvisions(side: int) -> None:
    theirs = torchvision.models.vgg11(num_classes=7).eval()
    ours = models.create("vgg11", num_classes=7).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, side, 32)
    found, expected = ours(x), theirs(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for output in (found, expected):
        output.square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-5)


def test_a_vit_has_timms_names_and_answers() -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=7).eval()
    ours = models.create("vit_tiny", num_classes=7).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


def test_a_resnet_answers_as_torchvisions() -> None:
    theirs = torchvision.models.resnet18(num_classes=7).eval()
    for options in ({}, {"layer": "convnn", "similarity": "space"}):
        ours = models.create("resnet18", num_classes=7, **options).eval()
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(2, 3, 64, 80)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


SMALL: dict[str, Any] = {
    "vgg": lambda **options: VGG(((8,), (8,), (16,), (16, (16, "1")), (16,)), num_classes=5, **options),
    "resnet": lambda **options: ResNet("bottleneck", (1, 1, 1, 1), num_classes=5, stem="cifar", **options),
    "basic": lambda **options: ResNet("basic", (1, 2, 1, 1), num_classes=5, **options),
    "vit": lambda **options: ViT(32, 2, 4, 8, num_classes=5, image_size=32, **options),
}
FAMILIES = [
    *((model, layer) for model in ("vgg", "resnet", "basic") for layer in ("conv", "convnn", "hybrid", "attention")),
    *(("vit", layer) for layer in ("attention", "convnn", "kvt", "local", "sparse", "linear")),
]
OPTIONS: dict[str, Any] = {"kvt": {"k": 5}, "sparse": {"stride": 3}, "convnn": {"k": 4}, "hybrid": {"k": 4}}


@pytest.mark.parametrize(("model", "layer"), FAMILIES)
def test_every_family_learns_with_every_layer(model: str, layer: str) -> None:
    torch.manual_seed(0)
    made = SMALL[model](layer=layer, **OPTIONS.get(layer, {}))
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4) % 2
    step = torch.optim.SGD(made.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(made(x), y)
        step.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in made.parameters())
        step.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("model", "layer"), [("vgg", "hybrid"), ("resnet", "hybrid"), ("vit", "convnn")])
def test_it_runs_at_sizes_it_was_not_built_for(model: str, layer: str) -> None:
    made = SMALL[model](layer=layer, k=4, in_channels=2).eval()
    for size in ((32, 32), (48, 40), (64, 32)):
        assert made(torch.randn(2, 2, *size)).shape == (2, 5)


def test_sinusoidal_positions_know_any_size() -> None:
    made = ViT(32, 2, 4, 8, image_size=32, positions="sinusoidal", norm="patch", num_classes=5)
    assert made(torch.randn(2, 3, 48, 40)).shape == (2, 5)
    assert "pos_embed" not in made.state_dict()


@pytest.mark.parametrize(("model", "layer"), [("vgg", "hybrid"), ("basic", "hybrid"), ("vit", "convnn")])
def test_one_of_each_family_compiles(model: str, layer: str) -> None:
    made = SMALL[model](layer=layer, k=4).eval()
    x = torch.randn(1, 3, 32, 32)
    torch.compiler.reset()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), made(x), rtol=1e-4, atol=1e-4)


def test_factories_are_layers_of_ones_own() -> None:
    seen = []

    def layer(inputs: int, outputs: int, /, *, stride: int = 1, bias: bool = True) -> nn.Module:
        seen.append((inputs, outputs, stride))
        return ConvNN2d(inputs, outputs, 3, stride, 1, bias=bias, similarity="cosine")

    ResNet("basic", (1, 1, 1, 1), layer=layer, strided=layer)
    assert (64, 128, 2) in seen
    assert (512, 512, 1) in seen
    made = ViT(32, 2, 4, 8, image_size=32, layer=ConvNNAttention.using(k=5, candidates=random(9)))
    assert isinstance(made.blocks[0].attn, ConvNNAttention)
    with pytest.raises(TypeError, match="options are for a layer by name; give k, ratio to the factory"):
        VGG(((8,),), layer=layer, k=3, ratio=0.5)


def test_in_a_published_resnet_the_strided_convolutions_stay() -> None:
    made = models.create("resnet50", layer="hybrid", device="meta")
    kinds = [
        type(made.get_submodule(f"layer{s}.{b}.conv2")).__name__
        for s in range(1, 5)
        for b in range((3, 4, 6, 3)[s - 1])
    ]
    assert kinds.count("HybridConv2d") == 13
    assert kinds.count("Conv2d") == 3


def test_classifiers_can_be_reset_and_left_out() -> None:
    for name, make in SMALL.items():
        made: Any = make()
        x = torch.randn(2, 3, 32, 32)
        features = made.forward_features(x)
        torch.testing.assert_close(made.eval().forward_head(made.forward_features(x)), made(x))
        made.reset_classifier(9)
        assert made(x).shape == (2, 9), name
        assert isinstance(made.get_classifier(), nn.Linear)
        made.reset_classifier(0)
        assert made(x).shape == made.forward_head(features, pre_logits=True).shape


def test_the_impossible_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown model 'resnet19'; known are vgg11"):
        models.create("resnet19")
    with pytest.raises(ValueError, match="unknown layer 'cnv'; known are 'attention', 'conv', 'convnn', 'hybrid'"):
        models.create("resnet18", layer="cnv")
    with pytest.raises(ValueError, match=r"multiples of the patch, 8, got \(33, 32\)"):
        SMALL["vit"]()(torch.randn(1, 3, 33, 32))
    with pytest.raises(ValueError, match="an image of at least 32 by 32"):
        SMALL["vgg"]()(torch.randn(1, 3, 16, 16))


def test_timm_knows_the_models() -> None:
    listed = timm.list_models("convnn_*")
    assert set(listed) == set(registered.NAMES)
    model: Any = timm.create_model("convnn_vit_tiny_patch16_224", k=16, num_classes=7)
    assert model.blocks[0].attn.kernel.weight.shape == (64, 1, 16)
    assert model.default_cfg["classifier"] == "head"
    assert resolve_data_config(model=model)["input_size"] == (3, 224, 224)
    model.reset_classifier(3)
    assert model(torch.randn(1, 3, 224, 224)).shape == (1, 3)
    features: Any = timm.create_model("convnn_vit_tiny_patch16_224", features_only=True)
    assert [tuple(f.shape) for f in features(torch.randn(1, 3, 224, 224))] == [(1, 192, 14, 14)] * 3


def test_timm_extracts_features_of_convolutional_ones() -> None:
    model: Any = timm.create_model("convnn_resnet18", num_classes=7, ratio=0.25, in_chans=1)
    assert model(torch.randn(1, 1, 64, 64)).shape == (1, 7)
    assert model.default_cfg["first_conv"] == "conv1"
    features: Any = timm.create_model("convnn_resnet18", features_only=True, layer="conv")
    assert features.feature_info.channels() == [64, 64, 128, 256, 512]
    assert [f.shape[-1] for f in features(torch.randn(1, 3, 64, 64))] == [32, 16, 8, 4, 2]
    vgg = timm.create_model("convnn_vgg11", features_only=True, layer="conv", out_indices=(0, 4))
    assert [tuple(f.shape) for f in vgg(torch.randn(1, 3, 64, 64))] == [(1, 64, 32, 32), (1, 512, 2, 2)]


@pytest.mark.parametrize("name", ["vgg16", "resnet18"])
def test_it_starts_as_torchvisions_do(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 64, 64)
    with torch.device("cpu"), torch.no_grad():
        theirs, ours = getattr(torchvision.models, name)(num_classes=10), models.create(name, num_classes=10)
        spreads = []
        for model in (theirs, ours):
            stem: Any = model.features if name == "vgg16" else nn.Sequential(*list(model.children())[:-2])
            spreads.append(stem.eval()(x).std(0).mean().item())
    assert 0.5 < spreads[1] / spreads[0] < 2


def test_a_vit_starts_as_timms_does() -> None:
    ours = models.create("vit_tiny", image_size=64, layer="convnn")
    theirs = timm.create_model("vit_tiny_patch16_224")
    for name, weight in ours.named_parameters():
        if "kernel" not in name and "norm" not in name and "cls" not in name and "patch_embed" not in name:
            other = theirs.get_parameter(name)
            assert abs(weight.std() - other.std()) < 0.1 * other.std() + 1e-6, name
    assert (ours.get_parameter("blocks.0.attn.kernel.weight") == 1).all()


def test_what_a_factory_made_starts_as_it_was_made() -> None:
    def layer(inputs: int, outputs: int, /, *, stride: int = 1, bias: bool = True) -> nn.Module:
        made = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=bias)
        nn.init.zeros_(made.weight)
        return made

    for block in ("basic", "bottleneck"):
        made: Any = ResNet(block, (1, 1, 1, 1), layer=layer)
        assert made.layer1[0].conv2.weight.abs().max() == 0
        assert made.conv1.weight.abs().max() > 0


def test_devices_types_and_sizes_mean_what_they_say() -> None:
    for name, options in (("resnet18", {"layer": "hybrid"}), ("vit_tiny", {"image_size": 64})):
        made = models.create(name, num_classes=3, dtype=torch.float64, **options)
        assert {parameter.dtype for parameter in made.parameters()} == {torch.float64}
        assert made(torch.randn(1, 3, 64, 64, dtype=torch.float64)).dtype == torch.float64
    half = models.create("vit_tiny", image_size=64, dtype=torch.bfloat16)
    assert half(torch.randn(1, 3, 96, 64).bfloat16()).dtype == torch.bfloat16
    with pytest.raises((RuntimeError, AssertionError)):  # the first accelerator, where there is none
        models.create("resnet18", device=torch.cuda.device_count() + 7)
    wrong: list[dict[str, Any]] = [{"image_size": -64}, {"image_size": 64.0}, {"patch": 0}, {"in_channels": 0}]
    for given in wrong:
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            models.create("vit_tiny", **given)
    with pytest.raises(ValueError, match="a ResNet needs at least one stage, got no depths"):
        ResNet("basic", ())


def test_attention_on_a_map_is_attention_among_cells_that_know_their_places() -> None:
    layer = MapAttention(6, 10, heads=2).double()
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    tokens = x.clone()
    for row in range(5):
        for column in range(4):
            for channel in range(6):
                place, number = (row, channel) if channel < 3 else (column, channel - 3)
                angle = torch.tensor(place / 10000 ** (2 * (number // 2) / 3))
                tokens[:, channel, row, column] += angle.sin() if number % 2 == 0 else angle.cos()
    expected = layer.attn(tokens.flatten(2).mT).mT.reshape(2, 10, 5, 4)
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)
    halved = models.create("resnet8", layer="attention", strided="attention", num_classes=3)
    assert halved(torch.randn(2, 3, 9, 7)).shape == (2, 3)


def test_strided_convolutions_can_be_written_out() -> None:
    one = models.create("resnet18", layer="hybrid", ratio=0.25, device="meta")
    other = models.create("resnet18", layer="hybrid", ratio=0.25, strided="conv", device="meta")
    assert repr(one) == repr(other)
    both = models.create("resnet18", layer="hybrid", ratio=0.25, strided="hybrid", device="meta")
    assert type(both.get_submodule("layer2.0.conv1")).__name__ == "HybridConv2d"


def test_timms_ordinary_arguments_work_or_are_refused_by_name() -> None:
    model: Any = timm.create_model("convnn_vgg11", drop_rate=0.3, global_pool="avg", num_classes=3)
    assert model.classifier[2].p == 0.3
    timm.create_model("convnn_resnet18", drop_rate=0.0, drop_path_rate=0.0, img_size=64)
    for options in ({"drop_rate": 0.1}, {"drop_path_rate": 0.1}, {"global_pool": "max"}, {"output_stride": 16}):
        with pytest.raises(ValueError, match=f"convnn_resnet18 takes {next(iter(options))}="):
            timm.create_model("convnn_resnet18", **options)
