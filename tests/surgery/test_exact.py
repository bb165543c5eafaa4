"""A twin computes what its module computed: outputs, gradients, and in every corner of the modules' arguments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import convnn
from convnn import HybridConv1d, HybridConv2d, HybridConv3d, MultiheadConvNN
from convnn.selection import straight_through
from convnn.surgery import Report
from tests.surgery.nets import MODELS, ResNet, Transformer

# What torch says of its own layers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning"),
]


def outcome(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y)).sum().backward()
    return y.detach(), {"input": x.grad} | {name: p.grad for name, p in model.named_parameters()}


def compare(model: nn.Module, twin: nn.Module, x: Tensor) -> None:
    (y, grads), (expected, wanted) = outcome(twin, x), outcome(model, x)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grads, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_computes_and_learns_the_same(name: str, training: bool) -> None:
    make, shape = MODELS[name]
    model = make().train(training)
    twin, report = convnn.convert(model)
    assert report.exact
    assert report.replaced
    assert not any(type(m) in {nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention} for m in twin.modules())
    x = torch.randn(shape)
    compare(model, twin, x)
    assert list(twin.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(twin(x), model(x), atol=1e-5, rtol=1e-5)


MODES = ("zeros", "reflect", "replicate", "circular")
WINDOWS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "same, even": {"kernel_size": 4, "padding": "same"},
    "valid": {"kernel_size": 2, "padding": "valid", "bias": False},
    "dilated groups": {"kernel_size": 2, "dilation": 2, "padding": 1, "groups": 2},
}
CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
HYBRIDS: dict[int, Any] = {1: HybridConv1d, 2: HybridConv2d, 3: HybridConv3d}


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", WINDOWS)
def test_every_argument_of_a_convolution(axes: int, mode: str, window: str) -> None:
    conv = CONVOLUTIONS[axes](4, 6, padding_mode=mode, **WINDOWS[window])
    x = torch.randn(2, 4, *(5, 7, 6)[:axes])
    twin, report = convnn.convert(conv)
    assert isinstance(report, Report)
    assert report.exact
    assert type(twin).__name__ == f"ConvNN{axes}d"
    compare(conv, twin, x)
    assert torch.equal(twin(x), conv(x)), "torch's own convolution stands for the search"
    if conv.groups == 1:
        half, report = convnn.convert(conv, {"*": HYBRIDS[axes].using(ratio=0.34)})
        assert report.exact
        assert (half.convnn.out_channels, half.conv.out_channels) == (2, 4)
        assert half.convnn.blend.share == 0
        torch.testing.assert_close(half(x), conv(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"pointwise": True}, {"ratio": 1.0}, {"ratio": 0.0}, {"backend": "chunked"}])
@pytest.mark.parametrize("bias", [True, False])
def test_a_hybrid_starts_as_the_convolution_it_came_from(options: dict[str, Any], bias: bool) -> None:
    conv = nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=1, bias=bias)
    twin, report = convnn.convert(conv, {nn.Conv2d: HybridConv2d.using(**{"ratio": 0.5, **options})})
    assert report.exact
    x = torch.randn(2, 4, 7, 6, requires_grad=True)
    y, expected = twin(x), conv(x)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    outer = torch.randn_like(y)
    halves = [half for half in (twin.convnn, twin.conv) if half is not None]
    for name in ("weight", "bias")[: 1 + bias]:
        own = torch.autograd.grad(y, [getattr(half, name) for half in halves], outer, retain_graph=True)
        wanted = torch.autograd.grad(expected, getattr(conv, name), outer, retain_graph=True)[0]
        torch.testing.assert_close(torch.cat(own), wanted, atol=1e-4, rtol=1e-4)
    twin_grad, conv_grad = (torch.autograd.grad(out, x, outer)[0] for out in (y, expected))
    torch.testing.assert_close(twin_grad, conv_grad, atol=1e-4, rtol=1e-4)
    moved = sum(p.numel() for p in twin.parameters()) - sum(p.numel() for p in conv.parameters())
    assert moved == (6 * 6 if "pointwise" in options else 0)


def test_a_depthwise_convolution_becomes_one_half_of_a_hybrid() -> None:
    conv, x = nn.Conv2d(4, 8, 3, padding=1, groups=4), torch.randn(2, 4, 5, 6)
    twin, report = convnn.convert(conv, {"*": HybridConv2d.using(ratio=1.0, branch="depthwise")})
    assert report.exact
    torch.testing.assert_close(twin(x), conv(x), atol=1e-5, rtol=1e-5)


def test_identity_projections_keep_the_convolution() -> None:
    conv, x = nn.Conv2d(4, 6, 3, padding=1), torch.randn(2, 4, 5, 6)
    twin, report = convnn.convert(conv, {"*": convnn.ConvNN2d.using(projection="linear", blend=0.0)})
    assert report.exact
    torch.testing.assert_close(twin(x), conv(x), atol=1e-5, rtol=1e-5)


def test_a_hybrid_moves_away_when_its_share_is_raised() -> None:
    conv, x = nn.Conv2d(4, 6, 3, padding=1), torch.randn(2, 4, 7, 6)
    twin, _ = convnn.convert(conv, {"*": HybridConv2d.using(ratio=0.5)})
    twin.convnn.blend.start = 1.0
    y, expected = twin(x), conv(x)
    torch.testing.assert_close(y[:, 3:], expected[:, 3:], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(y[:, :3], expected[:, :3], atol=0.1)


@pytest.mark.parametrize("kernel", [None, "depthwise", "separable", "standard"])
def test_attention_to_as_many_keys_as_there_are_is_torch_s(kernel: Any) -> None:
    module, x = nn.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 7, 12)
    twin, report = convnn.convert(module, {"*": MultiheadConvNN.using(k=7, kernel=kernel)})
    assert not report.exact
    assert "7 nearest" in report[""].note
    torch.testing.assert_close(twin(x, x, x), module(x, x, x), atol=1e-5, rtol=1e-5)
    fewer, _ = convnn.convert(module, {"*": MultiheadConvNN.using(k=2, kernel=kernel)})
    assert not torch.allclose(fewer(x, x, x)[0], module(x, x, x)[0], atol=1e-3)


def test_the_twins_run_inside_torch_s_encoder_where_its_fast_path_would() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    twin, report = convnn.convert(model)
    assert any("use_nested_tensor" in note for note in report.notes)
    calls: list[str] = []
    for name, module in twin.named_modules():
        if isinstance(module, MultiheadConvNN):
            module._masks = counting(module._masks, calls, name)  # type: ignore[method-assign]
    x, padding = torch.randn(2, 9, 16), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, -3:] = True
    with torch.no_grad():
        torch.testing.assert_close(twin(x), model(x), atol=1e-5, rtol=1e-5)
        y, expected = twin(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding)
    assert calls == ["layers.0.self_attn", "layers.1.self_attn"] * 2
    torch.testing.assert_close(y[~padding], expected[~padding], atol=1e-5, rtol=1e-5)
    again, report = convnn.revert(twin)
    assert again.use_nested_tensor
    assert any("again" in note for note in report.notes)


def counting(function: Any, calls: list[str], name: str) -> Any:
    def counted(*arguments: Any) -> Any:
        calls.append(name)
        return function(*arguments)

    return counted


def test_a_decoder_layer_alone() -> None:
    model = nn.TransformerDecoderLayer(16, 4, 24, dropout=0.0)
    twin, report = convnn.convert(model)
    assert [entry.name for entry in report.replaced] == ["self_attn", "multihead_attn"]
    x, memory = torch.randn(5, 2, 16), torch.randn(7, 2, 16)
    torch.testing.assert_close(twin(x, memory), model(x, memory), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_precision_is_kept(dtype: torch.dtype) -> None:
    model, x = ResNet().to(dtype).eval(), torch.randn(2, 3, 12, 9, dtype=dtype)
    twin, _ = convnn.convert(model, {"layer2.*.conv2": HybridConv2d.using(ratio=0.5), "*": convnn.surgery.exact})
    assert {p.dtype for p in twin.parameters()} == {dtype}
    tolerance = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(twin(x), model(x), atol=tolerance, rtol=tolerance)
    assert torch.equal(convnn.convert(model)[0](x), model(x))


@pytest.mark.parametrize("make", [ResNet, lambda: Transformer(True)])
def test_nothing_is_materialised_on_the_meta_device(make: Any) -> None:
    with torch.device("meta"):
        model = make()
    rules: Any = {
        nn.Conv2d: HybridConv2d.using(pointwise=True, conv_bias=True, convnn_bias=True),
        nn.MultiheadAttention: convnn.surgery.exact,
    }
    present = {key: rule for key, rule in rules.items() if any(isinstance(m, key) for m in model.modules())}
    twin, report = convnn.convert(model, present)
    assert report.exact
    assert all(p.is_meta for p in twin.parameters())
    again, _ = convnn.revert(twin)
    assert all(p.is_meta for p in again.parameters())
    if make is ResNet:
        assert twin(torch.empty(2, 3, 12, 9, device="meta")).shape == (2, 5)


def test_converting_moves_nobody_s_random_numbers() -> None:
    model = ResNet()
    state = torch.get_rng_state()
    convnn.convert(model, {"*": HybridConv2d.using(ratio=0.5, pointwise=True)})
    assert torch.equal(torch.get_rng_state(), state)


def test_the_same_weights_in_the_layout_they_had() -> None:
    model = ResNet().to(memory_format=torch.channels_last)
    twin, _ = convnn.convert(model)
    assert twin.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 12, 9).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(twin(x), copy.deepcopy(model)(x), atol=1e-5, rtol=1e-5)


def test_a_selection_that_learns_is_no_convolution_any_more() -> None:
    rule = HybridConv2d.using(ratio=0.5, selection=straight_through(0.5))
    twin, report = convnn.convert(nn.Sequential(nn.Conv2d(4, 6, 3, padding=1)), {"0": rule})
    assert not report["0"].exact
    assert report["0"].note.endswith("its selection is not hard")
    with pytest.raises(ValueError, match="its selection is not hard"):
        convnn.revert(twin)
