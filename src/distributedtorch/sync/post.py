"""Post-local SGD: gradients are averaged after every step at first, as under ddp; then replicas step alone.

Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.

Each rank holds: what ddp holds at first, with a lossy wire also the parameters once more; what `local` holds later.
Travels per step and rank: 2 Psi (N-1)/N at first, behind backward; that much divided by `every` afterwards.
Use it where `local` falls behind at the start, when gradients change fast and optimizers such as Adam learn their
scale: `local(every=16,after=100)`. Until the two part, replicas are those of ddp, optimizer state included. What a wire
left out of gradients by then is dropped: what travels afterwards are changes of parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.comm import Comm
from distributedtorch.core.sync import Trained, bytes_of
from distributedtorch.core.wire import Wire
from distributedtorch.sync.ddp import Ddp
from distributedtorch.sync.local import Local
from distributedtorch.sync.loose import Meet
from distributedtorch.sync.memory import checksum


class PostLocal(Local):
    """Replicas that average gradients for so many steps, and their parameters in rounds after that."""

    common = ("steps",)

    def __init__(self, trained: Trained, comm: Comm, wire: Wire, meet: Meet, *, after: int, **options: Any) -> None:
        super().__init__(trained, comm, wire, meet, **options)
        self.after, self.trained = after, trained
        self.first: Ddp | None = None
        """What averages gradients; None when replicas step alone."""
        self._set_out()

    def _set_out(self) -> None:
        """As many steps were taken as `steps` says: together, or each replica alone."""
        if self.steps >= self.after:
            if self.first is not None:
                self.first = None
                for param in self.params:
                    param.grad = None if param.grad is None else param.grad.clone()  # it looked into ddp's memory
                self.remember()
        elif self.first is None:
            params, names, optimizer = self.params, self.names, self.optimizer
            self.first = Ddp(params, names, optimizer, self.comm, self.trained.name, wire=self.wire)
        self.began = time.monotonic()

    @property
    def lockstep(self) -> bool:  # type: ignore[override]
        return self.first is not None

    @property
    def eager(self) -> bool:  # type: ignore[override]
        return self.first is None

    @property
    def filled(self) -> list[bool]:
        return super().filled if self.first is None else self.first.filled

    @property
    def pending(self) -> bool:
        return super().pending if self.first is None else self.first.pending

    def begin(self, *, exchange: bool, hide: bool) -> None:
        if self.first is not None:
            self.first.root, self.first.windowed = self.root, self.windowed
            return self.first.begin(exchange=exchange, hide=hide)
        return super().begin(exchange=exchange, hide=hide)

    def ready(self, index: int, *, again: bool) -> None:
        if self.first is not None:
            self.first.scale = self.scale
            self.first.ready(index, again=again)

    def hold(self) -> None:
        if self.first is not None:
            self.first.hold()

    def launch_rest(self) -> None:
        if self.first is not None:
            self.first.scale = self.scale
            self.first.launch_rest()

    def finish(self, used: Sequence[bool]) -> None:
        super().finish(used) if self.first is None else self.first.finish(used)

    def restore(self) -> None:
        super().restore() if self.first is None else self.first.restore()

    def wipe(self, index: int) -> None:
        super().wipe(index) if self.first is None else self.first.wipe(index)

    def assigned(self) -> bool:
        return super().assigned() if self.first is None else self.first.assigned()

    def update(self, step: Callable[[], Any]) -> Any:
        if self.first is None:
            return super().update(step)
        result = step()
        self.steps += 1
        if self.steps >= self.after:
            self._part()
        return result

    def _part(self) -> None:
        """From here on replicas step alone, and begin alike."""
        self._set_out()
        sums = [checksum(param.detach().contiguous()) for param in self.params]
        every = self.comm.exchange(f"{self.name}/parting", torch.tensor(sums))
        if bool((every == every[0]).all()):
            self.average_buffers()
            self.start_here()
        else:
            self.begin_anew()

    def loaded(self) -> None:
        super().loaded()
        if self.first is not None:
            self.first.loaded()

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        super().take_own_state(state)
        self._set_out()

    def take_common_state(self, state: Mapping[str, Tensor]) -> None:
        self._let_go()
        self.steps, self.taken = int(state["steps"]), 0
        self._set_out()
        self.loaded()

    def bytes_held(self) -> dict[str, int]:
        if self.first is None:
            return super().bytes_held()
        held = self.first.bytes_held()
        return {**held, "parameters": held["parameters"] + sum(map(bytes_of, self.anchor))}
