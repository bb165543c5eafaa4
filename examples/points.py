"""Points anywhere in space as tokens: the same attention, with neighbours by place, by features, or by both.

Clouds of points on a sphere, a cube, a torus, a cylinder and a cone, each turned at random, are told apart. A point's
neighbours are its nearest in space (a descriptor of coordinates), the most alike (of features), or a blend of the two.

python examples/points.py
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import ConvNNAttention
from convnn.blend import Blend

SHAPES = ("sphere", "cube", "torus", "cylinder", "cone")


def surface(shape: str, count: int, generator: torch.Generator) -> Tensor:
    """Random points on a shape, ``(count, 3)``."""
    u, v, w = torch.rand(3, count, generator=generator)
    turn = 2 * torch.pi * u
    if shape == "sphere":
        return F.normalize(torch.randn(count, 3, generator=generator), dim=-1)
    if shape == "cube":
        points = 2 * torch.stack([u, v, w], -1) - 1
        face = torch.randint(3, (count,), generator=generator)
        return points.scatter(1, face[:, None], points.gather(1, face[:, None]).sign()) / 3**0.5 * 1.3
    if shape == "torus":
        ring, tube = turn, 2 * torch.pi * v
        far = 0.7 + 0.3 * tube.cos()
        return torch.stack([far * ring.cos(), far * ring.sin(), 0.3 * tube.sin()], -1)
    height = 2 * v - 1 if shape == "cylinder" else 1 - 2 * v.sqrt()
    radius = torch.full_like(v, 0.6) if shape == "cylinder" else 0.9 * v.sqrt()
    return torch.stack([radius * turn.cos(), radius * turn.sin(), height], -1)


def clouds(count: int, points: int, seed: int) -> tuple[Tensor, Tensor]:
    """Clouds ``(count, points, 3)``, turned and a little noisy, and the numbers of their shapes ``(count,)``."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(SHAPES)
    drawn = torch.stack([surface(SHAPES[int(label)], points, generator) for label in labels])
    turns = torch.linalg.qr(torch.randn(count, 3, 3, generator=generator)).Q
    return drawn @ turns.mT + 0.03 * torch.randn(drawn.shape, generator=generator), labels


def by_place(k: int) -> dict[str, Any]:
    """Neighbours nearest in space: what is compared are coordinates."""
    return {"k": k, "position": "coordinates", "similarity": "euclidean", "kernel": "separable"}


def by_features(k: int) -> dict[str, Any]:
    """Neighbours most alike, wherever they are."""
    return {"k": k, "kernel": "separable"}


def by_both(k: int) -> dict[str, Any]:
    """A share of each, which is learned."""
    blend = Blend(0.3, axes=3, space="euclidean", features="cosine", learned=True)
    return {"k": k, "position": blend.descriptor, "similarity": blend, "kernel": "separable"}


NEIGHBOURS = {"place": by_place, "features": by_features, "both": by_both}


class Shapes(nn.Module):
    """Blocks of attention among points, then the largest number of each channel: no order, no grid.

    Shape:
        points ``(B, N, 3)``; ``tokens`` gives ``(B, N, dim)``, ``forward`` gives ``(B, classes)``.
    """

    def __init__(self, neighbours: str, *, dim: int = 32, depth: int = 2, k: int = 8) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, dim), nn.GELU(), nn.Linear(dim, dim))
        self.attend = nn.ModuleList(ConvNNAttention(dim, 4, **NEIGHBOURS[neighbours](k)) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(depth)
        )
        self.head = nn.Linear(dim, len(SHAPES))

    def tokens(self, points: Tensor) -> Tensor:
        """What is known of every point."""
        takes = {"coords": points} if self.attend[0].position is not None else {}
        x = self.embed(torch.cat([points, points.norm(dim=-1, keepdim=True)], -1))
        for attend, mlp, one, two in zip(self.attend, self.mlps, self.norms[::2], self.norms[1::2], strict=True):
            x = x + attend(one(x), **takes)
            x = x + mlp(two(x))
        return x

    def forward(self, points: Tensor) -> Tensor:  # noqa: D102
        return self.head(self.tokens(points).amax(-2))


def learned(model: nn.Module, points: Tensor, labels: Tensor, epochs: int) -> None:
    """Train a model."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=epochs * -(-len(points) // 32))
    for _ in range(epochs):
        for batch in torch.randperm(len(points)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(points[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def share_right(model: nn.Module, points: Tensor, labels: Tensor) -> float:
    """How many clouds are told what they are."""
    return float((model(points).argmax(-1) == labels).float().mean())


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train a model for each kind of neighbours; print how many clouds it tells apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clouds", type=int, default=240, help="how many to learn from")
    parser.add_argument("--points", type=int, default=64, help="in a cloud that is learned from")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--k", type=int, default=8, help="neighbours of a point")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    points, labels = clouds(given.clouds, given.points, given.seed)
    more = given.points + given.points // 2
    tests = {count: clouds(150, count, given.seed + 1) for count in (given.points, more)}
    print(f"{given.clouds} clouds of {given.points} points on {', '.join(SHAPES)}, turned at random")
    found = {}
    for neighbours in NEIGHBOURS:
        torch.manual_seed(given.seed)
        model, start = Shapes(neighbours, k=given.k), time.perf_counter()
        learned(model, points, labels, given.epochs)
        taken, rights = time.perf_counter() - start, [share_right(model, *test) for test in tests.values()]
        said = ", ".join(f"{100 * right:.1f} % of {count} points" for right, count in zip(rights, tests, strict=True))
        print(f"neighbours by {neighbours:9} right {said}; {taken:.1f} s")
        found[neighbours] = rights[0]
    return found


if __name__ == "__main__":
    main()
