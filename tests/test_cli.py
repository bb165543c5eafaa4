"""The command line: quick help, one line on bad input, meaningful exit codes, JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from convnn.backends import BACKENDS
from convnn_lab import cli, tables, verify
from convnn_lab.verify.drawing import Answer, Problem
from convnn_lab.verify.rows import Comparison


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from convnn_lab.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: sys.exit(end.code or (3 if 'torch' in sys.modules else 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "verify" in done.stdout


def test_verify_prints_a_table_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "table.json"
    assert cli.main(["verify", "--cases", "1", "--seed", "5", "--json", str(target)]) == cli.HOLDS
    printed = capsys.readouterr().out
    written = json.loads(target.read_text())
    assert "\x1b" not in printed  # no bar where there is no terminal
    assert written["holds"] is True
    assert (written["cases"], written["seed"]) == (1, 5)
    assert [row["peer"] for row in written["rows"]] == [comparison.peer for comparison in verify.COMPARISONS]
    for row in written["rows"]:
        assert row["cases"] >= 2
        assert 0 <= row["largest_difference"] <= written["tolerance"]
        assert row["holds"] is True
        assert row["arguments"].endswith("seed 5")
        assert row["peer"] in printed
    assert f"{sum(row['cases'] for row in written['rows'])} random cases, all equal within 1e-12" in printed
    assert torch.get_default_dtype() == torch.float32


def test_verify_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "COMPARISONS", (given(ValueError("broken")),))
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        verify.compare(1, 0)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert torch.get_default_dtype() == torch.float32


def test_a_bar_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(verify, "COMPARISONS", (given(0.0),))
    monkeypatch.setattr(verify, "Console", partial(Console, force_terminal=True, color_system=None))
    verify.compare(3, 0)
    assert f"{verify.count(3)}/{verify.count(3)}" in capsys.readouterr().out


def test_a_wrong_backend_is_found_in_every_row_that_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row lets torch's own convolution stand for the search."""
    right = BACKENDS["chunked"]
    wrong = replace(right, aggregate=lambda *given: right.aggregate(*given) + 1e-9, fused=None)
    monkeypatch.setitem(BACKENDS, "chunked", wrong)
    rows = verify.compare(1, 0)
    assert {row.peer for row in rows if row.holds} == {"Conv, 1x1"}  # the hybrid without a search
    assert all(row.worst.startswith("backend chunked, ") for row in rows if not row.holds)
    assert all(row.error is None for row in rows)


def test_by_default_there_are_many_cases() -> None:
    assert verify.count(cli.Verify().cases) >= 600
    assert verify.count(1) == sum(len(comparison.backends) for comparison in verify.COMPARISONS)


def test_every_backend_is_in_the_table() -> None:
    for comparison in verify.COMPARISONS:
        ours = set(comparison.backends)
        assert ours >= {"chunked"}, comparison.peer


def given(error: float | Exception | None, backend: str = "chunked") -> Comparison:
    """A comparison of a random number with itself, but for what goes wrong on one backend."""

    def case() -> Problem:
        number = torch.rand(3)

        def ours(run: Any) -> Tensor:
            if isinstance(error, Exception) and run == backend:
                raise error
            return number + (error if isinstance(error, float) and run == backend else 0.0)

        return Problem(ours, lambda: number, f"number({number[0]:.6f}, [3])")

    return Comparison("a number", "itself", case)


