"""The benchmark of networks, without a device to measure on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import HybridConv2d, models
from convnn.functional import convnn
from convnn_lab import cli
from convnn_lab.bench import check as checking
from convnn_lab.bench import maps, measure, networks, report


class Small(nn.Module):
    """Two hybrid layers, for a network that takes long to make."""

    def __init__(self, *, layer: Any, num_classes: int, device: str, **options: Any) -> None:
        super().__init__()
        make: Any = partial(HybridConv2d, kernel_size=3, **options) if layer == "hybrid" else layer
        self.features = nn.Sequential(make(3, 6), nn.ReLU(), make(6, 4)).to(device)
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).mean((-1, -2)))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> networks.Case:
    monkeypatch.setattr(models, "create", lambda _, **options: Small(**options))
    return networks.Case("vgg11", 3, 8, classes=5)


def test_networks_have_a_loss_and_all_gradients(small: networks.Case) -> None:
    for name, options in {**networks.VARIANTS["vgg11"], **networks.VARIANTS["resnet50"]}.items():
        torch.manual_seed(0)
        model = networks.create(small, "cpu", **options)
        images, labels = networks._images(small, "cpu")
        networks.checked(name, model, images[:2])
        expected = F.cross_entropy(model.eval()(images), labels)
        torch.testing.assert_close(networks.loss_of(model, "float32", images, labels), expected)
        loss = networks.loss_of(model, "bf16", images, labels)
        assert (loss - expected).abs() < 0.05 * expected
        torch.autograd.grad(loss, list(model.parameters()))  # each has one, or this raises


def test_the_plain_network_is_the_hybrid_one(small: networks.Case) -> None:
    # In float64 no two neighbours are so close that either may come first.
    one, other = (networks.create(small, "cpu", plain=plain).double() for plain in (False, True))
    assert isinstance(other.get_submodule("features.0"), maps.Around)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        theirs.data.copy_(ours.data)
    images, _ = networks._images(small, "cpu")
    images = images.double()
    torch.testing.assert_close(other(images), one(images), rtol=1e-6, atol=1e-8)


def test_a_network_that_is_not_right_is_not_timed(small: networks.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (images, _) = networks.create(small, "cpu"), networks._images(small, "cpu")
    with pytest.raises(ValueError, match="the loss is nan"):
        networks.checked("case", networks.create(small, "cpu", ratio=0), images[:, :, :5] * torch.nan)
    monkeypatch.setattr(checking, "convnn", lambda *given, **options: convnn(*given, **options) * 1.05)
    with pytest.raises(ValueError, match="case, hybrid layer 0: the output is off by"):
        networks.checked("case", model, images)


def test_precision_is_put_back() -> None:
    def state() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    before = state()
    for precision, multiplies in {"tf32": True, "bf16": True, "float32": False}.items():
        with networks.multiplying(precision):
            assert state() == (multiplies, multiplies)
        assert state() == before
    with pytest.raises(ValueError, match="one of tf32, float32, bf16, got 'half'"), networks.multiplying("half"):
        pass


def test_networks_have_the_sizes_that_are_asked_for() -> None:
    assert str(networks.CASES["vgg11"]) == "vgg11, 256, 32x32"
    assert str(networks.CASES["resnet50"]) == "resnet50, 64, 224x224"


def test_a_table_of_training_steps_has_its_own_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (measure.Training(*(float(number * factor) for number in range(1, 10))) for factor in (1, 2))
    rows = [report.Row("a", "ratio 0", None, "no memory"), report.Row("a", "x", one), report.Row("a", "y", two)]
    report.show(rows, tmp_path / "rows.csv", measure.Training)
    printed, lines = capsys.readouterr().out, (tmp_path / "rows.csv").read_text().splitlines()
    assert "forward / step / update" in printed
    assert "2.00 / 2.00 / 2.00" in printed
    assert lines[0].startswith("case,contender,forward,step,update,eager_forward")
    assert lines[2].startswith("a,x,1.0,2.0,3.0,4.0")


def test_what_was_measured_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(report, "release", lambda: released.append(1))
    report.timed("a", report.Contender("x", torch.sin, []), lambda *_: measure.Cost(*[1.0] * 9))
    report.timed("a", report.Contender("y", torch.sin, []), lambda *_: 1 / 0)  # type: ignore[arg-type]
    assert len(released) == 2


def test_networks_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "long", "--models", "vgg11"]) == cli.MISUSED
    assert "--models is for convnn bench vgg" in capsys.readouterr().err
    assert cli.main(["bench", "long", "--contenders", "sdpa"]) == cli.MISUSED
    assert "--contenders is for convnn bench op" in capsys.readouterr().err
    assert cli.main(["bench", "op", "--contenders", "spda"]) == cli.MISUSED
    assert "convnn bench op has 'sdpa', 'convnn', 'convnn, no kernel'" in capsys.readouterr().err
    assert cli.main(["bench", "vgg", "--models", "vgg12"]) == cli.MISUSED
    assert "vgg12" in capsys.readouterr().err
