"""How the author's logs name their runs; every run has seed 42 and 150 epochs."""

from __future__ import annotations

from typing import TypeAlias

from convnn_lab.tables.record import Dataset

CIFAR: dict[Dataset, str] = {"cifar10": "CIFAR10", "cifar100": "CIFAR100"}

Numbers: TypeAlias = tuple[float, float, float, float]
"""loss, accuracy, GFLOPS and parameters in millions, as :class:`~convnn_lab.tables.record.Logged` takes them"""


def vgg_run(dataset: Dataset, folder: str, name: str, ratio: float) -> str:
    """The name of a run of VGG-11, as in ``K_test/VGG11-CIFAR10/BranchingConvNN_K9_KS3_col_col_br0500_s42``."""
    return f"{folder}/VGG11-{CIFAR[dataset]}/{name}_br{round(1000 * ratio):04}_s42"


def vit_run(dataset: Dataset, folder: str, name: str) -> str:
    """The name of a run of ViT-Tiny, as in ``K_test/ViT-Tiny-CIFAR10/KvtAttention_K9_s42``."""
    return f"{folder}/ViT-Tiny-{CIFAR[dataset]}/{name}_s42"
