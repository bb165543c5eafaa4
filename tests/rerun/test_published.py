"""Published epochs count as runs, for as long as they are: nothing that is known is trained again."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from convnn_lab.rerun import commands, published, report, results
from convnn_lab.rerun.plan import Job, Told, jobs
from convnn_lab.tables import Table
from convnn_lab.train.run import Run
from tests.rerun.calls import Call, epochs, written

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def asked(table: Table, output: Path, data_dir: Path, told: Told, seed: int = 42) -> list[Job]:
    found = jobs(table.rows[:2], [seed], output, replace(told, data_dir=data_dir))
    return [job for several in found for job in several]


def test_published_epochs_are_the_runs_that_they_tell_of(
    call: Call, steady: Table, data_dir: Path, tmp_path: Path
) -> None:
    assert call(tmp_path / "theirs", "--seeds", "1", "2", "--epochs", "3") == commands.HOLDS
    file = tmp_path / "theirs" / "tiny" / "epochs.csv"
    assert {line["device"] for line in written(tmp_path / "theirs", "epochs.csv")} == {"cpu"}
    for length, output in ((3, tmp_path / "ours"), (2, tmp_path / "shorter")):
        every = [job for seed in (1, 2) for job in asked(steady, output, data_dir, Told(length), seed)]
        assert published.adopt(every, [file]) == every
        assert published.adopt(every, [file]) == []
        for job in every:
            theirs = epochs(Run(tmp_path / "theirs" / job.folder.relative_to(output)))[:length]
            for epoch, of in zip(epochs(Run(job.folder)), theirs, strict=True):
                assert epoch == pytest.approx({name: of[name] for name in epoch}, rel=1e-5)
    # Nothing is trained to print them, and they are printed alike.
    assert call(tmp_path / "ours", "--seeds", "1", "2", "--epochs", "3") == commands.HOLDS
    assert not list((tmp_path / "ours").rglob("checkpoints"))
    for mine, known in zip(written(tmp_path / "ours"), written(tmp_path / "theirs"), strict=True):
        for name in ("accuracy", "accuracy_std", "loss", "best_accuracy"):
            assert float(mine[name]) == pytest.approx(float(known[name]), rel=1e-4)
        for name in ("row", "seeds", "epochs", "device", "command"):
            assert mine[name] == known[name]
    assert [len(each.runs) for each in results.collect(steady, tmp_path / "shorter")] == [2, 2]


@pytest.mark.parametrize(
    "told", [Told(4), Told(3, precision="bf16"), Told(3, compile=True), Told(3, deterministic=True)], ids=str
)
def test_a_run_that_was_not_run_like_this_is_left_to_be_trained(
    call: Call, steady: Table, data_dir: Path, tmp_path: Path, told: Told
) -> None:
    assert call(tmp_path, "--epochs", "3") == commands.HOLDS
    file = tmp_path / "tiny" / "epochs.csv"
    assert len(published.adopt(asked(steady, tmp_path / "ours", data_dir, Told(3)), [file])) == 2
    assert published.adopt(asked(steady, tmp_path / "other", data_dir, told), [file]) == []
    assert published.adopt(asked(steady, tmp_path / "seed", data_dir, Told(3), seed=1), [file]) == []
    assert not (tmp_path / "other").exists()
    other = tmp_path / "other.csv"
    for said, instead in ((",float32,", ",bf16,"), (",False,", ",True,")):
        other.write_text(file.read_text().replace(said, instead))
        assert published.adopt(asked(steady, tmp_path / "other", data_dir, Told(3)), [other]) == []


def test_where_the_rate_falls_only_a_run_of_the_same_length_is_the_one_asked_for(
    call: Call, tiny: Table, data_dir: Path, tmp_path: Path
) -> None:
    assert call(tmp_path) == commands.HOLDS
    file = tmp_path / "tiny" / "epochs.csv"
    assert published.adopt(asked(tiny, tmp_path / "ours", data_dir, Told(1)), [file]) == []
    assert len(published.adopt(asked(tiny, tmp_path / "ours", data_dir, Told(2)), [file])) == 2


def test_what_has_begun_is_left_as_it_is(call: Call, steady: Table, data_dir: Path, tmp_path: Path) -> None:
    assert call(tmp_path, "--rows", "Conv2D") == commands.HOLDS
    first, second = asked(steady, tmp_path, data_dir, Told(2))
    before = Run(first.folder).rows()
    assert call(tmp_path / "theirs", "--epochs", "3") == commands.HOLDS
    assert published.adopt([first, second], [tmp_path / "theirs" / "tiny" / "epochs.csv"]) == [second]
    assert Run(first.folder).rows() == before
    assert (first.folder / "checkpoints").exists()


@pytest.mark.parametrize("at", ["started", "write_rows", "create"])
def test_an_adoption_that_was_killed_is_begun_anew(
    at: str, call: Call, steady: Table, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(tmp_path, "--epochs", "3") == commands.HOLDS
    every = asked(steady, tmp_path / "ours", data_dir, Told(2))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, at, killed)
        with pytest.raises(KeyboardInterrupt):
            published.adopt(every, [tmp_path / "tiny" / "epochs.csv"])
    every[0].folder.mkdir(parents=True)
    (every[0].folder / ".lock").touch()  # a process that meant to train it was killed before its first step
    assert published.adopt(every, [tmp_path / "tiny" / "epochs.csv"]) == every
    assert [len(Run(job.folder).rows()) for job in every] == [2, 2]
    assert sorted(path.name for path in every[0].folder.parent.iterdir()) == ["seed-42"]


def test_every_epoch_says_what_its_own_run_was_on(
    call: Call, steady: Table, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(tmp_path, "--rows", "Conv2D", "--seeds", "1", "2") == commands.HOLDS
    (found,) = results.collect(steady, tmp_path)
    assert found.devices == ("cpu", "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(results, "_device", lambda run: "NVIDIA H200" if run.folder.name == "seed-1" else "cpu")
        (apart,) = results.collect(steady, tmp_path)
    _, file = report.write(tmp_path / "apart" / "tiny", steady, [apart])
    told = {(line["seed"], line["device"]) for line in written(tmp_path / "apart", "epochs.csv")}
    assert told == {("1", "NVIDIA H200"), ("2", "cpu")}
    assert [row["device"] for row in written(tmp_path / "apart")] == ["NVIDIA H200, cpu"]
    for seed, gpus in ((1, ["NVIDIA H200"]), (2, [])):
        (job,) = published.adopt(asked(steady, tmp_path / "ours", data_dir, Told(2), seed), [file])
        assert json.loads((job.folder / "environment.json").read_text())[-1]["gpus"] == gpus


def test_a_file_of_something_else_is_refused(call: Call, tmp_path: Path) -> None:
    assert call(tmp_path, "--rows", "Conv2D") == commands.HOLDS
    lines = (tmp_path / "tiny" / "epochs.csv").read_text().splitlines()

    def file(*some: str) -> Path:
        (tmp_path / "some.csv").write_text("\n".join([*some, ""]))
        return tmp_path / "some.csv"

    assert [len(known.epochs) for known in published.read(file(*lines))] == [2]
    assert [
        known.recipe for known in published.read(file(lines[0], *(line.replace("tiny", "old") for line in lines[1:])))
    ] == [None]
    assert published.read(file()) == []
    for some, message in (
        ((lines[0].replace("seed", "sow"), *lines[1:]), "columns must be table, row, dataset, seed.*, got table, row"),
        ((lines[0], lines[2]), "Conv2D with seed 42 must have epochs from 0 on, at most 2"),
        ((*lines, *lines[1:]), "must have epochs from 0 on"),
        ((*lines, lines[2].replace(",1,", ",2,", 1)), "must have epochs from 0 on, at most 2"),
        ((lines[0], lines[1] + ",0"), "is damaged"),
        ((lines[0], lines[1].rpartition(",")[0] + ",nan"), "every number must be finite"),
        ((lines[0], lines[1].replace("False", "false")), "compiled must be True or False"),
        ((lines[0], lines[1].rpartition(",")[0]), "is damaged"),
        ((lines[0], lines[1].replace(",0,", ",x,", 1)), "is damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            published.read(file(*some))


def test_every_published_run_is_one_of_a_row() -> None:
    files = sorted(RESULTS.glob("*-epochs.csv"))
    assert files
    for path in files:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        known = published.read(path)
        assert sum(len(each.epochs) for each in known) == len(lines)
        for each in known:
            assert each.recipe is not None
            assert all(0 < epoch["val_acc"] <= 1 and epoch["seconds"] > 0 for epoch in each.epochs)
