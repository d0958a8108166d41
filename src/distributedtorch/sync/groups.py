"""Groups: parameters that hardly move are exchanged every so many steps, the others at every step.

Each rank holds: parameters Psi, gradients Psi, optimizer state K Psi; the parameters as they were at the beginning Psi;
sums of the gradients of those that are exchanged rarely.
Travels per step and rank: 2 Psi (N-1)/N for a part a of the parameters at every step, for the rest at every `every`-th.

A parameter is *fixed* while it has moved since the beginning by less than `drift` of its size, or where a part of its
name is `fixed`; the others are *adaptive*. Gradients of fixed ones add up on each rank; every `every` steps the mean
over ranks of these sums makes one step of the optimizer (`combine=sum`: their sum over ranks, which depends on how many
there are). Who is fixed is decided anew then, from parameters that all ranks have alike. No gradient is older than
`every` steps. Use it for fine-tuning, where most layers hardly move. `every=1` is ddp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.sync import Trained, bytes_of, require_like
from distributedtorch.core.wire import Wire, sums, travelling
from distributedtorch.sync.alone import Alone


class Groups(Alone):
    """Replicas that exchange what moves often, and the rest now and then."""

    comes_and_goes = ("kept/",)
    optimizer: torch.optim.Optimizer

    @property
    def apart(self) -> bool:
        return True

    def __init__(
        self,
        trained: Trained,
        comm: Comm,
        wire: Wire,
        *,
        every: int,
        drift: float = 0.01,
        fixed: str | None = None,
        combine: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__(trained.params, trained.names, trained.optimizer, comm)
        self.wire, self.every, self.most_drift, self.combine = wire, every, drift, combine
        self.name = f"groups/{trained.name}"
        self.named = None if fixed is None else [fixed in name.split(".") for name in self.names]
        self.origin = [] if self.named else [param.detach().clone() for param in self.params]
        self.fixed = self.named or [False] * len(self.params)
        """Which parameters are exchanged rarely: at first none, unless named."""
        self.kept: list[Tensor | None] = [None] * len(self.params)
        """Of fixed parameters, gradients since the last exchange."""
        self.inside_fixed: list[Tensor | None] = [None] * len(self.params)
        """The same, of a window that is still open."""
        self.used_since = [False] * len(self.params)
        self.steps = 0
        if self.named is not None and not any(self.named):
            parts = sorted({part for name in self.names for part in name.split(".")})
            do = f"one of {', '.join(parts[:20])}"
            raise UsageError(explain(f"groups(fixed={fixed}), which is in no parameter's name", "a part of some", do))

    def finish(self, used: Sequence[bool]) -> None:
        due = (self.steps + 1) % self.every == 0 and not self.hide
        local = [None if param.grad is None else self._unscaled(param.grad) for param in self.params]
        factor = self.scale * self.comm.world * self.root  # of a window of several batches
        for index, grad in enumerate(local):
            if self.fixed[index]:
                self.used_since[index] |= used[index]
                self.inside_fixed[index] = _sum(self.inside_fixed[index], grad)
                if not self.hide:
                    window, self.inside_fixed[index] = self.inside_fixed[index], None
                    self.kept[index] = _sum(self.kept[index], None if window is None else window * factor)
        new: list[Tensor | None] = [None] * len(self.params)
        now = [k for k, fixed in enumerate(self.fixed) if not fixed and used[k]]
        self._exchange("adaptive", now, local, new, 1 / self.comm.world)
        if due:
            late = [k for k, fixed in enumerate(self.fixed) if fixed and self.used_since[k]]
            each = 1 / self.comm.world if self.combine == "mean" else 1.0
            self._exchange("fixed", late, self.kept, new, each / factor)
            self.kept, self.used_since = [None] * len(self.params), [False] * len(self.params)
        self._add(new)
        self.remember()

    def _exchange(
        self, what: str, which: list[int], mine: Sequence[Tensor | None], into: list[Tensor | None], scale: float
    ) -> None:
        """Sum gradients over ranks."""
        params = [self.params[k] for k in which]

        def scaled(place: int, out: Tensor) -> None:
            grad = mine[which[place]]
            out.zero_() if grad is None else torch.mul(grad.to_dense(), scale, out=out)

        for slab, flat in sums(
            self.comm, self.wire, f"{self.name}/{what}", travelling(params, self.wire, self.comm.world), scaled
        ):
            for slot in slab.slots:
                into[which[slot.index]] = slot.view(flat).clone()

    def update(self, step: Callable[[], Any]) -> Any:
        result = step()
        self.steps += 1
        if self.steps % self.every == 0 and self.named is None:
            pairs = zip(self.params, self.origin, strict=True)
            fixed = torch.tensor([bool((p.detach() - o).norm() < self.most_drift * o.norm()) for p, o in pairs])
            self.fixed = self.comm.exchange(f"{self.name}/fixed", fixed)[0].tolist()  # others may round in another way
        return result

    @property
    def share(self) -> float:
        """The part of all numbers that is exchanged at every step now."""
        sizes = [param.numel() for param in self.params]
        return sum(size for size, fixed in zip(sizes, self.fixed, strict=True) if not fixed) / max(sum(sizes), 1)

    def loaded(self) -> None:
        self.kept, self.used_since = [None] * len(self.params), [False] * len(self.params)
        for param, origin in zip(self.params, self.origin, strict=False):
            origin.copy_(param.detach())

    def own_state(self) -> dict[str, Tensor]:
        flags = torch.tensor([self.fixed, self.used_since, [kept is not None for kept in self.kept]])
        kept = {f"kept/{k}": value for k, value in enumerate(self.kept) if value is not None}
        origin = {f"origin/{k}": value for k, value in enumerate(self.origin)}
        return {"flags": flags, "steps": torch.tensor(self.steps), **kept, **origin}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        self.fixed, self.used_since, there = state["flags"].tolist()
        kept = {k: require_like(f"kept/{k}", state[f"kept/{k}"], self.params[k]) for k, has in enumerate(there) if has}
        self.kept = [kept[k].to(param.device) if k in kept else None for k, param in enumerate(self.params)]
        self.steps = int(state["steps"])
        for k, origin in enumerate(self.origin):
            origin.copy_(state[f"origin/{k}"])

    def bytes_held(self) -> dict[str, int]:
        held = super().bytes_held()
        sums_ = sum(bytes_of(kept) for kept in self.kept if kept is not None)
        more = {
            "gradients": held["gradients"] + sums_,
            "parameters": held["parameters"] + sum(map(bytes_of, self.origin)),
        }
        return {**held, **more}


def _sum(before: Tensor | None, new: Tensor | None) -> Tensor | None:
    return new if before is None else before if new is None else before + new
