"""Where all random generators stand, in types that are safe to load."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def state() -> dict[str, Any]:
    """Note where they stand."""
    numpy: Any = np.random.get_state()
    kind, keys, place, has, cached = numpy
    version, words, spare = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), int(place), int(has), float(cached)],
        "python": [version, list(words), spare],
    }


def restore(given: dict[str, Any]) -> None:
    """Put all generators back."""
    torch.set_rng_state(given["torch"].cpu())
    if given["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(given["cuda"].cpu())
    kind, keys, place, has, cached = given["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), place, has, cached))
    version, words, spare = given["python"]
    random.setstate((version, tuple(words), spare))
