"""Through a whole model: every convolution and attention for its twin, and back."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from convnn.surgery.carry import BACK, carry, is_ours, is_quantised, untag, why_no_twin
from convnn.surgery.report import Entry, Report
from convnn.surgery.rules import Rule, Rules, attempt, exact, leave, near, require_matched, require_used, rules_of
from convnn.surgery.twins import Refused, Twin, load_integrations, maker_of
from convnn.surgery.walk import Walk, held, tied
from convnn.surgery.wrappers import inner_of, require_plain


def convert(model: nn.Module, rules: Rules | None = None, *, copy: bool = True) -> tuple[Any, Report]:
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
    chosen = None if rules is None else rules_of(rules)
    return _through(model, copy, lambda inside: Conversion(inside, chosen))


def revert(model: nn.Module, names: str = "*", *, strict: bool = True, copy: bool = True) -> tuple[Any, Report]:
    """Replace twins by the modules they came from, with the parameters the twins have now.

    Args:
        model: what :func:`convert` made, trained or not.
        names: a pattern of names; what it does not match stays. One that matches no module is an error.
        strict: whether a twin that has become something its module could not be (a hybrid whose 1x1 has learned, a
            share of features that was raised, a limited k) is an error, and nothing is changed; otherwise it is left.
        copy: whether the model that was given stays as it is.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3))
        >>> again, report = revert(convert(model)[0])
        >>> type(again[0]).__name__, torch.equal(again[0].weight, model[0].weight)
        ('Conv2d', True)
    """
    require_plain(model)
    return _through(model, copy, lambda inside: Reversion(inside, names, strict))


def _through(model: Any, copy: bool, start: Callable[[nn.Module], Walk]) -> tuple[Any, Report]:
    """Do some work on a model or on its copy; what goes wrong goes wrong before anything is changed."""
    if copy:
        try:
            model = copying.deepcopy(model)
        except Exception as error:
            raise ValueError(f"the model cannot be copied ({error}); convert it in place with copy=False") from error
    wrapper, inside = inner_of(model)
    devices = sorted({parameter.device.index for parameter in inside.parameters() if parameter.is_cuda})
    # What a layer draws for its start is replaced here, and should move nobody's random numbers.
    with torch.random.fork_rng(devices=devices):
        walk = start(inside)
        walk.plan()
    inside = walk.place()
    if wrapper is not None:
        wrapper.module = inside
    return (inside if wrapper is None else wrapper), walk.report


class Conversion(Walk):
    """From modules to twins."""

    def __init__(self, model: nn.Module, rules: list[Rule] | None) -> None:
        super().__init__(model)
        self.strict = rules is not None
        self.rules = [Rule(nn.Module, exact)] if rules is None else rules
        self.held, self.tied = held(model), tied(model)

    def plan(self) -> None:  # noqa: D102
        if self.strict:
            known = [name for name, module in self.everything.items() if name and _looks_convertible(module)]
            require_matched(self.rules, self.everything, known)
        super().plan()
        if self.strict:
            require_used(self.rules, self.everything)

    def decide(self, module: nn.Module) -> bool:  # noqa: D102
        rule = self._rule(module)
        if is_ours(module):
            self._leave(module, rule, why_no_twin(module))
            return True
        if rule is not None and rule.choice is leave:
            self._leave_all(module, rule)
            return True
        if not _looks_convertible(module) and (rule is None or not rule.is_for_any_module):
            return False
        made = attempt(rule, module, self.held.get(id(module))) if rule is not None else "no rule is about it"
        if isinstance(made, Twin):
            made = self._untied(module, made)
        if isinstance(made, str) or rule is None:
            self._leave(module, rule, str(made))
            return False
        rule.used += 1
        if made is not None:
            self.planned[id(module)] = carry(module, made)
            self.enter(module, made.module, made.exact, made.note)
        elif _looks_convertible(module):
            self.enter(module, None, True, "left by its rule")
        return made is not None

    def passed(self, module: nn.Module, inside: list[Entry]) -> None:  # noqa: D102
        name = type(module).__name__
        # An attention is no news around another one, but it is around the convolutions it is made of.
        attends = _is_attention(name) and not any(_is_attention(entry.before) for entry in inside)
        if attends or ("conv" in name.lower() and is_quantised(module) and not inside):
            rule = self._rule(module)
            self._leave(module, rule, "no rule is about it" if rule is None else why_no_twin(module))

    def _rule(self, module: nn.Module) -> Rule | None:
        matching = [rule for rule in self.rules if rule.matches(self.names[id(module)], module)]
        for other in matching[1:]:
            other.reasons.append(f"{self.names[id(module)][0]}: the rule {matching[0]} comes first")
        return matching[0] if matching else None

    def _untied(self, module: nn.Module, made: Twin) -> Twin | str:
        """The twin, or why it cannot be: a parameter that it does not hold itself is somebody else's too."""
        kept = {id(parameter) for parameter in made.module.parameters()}
        lost = [self.tied[id(p)] for p in module.parameters() if id(p) in self.tied and id(p) not in kept]
        return f"its twin would untie {' and '.join(lost[0])}" if lost else made

    def _leave_all(self, module: nn.Module, rule: Rule) -> None:
        """Leave a module with all that is in it, and say so of what would have a twin."""
        rule.used += 1
        for part in module.modules():
            self.seen.add(id(part))
            if _looks_convertible(part):
                self.enter(part, None, True, "left by its rule")

    def _leave(self, module: nn.Module, rule: Rule | None, reason: str) -> None:
        self.enter(module, None, True, reason)
        if rule is not None:
            rule.reasons.append(f"{self.names[id(module)][0]}: {reason}")


