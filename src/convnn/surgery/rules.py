"""What should stand where: patterns of names, classes or predicates, and a layer or a function for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from convnn.surgery.carry import obstacle, why_no_twin
from convnn.surgery.twins import Refused, Twin, maker_of

Key: TypeAlias = str | type[nn.Module] | Callable[[nn.Module], bool]
Choice: TypeAlias = type[nn.Module] | Callable[[Any], nn.Module | Twin | None]
Rules: TypeAlias = Mapping[Any, Choice]


def exact(module: nn.Module) -> Twin:
    """A choice for a rule: the twin that changes nothing."""
    maker = maker_of(module)
    if maker is None:
        raise Refused(why_no_twin(module))
    return maker(module, None)


def leave(module: nn.Module) -> None:
    """A choice for a rule: the module stays, with all that is in it."""


@dataclass
class Rule:
    """One rule, and what became of what it matched."""

    key: Key
    choice: Choice
    used: int = 0
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) and not callable(self.key):
            raise TypeError(f"a rule is for a pattern of names, a class or a predicate, got {self.key!r}")
        if isinstance(self.choice, nn.Module):
            raise TypeError(
                f"what a rule puts there must be a layer class or a function, got an instance of "
                f"{type(self.choice).__name__}: give the class, configured by using"
            )
        if not callable(self.choice):
            raise TypeError(f"what a rule puts there must be a layer class or a function, got {self.choice!r}")

    @property
    def is_for_any_module(self) -> bool:
        """Whether it is about whatever it matches, and not about what has a twin only."""
        return not isinstance(self.choice, type) and self.choice is not exact

    def matches(self, names: Sequence[str], module: nn.Module) -> bool:
        """Whether this rule is about a module."""
        if isinstance(self.key, str):
            return any(fnmatchcase(name, self.key) for name in names)
        return isinstance(module, self.key) if isinstance(self.key, type) else bool(self.key(module))

    def twin(self, module: nn.Module) -> Twin | None:
        """What this rule puts in the place of a module; None to leave it."""
        if isinstance(self.choice, type):
            maker = maker_of(module)
            if maker is None:
                raise Refused(why_no_twin(module))
            return maker(module, self.choice)
        made = self.choice(module)
        if made is None or made is module:
            return None
        if isinstance(made, nn.Module):
            name = getattr(self.choice, "__name__", repr(self.choice))
            return Twin(made, exact=False, note=f"made by {name}, which says nothing of exactness")
        if not isinstance(made, Twin):
            raise TypeError(f"the function of a rule must give a module, a Twin or None, got {made!r}")
        return made

    def __str__(self) -> str:
        return repr(self.key) if isinstance(self.key, str) else getattr(self.key, "__name__", repr(self.key))


def rules_of(rules: Rules) -> list[Rule]:
    """What was given as rules, in their order."""
    if not isinstance(rules, Mapping):
        raise TypeError(f"rules must be a mapping such as {{'conv1': HybridConv2d.using(ratio=0.5)}}, got {rules!r}")
    return [Rule(key, choice) for key, choice in rules.items()]


def attempt(rule: Rule, module: nn.Module, held: str | None) -> Twin | str | None:
    """The twin by a rule, None to leave the module, or the reason there is none."""
    try:
        made = rule.twin(module)
    except Refused as refused:
        return str(refused)
    if made is None or held is not None:
        return made and f"it is also kept in {held}, where no twin would take its place"
    wrapped = any(part is module for part in made.module.modules())
    return (None if wrapped else obstacle(module)) or made


def require_matched(rules: Sequence[Rule], everything: Mapping[str, nn.Module], known: Sequence[str]) -> None:
    """Require that every rule is about something; otherwise name what is near."""
    for rule in rules:
        if not any(rule.matches([name], module) for name, module in everything.items()):
            raise ValueError(f"the rule {rule} matches nothing; {_near(rule, everything, known)}")


def _near(rule: Rule, everything: Mapping[str, nn.Module], known: Sequence[str]) -> str:
    if not known:
        return "the model has nothing that could be converted"
    if not isinstance(rule.key, str):
        kinds = sorted({type(everything[name]).__name__ for name in known})
        return f"what could be converted is of {', '.join(kinds)}"
    return near(rule.key, known)


def near(pattern: str, known: Sequence[str]) -> str:
    """Which names somebody may have meant by a pattern that matches none."""
    close = get_close_matches(pattern, known, 3, cutoff=0.4)
    return f"did you mean {', '.join(map(repr, close))}?" if close else f"names are {_some(known)}"


def require_used(rules: Sequence[Rule], everything: Mapping[str, nn.Module]) -> None:
    """Require that every rule had a say; otherwise give the reasons."""
    for rule in rules:
        if not rule.used:
            matched = [(name, module) for name, module in everything.items() if rule.matches([name], module)]
            reasons = rule.reasons or [_unused(name, module) for name, module in matched]
            more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
            raise ValueError(f"the rule {rule} replaced nothing: {'; '.join(reasons[:3])}{more}")


def _unused(name: str, module: nn.Module) -> str:
    inside = f"; a rule for what is in it is {f'{name}.*'!r}" if name and any(module.children()) else ""
    return f"{name} ({type(module).__name__}): it has no twin, or is inside what was replaced{inside}"


def _some(names: Sequence[str]) -> str:
    said = ", ".join(map(repr, names[:5]))
    return said + (f" and {len(names) - 5} more" if len(names) > 5 else "")
