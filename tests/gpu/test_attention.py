"""Every key, and what torch asks of an operator, on a CUDA device."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import convnn
from convnn import ConvNNAttention
from convnn.backends.triton import gates
from convnn.functional import convnn as operator
from convnn.masks import causal, strided, window
from convnn.relative import RelativeBias
from convnn.weighting import LearnedTemperature, softmax_at

pytestmark = pytest.mark.gpu

ALL: Any = "all"
BRAIN, SINGLE = torch.bfloat16, torch.float32


def randn(*shape: int, dtype: torch.dtype = BRAIN, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def some(*shape: int) -> Tensor:
    mask = torch.rand(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) < 0.5
    mask[..., 3] = False
    mask[..., 0, :] = shape[-2] == 1
    return mask


MASKS: dict[str, Any] = {
    "none": lambda: None,
    "causal": lambda: causal,
    "window": lambda: window(7),
    "a rule": lambda: strided(9),
    "bool": lambda: some(2, 1, 50, 70),
    "key padding": lambda: some(2, 1, 1, 70),
    "causal and key padding": lambda: [causal, some(2, 1, 1, 70)],
    "float": lambda: randn(50, 70, dtype=SINGLE, seed=5),
    "float with -inf": lambda: randn(3, 50, 70, dtype=SINGLE, seed=5).masked_fill(~some(50, 70), -torch.inf),
}
WEIGHTINGS: dict[str, Any] = {"softmax": "softmax", "softmin": "softmin", "cold": softmax_at(0.4)}


def pulled(leaves: list[Tensor], mask: Any, weighting: Any, backend: str) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    learned = isinstance(mask, Tensor) and mask.is_floating_point()
    mask = mask.detach().to(leaves[0].dtype).requires_grad_() if learned else mask
    output = operator(*leaves, k=ALL, mask=mask, weighting=weighting, backend=backend)
    pull = randn(*output.shape, dtype=SINGLE, seed=9).to(output)
    return [output, *torch.autograd.grad(output, [*leaves, mask] if learned else leaves, pull)]


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
@pytest.mark.parametrize("channels", [64, 6])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_key_is_torchs_attention(
    mask: str, weighting: str, channels: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def otherwise() -> Any:
        raise AssertionError("this should be torch's attention")

    monkeypatch.setattr(gates, "otherwise", otherwise)
    leaves = [randn(2, 3, n, channels, dtype=dtype, seed=seed) for seed, n in enumerate((50, 70, 70))]
    made = MASKS[mask]()
    ours = pulled(leaves, made, WEIGHTINGS[weighting], "triton")
    theirs = pulled([leaf.double() for leaf in leaves], made, WEIGHTINGS[weighting], "reference")
    for mine, exact in zip(ours, theirs, strict=True):
        error = (mine.double() - exact).norm() / exact.norm().clamp(min=1e-2)
        assert error < (1e-4 if dtype == SINGLE else 2e-2)


FUSED = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
FUSED["cudnn"] = SDPBackend.CUDNN_ATTENTION


@pytest.mark.parametrize("kernel", FUSED)
@pytest.mark.parametrize("n", [70, 200])
def test_torchs_kernels_do_not_see_a_nan_in_the_future(kernel: str, n: int) -> None:
    query, key, value = (randn(2, 3, n, 64, seed=seed) for seed in range(3))
    key[0, 1, 37, 5], query[1, 2, 3, 0] = torch.nan, torch.nan
    rows = torch.zeros(2, 3, n, device="cuda").bool()
    rows[0, 1, 37:], rows[1, 2, 3] = True, True
    with sdpa_kernel(FUSED[kernel]):
        ours = operator(query, key, value, k=ALL, mask=causal, backend="triton")
    assert torch.equal(ours.isnan().all(-1), rows)
    assert torch.equal(ours.isnan().any(-1), rows)


@pytest.mark.parametrize("mask", ["window", "bool", "key padding", "float", "causal"])
@pytest.mark.parametrize("channels", [64, 6])
def test_a_nan_reaches_the_rows_that_may_see_it(mask: str, channels: int) -> None:
    query, key, value = (randn(2, 3, n, channels, seed=seed) for seed, n in enumerate((50, 70, 70)))
    key[0, 1, 3:5, 5], query[1, 2, 2, 0] = torch.nan, torch.nan
    made = MASKS[mask]()
    ours = operator(query, key, value, k=ALL, mask=made, backend="triton")
    theirs = operator(query.double(), key.double(), value.double(), k=ALL, mask=made, backend="reference")
    assert torch.equal(ours.isnan(), theirs.isnan())


def test_no_mask_beyond_the_budget_is_made() -> None:
    x = randn(1, 1, 6000, 64)
    for mask in (causal, window(5), torch.ones(6000, device="cuda").bool()[None]):
        operator(x, x, x, k=ALL, mask=mask, backend="triton")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        operator(x, x, x, k=ALL, mask=mask, backend="triton")
        # 6000 x 6000 of anything is 36 million bytes or more; a few blocks of 4 million numbers are chunked's.
        assert torch.cuda.max_memory_allocated() - before < (100e6 if mask is not causal else 10e6)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device() -> None:
    leaves: Any = [randn(2, 3, 60, 16, dtype=SINGLE, seed=seed).requires_grad_() for seed in range(3)]
    bias, temperature = RelativeBias((6, 10), heads=3, device="cuda"), LearnedTemperature(device="cuda")
    among, padding = torch.arange(0, 60, 3, device="cuda"), some(2, 1, 1, 60)
    pull = randn(2, 3, 60, 16, dtype=SINGLE)
    gates._tried.cache_clear()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for option in ({}, {"mask": causal}, {"mask": bias, "weighting": temperature}, {"mask": padding}):
            operator(*leaves, k=ALL, backend="triton", **option).backward(pull)
        for similarity in ("scaled_dot", "cosine"):
            operator(*leaves, k=5, candidates=among, similarity=similarity, backend="triton").backward(pull)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert gates._tried.cache_info().misses == 1
    assert leaves[0].grad.isfinite().all()


STOPS = """
import torch
from convnn.functional import aggregate, convnn
from convnn.neighbors import Neighbors
x = torch.randn(300, 16, device="cuda")
index = torch.full((9, 4), 10**8, device="cuda")
run = {
    "candidates": lambda: convnn(x, x, x, k=3, candidates=index[0], backend="triton"),
    "neighbours": lambda: aggregate(x, Neighbors(index.float(), index), backend="triton"),
}
try:
    run["WHAT"]()
    torch.cuda.synchronize()
