"""What figures of a table show: which rows, compared by what, and how far runs on their way are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from matplotlib.figure import Figure

from convnn_lab.rerun import commands, figures, labels, plan, results
from convnn_lab.rerun.plan import Job, Told
from convnn_lab.rerun.plan import jobs as planned
from convnn_lab.rerun.records import Result
from convnn_lab.tables import TABLES, Row, Table
from convnn_lab.train.run import Run
from tests.rerun.calls import Call, stop_after, written


def test_lines_of_a_figure_are_called_what_they_differ_in(tmp_path: Path) -> None:
    def names(table: str, field: str, *words: str) -> set[str]:
        rows = plan.chosen(TABLES[table], words, ["cifar10"])
        asked = planned(rows, [42], tmp_path, Told())
        found = [result(row, job) for row, (job,) in zip(rows, asked, strict=True) if field in row.configuration]
        return {labels.series(each, found, field) for each in found}

    assert names("vary-lambda", "ratio") == {"with positions", "without positions"}
    assert names("vary-lambda", "ratio", "without") == {""}
    assert names("vgg-k", "k") == {"1x1 kernel", "2x2 kernel", "3x3 kernel"}
    assert names("vgg-lr", "lr") == {"λ = 0.0", "λ = 0.5", "λ = 1.0"}
    assert names("vit-k", "k") == {"convnn, all", "convnn, random", "kvt"}
    assert "spatial, λ = 0.5" in names("vgg-candidates", "r")


def test_a_figure_says_how_its_rows_were_run(tmp_path: Path) -> None:
    rows = plan.chosen(TABLES["vgg-k"], ["3x3", "2x2"], ["cifar10"])[:12]
    short, long = (planned(rows, [42], tmp_path, Told(epochs=each, precision="tf32")) for each in (5, 150))
    found = [replace(result(row, job), epochs=5) for row, (job,) in zip(rows, short, strict=True)]
    assert labels.about(found) == "ours: 5 epochs, tf32, 1 seed"
    more = [replace(result(row, job), seeds=(42, 43)) for row, (job,) in zip(rows, long, strict=True)]
    both = labels.about([*found, *more])
    assert both == "ours: 5 to 150 epochs, tf32, 1 to 2 seeds; means over seeds, bars: their standard deviation"
    assert labels.about(more, bars=False) == "ours: 150 epochs, tf32, 2 seeds; means over seeds, thin: each"
    axes: Any = Figure().subplots()
    figures._against_gflops(axes, [*found, *more], "k")
    legend = axes.get_legend_handles_labels()[1]
    assert "3x3 kernel, λ = 0.0, 5 epochs, tf32" in legend
    assert "3x3 kernel, λ = 0.0, 150 epochs, tf32" in legend
    looks = {tuple(figures._look(number).items()) for number in range(40)}
    assert len(looks) == 40


def test_bars_stand_where_there_are_several_seeds() -> None:
    axes: Any = Figure().subplots()
    figures._points(axes, [1, 2], [[3.0], [4.0, 6.0]])
    (drawn,) = axes.containers
    alone, several = drawn[2][0].get_segments()
    assert drawn[0].get_ydata().tolist() == [3.0, 5.0]
    assert len(alone) == 0
    assert several[:, 1].tolist() == pytest.approx([5 - 2**0.5, 5 + 2**0.5])


def test_a_legend_names_the_logs_of_all_lines_once(tmp_path: Path) -> None:
    rows = plan.chosen(TABLES["vary-lambda"], ["Branching"], ["cifar10"])
    asked = planned(rows, [42], tmp_path, Told(epochs=5))
    axes: Any = Figure().subplots()
    figures._against(axes, [result(row, job) for row, (job,) in zip(rows, asked, strict=True)], "ratio", "λ")
    legend = axes.get_legend_handles_labels()[1]
    assert sorted(legend) == ["author's logs, last of 150 epochs", "with positions", "without positions"]
    logged = [line for line in axes.lines if line.get_linestyle() == ":" and len(line.get_xdata())]
    assert len(logged) == 2


def test_a_legend_of_many_lines_stands_beside_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    def kept(figure: Any, *_: Any, **__: Any) -> None:
        figure.canvas.draw()
        drawn.append(figure)

    monkeypatch.setattr(Figure, "savefig", kept)
    rows = plan.chosen(TABLES["vary-lambda"], ["without"], ["cifar10"])
    found = [result(row, job) for row, (job,) in zip(rows, planned(rows, [42], tmp_path, Told()), strict=True)]
    for count in (3, 4):
        figures._panels(tmp_path / f"{count}.png", found[:count], figures._curves, sides=3)
    few, many = ([each.get_legend() for each in figure.axes] for figure in drawn)
    assert None not in few
    assert many[:-1] == [None, None]
    assert many[-1].get_window_extent().x0 >= drawn[1].axes[-1].get_window_extent().x1
    assert few[-1].get_window_extent().x1 <= drawn[0].axes[-1].get_window_extent().x1


def result(row: Row, job: Job) -> Result:
    epochs = tuple({"epoch": n, "train_loss": 1.0, "val_acc": 0.5, "val_loss": 1.0, "seconds": 1.0} for n in range(150))
    return Result(row, job, (epochs,), (42,), 150, ("cpu",), 1, 1.0)


def test_a_run_on_its_way_is_a_curve_and_no_result(
    call: Call, tiny: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 5)  # of three batches an epoch
        assert call(tmp_path, "--rows", "Branching", "--seeds", "3") == commands.UNFINISHED
    assert call(tmp_path, "--rows", "Conv2D") == commands.HOLDS
    found, (going,) = results.collect(tiny, tmp_path), results.going(tiny, tmp_path)
    assert [each.row.label for each in found] == ["Conv2D"]
    assert (going.row.label, going.how, going.epochs) == ("Branching, 0.5", ["1 of 2 epochs", "float32", "seed 3"], 1)
    places: Any = Figure().subplots(1, 3)
    figures._curves(places, [*found, going])
    names = ["Conv2D, 2 epochs, float32", "Branching, 0.5, 1 of 2 epochs, float32, seed 3"]
    assert [line.get_label() for line in places[0].get_lines()] == names
    assert list(places[0].get_lines()[1].get_ydata()) == [Run(going.job.folder).rows()[0]["train_loss"]]
    (tmp_path / "tiny" / "loss.png").unlink()
    capsys.readouterr()
    assert call(tmp_path, "--figures") == commands.HOLDS
    assert "1 of 2 epochs, float32, seed 3" in capsys.readouterr().out
    assert (tmp_path / "tiny" / "loss.png").exists()
    assert call(tmp_path, "--figures", "--rows", "Branching") == commands.HOLDS
    assert [row["row"] for row in written(tmp_path)] == ["Conv2D"]
    assert "Conv2D" not in capsys.readouterr().out
    assert figures.draw(tmp_path / "alone", tiny, [], [going]) == [tmp_path / "alone" / "loss.png"]
    # More than can be told apart: those that have finished.
    several = [replace(going, job=replace(going.job, folder=tmp_path / str(n))) for n in range(figures.MOST)]
    assert figures.draw(tmp_path / "many", tiny, found, several)[-1].name == "loss.png"
    assert figures.draw(tmp_path / "too-many", tiny, [], [*several, going]) == []
    compiled = replace(going.job.recipe, compile=True)
    assert replace(going, job=replace(going.job, recipe=compiled)).how[1:3] == ["float32", "compiled"]


def test_a_run_that_is_two_rows_is_drawn_once(call: Call, tiny: Table, tmp_path: Path) -> None:
    assert call(tmp_path) == commands.HOLDS
    found = results.collect(tiny, tmp_path)
    places: Any = Figure().subplots(1, 3)
    figures._curves(places, [*found, replace(found[0], row=replace(found[0].row, label="the same"))])
    for place, values in zip(places, ("train_loss", "val_loss", "val_acc"), strict=True):
        line, other = place.get_lines()
        assert (line.get_label(), other.get_label()) == ("Conv2D", "Branching, 0.5")
        factor = 100 if values == "val_acc" else 1
        assert line.get_ydata()[0] == pytest.approx(factor * found[0].curves[0][values])


def test_the_last_ten_epochs_are_told_or_the_last_third(call: Call, tmp_path: Path) -> None:
    one = ("--rows", "Branching", "--seeds", "1", "2")
    assert call(tmp_path, *one, "--epochs", "7") == commands.HOLDS
    (row,) = written(tmp_path)
    runs = [Run(tmp_path / "tiny" / "cifar10-branching-0.5" / f"seed-{seed}") for seed in (1, 2)]
    lasts = [[100 * epoch["val_acc"] for epoch in run.rows()[5:]] for run in runs]
    assert float(row["late_accuracy"]) == pytest.approx(mean(map(mean, lasts)), rel=1e-5)
    assert float(row["late_std"]) == pytest.approx(stdev(map(mean, lasts)), rel=1e-5)
    assert float(row["epoch_std"]) == pytest.approx(mean(map(stdev, lasts)), rel=1e-5)
    assert call(tmp_path / "short", *one) == commands.HOLDS
    (row,) = written(tmp_path / "short")
    assert row["late_accuracy"] == row["late_std"] == row["epoch_std"] == ""
    (found,) = results.collect(TABLES["tiny"], tmp_path)
    longer = replace(found, epochs=35, runs=tuple(5 * run for run in found.runs))
    assert [len(last) for last in longer.lasts] == [10, 10]


def test_figures_compare_what_moves_least_and_curves_are_means_of_whole_windows(call: Call, tmp_path: Path) -> None:
    one = ("--rows", "Branching", "--seeds", "1", "2")
    assert call(tmp_path, *one, "--epochs", "20") == call(tmp_path / "short", *one) == commands.HOLDS
    (long,), (short,) = (results.collect(TABLES["tiny"], each) for each in (tmp_path, tmp_path / "short"))
    accuracies = [[100 * epoch["val_acc"] for epoch in run] for run in long.runs]
    said, height = figures._heights([long])
    assert said == "mean of the last 6 epochs"
    assert height(long) == pytest.approx([mean(each[14:]) for each in accuracies])
    said, height = figures._heights([long, short])
    assert said == "last epoch"
    assert height(long) == pytest.approx([each[-1] for each in accuracies])

    places: Any = Figure().subplots(1, 3)
    figures._curves(places, [long, short])
    faint, other, both, *more = places[2].get_lines()
    assert [line.get_alpha() for line in (faint, other, both)] == [0.35, 0.35, None]
    assert list(both.get_xdata()) == list(range(4, 21))
    fours = [mean(each[-4:]) for each in accuracies]
    assert both.get_ydata()[-1] == pytest.approx(mean(fours))
    assert [line.get_ydata()[-1] for line in (faint, other)] == pytest.approx(fours)
    assert "moving average of 4" in places[2].get_ylabel()
    assert [list(line.get_xdata()) for line in more] == [[1, 2]] * 3
    places = Figure().subplots(1, 3)
    figures._curves(places, [replace(long, runs=tuple((*run, *run, *run) for run in long.runs))])
    assert {len(line.get_xdata()) for line in places[2].get_lines()} == {60 - 9}
