"""What rules may say, what the report says, and every refusal."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import convnn
from convnn import ConvNN1d, ConvNN2d, ConvNNAttention, HybridConv2d, MultiheadConvNN, surgery
from tests.surgery.nets import ResNet


def test_a_report_lists_what_was_replaced_and_what_was_left() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 2), nn.Linear(2, 2))
    _, report = convnn.convert(model, {"0": ConvNN2d.using(similarity="cosine"), "1": surgery.leave})
    assert [(e.name, e.before, e.after, e.exact) for e in report] == [
        ("0", "Conv2d", "ConvNN2d", False),
        ("1", "ConvTranspose2d", None, True),
    ]
    assert not report.exact
    assert len(report) == 2
    assert report.replaced == (report["0"],)
    assert report.left == (report["1"],)
    lines = str(report).splitlines()
    assert lines[0].split() == ["name", "was", "is", "exact", "note"]
    assert re.fullmatch(r"0 +Conv2d +ConvNN2d +no +neighbours by cosine", lines[2])
    assert re.fullmatch(r"1 +ConvTranspose2d +\(left\) +- +left by its rule", lines[3])
    assert lines[-1] == "1 replaced (1 not exact), 1 left"
    assert repr(report) == str(report)
    with pytest.raises(KeyError, match="2"):
        report["2"]


def test_a_model_with_nothing_to_convert_is_reported_as_such() -> None:
    _, report = convnn.convert(nn.Sequential(nn.Linear(3, 4)))
    assert str(report) == "0 replaced (0 not exact), 0 left"


def test_rules_go_by_name_class_and_predicate_and_the_first_counts() -> None:
    rules: Any = {
        "layer1.0.*": surgery.leave,
        "layer[1-9].*.conv2": HybridConv2d.using(ratio=0.5),
        (lambda module: getattr(module, "kernel_size", None) == (1, 1)): ConvNN2d.using(backend="reference"),
        nn.Conv2d: ConvNN2d,
    }
    twin, report = convnn.convert(ResNet(), rules)
    assert report["layer1.0.conv2"].note == "left by its rule"
    assert type(twin.layer1[0].conv1) is nn.Conv2d
    assert len(report) == 10
    assert isinstance(twin.layer1[1].conv2, HybridConv2d)
    assert twin.layer2[0].downsample[0].backend == "reference"
    assert type(twin.layer2[0].conv1) is ConvNN2d
    assert report.exact


def test_what_is_left_stays_with_all_that_is_in_it() -> None:
    twin, report = convnn.convert(ResNet(), {"layer1": surgery.leave, "*": surgery.exact})
    assert [entry.name for entry in report.left] == [f"layer1.{n}.conv{m}" for n in (0, 1) for m in (1, 2)]
    assert {entry.note for entry in report.left} == {"left by its rule"}
    assert len(report.replaced) == 6
    assert type(twin.layer1[0].conv1) is nn.Conv2d


def test_what_no_rule_is_about_is_left_and_listed() -> None:
    _, report = convnn.convert(ResNet(), {"conv1": ConvNN2d})
    assert len(report.replaced) == 1
    assert {entry.note for entry in report.left} == {"no rule is about it"}


def test_functions_give_modules_twins_or_nothing() -> None:
    def chosen(module: nn.Conv2d) -> nn.Module | surgery.Twin | None:
        if module.kernel_size == (1, 1):
            return None
        return surgery.exact(module) if module.stride == (1, 1) else nn.Identity()

    twin, report = convnn.convert(ResNet(), {nn.Conv2d: chosen})
    assert isinstance(twin.conv1, nn.Identity)
    assert report["conv1"].note == "made by chosen, which says nothing of exactness"
    assert type(twin.layer2[0].conv2) is ConvNN2d
    assert report["layer2.0.downsample.0"].after is None
    with pytest.raises(TypeError, match="must give a module, a Twin or None, got 3"):
        convnn.convert(ResNet(), {"conv1": lambda _: 3})  # type: ignore[dict-item, return-value]


def test_a_function_may_replace_a_whole_block() -> None:
    twin, report = convnn.convert(ResNet(), {"layer2": lambda _: nn.Conv2d(4, 6, 1)})
    assert report["layer2"].before == "Sequential"
    assert twin(torch.randn(1, 3, 12, 9)).shape == (1, 5)
    assert not any(entry.name.startswith("layer2.") for entry in report)


UNMATCHED = {
    "a name": ("layer1.0.cnv1", r"the rule 'layer1\.0\.cnv1' matches nothing; did you mean 'layer1\.0\.conv1'"),
    "a pattern": ("layers[12].*.conv2", r"matches nothing; did you mean '"),
    "nothing near": ("zzz", r"matches nothing; names are 'conv1', .* and 5 more"),
    "a class": (nn.Conv3d, r"the rule Conv3d matches nothing; what could be converted is of Conv2d"),
}


@pytest.mark.parametrize("case", UNMATCHED)
def test_a_rule_that_matches_nothing_is_an_error_that_names_what_is_near(case: str) -> None:
    key, message = UNMATCHED[case]
    with pytest.raises(ValueError, match=message):
        convnn.convert(ResNet(), {key: HybridConv2d})
    with pytest.raises(ValueError, match="has nothing that could be converted"):
        convnn.convert(nn.Linear(2, 2), {key: HybridConv2d})


def test_a_rule_that_changes_nothing_is_an_error_with_its_reasons() -> None:
    with pytest.raises(ValueError, match=r"'fc' replaced nothing: fc \(Linear\): it has no twin"):
        convnn.convert(ResNet(), {"fc": ConvNN2d})
    with pytest.raises(ValueError, match=r"'conv1' replaced nothing: conv1: the rule '\*' comes first"):
        convnn.convert(ResNet(), {"*": ConvNN2d, "conv1": HybridConv2d})
    with pytest.raises(ValueError, match=r"conv1: the kernel must fit.*; and 6 more"):
        convnn.convert(ResNet(), {"*conv*": ConvNN2d.using(k=4), "*": surgery.exact})
    with pytest.raises(ValueError, match="conv1: already a ConvNN layer"):
        convnn.convert(convnn.convert(ResNet())[0], {"conv1": HybridConv2d})


def test_rules_must_be_rules() -> None:
    with pytest.raises(TypeError, match="a rule is for a pattern of names, a class or a predicate, got 3"):
        convnn.convert(ResNet(), {3: ConvNN2d})
    with pytest.raises(TypeError, match="must be a layer class or a function, got 'hybrid'"):
        convnn.convert(ResNet(), {"*": "hybrid"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        convnn.convert({})  # type: ignore[arg-type]


LAYERS: dict[str, tuple[nn.Module, Any, str]] = {
    "another number of axes": (nn.Conv2d(3, 4, 3), ConvNN1d, "ConvNN2d and HybridConv2d can stand for Conv2d, C.*1d"),
    "no layer of maps": (nn.Conv2d(3, 4, 3), ConvNNAttention.using(k=3), "for Conv2d, ConvNNAttention cannot"),
    "another class": (nn.Conv2d(3, 4, 3), nn.Identity, "can stand for Conv2d, Identity cannot"),
    "k": (nn.Conv2d(3, 4, 3), ConvNN2d.using(k=4), r"the kernel must fit: .* leave out k, patch"),
    "heads": (nn.Conv2d(4, 4, 3), ConvNN2d.using(heads=2), r"is \(4, 4, 3, 3\), that of the layer \(4, 2, 3, 3\)"),
    "the window": (nn.Conv2d(3, 4, 3), ConvNN2d.using(stride=2), "stride of the rule's layer: the convolution decides"),
    "a bad option": (nn.Conv2d(3, 4, 3), ConvNN2d.using(boundary="left"), "boundary must be one of"),
    "hybrid groups": (nn.Conv2d(4, 4, 3, groups=2), HybridConv2d, "both halves of a hybrid see all channels.*groups=2"),
    "hybrid depthwise": (
        nn.Conv2d(4, 8, 3, groups=4), HybridConv2d.using(branch="depthwise"), "give ratio=0.0 or ratio=1.0"
    ),
    "hybrid separable": (nn.Conv2d(4, 8, 3), HybridConv2d.using(branch="separable"), "leave out branch='separable'"),
    "hybrid k": (nn.Conv2d(4, 8, 3), HybridConv2d.using(k=4), "leave out k and patch"),
    "hybrid bias": (nn.Conv2d(4, 8, 3), HybridConv2d.using(conv_bias=False), "the convolution has a bias: leave out"),
    "attention": (nn.MultiheadAttention(8, 2), ConvNNAttention.using(k=3), "takes queries and keys; ConvNNAttention"),
    "attention's own": (nn.MultiheadAttention(8, 2), MultiheadConvNN.using(dropout=0.1), "dropout of the rule's layer"),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_that_cannot_stand_there_is_refused(case: str) -> None:
    module, layer, message = LAYERS[case]
    with pytest.raises(ValueError, match=message):
        convnn.convert(module, {"*": layer})


INEXACT: dict[str, tuple[nn.Module, Any, str]] = {
    "blend": (nn.Conv2d(3, 4, 3), ConvNN2d.using(blend=0.3), "neighbours by Blend of 0.3"),
    "weighting": (nn.Conv2d(3, 4, 3), ConvNN2d.using(weighting="softmax"), "do not all count alike"),
    "padding": (nn.Conv2d(3, 4, 3), ConvNN2d.using(include_padding=False), "include_padding=False"),
    "boundary": (nn.Conv2d(3, 4, 3), ConvNN2d.using(boundary="shift"), "boundary are not a convolution's"),
    "hybrid": (nn.Conv2d(3, 4, 3), HybridConv2d.using(similarity="cosine"), "2 + 2 channels; neighbours by cosine"),
    "similarity": (nn.MultiheadAttention(8, 2), MultiheadConvNN.using(similarity="cosine"), "another similarity"),
    "mask": (nn.MultiheadAttention(8, 2), MultiheadConvNN.using(mask="causal"), "a mask or candidates choose"),
}


@pytest.mark.parametrize("case", INEXACT)
def test_what_a_rule_says_holds_and_the_report_says_what_it_changes(case: str) -> None:
    module, layer, note = INEXACT[case]
    _, report = convnn.convert(module, {"*": layer})
    assert not report.exact
    assert note in report[""].note


class Scaled(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class StrangeAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)


def patched(module: Any) -> Any:
    module.forward = lambda x: x
    return module


def hooked(module: Any) -> Any:
    module.register_state_dict_post_hook(lambda *_: None)
    return module


def legacy(module: Any) -> Any:
    weight = module.weight
    del module._parameters["weight"]
    module.weight_g, module.weight_v = nn.Parameter(weight.detach().norm()[None]), weight
    module.weight = weight.detach() * 1
    return module


def hooked_inside(module: Any) -> Any:
    module.out_proj.register_forward_hook(lambda *_: None)
    return module


def rebuilt_inside(module: Any) -> Any:
    module.out_proj = nn.Identity()
    return module


LEFT: dict[str, tuple[Any, str]] = {
    "transposed": (nn.ConvTranspose2d(3, 4, 2), "a transposed convolution spreads"),
    "a subclass": (Scaled(3, 4, 3), r"test_rules\.Scaled is a subclass of Conv2d; register a twin"),
    "parametrized": (parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), "parametrized: bake it in"),
    "pruned": (
        prune.l1_unstructured(nn.Conv2d(3, 4, 3), "weight", 2),
        "it has weight_mask, weight_orig and its weight",
    ),
    "weight norm of old": (legacy(nn.Conv2d(3, 4, 3)), "it has weight_g, weight_v and its weight is no parameter"),
    "a patched forward": (patched(nn.Conv2d(3, 4, 3)), "its forward was replaced on the instance"),
    "state dict hooks": (hooked(nn.Conv2d(3, 4, 3)), r"hooks on its state dict \(_state_dict_hooks\)"),
    "out_proj with hooks": (hooked_inside(nn.MultiheadAttention(8, 2)), "its out_proj has hooks"),
    "another out_proj": (rebuilt_inside(nn.MultiheadAttention(8, 2)), "its out_proj is Identity"),
    "unknown attention": (StrangeAttention(), r"no twin is known of .*test_rules\.StrangeAttention"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_has_no_twin_is_left_with_its_reason(case: str) -> None:
    module, reason = LEFT[case]
    model = nn.Sequential(module, nn.Conv2d(3, 4, 3))
    same, report = convnn.convert(model, copy=False)
    assert same[0] is module
    assert re.search(reason, report["0"].note)
    assert [entry.name for entry in report.replaced] == ["1"]
    with pytest.raises(ValueError, match=reason):
        convnn.convert(nn.Sequential(module), {"0": ConvNN2d}, copy=False)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_lazy_and_quantised_modules_are_left() -> None:
    lazy = nn.Sequential(nn.LazyConv2d(4, 3))
    _, report = convnn.convert(lazy)
    assert "lazy: it has no weights" in report["0"].note
    lazy(torch.randn(1, 3, 5, 5))
    assert convnn.convert(lazy)[1].exact
    quantised = nn.Sequential(torch.ao.nn.quantized.Conv2d(3, 4, 3))
    _, report = convnn.convert(quantised, copy=False)
    assert "quantised: convert the float model" in report["0"].note


def test_a_module_kept_in_a_plain_list_is_left() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    vars(model)["order"] = [model[1]]
    _, report = convnn.convert(model)
    assert report["1"].note == "it is also kept in order, where no twin would take its place"
    assert len(report.replaced) == 1


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


class FSDPModule(nn.Sequential):
    pass


def compiled() -> nn.Module:
    inside: Any = torch.compile(ResNet(), backend="eager")
    return nn.Sequential(inside)


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    model.compile(backend="eager")
    return model


WRAPPED: dict[str, tuple[Any, str]] = {
    "DDP": (lambda: DistributedDataParallel(ResNet()), r"the model is wrapped in Distributed.*\(\.module is inside\)"),
    "FSDP": (lambda: FSDPModule(nn.Conv2d(3, 4, 3)), "the model is sharded by FSDP"),
    "compiled": (compiled, r"0 is wrapped by torch\.compile"),
    "compiled in place": (compiled_in_place, "the model is compiled in place"),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_what_holds_on_to_a_model_is_refused(case: str) -> None:
    make, message = WRAPPED[case]
    with pytest.raises(ValueError, match=message):
        convnn.convert(make())
    with pytest.raises(ValueError, match=message):
        convnn.revert(make())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_script_is_refused() -> None:
    with pytest.raises(ValueError, match="the model is a script"):
        convnn.convert(torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3))))


class Stubborn(nn.Sequential):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not me")


def test_a_model_that_cannot_be_copied_says_how_to_go_on() -> None:
    model = Stubborn(nn.Conv2d(3, 4, 3))
    with pytest.raises(ValueError, match=r"cannot be copied \(not me\); convert it in place with copy=False"):
        convnn.convert(model)
    assert convnn.convert(model, copy=False)[1].exact


def half(module: Any, layer: Any) -> surgery.Twin:
    if layer is not None:
        raise surgery.Refused("only its exact twin is known")
    plain = nn.Conv2d(module.in_channels, module.out_channels, module.kernel_size)
    plain.load_state_dict({name: 2 * tensor for name, tensor in module.state_dict().items()})
    return surgery.Twin(convnn.recipes.from_conv(plain), True, "twice the weights")


@pytest.mark.parametrize("match", [Scaled, lambda module: isinstance(module, Scaled)])
def test_others_add_twins_of_their_own(match: Any) -> None:
    model, x = nn.Sequential(Scaled(3, 4, 3), nn.Conv2d(4, 4, 3)), torch.randn(1, 3, 7, 8)
    surgery.register(match, half)
    try:
        twin, report = convnn.convert(model)
        assert report.exact
        assert report["0"].note == "twice the weights"
        torch.testing.assert_close(twin(x), model(x), atol=1e-5, rtol=1e-5)
        with pytest.raises(ValueError, match="0: only its exact twin is known"):
            convnn.convert(model, {"0": ConvNN2d})
        with pytest.raises(ValueError, match="0: it has no way back"):
            convnn.revert(twin)
    finally:
        surgery.unregister(match)
    assert "subclass of Conv2d" in convnn.convert(copy.deepcopy(model))[1]["0"].note
    with pytest.raises(ValueError, match="nothing is registered for"):
        surgery.unregister(match)


def test_the_latest_to_register_is_asked_first_and_only_modules_can_be_matched() -> None:
    with pytest.raises(TypeError, match="match must be a class of modules or a predicate"):
        surgery.register(int, half)  # type: ignore[arg-type]

    def second(*_: Any) -> surgery.Twin:
        raise surgery.Refused("not today")

    def is_scaled(module: nn.Module) -> bool:
        return isinstance(module, Scaled)

    surgery.register(Scaled, half)
    surgery.register(is_scaled, second)
    try:
        assert convnn.convert(Scaled(3, 4, 3))[1][""].note == "not today"
    finally:
        surgery.unregister(Scaled)
        surgery.unregister(is_scaled)


def test_integrations_are_imported_for_the_models_that_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("convnn.surgery.twins.find_spec", asked.append)
    convnn.convert(ResNet())
    assert asked == []
    monkeypatch.setattr(Scaled, "__module__", "timm.layers.something")
    convnn.convert(Scaled(3, 4, 3))
    assert asked == ["convnn.integrations.timm"]
