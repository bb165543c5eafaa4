"""Checkpoints: weights as safetensors, the rest in types that load without trusting anybody, both or neither."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import CheckpointIO
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from convnn_lab.train import store

WEIGHTS, AVERAGE, STATE = "weights.safetensors", "average.safetensors", "state.pt"
# What a file of weights is called in the state of a run, and how its names begin there.
PARTS = {WEIGHTS: "model.", AVERAGE: "average.module."}


class Folders(CheckpointIO):
    """Lets Lightning write and read the folders of a run; a path names the state in one of them.

    Args:
        whole: keep the weights in the state as well, where a strategy reads that file by itself.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self.whole = whole

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:  # noqa: ARG002
        """Write one; the one before is kept as ``previous``."""
        folder = Path(path).parent
        named = checkpoint["state_dict"]
        files = {name: partial(_save, named, start) for name, start in PARTS.items() if _any(named, start)}
        rest = {name: value for name, value in named.items() if not name.startswith(tuple(PARTS.values()))}
        state = checkpoint if self.whole else {**checkpoint, "state_dict": rest}
        run = checkpoint["run"]
        about = {name: run[name] for name in ("epoch", "position", "step", "time")}
        store.write_folder(
            folder, {**files, STATE: lambda file: torch.save(state, file)}, about, folder.with_name("previous")
        )

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Read one; nothing in it is executed."""
        folder = Path(path).parent
        checkpoint = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        for name, start in PARTS.items():
            if (folder / name).exists():
                weights = load_file(folder / name)
                checkpoint["state_dict"] |= {f"{start}{key}": value for key, value in weights.items()}
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Folders remove themselves."""


def save_best(folder: Path, weights: Mapping[str, Tensor], about: dict[str, Any]) -> None:
    """Write the weights of the best epoch so far."""
    store.write_folder(folder, {WEIGHTS: partial(_save, weights, "")}, about)


def load_weights(model: nn.Module, folder: Path, *, average: bool = False) -> None:
    """Put the weights of a checkpoint into a model."""
    wrong = store.damage(folder)
    if wrong is not None:
        raise ValueError(f"checkpoint {folder} is damaged: {wrong}")
    path = folder / (AVERAGE if average else WEIGHTS)
    if not path.exists():
        raise ValueError(f"there is no {path}")
    model.load_state_dict(load_file(path))


def _any(named: Mapping[str, Tensor], start: str) -> bool:
    return any(name.startswith(start) for name in named)


def _save(named: Mapping[str, Tensor], start: str, path: Path) -> None:
    weights = {name.removeprefix(start): value for name, value in named.items() if name.startswith(start)}
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}, path)
