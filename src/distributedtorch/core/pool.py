"""Memory for a while, used again rather than asked of the system anew."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from distributedtorch.core.segment import Own

_HOST = torch.device("cpu")


class Pool:
    """Blocks of host memory, private or in this rank's segment."""

    def __init__(self, own: Own | None = None) -> None:
        self.own = own
        """Where memory lies from which exchanges are made without a copy."""
        self._free: dict[tuple[torch.dtype, bool], list[Tensor]] = defaultdict(list)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device = _HOST) -> Tensor:
        """Memory of its own, in the segment where there is one."""
        if self.own is not None and device.type == "cpu":
            return self.own.zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device = _HOST, *, shared: bool = False) -> Tensor:
        """A block that was given back, where the size it last had is near, or else a new one.

        On accelerators torch's own allocator does that. `shared`: in the segment, if there is one.
        """
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        shared = shared and self.own is not None
        free = self._free[dtype, shared]
        fits = [k for k, block in enumerate(free) if numel <= block.numel() <= 2 * numel]
        if fits:
            block = free.pop(min(fits, key=lambda k: free[k].numel()))
            # Not a view of it: nothing else is to look at this memory.
            return block.new_empty(0).set_(block.untyped_storage(), 0, (numel,), (1,))
        small = [k for k, block in enumerate(free) if block.numel() < numel]
        if small:
            free.pop(small[0])  # let it go, so that there are hardly more blocks than are used at once
        return self.zeros(numel, dtype) if shared else torch.empty(numel, dtype=dtype)

    def give_back(self, tensors: list[Tensor]) -> None:
        """Return borrowed memory."""
        for tensor in [tensor for tensor in tensors if tensor.device.type == "cpu"]:
            block = tensor.new_empty(0).set_(tensor.untyped_storage())
            shared = self.own is not None and self.own.offset_of(tensor) is not None
            self._free[tensor.dtype, shared].append(block)

    def let_go(self) -> None:
        """Keep no memory for later."""
        self._free.clear()
