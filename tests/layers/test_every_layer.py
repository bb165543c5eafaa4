"""What holds for every layer: sizes, copies, pickles, state dicts, compilation, configured classes, recipes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import convnn
from convnn import recipes
from convnn.blend import Blend
from convnn.candidates import grid, random
from convnn.descriptor import scaled_concat
from convnn.masks import window
from convnn.relative import RelativeBias
from convnn.similarity import Bilinear
from convnn.weighting import LearnedTemperature

Made = tuple[Callable[[], nn.Module], list[tuple[int, ...]]]

MAP = [(2, 4, 6, 9), (1, 4, 5, 5), (3, 4, 8, 4), (4, 7, 6)]
TOKENS = [(2, 20, 12), (1, 13, 12), (3, 2, 16, 12), (17, 12)]
LAYERS: dict[str, Made] = {
    "ConvNN1d": (lambda: convnn.ConvNN1d(4, 6, 3, 2, 1, backend="chunked"), [(2, 4, 20), (1, 4, 9), (4, 11)]),
    "ConvNN2d": (lambda: convnn.ConvNN2d(4, 6, (3, 2), padding=1, groups=2, backend="chunked"), MAP),
    "ConvNN3d": (lambda: convnn.ConvNN3d(4, 6, 2, similarity="cosine"), [(2, 4, 3, 4, 5), (1, 4, 2, 3, 3)]),
    "convolution": (lambda: convnn.ConvNN2d(4, 6, 3, padding="same", padding_mode="reflect"), MAP),
    "features": (lambda: convnn.ConvNN2d(4, 6, 3, padding=1, similarity="cosine", k=5), MAP),
    "positions": (
        lambda: convnn.ConvNN2d(4, 6, 3, padding=1, similarity="cosine", position=scaled_concat(0.5)),
        MAP,
    ),
    "blend": (lambda: convnn.ConvNN2d(4, 6, 3, padding=1, blend=Blend(0.4, learned=True), weighting="softmax"), MAP),
    "heads": (lambda: convnn.ConvNN2d(4, 6, 3, padding=1, heads=2, similarity="dot", projection="linear"), MAP),
    "hybrid": (lambda: convnn.HybridConv2d(4, 6, 3, candidates=grid(9)), MAP),
    "hybrid, random": (lambda: convnn.HybridConv2d(4, 6, 3, candidates=random(9)).eval(), MAP),
    "attention": (lambda: convnn.ConvNNAttention(12, 3, k=5), TOKENS),
    "attention, own kernels": (
        lambda: convnn.ConvNNAttention(12, 3, k=5, kernel="separable", shared_kernel=False, mask=window(6)),
        TOKENS,
    ),
    "self-attention": (lambda: recipes.self_attention(12, 3), TOKENS),
    "local": (lambda: recipes.local(12, window=4), TOKENS),
    "linear": (lambda: convnn.LinearAttention(12, 3, causal=True), TOKENS),
}


def remembered(layer: nn.Module) -> str:
    return repr({name: [(key, id(value)) for key, value in vars(m).items()] for name, m in layer.named_modules()})


@pytest.mark.parametrize("name", LAYERS)
def test_one_layer_takes_any_size_after_any_size_and_remembers_nothing(name: str) -> None:
    make, shapes = LAYERS[name]
    layer = make()
    before = remembered(layer)
    inputs = [torch.randn(*shape) for shape in shapes]
    first = [layer(x) for x in inputs]
    again = [layer(x) for x in reversed(inputs)]
    for one, other in zip(first, reversed(again), strict=True):
        assert torch.equal(one, other)
    assert remembered(layer) == before


@pytest.mark.parametrize("name", LAYERS)
def test_copies_pickles_and_state_dicts_are_the_same_layer(name: str) -> None:
    make, shapes = LAYERS[name]
    layer, x = make(), torch.randn(*shapes[0])
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    fresh = make()
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_reach_every_parameter(name: str) -> None:
    make, shapes = LAYERS[name]
    layer, x = make(), torch.randn(*shapes[0], requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    for parameter_name, parameter in layer.named_parameters():
        # A search by features that counts all neighbours alike does not learn how they are compared, nor pretends to.
        assert parameter.requires_grad == (parameter_name not in ("to_query.weight", "to_key.weight"))
        if parameter.requires_grad:
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_half_types_stay_near(name: str, dtype: torch.dtype) -> None:
    make, shapes = LAYERS[name]
    layer = make().to(dtype)
    x = torch.randn(*shapes[0]).to(dtype)
    exact = copy.deepcopy(layer).double()
    y = layer(x)
    assert y.dtype == dtype
    # Neighbours may change where scores are close: most outputs agree.
    expected = exact(x.double())
    error = (y.double() - expected).abs()
    assert error.median() < 0.05 * expected.std()
    with torch.autocast("cpu", torch.bfloat16):
        assert copy.deepcopy(layer).float()(x.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", LAYERS)
def test_it_compiles_without_a_break(name: str) -> None:
    make, shapes = LAYERS[name]
    layer, x = make(), torch.randn(*shapes[0], requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    ours, theirs = compiled(x), layer(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    learned = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    grads = [torch.autograd.grad(y.square().sum(), learned, allow_unused=True) for y in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


def test_a_configured_class_is_a_class_with_options() -> None:
    sparse: Any = convnn.ConvNNAttention.using(k=5, candidates=random(9))
    assert issubclass(sparse, convnn.ConvNNAttention)
    layer = sparse(12, num_heads=3)
    assert layer.k == 5
    assert sparse(12, 3, k=7).k == 7
    assert sparse.using(k=6)(12, 3).k == 6
    assert sparse.using(k=6)(12, 3).candidates is not None
    assert sparse.__name__ == "ConvNNAttention"
    assert isinstance(copy.deepcopy(layer), sparse)
    assert convnn.ConvNN2d.using(padding=1, bias=False)(3, 8, 3, 1, 2).padding == (2, 2)
    plain = convnn.ConvNN2d.using()
    assert plain.using(k=5)(3, 8, 3).k == 5
    assert isinstance(pickle.loads(pickle.dumps(plain(3, 8, 3))), convnn.ConvNN2d)
    with pytest.raises(TypeError, match="ConvNNAttention has no option 'candidate'; did you mean candidates"):
        convnn.ConvNNAttention.using(candidate=3)


def test_a_configured_class_can_be_copied_saved_and_subclassed() -> None:
    chosen = convnn.ConvNN2d.using(similarity="cosine", k=5)
    layer, x = chosen(3, 4, 3), torch.randn(1, 3, 6, 7)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
        assert isinstance(twin, convnn.ConvNN2d)
        assert twin.k == 5
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), layer(x))

    class Mine(chosen):  # type: ignore[misc, valid-type]
        def forward(self, cells: Tensor) -> Tensor:
            return 2 * super().forward(cells)

    mine = Mine(3, 4, 3)
    assert torch.equal(copy.deepcopy(mine)(x), mine(x))
    assert Mine.using(bias=False)(3, 4, 3).bias is None

    class Loose(convnn.ConvNN2d):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)

    assert Loose.using(k=5)(3, 4, 3).k == 5
    assert isinstance(Mine.using(bias=False)(3, 4, 3), Mine)


def test_layers_of_one_configured_class_learn_apart() -> None:
    learned: Any = convnn.ConvNNAttention.using(
        k=5, similarity=Bilinear(4), weighting=LearnedTemperature(), mask=[RelativeBias((4, 5)), "causal"]
    )
    first, second = learned(12, 3), learned(12, 3)
    names = [name for name, _ in first.named_parameters()]
    assert {"similarity.weight", "weighting.log_temperature", "mask.mask0.table"} <= set(names)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert one is not other
    assert first(torch.randn(2, 20, 12)).shape == (2, 20, 12)


def test_every_layer_can_be_configured() -> None:
    for layer in (
        convnn.ConvNN1d, convnn.ConvNN2d, convnn.ConvNN3d, convnn.HybridConv1d, convnn.HybridConv2d,
        convnn.HybridConv3d,
    ):  # fmt: skip
        assert issubclass(layer.using(k=2), layer)
        assert layer.using(k=2)(2, 2, 1).extra_repr().startswith("2, 2")
    assert convnn.MultiheadConvNN.using(k=3, batch_first=True)(12, 3).k == 3
    assert convnn.LinearAttention.using(causal=True)(12, 3).causal


@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_from_conv_is_the_convolution(backend: str) -> None:
    for conv in (
        nn.Conv1d(4, 6, 4, 2, 1, 3),
        nn.Conv2d(4, 6, (3, 2), padding="same", groups=2, bias=False),
        nn.Conv3d(4, 6, 2, padding=1, padding_mode="circular").eval(),
    ):
        layer = recipes.from_conv(conv.double(), backend=backend)
        x = torch.randn(2, 4, *(11, 10, 9)[: len(conv.kernel_size)], dtype=torch.float64)
        torch.testing.assert_close(layer(x), conv(x), rtol=1e-12, atol=1e-12)
        assert layer.training == conv.training
        assert not any(p is q for p in layer.parameters() for q in conv.parameters())
    with pytest.raises(TypeError, match=r"takes nn.Conv1d, nn.Conv2d or nn.Conv3d, got ConvTranspose2d"):
        recipes.from_conv(nn.ConvTranspose2d(2, 3, 3))
    for options in ({"k": 5}, {"patch": 2}, {"projection": "linear"}):
        with pytest.raises(ValueError, match=r"must have the convolution's kernel of \(3, 2, 3, 3\), got one of"):
            recipes.from_conv(nn.Conv2d(2, 3, 3), similarity="cosine", **options)
    frozen = nn.Conv2d(2, 3, 3)
    frozen.weight.requires_grad_(False)
    assert [p.requires_grad for p in recipes.from_conv(frozen).parameters()] == [False, True]


def test_separable_is_depthwise_and_then_pointwise() -> None:
    layer = recipes.depthwise_separable(4, 7, 3, padding=1, dtype=torch.float64)
    x = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    first, second = layer
    by_channel = torch.nn.functional.conv2d(x, first.weight, None, padding=1, groups=4)  # type: ignore[arg-type]
    theirs = torch.einsum("oc,bchw->bohw", second.weight[..., 0, 0], by_channel) + second.bias[:, None, None]  # type: ignore[index]
    torch.testing.assert_close(layer(x), theirs)
