"""What pretrained networks were tested on, and how they do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_sample_images  # type: ignore[import-untyped]
from torch import Tensor, nn

from convnn_lab.data import idx
from convnn_lab.data.cifar import cifar10
from convnn_lab.pretrained import resnet50_keras, resnet_cifar, vit_mnist


@dataclass(frozen=True, eq=False)
class Images:
    """Images as a network takes them, and their labels, or none where nobody gave any.

    Shape:
        images ``(N, C, H, W)`` of float32, labels ``(N,)``.
    """

    images: Tensor
    labels: Tensor | None = None


@dataclass(frozen=True)
class Network:
    """A pretrained network: how it is read, and what it was tested on, out of the same folder."""

    name: str
    read: Callable[[Path], nn.Module]
    images: Callable[[Path, int | None], Images]


def normalized(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Bytes as numbers from 0 to 1, less the mean, over the deviation."""
    return (pixels.float() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def cifar_test(data: Path, count: int | None = None) -> Images:
    """The test set of CIFAR-10, or its first images."""
    test = cifar10(data / "cifar10").test
    return Images(normalized(test.images[:count], resnet_cifar.MEAN, resnet_cifar.STD), test.labels[:count])


def mnist_test(data: Path, count: int | None = None) -> Images:
    """The test set of MNIST, or its first images, from IDX files."""
    folders = (data / "mnist", data / "mnist" / "package" / "data")
    folder = next((each for each in folders if (each / "t10k-images-idx3-ubyte").is_file()), None)
    if folder is None:
        raise ValueError(f"mnist: looked for t10k-images-idx3-ubyte in {' and '.join(map(str, folders))}")
    pixels, labels = (idx.read(folder / f"t10k-{name}-ubyte")[:count] for name in ("images-idx3", "labels-idx1"))
    images = normalized(torch.from_numpy(pixels.copy())[:, None], vit_mnist.MEAN, vit_mnist.STD)
    return Images(images, torch.from_numpy(labels.copy()).long())


def photographs(data: Path, count: int | None = None) -> Images:  # noqa: ARG001 - they are not of the folder
    """The two photographs that come with scikit-learn: a palace in China and a flower."""
    return Images(torch.cat([resnet50_keras.prepared(image) for image in load_sample_images().images[:count]]))


def keras_folder(data: Path) -> Path:
    """Where ResNet-50's model.json is."""
    folders = (data / "resnet50", data / "resnet50" / "package" / "ResNet50")
    return next((each for each in folders if (each / "model.json").is_file()), folders[0])


def labels(data: Path) -> list[str]:
    """What the classes of ImageNet are called, from the labels.json beside ResNet-50."""
    path = keras_folder(data).parent / "assets" / "labels.json"
    names = json.loads(path.read_text())
    return [names[str(number)] for number in range(len(names))]


NETWORKS = {
    network.name: network
    for network in (
        Network("resnet20", lambda d: resnet_cifar.resnet_cifar(d / "models/resnet20_cifar10.safetensors"), cifar_test),
        Network("resnet56", lambda d: resnet_cifar.resnet_cifar(d / "models/resnet56_cifar10.safetensors"), cifar_test),
        Network("vit", lambda d: vit_mnist.vit_mnist(d / "models/vit_mnist.safetensors"), mnist_test),
        Network("resnet50", lambda d: resnet50_keras.resnet50(keras_folder(d)), photographs),
    )
}


@torch.no_grad()
def logits(model: nn.Module, images: Tensor, batch: int = 250) -> Tensor:
    """What a network answers, some images at a time."""
    return torch.cat([model(part) for part in images.split(batch)])


def right(answers: Tensor, truth: Tensor) -> float:
    """The share of images whose largest answer is their label."""
    return (answers.argmax(-1) == truth).double().mean().item()
