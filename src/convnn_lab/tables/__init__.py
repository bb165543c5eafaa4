"""The tables and figures of the thesis as data, addressed by what they show. Needs no torch.

A :class:`Row` has a configuration, what the thesis prints for it and what the author's own run logged. The thesis
truncates: 81.2695 is printed as 81.26. Its GFLOPS are those of torch's profiler, which sees neither a 1-D convolution,
so none of the aggregation, nor a 2-D one with ``padding="same"``. A figure whose points the thesis does not print has
what was logged; on ImageNet there are no logs. ``fashion-lambda`` is a table of our own, and has neither.

The keys of a configuration, each only where it applies:

==================== ============================================================================================
``model``            ``"vgg11"``, ``"vit_tiny"``, ``"resnet50"`` or ``"vit_base"``; absent where a row is one layer
``layer``            of VGG: ``"hybrid"``; of ResNet: ``"conv"``, ``"hybrid"`` or ``"convnn"``, the last without a
                     1x1; of ViTs: ``"attention"``, ``"kvt"``, ``"local"``, ``"sparse"`` or ``"convnn"``
``ratio``            share of the ConvNN branch in the channels of a hybrid layer, 0.0 to 1.0; in VGG 0.0 is called
                     Conv2D and 1.0 ConvNN, both with the 1x1
``kernel_size``      of the convolution branch
``k``                neighbours; absent where there is no ConvNN branch
``candidates``       ``"all"``, ``"random"`` or ``"spatial"``
``r``                how many candidates, the square of the side for a grid of pixels
``position``         True where coordinates are part of what is compared
``patch``            side of the patches that a ConvNN branch takes for pixels, 1 or 2
``kernel``           of ConvNN in a ViT: ``"depthwise"``, ``"separable"`` or ``"standard"``
``heads``            of a ViT
``lr``               learning rate, where it is varied
``epochs``           where the row is not the end of the training
``fused``            True for Fast-ConvNN
``batch``            with ``tokens`` and ``width``: the input of a single layer
``printed_...``      of a benchmark: what the thesis prints, digit by digit
==================== ============================================================================================
"""

from __future__ import annotations

from convnn_lab.tables.fast import FAST_CORRECTNESS, FAST_SPEED
from convnn_lab.tables.record import Dataset, Logged, Printed, Row, Table
from convnn_lab.tables.resnet import RESNET_IMAGENET, RESNET_K, RESNET_R
from convnn_lab.tables.vgg import FASHION_LAMBDA, VARY_LAMBDA, VGG_DYNAMICS, VGG_LR, VGG_PATCH
from convnn_lab.tables.vgg_candidates import VGG_CANDIDATES
from convnn_lab.tables.vgg_k import VGG_K
from convnn_lab.tables.vit_cifar import VIT_CIFAR, VIT_CIFAR_DYNAMICS, VIT_KERNELS
from convnn_lab.tables.vit_cifar_candidates import VIT_CANDIDATES
from convnn_lab.tables.vit_cifar_k import VIT_K
from convnn_lab.tables.vit_imagenet import (
    VIT_DYNAMICS,
    VIT_HEADS,
    VIT_IMAGENET,
    VIT_IMAGENET_CANDIDATES,
    VIT_IMAGENET_K,
)

__all__ = ["TABLES", "Dataset", "Logged", "Printed", "Row", "Table"]

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        *(VARY_LAMBDA, VGG_DYNAMICS, VGG_LR, VGG_K, VGG_CANDIDATES, VGG_PATCH),
        *(VIT_CIFAR, VIT_CIFAR_DYNAMICS, VIT_K, VIT_CANDIDATES, VIT_KERNELS),
        *(RESNET_IMAGENET, RESNET_K, RESNET_R),
        *(VIT_IMAGENET, VIT_HEADS, VIT_IMAGENET_K, VIT_IMAGENET_CANDIDATES, VIT_DYNAMICS),
        *(FAST_SPEED, FAST_CORRECTNESS),
        FASHION_LAMBDA,
    )
}
"""every table and figure of the experiments by name"""
