"""A step that is launched as a whole: recorded once, and replayed for every batch like the one it was recorded for.

Launched one by one, the kernels of a small step wait for the host that names them. A recorded step holds the model, the
loss and their gradients; what draws on the host, what is counted and the optimizer stay outside, so that a run is the
same run either way.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from convnn_lab.recipes import Recipe

Run = Callable[[], list[Tensor]]
Outcome = tuple[Tensor, Tensor, Tensor]  # logits, labels and loss
TRIES = 3  # batches before a recording: the first compiles and chooses algorithms, the last is watched
WAITS = "called a synchronizing CUDA operation"


class Recorder(Protocol):
    """What tries a function out, and records it."""

    def tried(self, run: Run) -> tuple[list[Tensor], list[str]]:
        """Run it once; name the places at which it waits for the device, which cannot be recorded."""
        ...

    def recorded(self, run: Run) -> tuple[list[Tensor], Callable[[], object]]:
        """Record it: tensors that are empty until the function beside them fills them, as often as it is called."""
        ...


class Graphs:
    """Records CUDA graphs."""

    def __init__(self) -> None:
        self.side: torch.cuda.Stream | None = None

    def tried(self, run: Run) -> tuple[list[Tensor], list[str]]:
        """Run it once on a stream of its own, as a recording does."""
        now = torch.cuda.current_stream()
        self.side = torch.cuda.Stream() if self.side is None else self.side
        self.side.wait_stream(now)
        with torch.cuda.stream(self.side), _watched() as waits:
            outputs = run()
        now.wait_stream(self.side)
        return outputs, waits

    def recorded(self, run: Run) -> tuple[list[Tensor], Callable[[], object]]:
        """Record it; threads that pin memory may go on meanwhile."""
        gc.collect()  # nothing old is to be freed while it records
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.side, capture_error_mode="thread_local"):
            outputs = run()
        return outputs, graph.replay


@contextmanager
def _watched() -> Iterator[list[str]]:
    """Note where torch waits for the device; other warnings are passed on."""
    places: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in caught:
        said = str(each.message)
        if WAITS in said:
            places.append(f"{each.filename}:{each.lineno}")
        elif "ynchronization debug mode" not in said:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


class Graphed:
    """The gradients of batches of one kind: by trials at first, then by a recording.

    Args:
        loss: logits, labels and loss of images and labels.
        parameters: those that want gradients.
        turns: how many batches make a step, whose gradients are added up.
        words: what else is settled when a step is recorded, such as how many neighbours there are; when it changes,
            the step is recorded anew.
        declined: called with the reason where a trial shows that the step cannot be recorded.
    """

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Outcome],
        parameters: Iterable[nn.Parameter],
        *,
        turns: int = 1,
        words: Callable[[], Hashable] = lambda: None,
        declined: Callable[[str], None],
        recorder: Recorder | None = None,
    ) -> None:
        self.loss, self.turns, self.words, self.declined = loss, turns, words, declined
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.recorder: Recorder = Graphs() if recorder is None else recorder
        self.kind: Hashable = None
        self.off, self.tries = False, 0
        self.replay: Callable[[], object] | None = None
        self.learned: list[nn.Parameter] = []
        self.found: list[Tensor] = []
        self.due = False

    def __call__(self, images: Tensor, labels: Tensor) -> Outcome | None:
        """The outcome of a batch, whose gradients are kept until :meth:`give`; None if it cannot be recorded."""
        if self.off:
            return None
        self._hold(images, labels)
        if self.replay is None and self.tries < TRIES:
            self._try()
        else:
            if self.replay is None:
                self._record()
            self.replay()  # type: ignore[misc]
        self.due = True
        logits, labels, loss = self.found[:3]
        return logits, labels, loss

    def give(self) -> bool:
        """Add the gradients of the last batch to those of the parameters; False where it left none here."""
        if not self.due:
            return False
        with torch.no_grad():
            for parameter, gradient in zip(self.learned, self.found[3:], strict=True):
                if parameter.grad is not None:
                    parameter.grad += gradient
                else:
                    parameter.grad = gradient.clone() if self.turns > 1 else gradient
        self.due = False
        return True

    def _hold(self, images: Tensor, labels: Tensor) -> None:
        """Put a batch where the recording looks for it."""
        kind = (images.shape, images.dtype, labels.shape, labels.dtype, self.words())
        if kind != self.kind:
            self.kind, self.tries, self.replay, self.found = kind, 0, None, []
            self.images, self.labels = torch.empty_like(images), torch.empty_like(labels)
        self.images.copy_(images)
        self.labels.copy_(labels)

    def _try(self) -> None:
        self.found, waits = self.recorder.tried(self._run)
        self.tries += 1
        if self.tries == TRIES and waits:
            self.off = True
            self.declined(f"the step waits for the GPU at {', '.join(dict.fromkeys(waits))}")

    def _record(self) -> None:
        self.found = []
        try:
            self.found, self.replay = self.recorder.recorded(self._run)
        except RuntimeError as error:
            said = f"recording the step as a CUDA graph failed: {str(error).strip().splitlines()[0]}"
            raise ValueError(f"{said}; --graph off launches it kernel by kernel") from error

    def _run(self) -> list[Tensor]:
        """The outcome and the gradients; those the parameters hold already are left alone."""
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        logits, labels, loss = self.loss(self.images, self.labels)
        with torch.autocast(loss.device.type, enabled=False):
            (loss / self.turns).backward()
        self.learned = [parameter for parameter in self.parameters if parameter.grad is not None]
        found: list[Any] = [parameter.grad for parameter in self.learned]
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient
        return [logits.detach(), labels, loss.detach(), *found]


def against(recipe: Recipe, *, gpu: bool, scaled: bool) -> str | None:
    """Why the steps of a recipe cannot be recorded, or None.

    Args:
        gpu: whether they run on one.
        scaled: whether gradients are scaled, by a number that is looked at after every step.
    """
    lines = [f"--morph-{words.kind}" for words in recipe.morphs if words.line]
    reasons = {
        "it needs a GPU, and this run has none": not gpu,
        "--fsdp gathers parameters inside a step": recipe.fsdp,
        "several processes add up their gradients inside a step": recipe.devices * recipe.nodes > 1,
        "fp16 looks at the scale of its gradients after every step": scaled,
        "--checkpoint-activations puts random generators back inside a step": recipe.checkpoint_activations,
        "--non-finite skip looks at the loss of every step": recipe.non_finite == "skip",
        f"{' and '.join(lines)} changes the model at every step": bool(lines),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
