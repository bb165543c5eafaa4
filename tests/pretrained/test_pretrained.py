"""Real pretrained networks, converted; with CONVNN_DATA naming the folder of models/, cifar10/, mnist/, resnet50/."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention
from torch import nn

import convnn
from convnn import ConvNN2d, ConvNNAttention
from convnn_lab.pretrained.scores import NETWORKS, labels, logits, right

# Of the first 200 images of the test sets.
RIGHT = {"resnet20": 0.91, "resnet56": 0.94, "vit": 0.96}


@pytest.fixture(scope="module")
def data() -> Path:
    if "CONVNN_DATA" not in os.environ:
        pytest.skip("CONVNN_DATA names no folder of pretrained networks (models/, cifar10/, mnist/, resnet50/)")
    return Path(os.environ["CONVNN_DATA"])


@pytest.mark.parametrize("name", RIGHT)
def test_a_trained_network_scores_what_it_scored(name: str, data: Path) -> None:
    model, given = NETWORKS[name].read(data), NETWORKS[name].images(data, 200)
    twin, report = convnn.convert(model)
    assert report.exact
    assert not report.left
    before, after = logits(model, given.images), logits(twin, given.images)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)
    assert given.labels is not None
    assert right(after, given.labels) == right(before, given.labels) == RIGHT[name]


def test_a_trained_convolution_is_found_by_the_genuine_search(data: Path) -> None:
    model, given = NETWORKS["resnet20"].read(data), NETWORKS["resnet20"].images(data, 3)
    rules: dict[Any, Any] = {nn.Conv2d: ConvNN2d.using(backend="chunked")}
    twin, report = convnn.convert(model, rules)
    assert report.exact
    torch.testing.assert_close(logits(twin, given.images), logits(model, given.images), atol=1e-3, rtol=0)


def test_half_the_tokens_are_enough_for_a_digit(data: Path) -> None:
    model, given = NETWORKS["vit"].read(data), NETWORKS["vit"].images(data, 200)
    rules: dict[Any, Any] = {Attention: ConvNNAttention.using(k=25, kernel=None)}
    nearest = convnn.convert(model, rules)[0]
    assert given.labels is not None
    assert right(logits(nearest, given.images), given.labels) > 0.9


def test_photographs_are_recognised_as_before(data: Path) -> None:
    model, given, names = NETWORKS["resnet50"].read(data), NETWORKS["resnet50"].images(data, None), labels(data)
    twin, report = convnn.convert(model)
    assert report.exact
    before, after = logits(model, given.images), logits(twin, given.images)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)
    assert torch.equal(after.topk(5).indices, before.topk(5).indices)
    china, flower = (names[place] for place in after.argmax(-1))
    assert (china, flower) == ("palace", "vase")
