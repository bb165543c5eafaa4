"""State dicts out of files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn


def tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file."""
    if not path.is_file():
        raise ValueError(f"there must be a file of weights at {path}, and there is none")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or damaged: {error}") from None


def filled(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """Give a model all its numbers, which must be exactly those it has, and put it into evaluation."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if "num_batches" not in name}
    came = {name: tuple(tensor.shape) for name, tensor in state.items() if "num_batches" not in name}
    differing = sorted(name for name in wanted.keys() | came.keys() if wanted.get(name) != came.get(name))
    if differing:
        name = differing[0]
        said = f"{name} must be {wanted.get(name, 'absent')}, got {came.get(name, 'nothing')}"
        raise ValueError(f"the weights are not this model's, {len(differing)} names or shapes differ; {said}")
    counts = {name: tensor for name, tensor in model.state_dict().items() if "num_batches" in name}
    model.load_state_dict({**{name: torch.zeros_like(count) for name, count in counts.items()}, **state})
    return model.eval()
