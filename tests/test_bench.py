"""The benchmark without a device to measure on: who is compared, what is checked before, what is written."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from convnn import ConvNNAttention, functional
from convnn.functional import convnn, nearest
from convnn.neighbors import Neighbors
from convnn_lab import cli
from convnn_lab.bench import check as checking
from convnn_lab.bench import conv, correctness, layer, long, measure, networks, op, peers, report
from convnn_lab.bench.check import check, gathered
from convnn_lab.bench.op import Case

CASE = Case(2, 37, 8, 5)
AMONG = Case(2, 37, 8, 5, candidates=11)
BRAIN, SINGLE = torch.bfloat16, torch.float32
COST = measure.Cost(*(float(number) for number in range(1, 10)))


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def functions(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[Tensor], Tensor | None]:
    """Contenders on the CPU by name, without compiling."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    inputs, among = op.problem(case, "cpu", SINGLE)
    return {each.name: each for each in op.contenders(case, inputs, among)}, inputs, among


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_contenders_compute_what_their_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    found, inputs, _ = functions(CASE, monkeypatch)
    exact = [tensor.double() for tensor in inputs]
    dense = peers.sdpa(SDPBackend.MATH)(*exact[:3])
    nearest = convnn(*exact[:3], k=5, backend="reference")
    expected = {
        "convnn": convnn(*exact, k=5, backend="reference"),
        "plain": convnn(*exact, k=5, backend="reference"),
        **dict.fromkeys(("convnn, no kernel", "kvt, masked", "kvt, flex"), nearest),
        **dict.fromkeys(("sdpa", "sdpa, math", "flex"), dense),
    }
    elsewhere = {"sdpa, flash", "sdpa, cudnn", "sdpa, efficient"}
    assert set(found) == set(expected) | elsewhere
    for name, output in expected.items():
        torch.testing.assert_close(found[name].function(*found[name].inputs).double(), output, rtol=1e-5, atol=1e-5)


def test_over_candidates_plain_and_ours_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    found, inputs, among = functions(AMONG, monkeypatch)
    exact = convnn(*(tensor.double() for tensor in inputs), k=5, candidates=among, backend="reference")
    for name in ("convnn", "plain"):
        torch.testing.assert_close(found[name].function(*inputs).double(), exact, rtol=1e-5, atol=1e-5)
    assert not {"kvt, masked", "kvt, flex"} & set(found)


def test_what_holds_all_scores_is_left_out_where_they_are_many() -> None:
    inputs, _ = op.problem(CASE, "meta", BRAIN)
    names = {each.name for each in op.contenders(Case(12, 16384, 64, 16), inputs, every_dense=True)}
    assert names < set(op.NAMES)
    assert names.isdisjoint({"plain", "kvt, masked", "kvt, flex", "sdpa, math"})
    assert {"sdpa", "convnn", "sdpa, flash", "sdpa, efficient", "flex"} <= names


def test_the_tables_have_the_sizes_that_are_asked_for() -> None:
    assert {8, 9, 36, 100} <= {case.k for case in op.CASES}
    assert layer.NEIGHBOURS[:2] == (9, 8)
    assert {36, 100} <= set(layer.NEIGHBOURS)


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("case", [CASE, AMONG, Case(2, 130, 16, 70)], ids=str)
def test_the_check_passes_what_is_right(case: Case, kernel: bool, dtype: torch.dtype) -> None:
    inputs, among = op.problem(case, "cpu", dtype)
    check(case, inputs if kernel else inputs[:3], case.k, among)


def test_gathered_neighbours_are_the_operator() -> None:
    query, key, value, kernel = (tensor.double() for tensor in op.problem(CASE, "cpu", SINGLE)[0])
    for given in ((query, key, value, kernel), (query, key, value)):
        output, found = convnn(*given, k=5, backend="reference", return_neighbors=True)
        torch.testing.assert_close(gathered(*given, index=found.index), output)


