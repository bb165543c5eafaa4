"""Where there is a CUDA device, the kernels are tested on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton.runner import DEVICE


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder the marker gpu there, before tests are chosen by their markers."""
    for item in items if DEVICE == "cuda" else []:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
