"""What may stand around a model, and what may not."""

from __future__ import annotations

from torch import jit, nn
from torch.nn.parallel import DistributedDataParallel

FIRST = "convert the model first, then"


def inner_of(model: nn.Module) -> tuple[nn.DataParallel[nn.Module] | None, nn.Module]:
    """A wrapper that only calls what is in it, and what is in it."""
    return (model, model.module) if isinstance(model, nn.DataParallel) else (None, model)


def require_plain(model: nn.Module) -> None:
    """Require a model that nothing holds on to: no process group, no compiler, no script."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        reason = _wrapped(module)
        if reason:
            raise ValueError(f"{name or 'the model'} is {reason}")


def _wrapped(module: nn.Module) -> str | None:
    bases = {base.__name__ for base in type(module).__mro__}
    if isinstance(module, DistributedDataParallel):
        return f"wrapped in DistributedDataParallel, which keeps its parameters: {FIRST} wrap it (.module is inside)"
    if bases & {"FullyShardedDataParallel", "FSDPModule"}:
        return f"sharded by FSDP, which keeps its parameters: {FIRST} shard it"
    if "_orig_mod" in module._modules:
        return f"wrapped by torch.compile: {FIRST} compile it (._orig_mod is inside)"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return f"compiled in place: {FIRST} compile it"
    if isinstance(module, jit.ScriptModule):
        return f"a script, whose modules cannot be replaced: {FIRST} script it"
    return None
