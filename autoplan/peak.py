"""The most bytes that tensors of this process hold at once, counted storage by storage.

Resident-set figures of the operating system include libraries, allocator caches and whatever else the process did before; a
forecast speaks of tensors. A storage counts from the operator that made it until it is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakMemory(TorchDispatchMode):
    """Counts while active. `peak_bytes` includes the storages of the tensors given at the start."""

    def __init__(self, resident: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._known: set[int] = set()
        for tensor in resident:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.is_meta or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now_bytes -= size
