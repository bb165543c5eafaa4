"""What record sees, and that seeing changes nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

import convnn
from convnn import ConvNN1d, ConvNN2d, ConvNN3d, ConvNNAttention, HybridConv1d, HybridConv2d, HybridConv3d, models
from convnn import MultiheadConvNN as Multihead
from convnn.backends.chunked import with_budget
from convnn.candidates import random
from convnn.patches import Patches
from convnn.watching import WATCHERS


class Attends(nn.Module):
    """torch's call, with or without weights."""

    def __init__(self, need_weights: bool, **options: Any) -> None:
        super().__init__()
        self.attn, self.need_weights = Multihead(12, 3, k=4, batch_first=True, **options), need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=self.need_weights)[0]


def hidden(k: int) -> Any:
    return ConvNNAttention(12, 3, k=k)


SEARCHES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], str]] = {
    # makes a layer for a backend; the input; the shape of what is found; its name
    "1d": (lambda b: ConvNN1d(4, 6, 3, padding=1, similarity="cosine", backend=b), (2, 4, 11), (2, 11, 3), ""),
    "2d": (lambda b: ConvNN2d(4, 6, 3, 2, similarity="cosine", k=5, backend=b), (2, 4, 7, 9), (2, 12, 5), ""),
    "3d": (lambda b: ConvNN3d(4, 6, 2, similarity="cosine", backend=b), (2, 4, 4, 5, 3), (2, 24, 8), ""),
    "space": (lambda b: ConvNN2d(4, 6, 3, padding=1, backend=b), (2, 4, 5, 7), (35, 9), ""),
    "heads": (lambda b: ConvNN2d(4, 6, 3, heads=2, similarity="cosine", backend=b), (2, 4, 5, 7), (2, 2, 15, 9), ""),
    "hybrid 1d": (lambda b: HybridConv1d(4, 6, 3, backend=b), (2, 4, 11), (2, 11, 3), "convnn"),
    "hybrid 2d": (lambda b: HybridConv2d(4, 6, 3, k=4, backend=b), (2, 4, 5, 7), (2, 35, 4), "convnn"),
    "hybrid 3d": (lambda b: HybridConv3d(4, 6, 3, k=4, backend=b), (1, 4, 4, 5, 3), (1, 60, 4), "convnn"),
    "patches": (
        lambda b: Patches(2)(ConvNN2d(16, 24, 3, similarity="dot", backend=b)),
        (2, 4, 8, 10),
        (2, 6, 9),
        "layer",
    ),
    "attention": (lambda b: ConvNNAttention(12, 3, k=4, backend=b), (2, 10, 12), (2, 3, 10, 4), ""),
    "own kernels": (
        lambda b: ConvNNAttention(12, 3, k=4, shared_kernel=False, backend=b),
        (2, 10, 12),
        (2, 3, 10, 4),
        "",
    ),
    "dropout": (lambda b: ConvNNAttention(12, 3, k=4, attn_drop=0.4, backend=b), (2, 10, 12), (2, 3, 10, 4), ""),
    "all": (lambda b: ConvNNAttention(12, 3, k="all", kernel=None, backend=b), (2, 10, 12), (2, 3, 10, 10), ""),
    "random": (lambda b: ConvNNAttention(12, 3, k=4, candidates=random(6), backend=b), (2, 10, 12), (2, 3, 10, 4), ""),
    "torch's call": (lambda b: Attends(False, backend=b), (2, 10, 12), (2, 3, 10, 4), "attn"),
    "with weights": (lambda b: Attends(True, backend=b), (2, 10, 12), (2, 3, 10, 4), "attn"),
    "with a kernel": (lambda b: Attends(True, kernel="standard", backend=b), (2, 10, 12), (2, 3, 10, 4), "attn"),
}


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, all gradients, and the random number that comes next."""
    torch.manual_seed(3)
    model.zero_grad()
    x = x.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [output.detach(), x.grad, *grads, torch.rand(1)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("backend", ["auto", "reference", with_budget(50)], ids=["auto", "reference", "blocks"])
@pytest.mark.parametrize("name", SEARCHES)
def test_a_recorded_layer_computes_the_same_bits(name: str, backend: Any) -> None:
    make, shape, found, layer = SEARCHES[name]
    model, x = make(backend), torch.randn(shape)
    before = trained(model, x)
    with convnn.record(model) as seen:
        inside = trained(model, x)
    assert equal(before, inside)
    assert equal(before, trained(model, x))
    assert list(seen) == [layer]
    (call,) = seen[layer]
    assert call.index.shape == call.scores.shape == call.weights.shape == found
    assert call.index.dtype == torch.int64
    assert int(call.index.min()) >= 0
    assert int(call.index.max()) < call.keys
    assert not call.scores.requires_grad
    assert not call.weights.requires_grad


def test_a_convolution_shows_its_windows() -> None:
    layer, x = ConvNN2d(3, 4, 3, stride=2, padding=1, dilation=2), torch.randn(2, 3, 9, 11)
    assert layer.is_convolution
    with convnn.record(layer) as seen:
        y = layer(x)
    (call,) = seen[""]
    assert torch.equal(y, F.conv2d(x, layer.weight, layer.bias, 2, 1, 2))
    padded = F.pad(x, (1, 1, 1, 1)).flatten(2)
    assert call.keys == padded.shape[-1]
    taken = padded[..., call.index]  # (B, C, N, K)
    ours = torch.einsum("bcnk,ock->bon", taken, layer.weight.flatten(2)) + layer.bias[:, None]  # type: ignore[index]
    torch.testing.assert_close(ours.unflatten(2, y.shape[2:]), y)
    assert torch.equal(call.weights, torch.ones(call.index.shape))


def test_what_is_seen_is_what_was_computed() -> None:
    layer: Any = ConvNNAttention(12, 3, k=4, mask="causal").double()
    nn.init.normal_(layer.kernel.weight)
    x = torch.randn(2, 10, 12, dtype=torch.float64)
    with convnn.record(layer) as seen:
        y = layer(x)
    (call,) = seen[""]
    assert call.heads == 3
    assert call.keys == 10
    q, k, v = layer.qkv(x).detach().unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    combined = torch.zeros(2, 10, 3, 4, dtype=torch.float64)
    for b, h, n in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(10)).tolist():
        scores = {j: float(q[b, h, n] @ k[b, h, j]) / 2 for j in range(n + 1)}
        nearest = sorted(scores, key=lambda j: -scores[j])[:4]
        filled = len(nearest)
        assert call.index[b, h, n].tolist() == nearest + [-1] * (4 - filled)
        shares = torch.tensor([scores[j] for j in nearest], dtype=torch.float64).softmax(0)
        torch.testing.assert_close(call.weights[b, h, n, :filled], shares)
        assert not call.weights[b, h, n, filled:].any()
        for rank, (j, share) in enumerate(zip(nearest, shares, strict=True)):
            torch.testing.assert_close(float(call.scores[b, h, n, rank]), scores[j])
            combined[b, n, h] += share * v[b, h, j] * layer.kernel.weight.detach()[:, 0, rank]
    torch.testing.assert_close(layer.proj(combined.flatten(2)), y)


@pytest.mark.parametrize(
    ("name", "options", "kind", "count", "size"),
    [
        ("vit_tiny", {"layer": "convnn", "image_size": 48}, ConvNNAttention, 12, 48),
        ("resnet8", {"layer": "hybrid"}, ConvNN2d, 4, 12),
        ("vgg11", {"layer": "convnn", "device": "meta"}, ConvNN2d, 8, 64),
    ],
)
def test_every_layer_of_a_model_is_seen(name: str, options: dict[str, Any], kind: Any, count: int, size: int) -> None:
    model = models.create(name, num_classes=5, **options).eval()
    x = torch.randn(1, 3, size, size, device=options.get("device"))
    with torch.no_grad(), convnn.record(model) as seen:
        y = model(x)
    layers = [name for name, module in model.named_modules() if isinstance(module, kind)]
    assert [call.layer for call in seen.calls] == layers
    assert len(layers) == count
    assert y.is_meta or torch.equal(y, model(x))


def test_passes_are_told_apart_and_the_last_may_be_kept() -> None:
    model = nn.Sequential(nn.Linear(5, 12), ConvNNAttention(12, 3, k=4), ConvNNAttention(12, 3, k=2))
    with convnn.record(model) as seen, convnn.record(model, keep="last") as last:
        for tokens in (7, 9):
            model(torch.randn(2, tokens, 5))
        model[2](torch.randn(1, 11, 12))
    expected = [("1", 0, 7), ("2", 0, 7), ("1", 1, 9), ("2", 1, 9), ("2", 2, 11)]
    assert [(call.layer, call.forward, call.keys) for call in seen.calls] == expected
    assert [(call.layer, call.forward, call.keys) for call in last.calls] == expected[-1:]
    assert (seen.forwards, last.forwards) == (3, 3)
    assert [call.keys for call in seen["2"]] == [7, 9, 11]
    assert seen.nbytes == sum(16 * call.index.numel() for call in seen.calls)
    with pytest.raises(KeyError, match=r"no call of '0' was seen; of '1', '2' there were some"):
        seen["0"]


def test_one_module_called_twice_is_seen_twice_and_strangers_are_not() -> None:
    shared, stranger = ConvNNAttention(12, 3, k=4), ConvNNAttention(12, 3, k=4)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.other = shared

        def forward(self, x: Tensor) -> Tensor:
            return self.one(self.other(x))

    x = torch.randn(2, 8, 12)
    with convnn.record(Twice()) as seen:
        pass
    assert not seen.calls
    with convnn.record(model := Twice()) as seen:
        model(x)
        stranger(x)
        convnn.functional.convnn(x, x, x, k=3)
    assert [(call.layer, call.forward) for call in seen.calls] == [("one", 0), ("one", 0)]


def test_only_what_was_asked_for_is_kept() -> None:
    model = nn.Sequential(hidden(2), nn.Sequential(hidden(3), hidden(4)), hidden(5))
    with convnn.record(model, layers=["1", "2"]) as seen:
        model(torch.randn(2, 8, 12))
    assert list(seen) == ["1.0", "1.1", "2"]
    for layers, error, said in ((["3"], ValueError, "no module '3'"), ("1", TypeError, "sequence of names")):
        with pytest.raises(error, match=said), convnn.record(model, layers=layers):
            pass


def test_what_does_not_fit_is_refused_before_it_is_made() -> None:
    model, x = nn.Sequential(hidden(2), hidden(4)), torch.randn(2, 8, 12)
    first = 2 * 3 * 8 * 2 * 16
    with convnn.record(model, max_bytes=3 * first) as seen:
        model(x)
    assert seen.nbytes == 3 * first
    said = rf"1 has neighbours \(2, 3, 8, 4\), which take {2 * first:,} bytes beside the {first:,} recorded already"
    with pytest.raises(ValueError, match=said), convnn.record(model, max_bytes=3 * first - 1) as seen:
        model(x)
    assert list(seen) == ["0"]
    with convnn.record(model, max_bytes=3 * first, keep="last") as seen:
        for _ in range(3):
            model(x)
    assert seen.nbytes == 3 * first

    def searched(*_: Any) -> Any:
        raise AssertionError("nothing is searched for what does not fit")

    reference = convnn.backends.BACKENDS["reference"]
    blind = convnn.backends.Backend(searched, reference.aggregate, reference.declines, reference.fused)
    layer = ConvNNAttention(12, 3, k=4, backend=blind)
    with pytest.raises(ValueError, match="max_bytes is 10"), convnn.record(layer, max_bytes=10):
        layer(x)


def test_a_model_is_left_as_it_was_when_something_goes_wrong() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(f"no {x.shape[0]}")

    model, x = nn.Sequential(hidden(3), Fails()), torch.randn(2, 8, 12)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError, match="no 2"), convnn.record(model) as seen:
        model(x)
    assert list(seen) == ["0"]
    with convnn.record(model) as seen:
        with pytest.raises(RuntimeError):
            model(x)
        model[0](x)
    assert [(call.layer, call.forward) for call in seen.calls] == [("0", 0), ("0", 1)]
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert not WATCHERS.get()
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_runs_without_its_code_inside_and_with_it_after(in_place: bool) -> None:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()
    plain = nn.Sequential(nn.Linear(5, 12), ConvNNAttention(12, 3, k=4))
    plain.requires_grad_(False)
    x = torch.randn(2, 8, 5)
    expected = plain(x)
    model: Any = plain
    if in_place:
        plain.compile(backend=counter)
    else:
        model = torch.compile(plain, backend=counter)
    model(x)
    frames, ran = counter.frame_count, counter.op_count
    assert frames == 1
    with convnn.record(model) as seen:
        y = model(x)
    assert torch.equal(y, expected)
    assert list(seen) == ["1"]
    model(x)
    assert (counter.frame_count, counter.op_count) == (frames, ran)


def test_a_part_that_is_compiled_is_seen_under_its_own_name() -> None:
    torch.compiler.reset()
    compiled: Any = torch.compile(hidden(4), backend="eager")
    model = nn.Sequential(nn.Linear(5, 12), compiled)
    with convnn.record(model, layers=["1"]) as seen:
        model(torch.randn(2, 8, 5))
    assert list(seen) == ["1"]


def test_what_backward_computes_again_is_no_second_pass() -> None:
    layer, x = hidden(4), torch.randn(2, 8, 12, requires_grad=True)

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    with convnn.record(model := Again()) as seen:
        model(x).sum().backward()
    assert [(call.layer, call.forward) for call in seen.calls] == [("inner", 0)]
    assert x.grad is not None


def test_torchs_fast_path_is_not_left_for_being_looked_at() -> None:
    torch.manual_seed(1)
    encoder = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
    model = nn.Sequential(encoder, hidden(4)).eval()
    x = torch.randn(2, 8, 12)
    with torch.no_grad():
        calls: list[str] = []
        whole = torch._transformer_encoder_layer_fwd

        def counted(*inputs: Any) -> Tensor:
            calls.append("fast")
            return whole(*inputs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
            y = model(x)
            with convnn.record(model):
                assert torch.equal(model(x), y)
    assert calls == ["fast", "fast"]


def test_another_thread_is_not_looked_at() -> None:
    model, x = nn.Sequential(hidden(4), hidden(2)), torch.randn(2, 8, 12)
    with convnn.record(model) as seen:
        thread = threading.Thread(target=lambda: model(x))
        thread.start()
        thread.join()
        assert not seen.calls
        model(x)
    assert list(seen) == ["0", "1"]


def test_gradients_flow_through_what_is_kept_if_asked() -> None:
    layer, x = hidden(4).double(), torch.randn(2, 8, 12, dtype=torch.float64, requires_grad=True)
    with convnn.record(layer, detach=False) as seen:
        layer(x)
    (call,) = seen[""]
    (ours,) = torch.autograd.grad(call.weights.square().sum(), x, retain_graph=True)
    q, k, _ = layer.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / 2).topk(4).values.softmax(-1)
    (theirs,) = torch.autograd.grad(weights.square().sum(), x)
    torch.testing.assert_close(ours, theirs)
    assert call.scores.requires_grad


def test_a_weighting_that_draws_leaves_the_numbers_to_come_alone() -> None:
    def noisy(scores: Tensor, filled: Tensor) -> Tensor:
        return (scores + torch.rand_like(scores)).masked_fill(~filled, -9.0).softmax(-1)

    model, x = nn.Sequential(ConvNNAttention(12, 3, k=4, weighting=noisy), nn.Dropout(0.5)), torch.randn(2, 8, 12)
    before = trained(model, x)
    with convnn.record(model):
        assert equal(trained(model, x), before)


def test_half_types_and_autocast_are_seen_as_they_are() -> None:
    model, x = hidden(4), torch.randn(2, 8, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
        with convnn.record(model, device="cpu") as seen:
            assert torch.equal(model(x), y)
    assert y.dtype == torch.bfloat16
    assert seen[""][0].scores.dtype == seen[""][0].weights.dtype == torch.float32


def test_what_cannot_be_recorded_is_refused() -> None:
    model, x = hidden(4), torch.randn(2, 8, 12)
    with convnn.record(model), pytest.raises(ValueError, match=r"cannot look into a transform of torch\.func"):
        torch.func.vmap(model)(x)
    wrong: list[tuple[Any, Any, str]] = [
        (lambda x: x, {}, r"an nn\.Module, got function"),
        (model, {"keep": "first"}, "keep must be"),
        (model, {"max_bytes": -1}, "max_bytes"),
    ]
    for given, options, said in wrong:
        with pytest.raises((TypeError, ValueError), match=said), convnn.record(given, **options):
            pass
