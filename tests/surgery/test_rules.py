"""What rules may say, what the report says, and twins of one's own."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import convnn
from convnn import ConvNN2d, HybridConv2d, surgery
from tests.surgery.nets import ResNet, Scaled


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


class ReducedAttention(nn.Module):
    """An attention with a convolution in it, and another attention around it."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside


def test_an_attention_nobody_knows_is_listed_beside_the_convolutions_in_it() -> None:
    model = nn.Sequential(ReducedAttention(nn.Conv2d(3, 4, 3)), ReducedAttention(nn.MultiheadAttention(8, 2)))
    report = convnn.convert(model)[1]
    assert {entry.name for entry in report.replaced} == {"0.inside", "1.inside"}
    assert [entry.name for entry in report.left] == ["0"]
    assert report["0"].note.startswith("no twin is known of tests.surgery.test_rules.ReducedAttention")


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
    with pytest.raises(
        ValueError, match=r"layer1 \(Sequential\): it has no twin.*; a rule for what is in it is 'layer1\.\*'"
    ):
        convnn.convert(ResNet(), {"layer1": ConvNN2d})
    with pytest.raises(ValueError, match=r"'conv1' replaced nothing: conv1: the rule '\*' comes first"):
        convnn.convert(ResNet(), {"*": ConvNN2d, "conv1": HybridConv2d})
    with pytest.raises(ValueError, match=r"conv1: the kernel must fit.*; and 6 more"):
        convnn.convert(ResNet(), {"*conv*": ConvNN2d.using(k=4), "*": surgery.exact})
    with pytest.raises(ValueError, match=r"conv1: already a ConvNN layer, made by convert: convnn\.revert goes back"):
        convnn.convert(convnn.convert(ResNet())[0], {"conv1": HybridConv2d})


def test_rules_must_be_rules() -> None:
    for rules in (["conv1"], "conv1"):
        with pytest.raises(TypeError, match="rules must be a mapping such as"):
            convnn.convert(ResNet(), rules)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got an instance of HybridConv2d: give the class, configured by using"):
        convnn.convert(ResNet(), {"conv1": HybridConv2d(3, 4, 3)})
    with pytest.raises(TypeError, match="a rule is for a pattern of names, a class or a predicate, got 3"):
        convnn.convert(ResNet(), {3: ConvNN2d})
    with pytest.raises(TypeError, match="must be a layer class or a function, got 'hybrid'"):
        convnn.convert(ResNet(), {"*": "hybrid"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        convnn.convert({})  # type: ignore[arg-type]


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
    monkeypatch.setattr("convnn.surgery.twins.importlib.import_module", asked.append)
    convnn.convert(ResNet())
    assert asked == []
    monkeypatch.setattr(Scaled, "__module__", "timm.layers.something")
    convnn.convert(Scaled(3, 4, 3))
    assert asked == ["convnn.integrations.timm"]
