"""Whether ranks have the same: a batch that each has read or drawn whole, told from a number that equal values share.

Where no loader hands batches out, a step's first forward tells what it is about. It is looked at in the first two
steps only: the first one's forward may be a trial of shapes. A model that `model.compile()` has compiled in place
shows nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from distributedtorch.core.override import hooked

_STEPS = 2


def proof_of(values: Any, *, anywhere: bool = False) -> float:
    """A number that equal values share and others do not; -1 where there is nothing to tell it from.

    Args:
        values: Tensors, arrays, numbers and text, in lists, tuples and mappings; other things are left out.
        anywhere: Look at what lies on a device, too: it may have been drawn there, from another random state.
    """
    digest = hashlib.blake2b(digest_size=6)
    return float(int.from_bytes(digest.digest())) if _take_in(digest, values, anywhere) else -1.0


def _take_in(digest: Any, value: Any, anywhere: bool) -> bool:
    """Take in all that can be told of a value; whether there was any."""
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.layout != torch.strided or value.is_meta or not value.numel():
            return False
        if not (anywhere or value.device.type == "cpu"):
            return False
        try:
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        except RuntimeError:  # inside a transform (vmap) it has no bytes
            return False
        return True
    if isinstance(value, bool | int | float | complex | str | bytes):
        digest.update(repr(value).encode())
        return True
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.dtype != object:
        digest.update(value.tobytes())
        return True
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any([_take_in(digest, one, anywhere) for one in inside])


class Drawn:
    """What each step's first forward was given, while no loader hands batches out."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        """Whether a backward is under way, which may compute forwards again."""
        self._known: set[int] = set()
        self._hooks: list[Callable[[], None]] = []
        self._steps = self._calls = 0
        self._inside: nn.Module | None = None
        self._proof = -1.0
        self.rows: int | None = None
        """Their leading dimension, if they have one."""

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Look at the forwards of these models, and of what they are made of, without a mark on them."""
        self._known |= {id(module) for model in models for module in model.modules()}
        if not self._hooks:
            self._hooks.append(register_module_forward_pre_hook(self._begins).remove)

    def close(self) -> None:
        """Look at nothing any more."""
        for remove in self._hooks:
            remove()
        self._hooks = []

    def _begins(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._inside is not None:
            return
        if id(module) in self._known or id(getattr(module, "_orig_mod", None)) in self._known:  # torch.compile's
            # A hook for all modules is not told keywords, and one that was told of them would not go without a trace.
            self._inside = module
            handle = hooked(module, module.register_forward_hook(self._ends, with_kwargs=True, always_call=True))
            self._hooks.append(handle)

    def _ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._inside = None
        self._hooks.pop()()
        self.saw(args, kwargs)

    def saw(self, args: Any, kwargs: Any) -> None:
        """A model was given this."""
        if not torch.is_grad_enabled() or self._busy():
            return
        self._calls += 1
        if self._calls == 1:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.rows = next((len(tensor) for tensor in tensors if tensor.dim()), None)
            self._proof = -1.0 if self.over else proof_of(tensors, anywhere=True)

    @property
    def over(self) -> bool:
        """Whether it has told all it can."""
        return self._steps >= _STEPS

    def tell(self) -> float:
        """What must be the same on all ranks at the end of this step; below 0: nothing that is sure."""
        return self._proof if self._calls == 1 or self._steps else -1.0

    def stepped(self) -> None:
        """An optimizer has stepped: the next forward is about another batch."""
        self._steps += self._calls > 0
        self._calls, self._proof, self.rows, self._inside = 0, -1.0, None, None
