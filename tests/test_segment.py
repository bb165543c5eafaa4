"""The segmentation example: its data and measure by loops, its nets on any size, and the whole at a small size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import segment


def test_labels_are_where_the_ink_is() -> None:
    images, labels = segment.canvases(6, (12, 19), 2, slice(0, 50), seed=3)
    assert images.shape == (6, 1, 12, 19)
    assert labels.shape == (6, 12, 19)
    assert float(images[:, 0][labels > 0].mean()) > float(images[:, 0][labels == 0].mean()) + 0.3
    assert all(1 <= len(canvas.unique()) - 1 <= 2 for canvas in labels)
    again, _ = segment.canvases(6, (12, 19), 2, slice(0, 50), seed=3)
    assert torch.equal(images, again)


def test_the_mean_iou_is_its_definition() -> None:
    found, labels = torch.randint(5, (2, 7, 9)), torch.randint(4, (2, 7, 9))
    ratios = []
    for number in range(segment.CLASSES):
        one = {place for place, value in enumerate(found.flatten().tolist()) if value == number}
        other = {place for place, value in enumerate(labels.flatten().tolist()) if value == number}
        if one | other:
            ratios.append(len(one & other) / len(one | other))
    assert segment.mean_iou(found, labels) == pytest.approx(sum(ratios) / len(ratios), rel=1e-6)
    assert segment.mean_iou(labels, labels) == 1


@pytest.mark.parametrize("layer", segment.OPTIONS)
def test_a_net_keeps_the_size_of_any_canvas(layer: str) -> None:
    model = segment.net(layer, 6).eval()
    with torch.no_grad():
        for size in ((8, 8), (9, 14)):
            assert model(torch.randn(2, 1, *size)).shape == (2, segment.CLASSES, *size)


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "segments.png"
    given = ["--canvases", "8", "--epochs", "1", "--width", "4", "--side", "10", "--picture", str(target)]
    found = segment.main(["--layers", "conv,hybrid", *given])
    assert set(found) == {"conv", "hybrid"}
    assert all(0 <= score <= 1 for score in found.values())
    said = capsys.readouterr().out
    assert "hybrid   mean IoU" in said
    assert "(18, 30)" in said
    assert target.read_bytes().startswith(b"\x89PNG")
