"""The example of points in space: shapes by their equations, models that know no order, and the whole, small."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples import points


def test_points_lie_on_their_shapes() -> None:
    drawn = {shape: points.surface(shape, 200, torch.Generator().manual_seed(1)).double() for shape in points.SHAPES}
    one = torch.ones(200, dtype=torch.float64)
    x, y, z = drawn["torus"].unbind(-1)
    near: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(drawn["sphere"].norm(dim=-1), one, **near)
    torch.testing.assert_close(drawn["cube"].abs().amax(-1), one * 1.3 / 3**0.5, **near)
    torch.testing.assert_close(((x**2 + y**2).sqrt() - 0.7) ** 2 + z**2, one * 0.09, **near)
    torch.testing.assert_close(drawn["cylinder"][:, :2].norm(dim=-1), one * 0.6, **near)
    torch.testing.assert_close(drawn["cone"][:, :2].norm(dim=-1), 0.45 * (1 - drawn["cone"][:, 2]), **near)


@pytest.mark.parametrize("neighbours", points.NEIGHBOURS)
def test_points_have_no_order(neighbours: str) -> None:
    model = points.Shapes(neighbours, dim=16, k=5).double()
    cloud = points.clouds(3, 20, seed=2)[0].double()
    order = torch.randperm(20)
    with torch.no_grad():
        torch.testing.assert_close(model.tokens(cloud[:, order]), model.tokens(cloud)[:, order], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(model(cloud[:, order]), model(cloud), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("neighbours", points.NEIGHBOURS)
def test_a_cloud_is_seen_by_itself(neighbours: str) -> None:
    model, cloud = points.Shapes(neighbours, dim=16, k=5).double(), points.clouds(3, 20, seed=2)[0].double()
    with torch.no_grad():
        alone = torch.cat([model(each[None]) for each in cloud])
        torch.testing.assert_close(model(cloud), alone, rtol=1e-9, atol=1e-9)


def shares(model: points.Shapes) -> list[float]:
    blends: list[Any] = [attend.similarity for attend in model.attend]
    return [float(blend.raw.detach()) for blend in blends]


def test_the_share_of_space_is_learned() -> None:
    model = points.Shapes("both", dim=16, k=5)
    cloud, labels = points.clouds(10, 20, seed=2)
    before = shares(model)
    points.learned(model, cloud, labels, epochs=2)
    after = shares(model)
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = points.main(["--clouds", "10", "--points", "16", "--epochs", "1", "--k", "4"])
    assert set(found) == set(points.NEIGHBOURS)
    said = capsys.readouterr().out
    assert "neighbours by features" in said
    assert "% of 24 points" in said
