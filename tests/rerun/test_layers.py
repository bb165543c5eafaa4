"""The tables of single layers: what is measured stands beside what the thesis prints of the same."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from convnn_lab import cli, tables
from convnn_lab.bench import measure
from convnn_lab.rerun import layers
from convnn_lab.tables import Row, Table


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tables, of small layers."""
    for name in ("fast-speed", "fast-correctness"):
        table = tables.TABLES[name]
        size = {"batch": 2, "tokens": 23, "width": 24, "heads": 3, "k": 4}
        rows = tuple(Row(row.label, row.dataset, {**row.configuration, **size}) for row in table.rows)
        monkeypatch.setitem(tables.TABLES, name, Table(name, table.title, rows))


def written(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_agreement_is_measured_wherever_there_is_a_device(
    small: None,  # noqa: ARG001
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["reproduce", "fast-correctness", "--output", str(tmp_path)]) == cli.HOLDS
    assert "2.86e-6" in capsys.readouterr().out
    rows = written(tmp_path / "fast-correctness")
    assert [row["thesis"] for row in rows[:5]] == ["0.0e-7", "1.5e-7", "2.86e-6", "2.62e-6", ""]
    assert {row["quantity"] for row in rows} == {"forward", "input", "kernel", "query projection"}
    assert all(float(row["ours"]) < 1e-4 for row in rows)


def test_time_and_memory_stand_beside_those_of_the_same_way(
    small: None,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def cost(function: Any, inputs: Any, parameters: Any) -> measure.Cost:
        assert len(parameters) >= 3
        assert function(*inputs).shape == (2, 23, 24)
        seen.append(type(function).__name__)
        return measure.Cost(1500.0, 2500.0, 4e3, 1.0, 1.0, 1.0, 30.0, 40.0, 50.0)

    monkeypatch.setattr(measure, "cost", cost)
    monkeypatch.setattr(measure, "require_device", lambda: None)
    monkeypatch.setattr(measure, "release", lambda: None)
    monkeypatch.setitem(layers.KINDS, "fast-speed", partial(layers._speed, device="cpu"))
    assert cli.main(["reproduce", "fast-speed", "--output", str(tmp_path)]) == cli.HOLDS
    assert seen == ["Around", "ConvNNAttention"] * 2
    rows = {(row["row"], row["quantity"]): row for row in written(tmp_path / "fast-speed")}
    assert len(rows) == 16
    fused, plain = rows["Triton, k = 4", "backward, ms"], rows["Original, k = 5", "forward, mb"]
    assert (fused["thesis"], fused["ours"]) == ("6.84", "2.500")
    assert (plain["thesis"], plain["ours"]) == ("795.01", "30.000")


def test_a_table_of_layers_has_nothing_to_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "fast-speed", "--plan"]) == cli.MISUSED
    assert "the rows of fast-speed are single layers" in capsys.readouterr().err