class Reversion(Walk):
    """From twins to modules."""

    def __init__(self, model: nn.Module, names: str, strict: bool) -> None:
        super().__init__(model)
        self.pattern, self.strict, self.changed = names, strict, list[str]()

    def plan(self) -> None:  # noqa: D102
        super().plan()
        known = [entry.name for entry in self.entries.values()]
        if self.pattern != "*" and not any(fnmatchcase(name, self.pattern) for name in self.everything):
            said = near(self.pattern, known) if known else "the model has no twins"
            raise ValueError(f"{self.pattern!r} matches nothing; {said}")
        if self.changed and self.strict:
            raise ValueError(f"no longer what it came from: {'; '.join(self.changed)}")

    def decide(self, module: nn.Module) -> bool:  # noqa: D102
        if not is_ours(module):
            return False
        names = self.names[id(module)]
        if not any(fnmatchcase(name, self.pattern) for name in names):
            self.enter(module, None, True, f"not matched by {self.pattern!r}")
        elif BACK not in vars(module):
            self.enter(module, None, True, "not made by convert")
        else:
            self._turn_back(module, vars(module)[BACK])
        return True

    def _turn_back(self, module: nn.Module, back: Any) -> None:
        try:
            made = None if back is None else back(module)
            reason = "it has no way back" if back is None else "it has become another layer"
        except Refused as refused:
            made, reason = None, str(refused)
        if made is None:
            self.changed.append(f"{self.names[id(module)][0] or 'the model'}: {reason}")
            self.enter(module, None, True, reason)
            return
        untag(module, carry(module, Twin(made, True)))
        vars(made).pop(BACK)
        self.planned[id(module)] = made
        self.enter(module, made, True, "")


def _is_attention(name: str) -> bool:
    return "attention" in name.lower() or "attn" in name.lower()


def _looks_convertible(module: nn.Module) -> bool:
    """Whether a reader of the report would look for this module in it."""
    known = isinstance(module, (_ConvNd, nn.MultiheadAttention)) or is_ours(module)
    return known or maker_of(module) is not None
