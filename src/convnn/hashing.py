"""Randomness that is a function: of whole numbers, in whole numbers, so that it compiles and is the same everywhere."""

from __future__ import annotations

import torch
from torch import Tensor


def mixed(number: Tensor) -> Tensor:
    """Mix the 32 low bits of whole numbers."""
    for _ in range(2):
        number = ((number ^ (number >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return number ^ (number >> 16)


def drawn(number: Tensor, seed: int) -> Tensor:
    """Draw a number from 0 to 2^32 - 1 for every given one; another seed draws others."""
    return mixed(number + mixed(torch.full_like(number, seed % 2**32)))
