"""torch.compile, torch.export, torch.func and double backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import convnn
from convnn.backends.chunked import with_budget
from convnn.blend import Blend
from convnn.candidates import grid, random
from convnn.descriptor import ConditionalEncoding, Fourier, pixels, scaled_concat, sinusoidal
from convnn.functional import convnn as operator
from convnn.functional import nearest
from convnn.patches import Patches
from convnn.relative import RelativeBias
from convnn.similarity import Bilinear, Mahalanobis, minkowski
from convnn.weighting import LearnedTemperature, softmax_at


def leaves() -> tuple[Tensor, ...]:
    shapes = ((2, 7, 5), (2, 11, 5), (2, 11, 6), (4, 3, 3))
    return tuple(torch.randn(*shape, requires_grad=True) for shape in shapes)


def compiles(function: Any, inputs: tuple[Tensor, ...], backend: str, tolerance: float = 1e-5) -> None:
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    ours, theirs = compiled(*inputs), function(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    grad = [torch.autograd.grad(y.square().sum(), inputs, allow_unused=True) for y in (ours, theirs)]
    torch.testing.assert_close(*grad, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("backend", ["auto", "reference", with_budget(160)], ids=["auto", "reference", "blocks"])
def test_the_operator_compiles_without_a_break(backend: Any) -> None:
    def run(q: Tensor, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return operator(q, x, v, w, k=3, mask="causal", similarity="cosine", backend=backend)

    compiles(run, leaves(), "aot_eager")


@pytest.mark.parametrize("similarity", ["pearson", "manhattan", "chebyshev", minkowski(3), Bilinear(5), "learned"])
def test_every_similarity_and_weighting_compiles(similarity: Any) -> None:
    learned = Mahalanobis(torch.eye(5), learned=True)
    weighting: Any = {"pearson": "sparsemax", "manhattan": "softmin", "chebyshev": softmax_at(0.5)}.get(
        similarity if isinstance(similarity, str) else "", LearnedTemperature()
    )

    def run(q: Tensor, x: Tensor, v: Tensor) -> Tensor:
        return operator(
            q, x, v, k=3, similarity=learned if similarity == "learned" else similarity, weighting=weighting
        )

    compiles(run, leaves()[:3], "aot_eager")


@pytest.mark.parametrize(
    ("k", "backend"), [(3, "chunked"), (3, with_budget(160)), ("all", "chunked"), ("all", "reference")]
)
def test_candidates_and_selves_compile(k: Any, backend: Any) -> None:
    among = random(6, per="sample", seed=2).eval()

    def run(q: Tensor, x: Tensor, v: Tensor) -> Tensor:
        oneself = torch.arange(q.shape[-2], device=q.device)
        narrow = operator(q, x, v, k=k, candidates=among, self_index=oneself, mask="causal", backend=backend)
        return narrow + operator(q, x, v, k=2, candidates=grid(4), self_score="one", backend=backend)

    compiles(run, leaves()[:3], "aot_eager")


def test_a_draw_is_made_anew_in_compiled_training() -> None:
    torch.compiler.reset()
    x = torch.randn(2, 40, 5)
    run = torch.compile(lambda t: nearest(t, t, k=3, candidates=random(6)).index, fullgraph=True, backend="aot_eager")
    assert not torch.equal(run(x), run(x))


POSITIONS: dict[str, Any] = {
    "scaled concatenation": scaled_concat(0.5),
    "Fourier features": Fourier(2, 4),
    "conditional": ConditionalEncoding(6),
    "sinusoidal": sinusoidal,
}


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("k", [4, "all"])
def test_descriptors_and_a_relative_bias_compile(name: str, k: Any) -> None:
    bias, describe = RelativeBias((3, 4), heads=2), POSITIONS[name]
    torch.nn.init.normal_(bias.table)

    def run(x: Tensor, table: Tensor) -> Tensor:
        described = describe(x, pixels((3, 4)))
        mask = replace(bias.on((3, 4)), table=table.flatten(1)[:, None])
        return operator(described, described, x, k=k, mask=[mask, "causal"])

    compiles(run, (torch.randn(3, 2, 12, 6, requires_grad=True), bias.table), "aot_eager")


def test_a_learned_blend_and_patches_compile() -> None:
    blend: Any = Blend(0.4, learned=True)

    def search(x: Tensor, raw: Tensor) -> Tensor:
        described = blend.descriptor(x, pixels((3, 4)))
        return operator(described, described, x, k=4, similarity=blend, mask="causal") + 0 * raw

    compiles(search, (torch.randn(2, 12, 6, requires_grad=True), blend.raw), "aot_eager")
    mix = Patches(2)(nn.Conv2d(12, 8, 1))
    compiles(mix, (torch.randn(2, 3, 6, 8, requires_grad=True),), "aot_eager")


def test_attention_compiles_without_a_break() -> None:
    def run(q: Tensor, x: Tensor, v: Tensor) -> Tensor:
        return operator(q, x, v, k="all", similarity="euclidean")

    compiles(run, leaves()[:3], "aot_eager")


def test_the_operator_compiles_with_neighbours_under_autocast() -> None:
    def run(q: Tensor, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output, found = operator(q, x, v, w, k=3, return_neighbors=True)
        return output.float() + found.scores.sum(-1, keepdim=True)

    compiles(run, leaves(), "aot_eager", tolerance=2**-8)  # the compiler rounds to bfloat16 in other places


def test_one_graph_serves_many_sizes() -> None:
    """One recompilation, to make sizes symbolic; not one per size."""
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def run(x: Tensor, w: Tensor) -> Tensor:
        return operator(x, x, x, w, k=3)

    kernel = torch.randn(6, 1, 3)
    for n in (10, 11, 17, 30, 55):
        x = torch.randn(2, n, 6)
        torch.testing.assert_close(run(x, kernel), operator(x, x, x, kernel, k=3), rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.filterwarnings("ignore")  # inductor's own
def test_inductor_gives_the_same_numbers() -> None:
    def run(q: Tensor, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return operator(q, x, v, w, k=3)

    compiles(run, leaves(), "inductor")


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.kernel = None if options["k"] == "all" else nn.Parameter(torch.randn(4, 3, options["k"]))

    def forward(self, x: Tensor) -> Tensor:
        return operator(x, x, x, self.kernel, **self.options)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("options", [{"k": 3, "mask": "causal"}, {"k": "all"}, {"k": 3, "similarity": "euclidean"}])
def test_export_holds_for_every_number_of_tokens(options: dict[str, Any], strict: bool) -> None:
    layer = Layer(**options)
    tokens = torch.export.Dim("tokens", min=3, max=5000)
    batch = torch.export.Dim("batch", max=100)
    exported = torch.export.export(
        layer, (torch.randn(2, 10, 6),), dynamic_shapes=({0: batch, 1: tokens},), strict=strict
    )
    for sizes in ((1, 3), (5, 33)):
        x = torch.randn(*sizes, 6)
        torch.testing.assert_close(exported.module()(x), layer(x), rtol=1e-5, atol=1e-5)


def test_chunked_refuses_to_be_exported() -> None:
    with pytest.raises(ValueError, match=r"backend 'chunked' cannot run these inputs: torch.export needs sizes"):
        torch.export.export(Layer(k=3, backend="chunked"), (torch.randn(2, 10, 6),), strict=False)


def test_vmap_is_the_batch() -> None:
    x, key = torch.randn(4, 7, 5), torch.randn(11, 5)

    def one(x: Tensor) -> Tensor:
        return operator(x, key, key, k=3, similarity="euclidean", mask="causal")

    torch.testing.assert_close(
        torch.func.vmap(one)(x), operator(x, key, key, k=3, similarity="euclidean", mask="causal")
    )
    found = torch.func.vmap(lambda x: nearest(x, key, k=3))(x)
    assert torch.equal(found.index, nearest(x, key, k=3).index)


@pytest.mark.parametrize("k", [3, "all"])
def test_jacrev_is_the_jacobian(k: Any) -> None:
    x = torch.randn(5, 4, dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        return operator(x, x, x, k=k)

    ours = torch.func.jacrev(run)(x)
    torch.testing.assert_close(ours, torch.autograd.functional.jacobian(run, x))


@pytest.mark.parametrize("backend", ["reference", "chunked", with_budget(30)], ids=["reference", "chunked", "blocks"])
@pytest.mark.parametrize("similarity", ["scaled_dot", "cosine", "euclidean"])
@pytest.mark.parametrize("k", [3, "all"])
def test_double_backward_is_right(k: Any, similarity: str, backend: Any) -> None:
    query, key, value = (
        torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((3, 4), (5, 4), (5, 2))
    )
    kernel: Any = None if k == "all" else torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)

    def run(q: Tensor, x: Tensor, v: Tensor, w: Tensor | None) -> Tensor:
        return operator(q, x, v, w, k=k, similarity=similarity, backend=backend)

    assert torch.autograd.gradgradcheck(run, (query, key, value, kernel))


@pytest.mark.parametrize("k", [3, "all"])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_gradients_come_in_batches(backend: str, k: Any) -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return operator(x, x, x, k=k, mask="causal", backend=backend)

    one_by_one = torch.autograd.functional.jacobian(run, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(run, x, vectorize=True), one_by_one)


def test_meta_tensors_give_shapes() -> None:
    x = torch.randn(2, 7, 6, device="meta")
    output, found = operator(x, x, x, k=3, return_neighbors=True)
    assert output.shape == (2, 7, 6)
    assert found.index.shape == (2, 7, 3)
    assert convnn.explain(x, x, x, k=3).name == "chunked"
