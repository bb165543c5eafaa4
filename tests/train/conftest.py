"""A run that takes a second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convnn_lab.recipes import RECIPES, Recipe


@pytest.fixture
def quick() -> Recipe:
    return replace(RECIPES["digits"], epochs=2, batch=512, layer="conv", accelerator="cpu")