@pytest.mark.parametrize("error", [1e-11, -1e-11, float("nan"), float("inf")])
def test_verify_ends_with_1_where_something_differs(
    error: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "table.json"
    monkeypatch.setattr(verify, "COMPARISONS", (given(0.0), given(error)))
    assert cli.main(["verify", "--cases", "3", "--seed", "7", "--json", str(target)]) == cli.FAILS
    printed = capsys.readouterr().out
    assert "DIFFERS" in printed
    assert "1 of 2 rows fail" in printed
    good, bad = json.loads(target.read_text(), parse_constant=pytest.fail)["rows"]  # a NaN is no JSON
    assert good["holds"]
    assert not bad["holds"]
    # The seed that is printed draws the same case again.
    assert bad["arguments"] in printed
    assert bad["worst"] in printed
    seed = re.search(r"backend chunked, --seed (\d+) --cases 1", printed)
    assert seed is not None
    assert cli.main(["verify", "--cases", "1", "--seed", seed[1]]) == cli.FAILS
    assert bad["arguments"] in capsys.readouterr().out


def test_the_seed_that_is_printed_draws_the_case_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def case() -> Problem:
        number = torch.rand(1)
        gap = 1.0 if number < 0.2 else 0.0
        return Problem(lambda _: number + gap, lambda: number, f"number({number.item()}, {'long, ' * 30})")

    monkeypatch.setattr(verify, "COMPARISONS", (Comparison("rarely", "wrong", case),))
    assert cli.main(["verify", "--cases", "30"]) == cli.FAILS
    place, arguments = capsys.readouterr().out.splitlines()[-3:-1]
    seed = place.split("--seed ")[1].removesuffix(" --cases 1")
    assert seed != "0"
    assert cli.main(["verify", "--cases", "1", "--seed", seed]) == cli.FAILS
    assert capsys.readouterr().out.splitlines()[-3:-1] == [place, arguments]


def test_a_nan_is_worse_than_any_difference_and_an_error_worse_than_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = iter([1.0, float("nan"), 2.0, 3.0])

    def case() -> Problem:
        number = next(numbers)
        return Problem(lambda run: torch.tensor([number]), lambda: torch.tensor([0.0]), str(number))  # noqa: ARG005

    monkeypatch.setattr(verify, "COMPARISONS", (Comparison("a number", "0", case),))
    assert verify.compare(4, 0)[0].arguments.startswith("nan, backend")
    nan, failing = fixed(torch.tensor([torch.nan]), torch.zeros(1)).case(), given(ValueError("later")).case()
    problems = iter([nan, failing, nan])
    monkeypatch.setattr(verify, "COMPARISONS", (Comparison("a number", "0", problems.__next__),))
    assert verify.compare(3, 0)[0].error == "ValueError: later"
    monkeypatch.setattr(verify, "COMPARISONS", (given(ValueError("[no] such thing")), given(0.0)))
    assert cli.main(["verify", "--cases", "2"]) == cli.FAILS
    printed = capsys.readouterr().out
    assert "FAILS" in printed
    assert "itself fails at backend chunked, --seed 0 --cases 1" in printed
    assert "ValueError: [no] such thing" in printed
    assert "number(" in printed
    assert "equal" in printed


def fixed(ours: Answer, theirs: Answer, *, relative: bool = False) -> Comparison:
    """A comparison of two answers that are known."""
    return Comparison("ours", "theirs", lambda: Problem(lambda _: ours, lambda: theirs, "known", relative))


def test_answers_of_another_shape_or_type_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones(3, dtype=torch.float64)
    for other in (ones[None], ones.float(), (ones, ones)):
        monkeypatch.setattr(verify, "COMPARISONS", (fixed(other, ones),))
        (row,) = verify.compare(1, 0)
        assert not row.holds
        assert (row.verdict, str(row.error)[:10]) == ("FAILS", "ValueError")


def test_a_difference_counts_by_size_only_where_a_case_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = (torch.full((2,), size, dtype=torch.float64) for size in (1e4, 1e-4))
    both = (
        fixed(large + 1e-10, large),
        fixed(large + 1e-10, large, relative=True),
        fixed(small + 1e-13, small, relative=True),
    )
    monkeypatch.setattr(verify, "COMPARISONS", both)
    assert [row.holds for row in verify.compare(1, 0)] == [False, True, True]


def test_a_case_that_cannot_be_drawn_fails_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def case() -> Problem:
        raise RuntimeError("no such size")

    target = tmp_path / "table.json"
    monkeypatch.setattr(verify, "COMPARISONS", (Comparison("nothing", "nothing", case), given(0.0)))
    assert cli.main(["verify", "--cases", "2", "--seed", "4", "--json", str(target)]) == cli.FAILS
    printed = capsys.readouterr().out
    assert "nothing fails at backend chunked, --seed 4 --cases 1" in printed
    assert "RuntimeError: no such size" in printed
    bad, good = json.loads(target.read_text(), parse_constant=pytest.fail)["rows"]
    assert (bad["holds"], bad["largest_difference"], bad["error"]) == (False, None, "RuntimeError: no such size")
    assert (good["holds"], good["error"]) == (True, None)


WRONG = {
    "nothing": ([], f"Expected one of {{{', '.join(cli.COMMANDS)}}}."),
    "no such command": (["verfy"], "Unrecognized options: verfy (see convnn --help)"),
    "no such option": (["verify", "--sed", "3"], "Unrecognized options: --sed, 3 (see convnn --help)"),
    "no number": (["verify", "--seed", "x"], "Error parsing --seed: invalid literal for int() with base 10: 'x'"),
    "no cases": (["verify", "--cases", "0"], "--cases must be at least 1, got 0"),
    "a negative seed": (["verify", "--seed", "-1"], "--seed must be from 0 to 2**63 - 1, got -1"),
    "no such folder": (["verify", "--json", "no/such/folder/x"], "--json must name a file that can be written, got"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_answered_in_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = WRONG[case]
    assert cli.main(arguments) == cli.MISUSED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"convnn: {message}")
    assert captured.err.count("\n") == 1


def test_without_the_laboratory_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["verify"]) == cli.MISUSED
    assert capsys.readouterr().err == "convnn: the command needs the laboratory: pip install 'convnn[lab]'\n"


def test_an_interruption_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "compare", interrupted)
    assert cli.main(["verify"]) == 130
    assert capsys.readouterr().err == "convnn: interrupted\n"


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == cli.HOLDS
    assert capsys.readouterr().out.startswith("convnn 0.")


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == cli.HOLDS
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 25
    assert lines[0].split() == ["vgg11", "132,863,336"]


