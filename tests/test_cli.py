"""The command line: quick help, one line on bad input, meaningful exit codes, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from convnn_lab import cli, verify


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
    assert cli.main(["verify", "--cases", "2", "--seed", "5", "--json", str(target)]) == cli.HOLDS
    printed = capsys.readouterr().out
    written = json.loads(target.read_text())
    assert written["holds"] is True
    assert (written["cases"], written["seed"]) == (2, 5)
    assert [row["peer"] for row in written["rows"]] == [peer for _, peer in verify.COMPARISONS]
    for row in written["rows"]:
        assert row["cases"] == 4
        assert 0 <= row["largest_difference"] <= written["tolerance"]
        assert row["peer"] in printed
    assert torch.get_default_dtype() == torch.float32


def test_verify_ends_with_1_where_something_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        ours, theirs = verify.attention(backend)
        return (ours * torch.nan, theirs) if backend == "chunked" else (ours, theirs)

    monkeypatch.setattr(verify, "COMPARISONS", {("broken", "attention"): broken})
    assert cli.main(["verify", "--cases", "3", "--seed", "7"]) == cli.FAILS
    printed = capsys.readouterr().out
    assert "DIFFERS" in printed
    assert "attention differs by nan at backend chunked, --seed 7 --cases 1" in printed


WRONG = {
    "nothing": ([], "Expected one of {verify}. (see convnn --help)"),
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
