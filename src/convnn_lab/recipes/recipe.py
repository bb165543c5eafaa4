"""What decides a run, field by field. Nothing here imports torch, so that help answers at once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

from convnn_lab.recipes import limits, schedules

Precision = Literal["float32", "tf32", "bf16", "fp16", "half"]
Graph = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Recipe:
    """A training run; every field is a flag."""

    # What is learned from.
    dataset: str = "digits"
    """digits, fashion-mnist, cifar10, cifar100, imagenet, folder for any folder of class folders, or shakespeare"""
    data_dir: Path | None = None
    """where its files are; digits bring their own"""
    image_size: int | None = None
    """side the images are brought to; their own unless told"""
    context: int | None = None
    """characters of a text that are seen at once; 256 unless told"""

    # What learns.
    model: str = "resnet8"
    """its name; see convnn models"""
    stem: Literal["imagenet", "cifar", "half"] | None = None
    """how a ResNet begins: 7x7 of stride 2 and a pooling, 3x3, or 3x3 of stride 2"""
    width: int | None = None
    """channels of a ResNet's first stage"""
    published: bool = False
    """the model to the last detail as it was published for the thesis"""
    layer: str = "conv"
    """what stands where a convolution or an attention stood: conv, hybrid, convnn, attention, kvt, ..."""
    ratio: float | None = None
    """share of neighbours in a hybrid layer"""
    k: int | None = None
    """how many neighbours"""
    candidates: str | None = None
    """among whom they are searched: all, random:R or grid:R"""
    position: str | None = None
    """how places take part in the search: scaled_concat, coordinates, ..."""
    similarity: str | None = None
    """how near two cells are: cosine, dot, euclidean, ..."""
    weighting: str | None = None
    """how much a neighbour counts: uniform, softmax, ..."""
    selection: str | None = None
    """how the neighbours are chosen: hard, soft:T or straight_through:T, at a temperature"""
    blend: float | None = None
    """share of features in how near two cells are, from 0, nearest in space, to 1"""
    dial: float | None = None
    """the same, learned by every layer, or by every head of a ViT, from this share on"""
    patch: int | None = None
    """side of the patches a search compares, or of a ViT's"""
    heads: int | None = None
    """of attention"""
    kernel: str | None = None
    """of a ViT's or GPT's convnn: depthwise, separable or standard"""
    kernel_size: int | None = None
    """side of the convolutions of the published VGG"""
    dropout: float | None = None
    """of a ViT's or GPT's blocks, or of VGG's classifier"""

    # How it learns.
    epochs: int = 20
    batch: int = 128
    """images, or windows of a text, that a step sees on all devices together"""
    device_batch: int | None = None
    """images a device sees at once; a step takes as many turns as that needs"""
    accumulate: int | None = None
    """turns a step takes, where that is to be said outright"""
    optimizer: str = "adamw"
    """as timm names it"""
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.01
    decay_all: bool = True
    """also of biases and norms"""
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: float = 0.0
    """epochs in which the rate rises"""
    warmup_lr: float = 1e-7
    """where it rises from"""
    min_lr: float = 0.0
    """where a cosine ends"""
    clip: float | None = 1.0
    """largest norm of a gradient"""
    smoothing: float = 0.0
    """share of a label given to all classes"""
    ema: float | None = None
    """also keep an average of the weights, with this decay"""

    # What changes on the way: values such as all,25,9 (each a part of the run) or 1,0.5@2 (from epoch 2 on), or 0..1.
    morph_k: str | None = None
    """how many neighbours"""
    morph_share: str | None = None
    """share of features of a fixed --blend"""
    morph_temperature: str | None = None
    """of the softmax that weighs neighbours"""
    morph_selection: str | None = None
    """temperature of --selection"""
    morph_layers: str = "*"
    """names of the layers that change, with * and ?"""

    # What is done to the images: the first seven to folders only.
    crop_scale: float | None = None
    """smallest share of an image a random crop takes"""
    crop_ratio: float = 0.75
    """narrowest such crop; the widest is its inverse"""
    flip: float = 0.0
    """how often an image is mirrored"""
    jitter: float = 0.0
    """of brightness, contrast and saturation"""
    augment: str | None = None
    """a policy as timm names it, such as rand-m9-mstd0.5-inc1"""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    crop_share: float = 0.875
    """side of the tested middle of an image, of the side it is resized to"""
    erase: float = 0.0
    """how often a part of an image is erased"""
    erase_mode: Literal["pixel", "rand", "const"] = "pixel"
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    mix_switch: float = 0.5
    """how often CutMix takes the place of Mixup where both are on"""

    # How it is computed.
    precision: Precision = "float32"
    """float32 to the last bit; tf32; bf16; fp16; half for bf16 where there is one, else fp16"""
    seed: int = 42
    deterministic: bool = False
    """the same numbers on every run on a GPU too, where that costs speed"""
    graph: Graph = "auto"
    """record a step on a GPU once and launch it as a whole: on, off, or auto for wherever that is possible"""
    compile: bool = False
    """write kernels for what stands between the layers' own: blocks once for all that are alike"""
    checkpoint_activations: bool = False
    """compute the inside of blocks again in backward instead of keeping it"""
    non_finite: Literal["stop", "skip"] = "stop"
    """what a loss or gradient that is not a number does"""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int = 1
    nodes: int = 1
    fsdp: bool = False
    """cut parameters and optimizer over the devices"""
    workers: int = 8
    """processes that read images of a folder"""

    # What is written.
    save_every: str = "1m"
    """time between two checkpoints, such as 90s or 1h30m"""
    save_steps: int | None = None
    """steps between two checkpoints, beside that"""
    max_time: str | None = None
    """stop after so much time, ready to be resumed"""
    tensorboard: bool = False
    wandb: str | None = None
    """also log to this project of Weights & Biases"""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and not isfinite(value):
                raise ValueError(f"{limits.flag(each.name)} must be a finite number, got {value}")
        limits.least(
            self, 1, "epochs", "batch", "device_batch", "accumulate", "image_size", "devices", "nodes", "save_steps"
        )
        limits.least(self, 1, "k", "patch", "heads", "kernel_size", "width", "context")
        limits.least(
            self, 0, "lr", "weight_decay", "warmup", "warmup_lr", "min_lr", "jitter", "mixup", "cutmix", "workers"
        )
        limits.share(self, "ratio", "dropout", "smoothing", "beta1", "beta2", "ema", "crop_scale", "crop_ratio", "flip")
        limits.share(self, "blend", "dial")
        limits.share(self, "crop_share", "erase", "mix_probability", "mix_switch")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be from 0 to 2**32 - 1, got {self.seed}")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"--clip must be more than 0, got {self.clip}")
        if self.warmup >= self.epochs:
            raise ValueError(f"--warmup must be shorter than the {self.epochs} epochs, got {self.warmup}")
        if self.schedule == "constant" and self.min_lr:
            raise ValueError(f"--min-lr is where a cosine ends; say --schedule cosine, got {self.min_lr}")
        if self.device_batch is not None and self.accumulate is not None:
            raise ValueError("--device-batch and --accumulate say the same thing; give one")
        if self.blend is not None and self.dial is not None:
            raise ValueError("--blend is a fixed share and --dial a learned one; give one")
        _ = self.save_seconds, self.max_seconds, self.morphs

    @property
    def morphs(self) -> list[schedules.Words]:
        """What changes on the way."""
        kinds: tuple[schedules.Kind, ...] = ("k", "share", "temperature", "selection")
        said = {kind: getattr(self, f"morph_{kind}") for kind in kinds}
        return [
            schedules.read(limits.flag(f"morph_{kind}"), kind, words, self.epochs)
            for kind, words in said.items()
            if words is not None
        ]

    @property
    def save_seconds(self) -> float:
        """Time between two checkpoints."""
        return limits.seconds("--save-every", self.save_every)

    @property
    def max_seconds(self) -> float | None:
        """Time after which the run stops."""
        return None if self.max_time is None else limits.seconds("--max-time", self.max_time)

    def shares(self, devices: int) -> tuple[int, int]:
        """How many images one of so many devices sees at once, and how many turns make a step."""
        turns = self.accumulate
        if turns is None:
            most = self.batch if self.device_batch is None else self.device_batch
            turns = -(-self.batch // (most * devices))
        if self.batch % (devices * turns):
            said = f"--batch must divide among {devices} devices and {turns} turns, got {self.batch}"
            raise ValueError(f"{said}; choose --batch or --accumulate so that it does")
        return self.batch // (devices * turns), turns

    def as_dict(self) -> dict[str, Any]:
        """Every field, for a file."""
        return {
            each.name: str(value) if isinstance(value := getattr(self, each.name), Path) else value
            for each in fields(self)
        }


def from_dict(given: dict[str, Any]) -> Recipe:
    """Read what ``as_dict`` wrote."""
    known = {each.name for each in fields(Recipe)}
    strange = sorted(set(given) - known)
    if strange:
        raise ValueError(f"a recipe has no field {', '.join(strange)}")
    folder = given.get("data_dir")
    checked = {"precision": get_args(Precision), "graph": get_args(Graph), "non_finite": ("stop", "skip")}
    for name, choices in checked.items():
        if name in given and given[name] not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {given[name]!r}")
    return Recipe(**{**given, "data_dir": None if folder is None else Path(folder)})
