"""Layers that can be configured ahead of being built."""

from __future__ import annotations

import copy
import inspect
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar

from torch import nn

L = TypeVar("L", bound="Configurable")


class Configurable(nn.Module):
    """A layer whose class can be given some of its arguments ahead of time."""

    given: ClassVar[dict[str, Any]] = {}

    @classmethod
    def using(cls: type[L], **options: Any) -> type[L]:
        """Make a subclass of this layer with some options set, for whoever wants a class and not an instance.

        An option given when the layer is built wins. A module among the options is copied for every layer, so that
        layers do not share what it learns.

        Example:
            >>> from convnn import ConvNN2d
            >>> nearest_in_features = ConvNN2d.using(similarity="cosine", k=5)
            >>> issubclass(nearest_in_features, ConvNN2d)
            True
            >>> nearest_in_features(3, 8, 3, padding=1)(torch.randn(1, 3, 6, 7)).shape
            torch.Size([1, 8, 6, 7])
        """
        base: Any = _plain(cls)
        known = [name for name in _signature(base).parameters if name != "self"]
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, 3) or known
                raise TypeError(f"{cls.__name__} has no option {name!r}; did you mean {', '.join(close)}?")
        return _configured(base, {**cls.given, **options})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let an instance of a configured class be pickled: its class has no name to be found by."""
        base = _plain(type(self))
        if base is type(self):
            return super().__reduce_ex__(protocol)
        return _revived, (base, type(self).given), dict(self.__dict__)

    def __deepcopy__(self: L, memo: dict[int, Any]) -> L:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


def _plain(cls: type[Any]) -> type[Any]:
    """The class that was configured, or the class itself if it was not."""
    return cls.__mro__[1] if cls is not Configurable and "given" in vars(cls) else cls


def _signature(cls: type[Any]) -> inspect.Signature:
    """The arguments of the first constructor that names them all."""
    signatures = [inspect.signature(c.__dict__["__init__"]) for c in cls.__mro__ if "__init__" in vars(c)]
    named = (s for s in signatures if not any(p.kind is p.VAR_KEYWORD for p in s.parameters.values()))
    return next(named, signatures[0])


def _configured(base: type[Any], options: dict[str, Any]) -> type[Any]:
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        taken = _signature(base).bind_partial(self, *arguments).arguments
        own = {name: fresh(option) for name, option in options.items() if name not in taken}
        base.__init__(self, *arguments, **{**own, **named})

    names = {"__init__": __init__, "given": options, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**names, "__module__": base.__module__, "__qualname__": base.__qualname__})


def fresh(option: Any) -> Any:
    """A copy of what can learn, so that no two layers share it."""
    return copy.deepcopy(option) if isinstance(option, (nn.Module, list, tuple)) else option


def _revived(base: type[Any], options: dict[str, Any]) -> Any:
    made: Any = _configured(base, options)
    return made.__new__(made)
