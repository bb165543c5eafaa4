"""What came of rows, as numbers: finished runs pooled over seeds, and runs on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from convnn_lab.recipes import Recipe
from convnn_lab.rerun.plan import Job
from convnn_lab.tables import Row
from convnn_lab.train.run import Row as Epoch
from convnn_lab.train.run import averaged

# What is quoted of an epoch.
EPOCH = ("epoch", "train_loss", "train_acc", "val_loss", "val_acc", "seconds")
LATE = 10  # epochs at the end of a run, of which the mean moves less than the last one does


@dataclass(frozen=True)
class Result:
    """Runs of a row that differ in their seed alone; numbers are those of the last epoch, or the one the row is of.

    Args:
        runs: the epochs of each run.
        devices: what each was last on.
        epochs: how many the numbers are quoted after.
        gflops: two for every multiplication with addition of the published architecture.
    """

    row: Row
    job: Job
    runs: tuple[tuple[Epoch, ...], ...]
    seeds: tuple[int, ...]
    epochs: int
    devices: tuple[str, ...]
    parameters: int
    gflops: float

    @property
    def accuracies(self) -> tuple[float, ...]:
        """Of each run, in percent."""
        return tuple(100 * run[self.epochs - 1]["val_acc"] for run in self.runs)

    @property
    def losses(self) -> tuple[float, ...]:
        """Test losses."""
        return tuple(run[self.epochs - 1]["val_loss"] for run in self.runs)

    @property
    def bests(self) -> tuple[float, ...]:
        """The accuracies of the best epochs."""
        return tuple(100 * max(epoch["val_acc"] for epoch in run[: self.epochs]) for run in self.runs)

    @property
    def lasts(self) -> tuple[tuple[float, ...], ...]:
        """The accuracies of the last ten epochs of each run, or the last third; one epoch is not like the next."""
        late = min(LATE, self.epochs // 3)
        ends = [run[self.epochs - late : self.epochs] for run in self.runs if late > 1]
        return tuple(tuple(100 * epoch["val_acc"] for epoch in end) for end in ends)

    @property
    def device(self) -> str:
        """What the runs were on."""
        return ", ".join(dict.fromkeys(self.devices))

    @property
    def seconds(self) -> float:
        """What the epochs of a run took, in the mean."""
        return mean(sum(epoch["seconds"] for epoch in run) for run in self.runs)

    @property
    def curves(self) -> tuple[Epoch, ...]:
        """The mean over seeds of every number of every epoch."""
        return tuple(averaged(self.runs))

    @property
    def how(self) -> list[str]:
        """How long and how precisely it was trained."""
        return [f"{self.epochs} epochs", *_computed(self.job.recipe)]

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, where there are several."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def accuracy(self) -> str:
        """The mean over seeds with its spread, in percent."""
        return with_spread(self.accuracies)

    @property
    def late(self) -> list[float | None]:
        """Of these epochs: the mean, its deviation over seeds, and that of an epoch within a run."""
        if not self.lasts:
            return [None] * 3
        means = [mean(each) for each in self.lasts]
        return [mean(means), stdev(means) if len(means) > 1 else None, mean(stdev(each) for each in self.lasts)]


@dataclass(frozen=True)
class Going:
    """A run that has not finished, as far as it is: a curve, and no result."""

    row: Row
    job: Job
    curves: tuple[Epoch, ...]
    devices: tuple[str]

    @property
    def runs(self) -> tuple[tuple[Epoch, ...]]:
        """It alone."""
        return (self.curves,)

    @property
    def epochs(self) -> int:
        """How many it has."""
        return len(self.curves)

    @property
    def seeds(self) -> tuple[int]:
        """Its own."""
        return (self.job.recipe.seed,)

    @property
    def how(self) -> list[str]:
        """How far it is, how precisely it is trained, and its seed."""
        recipe = self.job.recipe
        return [f"{self.epochs} of {recipe.epochs} epochs", *_computed(recipe), f"seed {recipe.seed}"]


def _computed(recipe: Recipe) -> list[str]:
    return [recipe.precision, *(["compiled"] if recipe.compile else [])]


def with_spread(values: Sequence[float]) -> str:
    """Write the mean of values, with their standard deviation where there are several."""
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{spread}"