except RuntimeError as error:
    print("stopped" if "assert" in str(error).lower() else error)
"""


@pytest.mark.parametrize("what", ["candidates", "neighbours"])
def test_the_device_stops_at_what_is_no_key(what: str) -> None:
    code = STOPS.replace("WHAT", what)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert "stopped" in done.stdout, done.stdout + done.stderr
    assert "illegal memory access" not in done.stdout + done.stderr


def test_a_triton_that_cannot_run_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int | None) -> None:
        raise RuntimeError("Failed to find C compiler.")

    x = randn(2, 50, 16)
    gates._tried.cache_clear()
    monkeypatch.setattr(gates, "_try", fails)
    choice = convnn.explain(x, x, x, k=9)
    gates._tried.cache_clear()
    assert choice.name == "chunked"
    assert choice.passed_over["triton"] == "Triton cannot run a kernel: Failed to find C compiler."
    monkeypatch.undo()
    assert convnn.explain(x, x, x, k=9).name == "triton"


def test_export_is_portable_unless_asked_by_name() -> None:
    x = randn(2, 20, 32, dtype=SINGLE)
    for backend in ("auto", "triton"):
        layer: nn.Module = ConvNNAttention(32, 2, k=5, backend=backend, device="cuda").eval()
        program = torch.export.export(layer, (x,))
        modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
        targets = {str(node.target) for module in modules for node in module.graph.nodes}
        assert any(target.startswith("convnn") for target in targets) == (backend == "triton")
        torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask", ["causal", "key padding", "window"])
def test_attention_compiles_and_is_captured(mask: str) -> None:
    leaves = [randn(2, 3, n, 64, seed=seed) for seed, n in enumerate((50, 70, 70))]
    made = MASKS[mask]()

    def run(*given: Tensor) -> Tensor:
        return operator(*given, k=ALL, mask=made, backend="triton")

    eager = run(*leaves)
    torch.testing.assert_close(torch.compile(run, fullgraph=True)(*leaves), eager, rtol=2e-2, atol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*leaves)
    graph.replay()
    torch.testing.assert_close(captured, eager)


def test_candidates_compile_and_are_captured() -> None:
    x, among = randn(2, 300, 64), torch.arange(0, 300, 3, device="cuda")

    def run(given: Tensor) -> Tensor:
        return operator(given, given, given, k=5, candidates=among, backend="triton")

    eager = run(x)
    torch.testing.assert_close(torch.compile(run, fullgraph=True)(x), eager, rtol=2e-2, atol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x)
    graph.replay()
    torch.testing.assert_close(captured, eager)
