"""What every test starts from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F

# Where there is no GPU, Triton interprets its kernels; it asks for that when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests run side by side share the cores.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    torch.set_num_threads(share)
    os.environ["OMP_NUM_THREADS"] = str(share)  # of the processes that tests start, so that they sum in the same order

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def start(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> Iterator[None]:
    """Seed, fill what torch.empty returns with NaN, and give doctests the names everybody uses."""
    torch.manual_seed(0)
    doctest_namespace.update(torch=torch, F=F)
    # With deterministic algorithms asked for, torch.empty returns NaN: what nobody wrote shows.
    # (CUDA has no deterministic scatter, and would only warn.)
    torch.use_deterministic_algorithms("gpu" not in request.keywords)
    # A run of a lower precision leaves products as it had them.
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    torch.use_deterministic_algorithms(False)
