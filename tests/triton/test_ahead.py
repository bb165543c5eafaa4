"""The kernels compile for GPUs at the sizes they are made for, and ask for no more than there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.triton.ahead import SHARED

PROBLEMS = (
    *(
        "197",
        "256",
        "many slots",
        "stream",
        "long lists",
        "single",
        "wide",
        "few",
        "few, single",
        "few, wide",
        "behind a mask",
    ),
    *(
        "maps",
        "small maps",
        "places beside features",
        "wide, long lists",
        "wide, among few",
        "not as wide, long lists",
        "widest",
        "widest, single",
        "widest, long lists",
    ),
    *("mixing", "mixing, single", "candidates", "attention", "one head"),
)
# Tables of the thesis with a GPU's kernels in their rows.
TABLES = ("vary-lambda", "vgg-k", "vgg-candidates", "vgg-patch", "vit-cifar", "vit-k", "vit-candidates", "vit-kernels")
# Those that an A100 is asked too, where a program has less memory.
OLDER = ("wide", "wide, long lists", "small maps", "places beside features", "mixing")
# Those of which the channels do not fit an H100 at once, or not into a compiler's patience or a warp's registers.
ROLLED = (
    *("places beside features", "wide, long lists", "widest", "widest, single", "widest, long lists"),
    *("mixing", "mixing, single"),
)
# Bytes that threads may keep in memory for want of registers; a tile in the wrong layout takes twice as many.
SPILLED = 4_000


def asked(*call: str, architecture: int) -> list[dict[str, Any]]:
    """What a module of this folder says of kernels it compiles in a process of its own, each within the limits."""
    alone = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    whole = [sys.executable, "-m", f"tests.triton.{call[0]}", str(architecture), *call[1:]]
    done = subprocess.run(whole, capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({each["kernel"] for each in kernels}) >= 3
    assert max(each["threads"] for each in kernels) <= 1024
    assert max(each["shared"] for each in kernels) <= SHARED[architecture]
    return kernels


@pytest.mark.parametrize("problem", PROBLEMS)
def test_kernels_compile_and_fit(problem: str) -> None:
    for architecture in (80, 90) if problem in OLDER else (90,):
        kernels = asked("ahead", problem, architecture=architecture)
        assert max(each["spilled"] for each in kernels) <= SPILLED, kernels
        if architecture == 90:
            assert any(each["rolled"] for each in kernels) == (problem in ROLLED), kernels


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["tf32", "bf16", "float32"])
@pytest.mark.parametrize("table", TABLES)
def test_kernels_of_every_row_compile_and_fit(table: str, precision: str) -> None:
    asked("rows", table, precision, architecture=90)
