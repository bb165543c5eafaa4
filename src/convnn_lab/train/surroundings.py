"""What a run happens on: devices, processes, precision, packages."""

from __future__ import annotations

import logging
import os
import platform
import warnings
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytorch_lightning as pl
import torch

from convnn_lab.recipes import Recipe

PACKAGES = ("convnn", "torch", "triton", "torchvision", "timm", "pytorch-lightning", "torchmetrics", "numpy")


def environment(trainer: pl.Trainer) -> dict[str, Any]:
    """What a run happens on."""
    packages = {}
    for package in PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "-"
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "processes": trainer.world_size,
        "packages": packages,
    }


def set_up(recipe: Recipe) -> None:
    """Let torch compute as the recipe says."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # What Lightning says of loaders and devices is decided here, not by its defaults.
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    warnings.filterwarnings("ignore", module="lightning_fabric")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = recipe.precision != "float32"
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def half(recipe: Recipe) -> torch.dtype | None:
    """The half type a recipe asks for, or None."""
    chosen = recipe.precision
    if chosen == "half":
        chosen = "bf16" if not on_gpu(recipe) or torch.cuda.is_bf16_supported() else "fp16"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(chosen)


def layout(recipe: Recipe) -> torch.memory_format:
    """How maps lie in memory: channels last where matrix units multiply, which take them so and no other way."""
    last = on_gpu(recipe) and recipe.precision != "float32"
    return torch.channels_last if last else torch.contiguous_format


def on_gpu(recipe: Recipe) -> bool:
    """Whether a recipe trains on a GPU; asked for by name where there is none, it is refused."""
    there = torch.cuda.is_available()
    if recipe.accelerator == "gpu" and not there:
        raise ValueError("--accelerator gpu: torch sees no GPU")
    return there and recipe.accelerator != "cpu"


def device_of(recipe: Recipe) -> torch.device:
    """Where arrays live: with the model that learns from them."""
    if not on_gpu(recipe):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def global_rank(devices: int = 1) -> int:
    """Which of several processes this is, as whoever started them says: torchrun, Lightning, or Slurm."""
    told = os.environ
    if "RANK" in told:
        return int(told["RANK"])
    if "LOCAL_RANK" in told or "NODE_RANK" in told:
        return int(told.get("NODE_RANK", "0")) * devices + int(told.get("LOCAL_RANK", "0"))
    # Slurm names a single task in an interactive shell too, where nobody else was started.
    return int(told["SLURM_PROCID"]) if int(told.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in told else 0


def as_started(recipe: Recipe) -> Recipe:
    """Take the number of processes from torchrun, where it started them."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return recipe
    devices, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    told = recipe.devices * recipe.nodes
    if told not in (1, world):
        raise ValueError(f"torchrun started {world} processes, and --devices {recipe.devices} --nodes {recipe.nodes}")
    return replace(recipe, devices=devices, nodes=world // devices)
