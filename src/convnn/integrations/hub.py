"""The models on the Hugging Face Hub, by huggingface_hub's own mechanism.

timm's models of :mod:`convnn.integrations.timm` go there by timm's own: ``timm.models.push_to_hf_hub`` and
``timm.create_model("hf-hub:...")``.
"""

from __future__ import annotations

import json
from typing import Any

try:
    from huggingface_hub import PyTorchModelHubMixin
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("convnn.integrations.hub needs huggingface_hub: pip install huggingface_hub") from missing

from torch import Tensor, nn

from convnn import models
from convnn.candidates import grid, random

__all__ = ["HubModel"]

CANDIDATES: dict[str, Any] = {"random": random, "grid": grid}


class HubModel(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="convnn",
    tags=["convnn", "image-classification"],
):
    """A model by name, with ``save_pretrained``, ``from_pretrained`` and ``push_to_hub``.

    Args:
        name: of :func:`convnn.models.create`.
        options: of the model, as JSON has them; candidates as ``"random:32"`` or ``"grid:9"``.

    Shape:
        as the model, which is ``model``.

    Example:
        >>> model = HubModel(name="resnet8", layer="hybrid", ratio=0.25, num_classes=10)
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        for option, value in options.items():
            if not _is_json(value):
                came = f"{option}={value!r}"
                raise ValueError(
                    f"a model on the hub is rebuilt from JSON: give options that JSON can hold, got {came}"
                )
        given = dict(options)
        if given.get("candidates") is not None:
            given["candidates"] = _candidates(given["candidates"])
        self.model = models.create(name, **given)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.model(x)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _candidates(said: Any) -> Any:
    kind, _, count = str(said).partition(":")
    if kind not in CANDIDATES or not count.isdigit():
        raise ValueError(f"candidates must be 'random:R' or 'grid:R', got {said!r}")
    return CANDIDATES[kind](int(count))
