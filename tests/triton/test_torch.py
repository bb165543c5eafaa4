"""What torch asks of an operator: export, checkpoints, several processes, counting, and its own checks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from convnn import ConvNNAttention
from convnn.backends.triton import flops
from convnn.functional import convnn as operator
from convnn.functional import nearest
from convnn.masks import causal, strided
from convnn.weighting import LearnedTemperature
from tests.triton.runner import DEVICE, Case


class Layer(nn.Module):
    """The operator on tokens, with a kernel unless every key is taken."""

    def __init__(self, kernel: tuple[int, int] | None = (6, 1), **options: Any) -> None:
        super().__init__()
        self.options = {"k": 3, "backend": "triton", **options}
        generator = torch.Generator().manual_seed(1)
        taps = None if kernel is None else torch.randn(*kernel, self.options["k"], generator=generator)
        self.kernel = None if taps is None else nn.Parameter(taps.to(DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        return operator(x, x, x, self.kernel, **self.options)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


EXPORTED: dict[str, Layer] = {
    "depthwise": Layer(),
    "no kernel": Layer(None),
    "causal": Layer(mask="causal"),
    "cosine, float mask": Layer(similarity="cosine", mask=tokens(9, 9, seed=2)),
    "a rule": Layer(mask=strided(3)),
    "standard kernel": Layer((4, 6)),
    "uniform, standard kernel": Layer((4, 6), weighting="uniform"),
    "another weighting": Layer(weighting="sparsemax"),
    "candidates": Layer(candidates=torch.arange(0, 9, 2, device=DEVICE)),
    "dropout": Layer(dropout_p=1.0),
}


def ours(program: torch.export.ExportedProgram) -> set[str]:
    """The operators of this package in a program."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = {str(node.target) for graph in graphs for node in graph.nodes}
    return {target for target in targets if target.startswith("convnn")}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", EXPORTED)
def test_by_name_it_is_exported_as_operators(name: str, strict: bool) -> None:
    layer, x = EXPORTED[name], tokens(2, 9, 6)
    program = torch.export.export(layer, (x,), strict=strict)
    assert "convnn.select.default" in ours(program)
    torch.testing.assert_close(program.module()(x + 1), layer(x + 1))


def test_what_it_does_not_know_is_exported_as_the_reference() -> None:
    for layer in (Layer(similarity="manhattan"), Layer(None, k="all", weighting="uniform")):
        x = tokens(2, 9, 6)
        program = torch.export.export(layer, (x,))
        torch.testing.assert_close(program.module()(x + 1), layer(x + 1))


def test_attention_is_exported_as_torchs() -> None:
    layer, x = Layer(None, k="all", mask="causal"), tokens(2, 9, 6)
    program = torch.export.export(layer, (x,))
    assert any("scaled_dot_product" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x + 1), layer(x + 1))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_an_exported_program_is_saved_trains_and_serves_other_sizes() -> None:
    layer = Layer(mask="causal")
    size = {0: torch.export.Dim("batch", max=50), 1: torch.export.Dim("tokens", min=4, max=200)}
    program = torch.export.export(layer, (tokens(2, 9, 6),), dynamic_shapes=(size,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded: Any = torch.export.load(file).module()
    for shape in ((3, 4, 6), (1, 33, 6)):
        x = tokens(*shape, seed=3)
        mine, theirs = loaded(x), layer(x)
        torch.testing.assert_close(mine, theirs)
        (into,) = torch.autograd.grad(mine.square().sum(), [loaded.kernel])
        assert layer.kernel is not None
        torch.testing.assert_close(into, *torch.autograd.grad(theirs.square().sum(), [layer.kernel]))


def test_without_a_name_the_reference_is_exported() -> None:
    program = torch.export.export(Layer(backend="auto"), (tokens(2, 9, 6),))
    assert not ours(program)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropped", [0.0, 0.4])
def test_a_checkpoint_changes_no_bit(dropped: float, reentrant: bool) -> None:
    temperature = LearnedTemperature(0.7).to(DEVICE)
    layer = Layer(dropout_p=dropped, weighting=temperature, mask=causal, k=4)
    parameters = [*layer.parameters(), temperature.log_temperature]
    results = []
    for saves in (False, True):
        torch.manual_seed(5)
        x = tokens(2, 20, 6).requires_grad_()
        y: Any = checkpoint(layer, x, use_reentrant=reentrant) if saves else layer(x)
        y.square().sum().backward()
        assert x.grad is not None
        results.append([y.detach(), x.grad, *(parameter.grad for parameter in parameters)])
        for parameter in parameters:
            parameter.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore")  # what torch.distributed says of itself
def test_several_processes_get_the_gradients_of_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), ConvNNAttention(8, 2, k=4, backend="triton")).to(DEVICE)
    x = tokens(3, 11, 8)
    plain(x).square().sum().backward()
    alone = [parameter.grad.clone() for parameter in plain.parameters() if parameter.grad is not None]
    plain.zero_grad()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        shared = nn.parallel.DistributedDataParallel(plain)
        shared(x).square().sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    together = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def counted(run: Any) -> dict[str, int]:
    assert flops is not None  # imported, it registers what is counted
    with FlopCounterMode(display=False) as counter:
        run()
    return {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}


