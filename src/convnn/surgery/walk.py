"""Through a whole model: every convolution and attention for its twin, and back."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from convnn.layers import MultiheadConvNN
from convnn.surgery.carry import BACK, carry, is_ours, untag
from convnn.surgery.report import Entry, Report
from convnn.surgery.rules import Rule, Rules, attempt, exact, require_matched, require_used
from convnn.surgery.twins import Refused, Twin, load_integrations, maker_of
from convnn.surgery.wrappers import inner_of, require_plain

M = TypeVar("M", bound=nn.Module)
NESTED = "_convnn_nested"


def convert(model: M, rules: Rules | None = None, *, copy: bool = True) -> tuple[M, Report]:
    """Replace convolutions and attentions of a model by their ConvNN twins, which hold the same parameters.

    A twin computes what the module computed, wherever that is possible; the report says where it is not, what was
    left, and why. Exact twins hold the module's own parameters, so that optimisers and tied weights stay what they are.

    Args:
        model: any module; wrap it for several devices and compile it afterwards.
        rules: from patterns of names (as a shell's; ``*`` also stands for dots), classes or predicates of a module, to
            a layer class such as ``HybridConv2d.using(ratio=0.5)``, or to a function of the module that gives another
            module, a :class:`Twin`, or None to leave it. The first that matches counts. What a layer class leaves open
            is chosen so that nothing changes. None is the exact twin of everything that has one.
        copy: whether the model that was given stays as it is.

    Returns:
        the model with its twins, and a :class:`~convnn.surgery.Report`.

    Example:
        >>> from convnn import HybridConv2d
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        >>> x = torch.randn(2, 3, 9, 12)
        >>> twin, report = convert(model, {"2": HybridConv2d.using(ratio=0.5)})
        >>> torch.allclose(twin(x), model(x), atol=1e-5)
        True
        >>> print(report)
        name  was     is            exact  note
        ----  ------  ------------  -----  -------------------------------------------------
        0     Conv2d  (left)        -      no rule is about it
        2     Conv2d  HybridConv2d  yes    4 + 4 channels; its share of features starts at 0
        1 replaced (0 not exact), 1 left
    """
    require_plain(model)
    load_integrations(model)
    chosen = None if rules is None else [Rule(key, choice) for key, choice in rules.items()]
    return _through(model, copy, lambda inside: _Conversion(inside, chosen))


def revert(model: M, names: str = "*", *, copy: bool = True) -> tuple[M, Report]:
    """Replace twins by the modules they came from, with the parameters the twins have now.

    A twin that has become something its module could not be (a hybrid whose halves were mixed, a share of features that
    was raised, a limited k) is an error that names it; then nothing is changed.

    Args:
        model: what :func:`convert` made, trained or not.
        names: a pattern of names; what it does not match stays.
        copy: whether the model that was given stays as it is.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3))
        >>> again, report = revert(convert(model)[0])
        >>> type(again[0]).__name__, torch.equal(again[0].weight, model[0].weight)
        ('Conv2d', True)
    """
    require_plain(model)
    return _through(model, copy, lambda inside: _Reversion(inside, names))


def _through(model: Any, copy: bool, start: Callable[[nn.Module], _Work]) -> tuple[Any, Report]:
    """Do some work on a model or on its copy; what goes wrong goes wrong before anything is changed."""
    if copy:
        try:
            model = copying.deepcopy(model)
        except Exception as error:
            raise ValueError(f"the model cannot be copied ({error}); convert it in place with copy=False") from error
    wrapper, inside = inner_of(model)
    devices = sorted({p.device.index for p in inside.parameters() if p.is_cuda})
    # What a layer draws for its start is replaced here, and should move nobody's random numbers.
    with torch.random.fork_rng(devices=devices):
        work = start(inside)
        work.plan()
    inside = work.place()
    if wrapper is None:
        return inside, work.report
    wrapper.module = inside
    return wrapper, work.report


class _Work:
    """A walk that decides about every module first, and puts the new ones in their places after."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.everything = dict(model.named_modules(remove_duplicate=False))
        self.names: dict[int, list[str]] = {}
        for name, module in self.everything.items():
            self.names.setdefault(id(module), []).append(name)
        self.planned: dict[int, nn.Module] = {}
        self.entries: dict[int, Entry] = {}
        self.notes: list[str] = []

    def plan(self) -> None:
        """Decide about every module, from the outside in."""
        self._visit(self.model, set())

    def _visit(self, module: nn.Module, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if self.decide(module):
            return
        before = len(self.entries)
        for child in module.children():
            self._visit(child, seen)
        if len(self.entries) == before and module is not self.model:
            self.nothing_inside(module)

    def decide(self, module: nn.Module) -> bool:
        """Plan what becomes of a module; True if nothing inside it is looked at."""
        raise NotImplementedError

    def nothing_inside(self, module: nn.Module) -> None:
        """Say something of a module that has nothing inside it to report."""

    def note(self, module: nn.Module, after: nn.Module | None, exact: bool, note: str) -> None:
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
        return Report(tuple(self.entries.values()), tuple(self.notes))


class _Conversion(_Work):
    def __init__(self, model: nn.Module, rules: list[Rule] | None) -> None:
        super().__init__(model)
        self.rules = [Rule(lambda module: True, exact)] if rules is None else rules  # noqa: ARG005
        self.strict = rules is not None
        self.held = dict(_held(model))

    def plan(self) -> None:
        if self.strict:
            known = [name for name, module in self.everything.items() if name and _looks_convertible(module)]
            require_matched(self.rules, self.everything, known)
        super().plan()
        if self.strict:
            require_used(self.rules)

    def decide(self, module: nn.Module) -> bool:
        names = self.names[id(module)]
        rule = next((rule for rule in self.rules if rule.matches(names, module)), None)
        if is_ours(module):
            self._left(module, rule, "already a ConvNN layer")
            return True
        by_function = rule is not None and self.strict and not isinstance(rule.choice, type)
        if not _looks_convertible(module) and not by_function:
            return False
        if rule is None:
            self._left(module, rule, "no rule is about it")
            return False
        made = attempt(rule, module, self.held.get(id(module)))
        if isinstance(made, Twin):
            rule.used += 1
            self.planned[id(module)] = carry(module, made)
            self.note(module, made.module, made.exact, made.note)
        elif made is None:
            rule.used += 1
            self.note(module, None, True, "left by its rule")
        else:
            self._left(module, rule, made)
        return isinstance(made, Twin)

    def _left(self, module: nn.Module, rule: Rule | None, reason: str) -> None:
        self.note(module, None, True, reason)
        if rule is not None:
            rule.reasons.append(f"{self.names[id(module)][0]}: {reason}")


class _Reversion(_Work):
    def __init__(self, model: nn.Module, names: str) -> None:
        super().__init__(model)
        self.pattern, self.changed = names, list[str]()

    def plan(self) -> None:
        super().plan()
        if self.changed:
            raise ValueError(f"no longer what it came from: {'; '.join(self.changed)}")

    def decide(self, module: nn.Module) -> bool:
        if not is_ours(module):
            return False
        names, back = self.names[id(module)], vars(module).get(BACK)
        if not any(fnmatchcase(name, self.pattern) for name in names):
            self.note(module, None, True, f"not matched by {self.pattern!r}")
        elif BACK not in vars(module):
            self.note(module, None, True, "not made by convert")
        else:
            try:
                made = None if back is None else back(module)
                reason = "it has no way back" if back is None else "it has become another layer"
            except Refused as refused:
                made, reason = None, str(refused)
            if made is None:
                self.changed.append(f"{names[0] or 'the model'}: {reason}")
            else:
                untag(module, carry(module, Twin(made, True)))
                del vars(made)[BACK]
                self.planned[id(module)] = made
                self.note(module, made, True, "")
        return True


def _looks_convertible(module: nn.Module) -> bool:
    """Whether a reader of the report would look for this module in it."""
    known = isinstance(module, (_ConvNd, nn.MultiheadAttention)) or is_ours(module)
    return known or maker_of(module) is not None


def _held(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Modules that are also kept in plain attributes, and where: no twin is put there."""
    for name, owner in model.named_modules():
        for attribute, value in vars(owner).items():
            if attribute in {"_modules", "_parameters", "_buffers"} or attribute == BACK:
                continue
            items = value.values() if isinstance(value, dict) else value
            for item in items if isinstance(value, (dict, list, tuple, set)) else [value]:
                if isinstance(item, nn.Module):
                    yield id(item), f"{name}.{attribute}".lstrip(".")


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
