"""The benchmark of how cost grows, and its figures, without a device to measure on."""

from __future__ import annotations

import csv
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from convnn.functional import convnn
from convnn_lab.bench import conv, op
from convnn_lab.bench.measure import Cost
from convnn_lab.bench.report import Contender, Row

FOLDER = Path(__file__).parents[1] / "benchmarks"
HEADS, AMONG, MAPS = op.Case(6, 29, 8, 5), op.Case(6, 31, 8, 5, 11), conv.Case(3, 7, 8, 12, k=9)


def script(name: str) -> Any:
    spec = spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


scaling, plots = script("scaling"), script("plots")


def on_cpu(case: Any) -> list[Any]:
    if isinstance(case, conv.Case):
        x = torch.randn(case.batch, case.inputs, case.side, case.side, dtype=torch.bfloat16)
        return [*conv.problem(case, x)]
    inputs, among = op.problem(case, "cpu", torch.bfloat16)
    return [*inputs, among]


def found(case: Any, given: list[Any]) -> dict[str, Contender]:
    return {each.name: each for each in scaling.contenders(case, given)}


def test_contenders_compute_what_their_names_say() -> None:
    *inputs, among = on_cpu(AMONG)
    query, key, value, kernel = inputs
    these = found(AMONG, [*inputs, among])
    assert list(these) == ["sdpa", "sdpa, candidates", "convnn"]
    output = {name: each.function(*each.inputs) for name, each in these.items()}
    torch.testing.assert_close(output["sdpa"], F.scaled_dot_product_attention(query, key, value))
    some = F.scaled_dot_product_attention(query, key[..., among, :], value[..., among, :])
    torch.testing.assert_close(output["sdpa, candidates"], some)
    only = convnn(query, key[..., among, :], value[..., among, :], kernel, k=5)
    torch.testing.assert_close(output["convnn"], only)
    cells, kernel = on_cpu(MAPS)
    maps = found(MAPS, [cells, kernel])["conv2d"]
    x = cells.unflatten(1, (7, 7)).permute(0, 3, 1, 2).contiguous()
    expected = F.conv2d(x, kernel.unflatten(-1, (3, 3)), padding=1)
    torch.testing.assert_close(maps.function(*maps.inputs), expected)
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in maps.inputs)


@pytest.mark.parametrize("case", [HEADS, AMONG, MAPS], ids=str)
def test_what_is_counted_is_what_plain_operations_do(case: Any) -> None:
    given = on_cpu(case)
    ours = found(case, given)["convnn"]
    *inputs, among = given if case is not MAPS else [given[0], given[0], given[0], given[1], None]
    query, key, value, kernel = inputs
    key, value = (each if among is None else each[..., among, :] for each in (key, value))
    neighbours = torch.zeros(*query.shape[:-1], case.k, dtype=torch.int16)
    rows = neighbours[..., 0].numel()
    with FlopCounterMode(display=False) as search:
        query @ key.mT
    # A depthwise tap multiplies twice and adds once; one that mixes channels is a matrix.
    per_row = 3 * kernel.numel() if kernel.shape[1] == 1 else 2 * kernel.numel()
    tensors = [query, *([] if case is MAPS else [key, value]), kernel, ours.function(*ours.inputs), neighbours]
    flops, size = scaling.counted(case, "convnn")
    assert flops == search.get_total_flops() + rows * per_row
    assert size == sum(tensor.nbytes for tensor in tensors)
    for name, each in found(case, given).items():
        if name == "conv2d":
            with FlopCounterMode(display=False) as convolution:
                output = each.function(*each.inputs)
            nbytes = sum(tensor.nbytes for tensor in (*each.inputs, output))
            assert scaling.counted(case, name) == (convolution.get_total_flops(), nbytes)
        elif name == ("sdpa" if among is None else "sdpa, candidates"):
            nbytes = 2 * query.nbytes + key.nbytes + value.nbytes
            assert scaling.counted(case, name) == (2 * search.get_total_flops(), nbytes)


def test_every_sweep_has_as_many_queries_as_the_others() -> None:
    for name in ("n", "k", "c", "r"):
        for case in scaling.SWEEPS[name]:
            assert 0.99 * scaling.TOKENS <= case.entries * case.tokens <= scaling.TOKENS
            assert case.entries % 12 == 0 or case.entries < 12


def made_up(case: str, contender: Contender) -> Row:
    if contender.name == "sdpa, candidates":
        return Row(case, contender.name, None, "RuntimeError: no")
    elements = float(sum(tensor.numel() for tensor in contender.inputs))
    return Row(case, contender.name, Cost(elements, elements, 3 * elements, *[7.0] * 6))


def test_from_the_sweep_to_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps = {"n": [HEADS, op.Case(6, 13, 8, 5)], "k": [HEADS, op.Case(6, 29, 8, 3)], "r": [AMONG], "maps": [MAPS]}
    asked: list[str] = []

    def timed(case: str, contender: Contender) -> Row:
        asked.append(f"{contender.name} {case}")
        return made_up(case, contender)

    monkeypatch.setattr(scaling, "SWEEPS", sweeps)
    monkeypatch.setattr(scaling, "drawn", on_cpu)
    monkeypatch.setattr(scaling, "timed", timed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(scaling.gc, "freeze", lambda: None)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(scaling, "surroundings", lambda: {"device": "none"})
    path = tmp_path / "scaling.csv"
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--jobs", "1", "--out", str(path)])
    assert scaling.main() == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:11] == list(scaling.COLUMNS)
    assert len(rows) == 2 * 2 + 2 * 2 + 3 + 2
    # Attention of one size is measured once, and so is ours where two sweeps meet.
    assert len(asked) == len(set(asked)) == 4 + 1 + 3 + 2
    assert [row["skipped"] for row in rows if not row["forward_us"]] == ["RuntimeError: no"]
    read = plots.read(path)
    assert len(read) == len(rows) - 1
    assert (read[0].n, read[0].k, read[0].c, read[0].r, read[0].contender) == (29, 5, 8, None, "sdpa")
    assert read[0].attained == pytest.approx(4 * 6 * 29 * 29 * 8 / (read[0].forward * 1e-6))
    monkeypatch.setattr(sys, "argv", ["plots.py", str(path), "-o", str(tmp_path / "figures")])
    assert plots.main() == 0
    for name in ("scaling", "roofline"):
        drawing = (tmp_path / "figures" / f"{name}.svg").read_bytes()
        assert len(drawing) < 150_000
        assert ElementTree.fromstring(drawing).tag.endswith("svg")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--sweeps", "m"], "invalid choice: 'm'"),
        (["--jobs", "0"], "--jobs must be 1 or more, got 0"),
        (["--out", "nowhere/at/all.csv"], "--out must be in a folder that exists"),
        ([], "on a CUDA device, and there is none"),
    ],
)
def test_scaling_says_what_it_needs(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["scaling.py", *given])
    with pytest.raises(SystemExit, match="2"):
        scaling.main()
    assert said in capsys.readouterr().err


def test_figures_want_the_table_of_that_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.csv"
    path.write_text("sweep,n,k,c,r,contender,both_us,flops,bytes\n")
    monkeypatch.setattr(sys, "argv", ["plots.py", str(path), "-o", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        plots.main()
    assert "it lacks forward_us" in capsys.readouterr().err
