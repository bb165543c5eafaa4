"""How kernels move while a run learns: a small file for the start and for every epoch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from convnn.layers.kernel import Kernel
from convnn.layers.maps import ConvNNNd
from convnn_lab.train import checkpoints, store
from convnn_lab.train.run import Run

KINDS = "kinds"  # what the kinds of the layers, in their order, are filed under


def folder(run: Run) -> Path:
    """Where they are kept."""
    return run.folder / "kernels"


def reduced(model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What is kept of every kernel, ``(channels, ranks)``, and of which kind each is.

    Of a kernel with one weight for each channel and rank it is that weight. Where channels are mixed it is how much a
    rank counts for an output channel: the root of the mean square over the channels that come in.
    """
    kept, kinds = {}, {}
    for name, module in model.named_modules():
        if not isinstance(module, (Kernel, ConvNNNd)):
            continue
        weight = weights[f"{name}.weight"].detach().float().cpu()
        if isinstance(module, Kernel):
            weight = weight.flatten(0, -3)  # heads with kernels of their own have channels of their own
        weight = weight.flatten(2)  # (channels, inputs, ranks)
        single = weight.shape[1] == 1
        label = name.removesuffix(".kernel") if isinstance(module, Kernel) else name
        kept[label] = (weight[:, 0] if single else weight.square().mean(1).sqrt()).contiguous()
        kinds[label] = "by channel" if single else "mixing"
    return kept, kinds


class Kernels(Callback):
    """Writes a file before the first step and after every epoch; an epoch that is run again is written again."""

    def __init__(self, run: Run, epoch: int) -> None:
        self.run, self.first = run, epoch

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Forget what comes after the checkpoint that is gone on from; keep where a new run starts."""
        if trainer.is_global_zero and folder(self.run).is_dir():
            for number, path in files(self.run).items():
                if number > self.first:
                    path.unlink()
        if pl_module.step == 0:
            self._write(trainer, pl_module, 0)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Keep where the epoch has led."""
        self._write(trainer, pl_module, pl_module.epoch + 1)

    def _write(self, trainer: pl.Trainer, learner: Any, number: int) -> None:
        # All processes take part in gathering what is spread over them.
        start = checkpoints.PARTS[checkpoints.WEIGHTS]
        named = trainer.strategy.lightning_module_state_dict() if learner.recipe.fsdp else learner.state_dict()
        weights = {name.removeprefix(start): value for name, value in named.items() if name.startswith(start)}
        if not trainer.is_global_zero:
            return
        kept, kinds = reduced(learner.model, weights)
        if kept:
            with store.storing(folder(self.run)):
                folder(self.run).mkdir(exist_ok=True)
            store.write(folder(self.run) / f"{number:04d}.safetensors", save(kept, {KINDS: json.dumps(kinds)}))


@dataclass(frozen=True)
class Moved:
    """The kernel of one layer through a run.

    Args:
        epochs: how many epochs each entry has learned, from 0, the start.
        kind: whether the numbers are weights, or how much a rank counts where channels are mixed.

    Shape:
        values ``(epochs, channels, ranks)``.
    """

    layer: str
    kind: str
    epochs: tuple[int, ...]
    values: Tensor

    def from_one(self) -> Tensor | None:
        """The root mean square distance from 1 by epoch and rank, where weights started there."""
        return _distance(self.values - 1) if bool((self.values[0] == 1).all()) else None

    def from_start(self) -> Tensor:
        """The root mean square distance from the start, by epoch and rank."""
        return _distance(self.values - self.values[:1])

    def mean(self) -> Tensor:
        """The mean over channels, by epoch and rank."""
        return self.values.double().mean(1)

    def deviation(self) -> Tensor:
        """The standard deviation over channels, by epoch and rank."""
        return self.values.double().std(1, correction=0)


def _distance(difference: Tensor) -> Tensor:
    return difference.double().square().mean(1).sqrt()


def files(run: Run) -> dict[int, Path]:
    """The files of a run by the epochs they have seen."""
    return {int(path.stem): path for path in sorted(folder(run).glob("[0-9]*.safetensors"))}


def read(run: Run) -> list[Moved]:
    """What a run kept of its kernels, layer by layer."""
    found = files(run)
    if 0 not in found:
        raise ValueError(f"{run.folder} kept no kernels: it has no layer with one, or was made by an older version")
    several: dict[str, list[Tensor]] = {}
    kinds: dict[str, str] = {}
    for path in found.values():
        try:
            with safe_open(path, "pt") as file:
                kinds = json.loads((file.metadata() or {})[KINDS])
                for layer in kinds:
                    several.setdefault(layer, []).append(file.get_tensor(layer))
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
    return [Moved(layer, kinds[layer], tuple(found), torch.stack(values)) for layer, values in several.items()]
