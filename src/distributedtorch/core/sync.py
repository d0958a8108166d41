"""The contract of a sync: how the replicas of one optimizer's parameters agree. Final classes live in `sync/`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.core.errors import CheckpointError, explain


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one optimizer trains: what a sync is made for."""

    params: list[nn.Parameter]
    names: list[str]
    optimizer: torch.optim.Optimizer
    models: list[nn.Module]
    """Where the parameters are used."""
    name: str
    """Tells this optimizer's exchanges from those of others."""
    block: str | None = None
    """The class of the modules that the plan calls blocks."""
    share: bool = False
    """Whether the plan keeps parameters once per host."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What one rank keeps of the optimizer's state of one parameter."""

    low: int
    high: int
    """For which of the parameter's elements, counted in memory order."""
    stride: tuple[int, ...]
    """The memory order."""
    shape: tuple[int, ...] | None
    """The shape in which values of the parameter's own shape are kept in pieces; None: they are kept whole."""
    copy: tuple[int, int] = (0, 1)
    """Which of how many ranks that keep the same this one is."""


class Sync(ABC):
    """How the replicas of one optimizer's parameters agree."""

    params: list[nn.Parameter]
    names: list[str]
    optimizer: torch.optim.Optimizer | None
    eager: bool = False
    """Whether it exchanges at every backward, also inside a window of several batches."""
    lockstep: bool = True
    """Whether replicas step together: gradients are exchanged, and the loop sees that ranks are at the same batch."""
    meets: bool = True
    """Whether all ranks come together as they train, so that what one asks for is heard by all."""
    divided: bool = False
    """Whether each rank has a part of the optimizer's state only."""

    @property
    @abstractmethod
    def filled(self) -> list[bool]:
        """Which parameters have gradients of earlier backwards that were not exchanged and are not shown."""

    @property
    def pending(self) -> bool:
        """Whether a window that is still open has given gradients that are not shown."""
        return any(self.filled)

    windowed: bool = False
    """Whether steps are made of windows of several batches (`accumulate`)."""
    scale: float
    """What the sum over ranks is multiplied by, set by the loop before the first `ready` of a backward."""
    root: float = 1.0
    """What backward started from (the loss scale), set by the loop before `begin`; `scale` takes it out again."""

    @abstractmethod
    def begin(self, *, exchange: bool, hide: bool) -> None:
        """Before a backward: leave `p.grad` so that autograd may write. `hide`: no gradient shown afterwards."""

    @abstractmethod
    def ready(self, index: int, *, again: bool) -> None:
        """Autograd has finished parameter `index`'s gradient in this backward; `again`: not for the first time."""

    @abstractmethod
    def hold(self) -> None:
        """Send nothing more before the end of this backward: gradients may come in several parts."""

    @abstractmethod
    def launch_rest(self) -> None:
        """After a backward: begin the exchanges that wait for gradients that never came."""

    @abstractmethod
    def finish(self, used: Sequence[bool]) -> None:
        """Complete the exchanges; `used[i]`: some rank has a gradient for parameter i."""

    @abstractmethod
    def restore(self) -> None:
        """After a backward that no rank's gradients of this sync came from: show again what `begin` put away."""

    @abstractmethod
    def wipe(self, index: int) -> None:
        """Make parameter `index`'s gradient that was not exchanged yet zero."""

    @abstractmethod
    def assigned(self) -> bool:
        """Whether some `p.grad` is a tensor the user put there."""

    @abstractmethod
    def update(self, step: Callable[[], Any]) -> Any:
        """Run the optimizer's own `step` on what this rank owns, then make all ranks agree."""

    def whole_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The optimizer's state of these parameters as one process would hold it. A group call where divided."""
        assert self.optimizer is not None
        return {param: self.optimizer.state[param] for param in self.params if param in self.optimizer.state}

    def take_state(self) -> None:
        """Keep of a whole state just loaded what this rank owns: all of it, unless divided."""
        return

    def state_loaded(self) -> None:
        """The optimizer's state has been loaded, of each parameter what this rank keeps; after `loaded`."""
        return

    def keeps(self, index: int) -> Kept:
        """What this rank keeps of the state of parameter `index`: all of it, unless divided."""
        param = self.params[index]
        return Kept(low=0, high=param.numel(), stride=tuple(param.stride()), shape=None)

    def own_state(self) -> dict[str, Tensor]:
        """What this rank alone has and needs to go on as it would have."""
        return {}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `own_state` gave."""
        return

    common: tuple[str, ...] = ()
    """With what names in `own_state` begin of what is the same on all ranks: a run in another world goes on with it."""
    comes_and_goes: tuple[str, ...] = ("wire/",)
    """With what names begin of what is there at times only."""

    def take_common_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on, in another world, from what is common in `own_state`."""
        return

    def settle(self) -> None:
        """Make replicas the same that can differ. A group call."""
        return

    def loaded(self) -> None:
        """Values were put into the parameters from outside, on all ranks. A group call."""
        return

    def stepped(self) -> None:
        """The optimizer has stepped, or has left a step out."""
        return

    @property
    def backlog(self) -> int | None:
        """Gradients that are not applied yet, for a sync that has such."""
        return None

    def consensus(self) -> dict[int, Tensor]:
        """By the id of a tensor that differs between ranks what they stand for together. A group call."""
        return {}

    def bytes_of_state(self) -> int:
        """Bytes of the optimizer's state of these parameters on this rank."""
        states = [self.optimizer.state[p] for p in self.params if p in self.optimizer.state] if self.optimizer else []
        return sum(bytes_of(tensor) for state in states for _, tensor in leaves(state))

    @abstractmethod
    def bytes_held(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state on this rank now."""


def leaves(value: Any, *path: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors in nested state, each with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, *path, key)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves(item, *path, number)


def share(low: int, high: int, copy: tuple[int, int]) -> tuple[int, int]:
    """Of a range that several ranks keep, the part that the one of this number stands for."""
    number, copies = copy
    return low + (high - low) * number // copies, low + (high - low) * (number + 1) // copies


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's values, and of a sparse one's numbers of rows."""
    if tensor.is_sparse:
        return bytes_of(tensor._indices()) + bytes_of(tensor._values())
    return tensor.numel() * tensor.element_size()


def require_like(name: str, saved: Tensor, like: Tensor) -> Tensor:
    """What was saved of this rank, where its shape and type are those of what it goes with here.

    Raises:
        CheckpointError: They are not.
    """
    if saved.shape == like.shape and saved.dtype == like.dtype:
        return saved
    shapes = [f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in (saved, like)]
    do = "go on with the same model, optimizer, hosts and DISTRIBUTEDTORCH_BUCKET_BYTES, or under another plan"
    raise CheckpointError(explain(f"the checkpoint has {name!r} as {shapes[0]}", f"as here, {shapes[1]}", do))
