"""The Triton backend on a CUDA device: large sizes, adversarial data, determinism, compilation, graphs, memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import convnn
from convnn import ConvNNAttention
from convnn.functional import convnn as operator
from convnn.functional import nearest
from tests.triton.runner import one_bin, step

pytestmark = pytest.mark.gpu

BRAIN, SINGLE = torch.bfloat16, torch.float32


def randn(*shape: int, dtype: torch.dtype = BRAIN, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def assert_exact(query: Tensor, key: Tensor, k: int, **options: Any) -> None:
    """The chosen scores are the K largest of their row, up to what is promised."""
    index = nearest(query, key, k=k, similarity="dot", backend="triton", **options).index
    tolerance = 2**-15 if query.dtype != SINGLE else 2**-20
    for start in range(0, query.shape[-2], 1024):
        rows = slice(start, start + 1024)
        scores = query[..., rows, :].double() @ key.double().mT
        best = scores.topk(k).values
        chosen = scores.gather(-1, index[..., rows, :]).sort(-1, descending=True).values
        size = (query[..., rows, :].double().norm(dim=-1) * key.double().norm(dim=-1).amax(-1, keepdim=True))[..., None]
        assert ((best - chosen) <= tolerance * best.abs() + 2**-20 * size).all()
        assert (index[..., rows, :].sort(-1).values.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
@pytest.mark.parametrize(
    ("lead", "n", "m", "k"),
    [
        ((4, 12), 197, 197, 9),
        ((4, 12), 197, 197, 36),
        ((2, 3), 1000, 1024, 9),
        ((2,), 3136, 3136, 16),
        ((2,), 700, 4100, 36),
        ((2,), 500, 2000, 128),
        ((), 300, 1500, 200),
        ((), 1000, 20_000, 16),
        ((), 500, 65_536, 16),
    ],
)
def test_the_chosen_are_the_largest(lead: tuple[int, ...], n: int, m: int, k: int, dtype: torch.dtype) -> None:
    assert_exact(randn(*lead, n, 64, dtype=dtype), randn(*lead, m, 64, dtype=dtype, seed=1), k)


def ascending(key: Tensor) -> Tensor:
    return key * 0.05 + torch.linspace(-1, 1, key.shape[-2], device="cuda")[:, None].to(key.dtype)


def periodic(key: Tensor) -> Tensor:
    return (key[..., :64, :].repeat(1, key.shape[-2] // 64 + 1, 1)[..., : key.shape[-2], :]) + key * 0.01


def blocks(key: Tensor) -> Tensor:
    return key * 0.05 + (torch.arange(key.shape[-2], device="cuda") // 64 % 7)[:, None].to(key.dtype)


def hubs(key: Tensor) -> Tensor:
    return torch.where(torch.arange(key.shape[-2], device="cuda")[:, None] % 500 == 3, 4.0, key)


def in_one_bin(key: Tensor, bins: int) -> Tensor:
    key, best = key.clone(), one_bin(key.shape[-2], bins).to("cuda")
    key[..., best, :] += 2
    return key


ADVERSARIES: dict[str, Callable[[Tensor], Tensor]] = {
    "ascending": ascending,
    "periodic": periodic,
    "blocks": blocks,
    "hubs": hubs,
    **{f"one bin of {bins}": partial(in_one_bin, bins=bins) for bins in (32, 64, 128)},
    "huge": lambda key: key * 1e15,
    "tiny": lambda key: key * 1e-18,
}


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
@pytest.mark.parametrize("k", [9, 36])
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_adversarial_keys_are_found(adversary: str, k: int, dtype: torch.dtype) -> None:
    query, key = randn(2, 600, 64, dtype=dtype).abs(), ADVERSARIES[adversary](randn(2, 2500, 64, dtype=dtype, seed=1))
    assert_exact(query, key.to(dtype), k)


@pytest.mark.parametrize("number", [0.0, 1.0, -1.0])
def test_equal_keys_are_chosen_once_each(number: float) -> None:
    query = torch.ones(300, 64, device="cuda", dtype=BRAIN)
    for m in (200, 3000):
        index = nearest(query, torch.full((m, 64), number, device="cuda", dtype=BRAIN), k=9, backend="triton").index
        assert (index.sort(-1).values.diff(dim=-1) > 0).all()
        assert (index >= 0).all()


SIZES = [(2, 12, 197, 64, 9), (1, 12, 1024, 64, 9), (1, 2, 4096, 64, 16), (2, 2, 300, 96, 40), (1, 1, 600, 512, 5)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients_agree_with_the_reference(size: tuple[int, ...]) -> None:
    batch, heads, n, d, k = size
    leaves = [randn(batch, heads, n, d, dtype=SINGLE, seed=seed) for seed in range(3)]
    leaves.append(randn(d, 1, k, dtype=SINGLE, seed=3))
    ours = step(leaves, k, {}, "triton")
    theirs = step([leaf.double() for leaf in leaves], k, {}, "reference")
    for mine, exact in zip(ours, theirs, strict=True):
        assert ((mine - exact).norm() / exact.norm()).item() < 1e-4


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_two_runs_are_equal_bit_by_bit(size: tuple[int, ...]) -> None:
    batch, heads, n, d, k = size
    leaves = [randn(batch, heads, n, d, seed=seed) for seed in range(3)] + [randn(d, 1, k, seed=3)]
    leaves[1][..., 7, :] = 3.0  # everybody's neighbour, or nobody's
    first, second = step(leaves, k, {}, "triton"), step(leaves, k, {}, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_equal_scores_everywhere_train() -> None:
    """Dead maps: every query chooses the same keys."""
    leaves = [torch.zeros(2, 2000, 64, device="cuda", dtype=BRAIN) for _ in range(2)]
    results = step([*leaves, randn(2, 2000, 64), randn(64, 1, 9)], 9, {}, "triton")
    assert all(tensor.isfinite().all() for tensor in results)


def test_it_is_the_default_and_says_so() -> None:
    x = randn(2, 50, 16)
    assert convnn.explain(x, x, x, k=9).name == "triton"
    assert convnn.explain(x.double(), x.double(), x.double(), k=9).name == "chunked"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("n", [100, 700])
def test_nothing_waits_for_the_device(n: int) -> None:
    leaves = [randn(2, n, 16, dtype=SINGLE, seed=seed).requires_grad_() for seed in range(3)]
    given: Any = [*leaves, randn(16, 1, 9, dtype=SINGLE).requires_grad_()]
    pull = randn(2, n, 16, dtype=SINGLE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        options: list[dict[str, Any]] = [{"similarity": name} for name in ("scaled_dot", "cosine", "euclidean")]
        for option in [*options, {"dropout_p": 0.1, "weighting": "uniform"}]:
            operator(*given, k=9, mask="causal", backend="triton", **option).backward(pull)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert given[0].grad.isfinite().all()


@pytest.mark.parametrize("n", [128, 600])
def test_a_training_step_is_captured_in_a_graph(n: int) -> None:
    leaves = [randn(2, n, 64, seed=seed) for seed in range(3)] + [randn(64, 1, 9, seed=3)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step(leaves, 9, {}, "triton")
    torch.cuda.current_stream().wait_stream(side)
    static = [leaf.requires_grad_() for leaf in leaves]
    pull = randn(2, n, 64, seed=5)

    def run() -> list[Tensor]:
        output = operator(*static, k=9, backend="triton")
        return [output.detach(), *torch.autograd.grad(output, static, pull)]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for leaf in static:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))


@pytest.mark.parametrize("n", [197, 600])
def test_the_layer_compiles_without_a_break(n: int) -> None:
    layer = ConvNNAttention(128, 2, k=9, device="cuda")
    x = randn(2, n, 128, dtype=SINGLE)
    with torch.autocast("cuda", BRAIN):
        ours, theirs = torch.compile(layer, fullgraph=True)(x), layer(x)
    torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)
    ours.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("n", [197, 4096])
def test_memory_is_close_to_attention(n: int) -> None:
    shape = (32, 12, n, 64) if n == 197 else (1, 12, n, 64)
    leaves: Any = [randn(*shape, seed=seed).requires_grad_() for seed in range(3)]
    given: Any = [*leaves, randn(64, 1, 9).requires_grad_()]
    peaks = []
    for run in (
        lambda: operator(*given, k=9),
        lambda: torch.nn.functional.scaled_dot_product_attention(*leaves),
    ):
        run().sum().backward()
        torch.cuda.synchronize()
        for leaf in leaves:
            leaf.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run().backward(torch.ones_like(leaves[0]))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] <= 1.5 * peaks[1]


def test_every_key_is_attention() -> None:
    query, key, value = (randn(2, 3, 300, 64, seed=seed) for seed in range(3))
    ours = operator(query, key, value, k="all", mask="causal")
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(ours, theirs)
