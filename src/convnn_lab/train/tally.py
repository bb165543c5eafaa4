"""Sums over samples, exact on any number of devices; nothing here waits for a GPU."""

from __future__ import annotations

from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric


def each(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A row of logits for each label: ``(B, N, V)`` and ``(B, N)`` become ``(B N, V)`` and ``(B N,)``.

    Labels that are shares of all classes, ``(B, V)``, stay as they are.
    """
    return (logits, labels) if labels.is_floating_point() else (logits.flatten(0, -2), labels.flatten())


class Tally(Metric):
    """Loss, top-1 and top-5 over samples: sums and counts, so that batches of unequal size weigh what they hold.

    The loss is also told in bits.
    """

    full_state_update = False
    loss: Tensor
    first: Tensor
    five: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in (("loss", torch.float64), ("first", torch.int64), ("five", torch.int64)):
            self.add_state(name, torch.zeros((), dtype=dtype), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor, loss: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            labels: classes, or a share for each of them, of which the largest is the one to find.
            loss: the mean over the batch, where it is something else than the cross entropy.
        """
        logits, labels = each(logits.detach().float(), labels)
        hard = labels.argmax(-1) if labels.is_floating_point() else labels
        mean = F.cross_entropy(logits, hard) if loss is None else loss.detach()
        best = logits.topk(min(5, logits.shape[-1])).indices == hard[:, None]
        self.loss += mean.double() * len(hard)
        self.first += best[:, 0].sum()
        self.five += best.any(-1).sum()
        self.count += len(hard)

    def compute(self) -> dict[str, float]:
        """The means so far."""
        count = int(self.count)
        means = {"loss": self.loss, "bits": self.loss / log(2), "acc": self.first, "top5": self.five}
        return {name: float(total) / count if count else float("nan") for name, total in means.items()}

    def sums(self) -> dict[str, Any]:
        """What this process has added up, for a checkpoint."""
        return {name: getattr(self, name).cpu() for name in ("loss", "first", "five", "count")}

    def go_on(self, sums: dict[str, Any]) -> None:
        """Go on from there."""
        for name, total in sums.items():
            setattr(self, name, total.to(self.loss.device))
        self._update_count = 1  # so that computing it does not warn of nothing being there
