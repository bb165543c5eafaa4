"""Lets the kernels of several processes run on a GPU at the same time, by NVIDIA's Multi-Process Service."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"


@contextmanager
def sharing() -> Iterator[Mapping[str, str]]:
    """Variables for processes that train side by side; without the service they take turns on the GPU.

    A service of our own runs until the block ends; where the caller names one, by ``CUDA_MPS_PIPE_DIRECTORY``, that one
    is left alone.
    """
    control = shutil.which(CONTROL)
    if control is None or PIPES in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="convnn-mps-", ignore_cleanup_errors=True) as folder:
        variables = {PIPES: folder, LOGS: folder}
        around = {**os.environ, **variables}
        wrong = _start(control, around, Path(folder) / "said")
        if wrong:
            sys.stdout.write(f"{CONTROL} did not start, so that processes take turns on the GPU: {wrong}\n")
            yield {}
            return
        try:
            yield variables
        finally:
            subprocess.run([control], env=around, input=b"quit\n", capture_output=True, check=False)


def _start(control: str, around: Mapping[str, str], said: Path) -> str:
    """Start the service; why it could not be, or nothing."""
    with said.open("w") as file:  # a daemon keeps what it was given: a pipe would never end
        null, call = subprocess.DEVNULL, [control, "-d"]
        code = subprocess.run(call, env=around, stdin=null, stdout=file, stderr=file, check=False).returncode
    return "" if code == 0 else " ".join(said.read_text(errors="replace").split()) or f"it ended with {code}"
