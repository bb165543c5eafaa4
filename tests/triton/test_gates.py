"""When the Triton backend may run, and what is said when it may not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from convnn.backends.triton import gates


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    gates._tried.cache_clear()
    yield
    gates._tried.cache_clear()


def test_a_triton_that_cannot_run_a_kernel_is_noticed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(index: int | None) -> None:
        tried.append(index)
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(gates, "_try", fails)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(3):
        assert gates.broken(0) == "Triton cannot run a kernel: Failed to find C compiler."
    assert tried == [0]
    gates.broken(1)
    assert tried == [0, 1]


def test_one_that_works_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int | None] = []
    monkeypatch.setattr(gates, "_try", tried.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert gates.broken(0) is None
    assert gates.broken(0) is None
    assert tried == [0]


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int | None] = []
    monkeypatch.setattr(gates, "_try", tried.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert gates.broken(0) is None
    assert not tried


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_driver_there_is_a_reason_and_no_crash() -> None:
    code = "from convnn.backends.triton import gates; print(gates.broken(0))"
    alone = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=alone, check=True)
    assert done.stdout.startswith("Triton cannot run a kernel: ")


def test_the_kernel_that_is_tried_runs() -> None:
    from convnn.backends.triton.kernels.trial import trial  # noqa: PLC0415

    number = torch.full((1,), 7, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
    trial[(1,)](number)
    assert number.item() == 0
