"""What a module has beside its parameters: what goes over to its twin, and what stands in the way of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from convnn.layers.configurable import Configurable
from convnn.surgery.twins import Refused, Twin

BACK, TAGS = "_convnn_back", "_convnn_tags"

# The dictionaries themselves go over, so that the handles of hooks can still remove them.
HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip
STATE_HOOKS = {
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
}  # fmt: skip
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TEACH = "register a twin with convnn.surgery.register, or give a function"
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def is_ours(module: nn.Module) -> bool:
    """Whether a module is a layer of this library, or the twin of something."""
    return isinstance(module, Configurable) or BACK in vars(module)


def why_no_twin(module: nn.Module) -> str:
    """Say why nobody makes a twin of a module that looks as if it should have one."""
    cases = {
        "already a ConvNN layer, made by convert: convnn.revert goes back": BACK in vars(module),
        "already a ConvNN layer": isinstance(module, Configurable),
        "parametrized: bake it in with torch.nn.utils.parametrize.remove_parametrizations": is_parametrized(module),
        "lazy: it has no weights before its first call; run the model once": isinstance(module, LazyModuleMixin),
        "a transposed convolution spreads each cell over a window; it gathers none": isinstance(module, TRANSPOSED),
        "quantised: convert the float model, then quantise": is_quantised(module),
    }
    name = f"{type(module).__module__}.{type(module).__name__}"
    bases = [base.__name__ for base in (*CONVOLUTIONS, nn.MultiheadAttention) if isinstance(module, base)]
    cases[f"{name} is a subclass of {''.join(bases)}; {TEACH}"] = bool(bases)
    return next((reason for reason, holds in cases.items() if holds), f"no twin is known of {name}; {TEACH}")


def is_quantised(module: nn.Module) -> bool:
    """Whether a module is one of torch's quantised ones, or made ready to be."""
    return bool({"quantized", "qat", "quantizable"} & set(type(module).__module__.split(".")))


def obstacle(module: nn.Module) -> str | None:
    """Why a module cannot be replaced by anything, or None if it can."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance, which a twin would not know"
    hooked = sorted(name for name in STATE_HOOKS if getattr(module, name, None))
    if hooked:
        return f"it has hooks on its state dict ({', '.join(hooked)}), which expect its own class"
    return None


def require_own(module: nn.Module, tensors: Sequence[str], parts: Sequence[str] = ()) -> None:
    """Refuse a module with parameters, buffers or modules its class does not have, such as those of pruning."""
    added = sorted(name for name, part in module._modules.items() if part is not None and name not in parts)
    if "activation_post_process" in added:
        raise Refused("made ready to be quantised: convert the float model, then prepare it")
    if added:
        raise Refused(f"somebody put {', '.join(added)} into it, which its twin would lose")
    others = sorted({*module._parameters, *module._buffers} - set(tensors))
    made = sorted(n for n in tensors if n not in module._parameters and getattr(module, n, None) is not None)
    if others or made:
        came = [f"it has {', '.join(others)}"] if others else []
        came += [f"its {', '.join(made)} is no parameter"] if made else []
        raise Refused(f"{' and '.join(came)}: undo weight_norm, spectral_norm or pruning first")


def carry(module: nn.Module, twin: Twin) -> nn.Module:
    """Give a twin the mode and the hooks of a module, and the way back."""
    made, kept = twin.module, {id(part) for part in module.modules()}
    for part in made.modules():
        if id(part) not in kept:
            part.training = module.training
    if all(part is not module for part in made.modules()):
        _carry_hooks(module, made)
    vars(made)[BACK] = twin.back
    return made


def _carry_hooks(module: nn.Module, made: nn.Module) -> None:
    for name in HOOKS:
        hooks, own = vars(module).get(name), vars(made).get(name)
        if isinstance(own, dict) and own and isinstance(hooks, dict):
            own.update(hooks)
        elif hooks or hooks is False:
            vars(made)[name] = hooks


def tag(module: nn.Module, made: nn.Module, fresh: nn.Module) -> None:
    """Carry over what somebody else wrote on a module: attributes a new one of its class does not have."""
    found = {name: value for name, value in vars(module).items() if name not in {*vars(fresh), *vars(made), BACK}}
    vars(made).update(found)
    vars(made)[TAGS] = tuple(found)


def untag(layer: nn.Module, made: nn.Module) -> None:
    """Give back what :func:`tag` carried over."""
    vars(made).update({name: vars(layer)[name] for name in vars(layer).get(TAGS, ()) if name in vars(layer)})


def built(make: Callable[..., Any], **arguments: Any) -> Any:
    """A layer, or a refusal with the reason it gave."""
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from error
