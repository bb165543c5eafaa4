"""Every layer that cannot stand somewhere, every module that has no twin, and every model that is held fast."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import convnn
from convnn import ConvNN1d, ConvNN2d, ConvNNAttention, HybridConv2d, MultiheadConvNN
from tests.surgery.nets import ResNet, Scaled

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
    "dropout": (nn.MultiheadAttention(8, 2, 0.1), MultiheadConvNN.using(k=3), "its dropout draws other numbers"),
    "mask": (nn.MultiheadAttention(8, 2), MultiheadConvNN.using(mask="causal"), "a mask or candidates choose"),
}


@pytest.mark.parametrize("case", INEXACT)
def test_what_a_rule_says_holds_and_the_report_says_what_it_changes(case: str) -> None:
    module, layer, note = INEXACT[case]
    _, report = convnn.convert(module, {"*": layer})
    assert not report.exact
    assert note in report[""].note


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


def holding(name: str, module: Any) -> Any:
    module.add_module(name, nn.Linear(2, 3))
    return module


LEFT: dict[str, tuple[Any, str]] = {
    "something in it": (holding("adapter", nn.Conv2d(3, 4, 3)), "somebody put adapter into it, which its twin would"),
    "something in an attention": (holding("adapter", nn.MultiheadAttention(8, 2)), "somebody put adapter into it"),
    "an observer": (holding("activation_post_process", nn.Conv2d(3, 4, 3)), "made ready to be quantised: convert the"),
    "transposed": (nn.ConvTranspose2d(3, 4, 2), "a transposed convolution spreads"),
    "a subclass": (Scaled(3, 4, 3), r"nets\.Scaled is a subclass of Conv2d; register a twin"),
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
    "unknown attention": (StrangeAttention(), r"no twin is known of .*test_refusals\.StrangeAttention"),
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
