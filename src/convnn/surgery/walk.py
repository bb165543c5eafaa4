"""A walk through a model that decides about every module first, and puts the new ones in their places after."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from convnn.layers import MultiheadConvNN
from convnn.surgery.carry import BACK
from convnn.surgery.report import Entry, Report

NESTED = "_convnn_nested"


class Walk:
    """What conversion and reversion have in common."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.everything = dict(model.named_modules(remove_duplicate=False))
        self.names: dict[int, list[str]] = {}
        for name, module in self.everything.items():
            self.names.setdefault(id(module), []).append(name)
        self.seen: set[int] = set()
        self.planned: dict[int, nn.Module] = {}
        self.entries: dict[int, Entry] = {}
        self.notes: list[str] = []

    def plan(self) -> None:
        """Decide about every module, from the outside in."""
        self._visit(self.model)

    def _visit(self, module: nn.Module) -> None:
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        if self.decide(module):
            return
        before = len(self.entries)
        for child in module.children():
            self._visit(child)
        if id(module) not in self.entries:
            self.passed(module, list(self.entries.values())[before:])

    def decide(self, module: nn.Module) -> bool:
        """Plan what becomes of a module; True if nothing inside it is looked at."""
        raise NotImplementedError

    def passed(self, module: nn.Module, inside: list[Entry]) -> None:
        """Report a module that nothing was said of, if it should be; what was said of its parts is given."""

    def enter(self, module: nn.Module, after: nn.Module | None, exact: bool, note: str) -> None:
        """Write down what becomes of a module."""
        kind = None if after is None else type(after).__name__
        names = tuple(self.names[id(module)])
        self.entries[id(module)] = Entry(names, type(module).__name__, kind, exact, note)

    def place(self) -> nn.Module:
        """Put the planned modules where the old ones stand, under every name."""
        for parent in list(self.model.modules()):
            for key, child in parent._modules.items():
                if child is not None and id(child) in self.planned:
                    parent._modules[key] = self.planned[id(child)]
        self.model = self.planned.get(id(self.model), self.model)
        self.notes += _nested(self.model)
        return self.model

    @property
    def report(self) -> Report:
        """What was decided."""
        return Report(tuple(self.entries.values()), tuple(self.notes))


def held(model: nn.Module) -> dict[int, str]:
    """Modules that are also kept in plain attributes, and where: no twin is put there."""
    found = {}
    for name, owner in model.named_modules():
        for attribute, value in vars(owner).items():
            items = value.values() if isinstance(value, dict) else value
            for item in items if isinstance(value, (dict, list, tuple, set)) else [value]:
                if isinstance(item, nn.Module) and attribute not in {"_modules", BACK}:
                    found[id(item)] = f"{name}.{attribute}".lstrip(".")
    return found


def tied(model: nn.Module) -> dict[int, list[str]]:
    """Parameters that several modules hold, and the names they have."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{name}.{own}".lstrip("."))
    return {key: names for key, names in owners.items() if len(names) > 1}


def _nested(model: nn.Module) -> Iterator[str]:
    """Let torch's encoders pack their tokens only where their attention is torch's."""
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder):
            ours = any(isinstance(part, MultiheadConvNN) for part in module.modules())
            if ours and module.use_nested_tensor:
                module.use_nested_tensor = False
                vars(module)[NESTED] = True
                yield f"{name or 'the model'}: use_nested_tensor=False, as the twins take no nested tensors"
            elif not ours and vars(module).pop(NESTED, False):
                module.use_nested_tensor = True
                yield f"{name or 'the model'}: use_nested_tensor=True again"
