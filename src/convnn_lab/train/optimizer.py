"""What updates the weights, and its rate, step by step."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from timm.optim._optim_factory import create_optimizer_v2, get_optimizer_class, get_optimizer_info
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import nn

from convnn_lab.recipes import Recipe
from convnn_lab.train import surroundings


def optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a recipe; its rate is set before every step."""
    betas = get_optimizer_info(recipe.optimizer).has_betas
    beside: dict[str, Any] = {"betas": (recipe.beta1, recipe.beta2)} if betas else {}
    if in_one_pass(recipe):
        beside["fused"] = True
    return create_optimizer_v2(
        model,
        opt=recipe.optimizer,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        filter_bias_and_bn=not recipe.decay_all,
        **beside,
    )


def in_one_pass(recipe: Recipe) -> bool:
    """Whether an update reads and writes every number once: on a GPU, where torch has such a kernel.

    Not with scaled gradients, which it would take before they are clipped, nor with parameters cut up over processes.
    """
    if not surroundings.on_gpu(recipe) or surroundings.half(recipe) is torch.float16 or recipe.fsdp:
        return False
    return "fused" in signature(get_optimizer_class(recipe.optimizer, bind_defaults=False)).parameters


def schedule(recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int) -> CosineLRScheduler | None:
    """The rate, step by step: a straight rise, then a cosine from the full rate to the least; None for a constant."""
    warm, total = round(recipe.warmup * steps), recipe.epochs * steps
    if recipe.schedule == "constant" and not warm:
        return None
    return CosineLRScheduler(
        optimizer,
        t_initial=max(1, total - warm),
        lr_min=recipe.lr if recipe.schedule == "constant" else recipe.min_lr,
        warmup_t=warm,
        warmup_lr_init=recipe.warmup_lr,
        warmup_prefix=True,
        t_in_epochs=False,
    )
