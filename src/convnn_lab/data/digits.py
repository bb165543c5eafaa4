"""The handwritten digits that come with scikit-learn: 1,797 images of 8 by 8."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from convnn_lab.data.arrays import Data, checked


def digits(data_dir: Path | None) -> Data:
    """Read the digits; every fifth image is tested on."""
    if data_dir is not None:
        raise ValueError(f"digits bring their own files; leave out --data-dir, got {data_dir}")
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped] # noqa: PLC0415
    except ModuleNotFoundError:
        raise ValueError("the digits come with scikit-learn: pip install 'convnn[lab]'") from None
    given = load_digits()
    images = np.round(given.images * (255 / 16)).astype(np.uint8)[:, None]
    tested = np.arange(len(images)) % 5 == 0
    parts = [
        checked(images[part], given.target[part], classes=10, shape=(1, 8, 8), source="digits")
        for part in (~tested, tested)
    ]
    learned = images[~tested] / 255
    return Data("digits", parts[0], parts[1], tuple("0123456789"), (float(learned.mean()),), (float(learned.std()),))