def test_operations_are_counted() -> None:
    batch, heads, n, m, e, c, k, r = 2, 3, 10, 70, 8, 6, 5, 7
    leaves: Any = [tokens(*shape).requires_grad_() for shape in ((2, 3, n, e), (2, 3, m, e), (2, 3, m, c), (c, 1, k))]
    entries = batch * heads * n
    count = counted(lambda: operator(*leaves, k=k, backend="triton").sum().backward())
    assert count["convnn.select"] == entries * m * 2 * e
    # A score again; the value times its weight, times its tap, and added.
    combine = entries * k * (2 * e + 3 * c)
    assert count["convnn.combine"] == combine
    assert count["convnn.combine_backward"] == 2 * combine
    weighed = counted(lambda: operator(*leaves, k=k, weighting="sparsemax", backend="triton").sum().backward())
    assert weighed["convnn.score"] == entries * k * 2 * e
    assert weighed["convnn.score_backward"] == 2 * weighed["convnn.score"]
    few = torch.arange(r, device=DEVICE)
    narrow = counted(lambda: operator(*leaves[:3], k=k, candidates=few, backend="triton").sum().backward())
    # All scores of few keys are at hand.
    assert narrow["convnn.attend_few"] == entries * (r * 2 * e + k * 2 * c)
    assert sum(narrow.values()) == 3 * narrow["convnn.attend_few"]


class Recorder(TorchDispatchMode):
    """Writes down with what the operators of this package are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).startswith("convnn"):
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


PROBED: dict[str, dict[str, Any]] = {
    "a kernel": {},
    "distance": {"similarity": "euclidean"},
    "float mask, at a temperature": {"mask": tokens(9, 11, seed=4), "weighting": LearnedTemperature()},
    "causal, uniform": {"mask": causal, "weighting": "uniform"},
    "candidates, own": {"candidates": torch.arange(0, 11, 2), "self_index": torch.arange(9), "self_score": "one"},
    "given weights": {"weighting": "sparsemax"},
    "dropout": {"dropout_p": 0.3},
}


SCORED = {f"convnn.{each}.default" for each in ("select", "score", "score_backward", "combine", "combine_backward")}
ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", PROBED)
def test_torch_accepts_every_operator_as_it_is_called(name: str) -> None:
    options: Any = {key: x.to(DEVICE) if isinstance(x, (Tensor, nn.Module)) else x for key, x in PROBED[name].items()}
    leaves: Any = [x.requires_grad_() for x in Case("", (9, 11, 8, 6), k=3, lead=(2,)).leaves()]
    with Recorder() as recorder:
        operator(*leaves, k=3, backend="triton", **options).sum().backward()
    names = {str(function) for function, _ in recorder.calls}
    # A score by agreement is never -inf, so that nobody need compute it to put one's own key first.
    assert ("convnn.own_first.default" in names) == (name == "candidates, own")
    assert names - {"convnn.own_first.default"} in (
        {"convnn.select.default", "convnn.combine.default", "convnn.combine_backward.default"},
        {"convnn.attend_few.default", "convnn.attend_few_backward.default"},
        SCORED,
    )
    assert (names == SCORED) == (name == "given weights")
    for function, args in recorder.calls:
        given = [x.detach().clone() if isinstance(x, Tensor) else x for x in args]
        # Only a softmax writes the number it keeps for its backward; otherwise two runs differ in what nobody reads.
        softmax = options.get("weighting") not in ("uniform", "sparsemax")
        torch.library.opcheck(function, tuple(given), test_utils=ALL_CHECKS if softmax else ALL_CHECKS[:3])


def test_neighbours_are_exported_too() -> None:
    class Search(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores, index = nearest(x, x, k=3, backend="triton")
            return scores, index

    x = tokens(2, 9, 6)
    program = torch.export.export(Search(), (x,))
    assert ours(program) == {"convnn.select.default"}
    torch.testing.assert_close(program.module()(x + 1), Search()(x + 1))
