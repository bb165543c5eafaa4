"""The kernels compile for GPUs at the sizes they are made for, and ask for no more than there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

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
    *("maps", "small maps", "places beside features", "widest", "widest, single", "widest, long lists"),
    *("mixing", "mixing, single", "candidates", "attention", "one head"),
)
# Those that an A100 is asked too, where a program has less memory.
OLDER = ("wide", "small maps", "places beside features", "mixing")
# Bytes that threads may keep in memory for want of registers; a tile in the wrong layout takes twice as many.
SPILLED = 4_000


@pytest.mark.parametrize("problem", PROBLEMS)
def test_kernels_compile_and_fit(problem: str) -> None:
    alone = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for architecture in (80, 90) if problem in OLDER else (90,):
        call = [sys.executable, "-m", "tests.triton.ahead", str(architecture), problem]
        done = subprocess.run(call, capture_output=True, text=True, check=False, env=alone)
        assert done.returncode == 0, done.stderr[-2000:]
        kernels = [json.loads(line) for line in done.stdout.splitlines()]
        assert len({each["kernel"] for each in kernels}) >= 3
        assert max(each["threads"] for each in kernels) <= 1024
        assert max(each["shared"] for each in kernels) <= SHARED[architecture]
        assert max(each["spilled"] for each in kernels) <= SPILLED, kernels
