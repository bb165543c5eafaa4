"""How much memory a piece of torch code really holds, on any device."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Watch the storages that operations create, forward and backward, while the mode is on.

    What existed before does not count, and neither does a view.

    Example:
        >>> with LiveTensors() as live:
        ...     x = torch.zeros(100)
        ...     y = x + x[:10].sum()
        >>> live.peak, live.largest
        (804, 100)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        """The most bytes alive at once."""
        self.largest = 0
        """The most elements in one tensor."""
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it made."""
        before = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in before:
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._seen:
            return
        size = storage.nbytes()
        self.largest = max(self.largest, size // tensor.element_size())
        self.now += size
        self.peak = max(self.peak, self.now)
        # The Python object of a storage lives exactly as long as its memory.
        self._seen[key] = weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.now -= size
        del self._seen[key]