def test_info_counts_layer_by_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "info.json"
    given = [
        "--layer",
        "hybrid",
        "--ratio",
        "0.25",
        "--k",
        "4",
        "--image",
        "64",
        "--classes",
        "10",
        "--json",
        str(target),
    ]
    assert cli.main(["info", "resnet18", *given, "--candidates", "random:16", "--latency", "--memory"]) == cli.HOLDS
    told = json.loads(target.read_text())
    assert told["parameters"] == sum(layer["parameters"] for layer in told["layers"])
    assert told["flops"] == sum(layer["flops"] for layer in told["layers"])
    assert told["executed"] > 0.5 * told["flops"]
    assert told["milliseconds"] > 0
    assert told["peak_bytes"] > 64 * 64 * 3 * 4
    assert f"{told['parameters']:,} parameters" in capsys.readouterr().out
    assert cli.main(["info", "vit_tiny", "--layer", "convnn", "--k", "16", "--image", "64"]) == cli.HOLDS


def test_reproduce_counts_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "table.json"
    assert cli.main(["reproduce", "vgg-patch", "--static", "--rows", "patch 2", "--json", str(target)]) == cli.HOLDS
    printed = capsys.readouterr().out
    written = json.loads(target.read_text())
    counts = {(row["label"], row["dataset"]): row for row in written["rows"]}
    typo = counts["Branching, 0.5, patch 2", "cifar100"]
    assert typo["parameters"] == 199_521_508
    assert typo["printed"]["parameters"] == "199.512M"
    assert not typo["agrees"]
    assert counts["Branching, 0.5, patch 2", "cifar10"]["agrees"]
    assert "199,521,508" in printed
    assert "typo" in printed
    for row in written["rows"]:
        assert row["flops"]["true"] > row["flops"]["thesis"]
        assert row["flops"]["executed"] > 0.5 * row["flops"]["true"]


def test_reproduce_lists_tables_and_says_what_it_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "--list"]) == cli.HOLDS
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("vary-lambda", "vit-imagenet-candidates", "fast-correctness"))
    for arguments, message in (
        (["nothing", "--static"], "unknown table 'nothing'; known are vary-lambda"),
        (["vgg-k"], "cifar10: say where its files are with --data-dir"),
        (["vgg-k", "--static", "--rows", "zebra"], "no row of vgg-k is called 'zebra'; there are"),
        (["fast-speed", "--static"], "the rows of fast-speed are single layers"),
    ):
        assert cli.main(["reproduce", *arguments]) == cli.MISUSED
        assert message in capsys.readouterr().err


def test_info_says_what_it_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["resnet19"], "unknown model 'resnet19'"),
        (["resnet18", "--candidates", "32"], "--candidates must be all, random:R or grid:R, got '32'"),
        (["resnet18", "--ratio", "0.5"], "does not take these options"),
    ):
        assert cli.main(["info", *arguments]) == cli.MISUSED
        assert message in capsys.readouterr().err


def test_reproduce_fails_where_a_number_differs_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tables.TABLES["resnet-imagenet"]
    row = replace(table.rows[1], printed=replace(table.rows[1].printed, parameters="25.558M"))
    monkeypatch.setitem(tables.TABLES, "resnet-imagenet", replace(table, rows=(row,)))
    assert row.note
    assert "parameters" not in row.note
    assert cli.main(["reproduce", "resnet-imagenet", "--static"]) == cli.FAILS
    assert "parameters -0.001" in capsys.readouterr().out


def test_info_counts_what_a_layer_does(tmp_path: Path) -> None:
    for layer in ("local", "linear", "attention", "kvt", "sparse"):
        target = tmp_path / f"{layer}.json"
        assert cli.main(["info", "vit_tiny", "--layer", layer, "--image", "64", "--json", str(target)]) == cli.HOLDS
        told = json.loads(target.read_text())
        assert told["flops"] == pytest.approx(told["executed"], rel=0.02), layer
    for arguments in (["vit_tiny", "--image", "-16"], ["resnet18", "--image", "0"], ["vit_tiny", "--channels", "0"]):
        assert cli.main(["info", *arguments]) == cli.MISUSED


def test_the_table_of_the_readme_is_the_one_that_is_printed() -> None:
    printed = (Path(__file__).parent.parent / "README.md").read_text()
    table = printed[printed.index("against torch") : printed.index("random cases, all equal")].splitlines()
    rows = [line.split("  ") for line in table if line.rstrip().endswith("equal")]
    said = [[cell.strip() for cell in row if cell.strip()][:3] for row in rows]
    cases = cli.Verify().cases
    assert said == [[c.operator, c.peer, str(cases * len(c.backends))] for c in verify.COMPARISONS]
