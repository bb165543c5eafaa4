"""Which layer is the twin of which module, and how others add theirs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

from torch import nn

PACKAGES = ("timm", "torchvision", "transformers")


class Refused(ValueError):  # noqa: N818 - what happened, in the words of the report
    """Raised for a module that cannot have a twin; the message is the reason the report gives."""


@dataclass(frozen=True)
class Twin:
    """A layer that stands where a module stood.

    Args:
        module: the layer; it holds the parameters of the module themselves wherever their shapes allow.
        exact: whether its outputs are the module's, up to rounding.
        note: what a reader of the report should know.
        back: makes the module again from the layer as it is then, or gives None, or raises :class:`Refused`, where the
            layer is no longer something the module could be. A function of a file, or a partial of one: it is pickled
            with the model.
    """

    module: nn.Module
    exact: bool
    note: str = ""
    back: Callable[[nn.Module], nn.Module | None] | None = None


Match: TypeAlias = type[nn.Module] | Callable[[nn.Module], bool]
Maker: TypeAlias = Callable[[Any, Any], Twin]
"""From a module and the layer class of a rule, or None for the twin that changes nothing."""

_MAKERS: dict[Any, Maker] = {}


def register(match: Match, twin: Maker) -> None:
    """Let :func:`convnn.convert` replace more modules.

    What was registered last is asked first; the same ``match`` again replaces what it had.

    Args:
        match: a class, which stands for itself and not for its subclasses, or a predicate of a module.
        twin: ``(module, layer) -> Twin``; ``layer`` is the class a rule gave, configured by ``using``, or None for the
            twin that changes nothing. It raises :class:`Refused` where there can be none. Hooks and the mode of the
            module are carried over by the caller.

    Example:
        >>> from convnn import convert, recipes, surgery
        >>> class Scaled(nn.Conv2d):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> def doubled(module, layer):
        ...     plain = nn.Conv2d(module.in_channels, module.out_channels, module.kernel_size)
        ...     plain.load_state_dict({name: 2 * tensor for name, tensor in module.state_dict().items()})
        ...     return surgery.Twin(recipes.from_conv(plain), exact=True, note="the 2 is in its weights")
        >>> surgery.register(Scaled, doubled)
        >>> model, report = convert(nn.Sequential(Scaled(3, 4, 3)))
        >>> type(model[0]).__name__
        'ConvNN2d'
        >>> surgery.unregister(Scaled)
    """
    if not callable(match) or (isinstance(match, type) and not issubclass(match, nn.Module)):
        raise TypeError(f"match must be a class of modules or a predicate, got {match!r}")
    _MAKERS.pop(match, None)
    _MAKERS[match] = twin


def unregister(match: Match) -> None:
    """Take back what :func:`register` added."""
    if match not in _MAKERS:
        raise ValueError(f"nothing is registered for {match!r}")
    del _MAKERS[match]


def maker_of(module: nn.Module) -> Maker | None:
    """Who makes the twin of a module, if anybody does."""
    for match, maker in reversed(_MAKERS.items()):
        fits = type(module) is match if isinstance(match, type) else match(module)
        if fits:
            return maker
    return None


def load_integrations(model: nn.Module) -> None:
    """Import what knows the modules of other packages, for those packages the model has modules of."""
    present = {type(module).__module__.partition(".")[0] for module in model.modules()}
    for package in PACKAGES:
        name = f"convnn.integrations.{package}"
        if package in present and find_spec(name) is not None:
            importlib.import_module(name)
