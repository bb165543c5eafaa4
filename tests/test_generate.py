"""The example that writes: from a run, with the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from convnn_lab.recipes import RECIPES
from convnn_lab.train import fit
from convnn_lab.train.run import Run
from examples import generate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("plays")
    (place / "input.txt").write_text("to be, or not to be: that is the question. " * 30)
    given = replace(RECIPES["shakespeare-tiny"], data_dir=place, context=16, epochs=1, batch=32, warmup=0.0, k=4)
    return fit.train("plays", replace(given, accelerator="cpu"), place / "run", quiet=True)


def test_the_example_writes_after_the_prompt(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(run.folder), "--prompt", "to be", "--count", "40", "--compare"]
    generate.main(given)
    first = capsys.readouterr().out
    written = first.partition("\n\n")[0]
    assert written.startswith("to be")
    assert len(written) == 45
    assert "characters a second" in first
    assert "8 characters: " in first
    assert first.rstrip().endswith("the same text")
    generate.main([*given, "--seed", "1", "--top", "3", "--weights", "last"])
    assert capsys.readouterr().out.partition("\n\n")[0] != written
    generate.main(given)
    assert capsys.readouterr().out.partition("\n\n")[0] == written


def test_strange_characters_and_other_runs_are_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no character 'Z'"):
        generate.main([str(run.folder), "--prompt", "Z"])
    with pytest.raises(ValueError, match="holds no run"):
        generate.main([str(tmp_path)])
