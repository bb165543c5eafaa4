"""What stays of a model: names, sharing, ties, hooks, modes, copies, pickles; and the way back."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import convnn
from convnn import ConvNN2d, ConvNNAttention, HybridConv2d, MultiheadConvNN
from tests.surgery.nets import Branches, ResNet

MIXED = {"layer2.*.conv2": HybridConv2d.using(ratio=0.5), "layer1.0.*": ConvNN2d.using(similarity="cosine")}


def bits(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_copy_leaves_the_model_and_in_place_keeps_its_parameters() -> None:
    model = ResNet()
    before, state = {name: type(m) for name, m in model.named_modules()}, bits(model)
    twin, _ = convnn.convert(model)
    assert {name: type(m) for name, m in model.named_modules()} == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}

    parameters = {name: id(p) for name, p in model.named_parameters()}
    same, _ = convnn.convert(model, copy=False)
    assert same is model
    assert {name: id(p) for name, p in same.named_parameters()} == parameters, "an optimiser still holds them"
    assert type(model.layer1[0].conv1) is ConvNN2d


def test_a_model_that_cannot_be_converted_in_place_is_not_touched() -> None:
    model = ResNet()
    with pytest.raises(ValueError, match="replaced nothing"):
        convnn.convert(model, {"layer1.*": ConvNN2d, "layer2.*": ConvNN2d.using(k=4)}, copy=False)
    assert not any(isinstance(m, ConvNN2d) for m in model.modules())


def test_one_module_at_two_names_has_one_twin() -> None:
    twin, report = convnn.convert(Branches())
    assert twin.line is twin.again
    assert report["line"] is report["again"]
    assert report["again"].names == ("line", "again")
    by_second, _ = convnn.convert(Branches(), {"again": convnn.ConvNN1d})
    assert by_second.line is by_second.again
    assert type(by_second.line) is convnn.ConvNN1d


def test_a_block_in_two_places_is_walked_once() -> None:
    block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1))
    model = nn.ModuleDict({"a": nn.Sequential(block), "b": nn.Sequential(nn.ReLU(), block)})
    twin, report = convnn.convert(model)
    assert report.entries[0].names == ("a.0.0", "b.1.0")
    assert len(report) == 1
    assert twin["a"][0][0] is twin["b"][1][0]
    assert type(twin["a"][0][0]) is ConvNN2d


def test_tied_weights_stay_tied_or_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, padding=1))
    model[1].weight = model[0].weight
    twin, _ = convnn.convert(model)
    assert twin[0].weight is twin[1].weight
    with pytest.raises(ValueError, match=r"would untie 0\.weight and 1\.weight"):
        convnn.convert(model, {"1": HybridConv2d})


def test_hooks_go_over_and_their_handles_still_remove_them() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    seen: list[str] = []
    handles = [
        model[0].register_forward_hook(lambda *given: seen.append(type(given[0]).__name__)),
        model[0].register_forward_pre_hook(lambda *_: seen.append("before"), with_kwargs=True),
        model[0].register_full_backward_hook(lambda *_: seen.append("backward")),
        model[0].register_full_backward_pre_hook(lambda *_: seen.append("backward first")),
    ]
    convnn.convert(model, copy=False)
    model(torch.randn(1, 3, 5, 6, requires_grad=True)).sum().backward()
    assert seen == ["before", "ConvNN2d", "backward first", "backward"]
    for handle in handles:
        handle.remove()
    model(torch.randn(1, 3, 5, 6))
    assert len(seen) == 4


def test_a_wrapper_around_the_module_leaves_its_hooks_where_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    twin, report = convnn.convert(model, {"0": lambda module: nn.Sequential(module, nn.ReLU())}, copy=False)
    assert twin(torch.randn(1, 3, 5, 6)).min() >= 0
    assert seen == [1]
    assert "says nothing of exactness" in report["0"].note
    with pytest.raises(ValueError, match="0: it has no way back"):
        convnn.revert(twin)


def test_what_a_function_hooked_itself_stays_beside_what_was_hooked_before() -> None:
    seen: list[str] = []

    def made(module: nn.Conv2d) -> nn.Module:
        twin = convnn.recipes.from_conv(module)
        twin.register_forward_hook(lambda *_: seen.append("new"))
        return twin

    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    model[0].register_forward_hook(lambda *_: seen.append("old"))
    convnn.convert(model, {"0": made})[0](torch.randn(1, 3, 5, 6))
    assert sorted(seen) == ["new", "old"]


def test_modes_gradients_and_tags_are_kept() -> None:
    model: Any = ResNet()
    model.layer1[0].conv1.eval().requires_grad_(False)
    model.layer2[0].conv2.requires_grad_(False)
    model.conv1.weight.requires_grad_(False)
    model.conv1.tag = "stem"
    twin, _ = convnn.convert(model, {"layer2.*": HybridConv2d.using(pointwise=True), "*": convnn.surgery.exact})
    assert not twin.layer1[0].conv1.training
    assert twin.layer1[0].conv2.training
    assert not twin.layer1[0].conv1.weight.requires_grad
    assert (twin.conv1.weight.requires_grad, twin.conv1.bias.requires_grad) == (False, True)
    assert not any(p.requires_grad for p in twin.layer2[0].conv2.parameters())
    assert all(p.requires_grad for p in twin.layer2[1].conv2.parameters())
    assert twin.conv1.tag == "stem"
    again, _ = convnn.revert(twin)
    assert again.conv1.tag == "stem"
    assert vars(again.conv1).keys() == vars(model.conv1).keys()
    assert {n: p.requires_grad for n, p in again.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }


def test_layers_of_this_library_are_left_with_all_that_is_in_them() -> None:
    model = nn.Sequential(HybridConv2d(3, 4, 3), nn.Conv2d(4, 4, 3), MultiheadConvNN(8, 2), ConvNNAttention(8, 2, k=3))
    twin, report = convnn.convert(model)
    assert [entry.name for entry in report.replaced] == ["1"]
    assert {entry.note for entry in report.left} == {"already a ConvNN layer"}
    assert type(twin[0].conv) is nn.Conv2d
    twice, report = convnn.convert(twin)
    assert not report.replaced
    assert len(report.left) == 4
    _, report = convnn.revert(twice)
    assert [entry.name for entry in report.replaced] == ["1"]
    assert {entry.note for entry in report.left} == {"not made by convert"}


@pytest.mark.parametrize("rules", [None, MIXED])
def test_copies_and_pickles_are_the_same_model_and_still_know_the_way_back(rules: Any) -> None:
    twin, x = convnn.convert(ResNet().eval(), rules)[0], torch.randn(2, 3, 12, 9)
    expected = twin(x)
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin)), loaded):
        assert torch.equal(other(x), expected)
        again, report = convnn.revert(other, strict=False)
        assert len(report.left) == (0 if rules is None else 2)
        torch.testing.assert_close(again(x), expected, atol=1e-5, rtol=1e-5)


def test_weights_of_the_model_load_into_its_exact_twin_and_back() -> None:
    model, other = ResNet(), ResNet()
    twin, _ = convnn.convert(other)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 12, 9)
    assert torch.equal(twin(x), model(x))
    other.load_state_dict(twin.state_dict())
    assert torch.equal(other.eval()(x), twin.eval()(x))


def test_inside_data_parallel_names_are_the_model_s() -> None:
    model = nn.DataParallel(ResNet())
    twin, report = convnn.convert(model, {"layer1.0.conv1": ConvNN2d})
    assert isinstance(twin, nn.DataParallel)
    assert [entry.name for entry in report.replaced] == ["layer1.0.conv1"]
    assert type(twin.module.layer1[0].conv1) is ConvNN2d
    assert type(convnn.revert(twin)[0].module.layer1[0].conv1) is nn.Conv2d


def test_a_converted_model_compiles_without_breaks() -> None:
    twin, _ = convnn.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)))
    x = torch.randn(2, 3, 9, 8)
    compiled = torch.compile(twin, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), twin(x))