def a_gradient_scaled(number: int, *given: Tensor, **options: Any) -> Tensor:
    """The operator, with one of its gradients too large by a twentieth."""
    leaves = list(given)
    leaves[number] = leaves[number] * 1.05 - leaves[number].detach() * 0.05
    return convnn(*leaves, **options)


@pytest.mark.parametrize("number", range(4))
def test_the_check_finds_a_wrong_gradient(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "convnn", partial(a_gradient_scaled, number))
    inputs, _ = op.problem(CASE, "cpu", SINGLE)
    with pytest.raises(ValueError, match=f"the {checking.NAMES[number + 1]} is off by"):
        check(CASE, inputs, CASE.k)


def test_the_check_finds_a_wrong_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "convnn", lambda *given, **options: convnn(*given, **options) * 1.05)
    with pytest.raises(ValueError, match="the output is off by"):
        check(CASE, op.problem(CASE, "cpu", BRAIN)[0], CASE.k)


def test_the_check_passes_another_of_two_that_are_as_near(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, kernel = op.problem(CASE, "cpu", SINGLE)[0]
    key[..., :4, :] = key[..., 4:8, :]

    def from_behind(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        return convnn(query, key.flip(-2), value.flip(-2), *rest, **options)

    given = [query[:1, :2], key[:1, :2], value[:1, :2]]
    first, last = (nearest(given[0], keys, k=CASE.k).index for keys in (given[1], given[1].flip(-2)))
    assert (first.sort(-1).values != (key.shape[-2] - 1 - last).sort(-1).values).any()
    monkeypatch.setattr(checking, "convnn", from_behind)
    check(CASE, [query, key, value, kernel], CASE.k)


def without_the_nearest(query: Tensor, key: Tensor, *, k: int, **options: Any) -> Neighbors:
    found = functional.nearest(query, key, k=k + 1, **options)
    return Neighbors(found.scores[..., 1:], found.index[..., 1:])


@pytest.mark.parametrize("case", [CASE, AMONG], ids=str)
def test_the_check_finds_a_wrong_choice(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, among = op.problem(case, "cpu", BRAIN)
    monkeypatch.setattr(checking, "nearest", without_the_nearest)
    with pytest.raises(ValueError, match="not its nearest keys"):
        check(case, inputs, case.k, among)


def test_the_check_finds_neighbours_twice_and_those_that_are_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, among = op.problem(AMONG, "cpu", BRAIN)
    for index in (torch.zeros(1, 1, 37, 5).long(), torch.arange(5).expand(1, 1, 37, 5)):
        monkeypatch.setattr(checking, "nearest", lambda *_, index=index, **__: Neighbors(index.float(), index))
        with pytest.raises(ValueError, match="twice, or one it may not choose"):
            check(AMONG, inputs, AMONG.k, among)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_layers_are_the_same_projections_around_each_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    found, x = layer.modules(24, 3, 5, device="cpu"), torch.randn(2, 19, 24)
    for each in found.values():
        each.requires_grad_(False)  # flex_attention has no backward on the CPU
    assert next(iter(found)) == "sdpa"
    for one, others in {"convnn": ["plain"], "convnn, no kernel": ["kvt, masked", "kvt, flex"]}.items():
        for other in others:
            assert list(map(id, found[one].parameters())) == list(map(id, found[other].parameters()))
            torch.testing.assert_close(found[other](x), found[one](x), rtol=1e-4, atol=1e-5)
    whole = ConvNNAttention(24, 3, k="all", kernel=None)
    whole.load_state_dict(found["convnn, no kernel"].state_dict())
    for name in ("sdpa", "sdpa, math", "flex"):
        torch.testing.assert_close(found[name](x), whole(x), rtol=1e-4, atol=1e-5)


def test_a_layer_is_checked_on_its_own_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 19, 24)
    layer.check_layer("case", ConvNNAttention(24, 3, k=5), x)
    with pytest.raises(ValueError, match="case: the layer is off by"):
        layer.check_layer("case", ConvNNAttention(24, 3, k=5, kernel_drop=0.5), x)
    monkeypatch.setattr(checking, "convnn", lambda *given, **options: convnn(*given, **options) * 1.05)
    with pytest.raises(ValueError, match="case: the output is off by"):
        layer.check_layer("case", ConvNNAttention(24, 3, k=5), x)


def test_the_correctness_test_compares_five_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = correctness.differences(2, 29, 24, 3, 4)
    assert [row.pair for row in rows][::2] == ["chunked and plain", "chunked and float64", "reference and float64"]
    assert all(0 < number < 1e-4 for row in rows for number in row.largest[1:])
    correctness.show(rows, tmp_path / "rows.csv")
    printed, written = capsys.readouterr().out, read(tmp_path / "rows.csv")
    assert all(word in printed for word in ("2.62e-6", "query projection", "plain and float64"))
    assert [float(row["input"]) for row in written] == [row.largest[1] for row in rows]
    assert written[0]["torch"] == torch.__version__


def test_the_correctness_test_is_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(correctness, "differences", partial(correctness.differences, 2, 29, 24, 3, 4))
    assert cli.main(["bench", "correctness"]) == cli.HOLDS
    assert "reference and float64" in capsys.readouterr().out


def test_the_correctness_test_sees_another_kernel() -> None:
    ours = ConvNNAttention(24, 3, k=4)
    x, pull = torch.randn(2, 2, 19, 24)
    right = correctness._results(ours, x, pull)
    with torch.no_grad():
        ours.kernel.weight[0, 0, 3] += 1e-2  # type: ignore[union-attr]
    assert min(correctness._largest(right, correctness._results(ours, x, pull))[:2]) > 1e-5


def test_a_table_names_what_it_was_measured_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        report.Row("a", "sdpa", COST),
        report.Row("a", "flex", None, "NoCompiler: none"),
        report.Row("b", "x", COST),
    ]
    report.show(rows, tmp_path / "rows.csv")
    printed, written = capsys.readouterr().out, read(tmp_path / "rows.csv")
    assert "skipped: NoCompiler: none" in printed
    assert "1.00 / 1.00 / 1.00" in printed
    assert [row["skipped"] for row in written] == ["", "NoCompiler: none", ""]
    assert [float(written[0][name]) for name in ("forward", "backward", "both", "memory_both")] == [1, 2, 3, 9]
    assert written[1]["forward"] == ""
    for row in written:
        assert row["torch"] == torch.__version__
        assert all(row[name] for name in ("device", "triton", "cuda", "commit"))


def raising(*_: Tensor) -> Tensor:
    raise RuntimeError("no such kernel\nand much more")


def test_a_peer_that_cannot_run_says_why_and_ours_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "cost", lambda function, inputs, _: function(*inputs))
    row = report.timed("a", report.Contender("flex", raising, []))
    assert (row.cost, row.skipped) == (None, "RuntimeError: no such kernel")
    with pytest.raises(RuntimeError, match="no such kernel"):
        report.timed("a", report.Contender("convnn", raising, [], peer=False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to measure on")
def test_measuring_needs_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    for run in (
        lambda: measure.cost(torch.sin, [torch.ones(2)]),
        lambda: next(op.op()),
        lambda: next(layer.attention()),
        lambda: next(conv.conv()),
        lambda: next(long.long()),
        lambda: next(networks.networks()),
        lambda: measure.training(torch.sin, [torch.ones(2)], []),
    ):
        with pytest.raises(ValueError, match="needs a CUDA device"):
            run()
    for what in ("op", "attention", "conv", "long", "vgg"):
        assert cli.main(["bench", what]) == cli.MISUSED
        assert "needs a CUDA device" in capsys.readouterr().err


def test_every_backend_of_torchs_attention_is_a_peer() -> None:
    there = {name for name in SDPBackend.__members__ if name not in ("ERROR", "OVERRIDEABLE")}
    assert {backend.name for backend in peers.BACKENDS.values()} == there
