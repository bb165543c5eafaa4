"""The way back: what comes, to the bit, and what no longer can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import convnn
from convnn import ConvNN2d, HybridConv2d, MultiheadConvNN
from tests.surgery.nets import Cross, ResNet


def test_biases_a_rule_adds_start_at_0_and_go_unless_they_have_learned() -> None:
    conv, x = nn.Conv2d(3, 4, 3, bias=False), torch.randn(2, 3, 6, 7)
    added = HybridConv2d.using(conv_bias=True, pointwise=True, pointwise_bias=True)
    twin, report = convnn.convert(conv, {"*": added})
    assert report.exact
    torch.testing.assert_close(twin(x), conv(x), atol=1e-5, rtol=1e-5)
    assert torch.equal(convnn.revert(twin)[0](x), conv(x))
    with torch.no_grad():
        twin.conv.bias[0] = 1.0
    with pytest.raises(ValueError, match="it has learned a bias, which the convolution had not"):
        convnn.revert(twin)


@pytest.mark.parametrize("rules", [None, {"*conv*": HybridConv2d.using(pointwise=True), "*": convnn.surgery.exact}])
def test_the_way_back_is_equal_to_the_bit(rules: Any) -> None:
    model, x = ResNet().eval(), torch.randn(2, 3, 12, 9)
    expected = model(x)
    again, report = convnn.revert(convnn.convert(model, rules)[0])
    assert len(report.replaced) == 10
    state = again.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert {n: type(m) for n, m in again.named_modules()} == {n: type(m) for n, m in model.named_modules()}
    assert torch.equal(again(x), expected)
    assert repr(again) == repr(model)


def test_attention_comes_back_to_the_bit() -> None:
    for options in ({"kdim": 12, "vdim": 10, "batch_first": True}, {"add_bias_kv": True, "bias": False}, {}):
        model, x = Cross(**options), torch.randn(2, 9, 16)
        again, _ = convnn.revert(convnn.convert(model)[0])
        assert type(again.attn) is nn.MultiheadAttention
        assert vars(again.attn).keys() == vars(model.attn).keys()
        assert torch.equal(again(x), model(x))


def train(model: nn.Module) -> None:
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(2, 3, 12, 9)).square().mean().backward()
    optimiser.step()


def test_what_was_trained_comes_back_with_its_weights() -> None:
    twin, _ = convnn.convert(ResNet(), {"*": HybridConv2d})
    train(twin)
    again, _ = convnn.revert(twin.eval())
    assert type(again.layer2[0].conv1) is nn.Conv2d
    x = torch.randn(2, 3, 12, 9)
    torch.testing.assert_close(again(x), twin(x), atol=1e-5, rtol=1e-5)


def test_what_is_no_convolution_any_more_says_so() -> None:
    twin, _ = convnn.convert(ResNet(), {"layer2.0.*": HybridConv2d.using(pointwise=True), "*": convnn.surgery.exact})
    train(twin)
    with pytest.raises(ValueError, match=r"no longer what it came from: layer2\.0\.conv1: its 1x1 is no longer the id"):
        convnn.revert(twin, copy=False)
    assert isinstance(twin.conv1, ConvNN2d), "nothing was changed"
    part, report = convnn.revert(twin, strict=False)
    assert [entry.name for entry in report.left] == [
        "layer2.0.conv1", "layer2.0.conv2", "layer2.0.downsample.0"
    ]  # fmt: skip
    assert len(report.replaced) == 7
    x = torch.randn(2, 3, 12, 9)
    assert torch.equal(part.eval()(x), twin.eval()(x))

    raised, _ = convnn.convert(nn.Conv2d(3, 4, 3), {"*": HybridConv2d})
    raised.convnn.blend.start = 0.5
    with pytest.raises(ValueError, match=r"the model: neighbours by Blend of 0\.5, axes=2, learned=False"):
        convnn.revert(raised)
    limited, _ = convnn.convert(nn.MultiheadAttention(8, 2), {"*": MultiheadConvNN.using(k=3)})
    with pytest.raises(ValueError, match="the model: attends to the 3 nearest keys, not to all"):
        convnn.revert(limited)


def test_some_go_back_by_their_names() -> None:
    twin, _ = convnn.convert(ResNet())
    again, report = convnn.revert(twin, "layer1.*")
    assert type(again.layer1[1].conv2) is nn.Conv2d
    assert type(again.layer2[1].conv2) is ConvNN2d
    assert report["conv1"].note == "not matched by 'layer1.*'"
    with pytest.raises(ValueError, match=r"'layr1\.0\.conv1' matches nothing; did you mean 'layer1\.0\.conv1'"):
        convnn.revert(twin, "layr1.0.conv1")
    with pytest.raises(ValueError, match="'layr1' matches nothing; the model has no twins"):
        convnn.revert(ResNet(), "layr1")
