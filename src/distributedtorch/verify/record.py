"""What a run under `verify` writes down, step by step, for the comparison.

Active where `DISTRIBUTEDTORCH_VERIFY` names a folder. Each rank appends JSON lines to `rank<r>.jsonl`: one line per
call of `dt.distribute` (initial values), one per optimizer step (learning rates, losses with their rows, a hash of
every row, sketches of parameters and buffers, of the gradient after backward and of the one that was used). After
`DISTRIBUTEDTORCH_VERIFY_STEPS` steps, or at the end of a shorter script, rank 0 writes `final.safetensors`, and every
rank leaves the script with exit code 0. Under zero1 and zero2 each gradient is gathered twice per step for its sketch.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from distributedtorch.core.batches import Rows
from distributedtorch.core.errors import PlanError, explain
from distributedtorch.core.plan import Plan
from distributedtorch.core.step import Loop, Member
from distributedtorch.data.cut import arrays
from distributedtorch.launch import record as ends
from distributedtorch.verify.sketch import sketch
from distributedtorch.verify.still import still

FOLDER, STEPS = "DISTRIBUTEDTORCH_VERIFY", "DISTRIBUTEDTORCH_VERIFY_STEPS"
ROWS, PLAN = "DISTRIBUTEDTORCH_VERIFY_ROWS", "DISTRIBUTEDTORCH_VERIFY_PLAN"
FINAL = "final.safetensors"


def wanted() -> bool:
    """Whether this run is one of verify's."""
    return FOLDER in os.environ


def reversed_rows() -> bool:
    """Whether this run measures rounding noise: the rows of every batch in reverse."""
    return os.environ.get(ROWS) == "reversed"


def plan_here(plan: Plan) -> Plan:
    """The plan to carry out: of the truth's, only the words that change the result."""
    if wanted():
        refuse_loose(plan)
    return plan.numerics() if os.environ.get(PLAN) == "numerics" else plan


def refuse_loose(plan: Plan) -> None:
    """Refuse to verify a plan that means another result than that of one process."""
    if not plan.exact:
        given = f"verify under the plan {plan}"
        needed = "a plan whose result is that of one process"
        raise PlanError(explain(given, needed, "compare losses instead (dt.compare), or verify under ddp"))


def workers_here(workers: int | None) -> int | None:
    """How many processes the call may start: none under verify, which has started them."""
    return None if wanted() else workers


def attach(loop: Loop, models: Sequence[nn.Module]) -> None:
    """Begin to record, if wanted."""
    if not wanted():
        return
    if not _recorder:
        _recorder.append(Recorder(Path(os.environ[FOLDER]), int(os.environ[STEPS]), loop))
    new = [model for model in models if all(model is not known for known in _recorder[0].models)]
    if new:  # a model that changes its plan is recorded already
        _recorder[0].add(new)


def arrived(rows: Rows, batch: Any) -> None:
    """A loader hands out a batch."""
    if _recorder:
        _recorder[0].arrived(rows, batch)


class Recorder:
    """This rank's record."""

    def __init__(self, folder: Path, steps: int, loop: Loop) -> None:
        self.folder, self.steps, self.loop = folder, steps, loop
        self.file = (folder / f"rank{loop.comm.rank}.jsonl").open("a", buffering=1)
        self.models: list[nn.Module] = []
        self.names: dict[int, str] = {}
        """Of parameters, by identity."""
        self.rows: list[list[str]] = []
        """A hash of each row of each batch since the last step."""
        self.counts: dict[tuple[int, int], float] = {}
        """How many rows each batch really had here: counted, not told."""
        self.losses: list[tuple[float, float]] = []
        """Loss and its units on this rank, of each backward since the last step."""
        self.gradient: dict[str, list[float]] = {}
        """Sketches of the gradients as backward left them."""
        self.complete = False
        loop.observers.append(self._backward_begins)
        loop.after_exchange.append(self._exchanged)
        loop.after_step.append(self._stepped)
        atexit.register(self._script_ended)

    def add(self, models: Sequence[nn.Module]) -> None:
        """Take models in, make them deterministic, and write their initial values down."""
        quiet: list[str] = []
        for model in models:
            self.models.append(model)
            prefix = _prefix(len(self.models))
            quiet += [prefix + name for name in still(model)]
            self.names |= {id(param): prefix + name for name, param in model.named_parameters()}
        trained = set(self.names.values())
        kinds = {name: [str(t.dtype).removeprefix("torch."), t.numel(), name in trained] for name, t in self._state()}
        self._write(world=self.loop.comm.world, quiet=quiet, kinds=kinds, state=self._sketches())

    def arrived(self, rows: Rows, batch: Any) -> None:
        """Hash the rows of a batch; a repeated row that stands in for none is no row."""
        self.rows.append(list(hashes(batch, int(rows.mine))) if rows.mine else [])
        self.counts[rows.source, rows.batch] = float(len(self.rows[-1]))

    def _backward_begins(self, roots: Sequence[Tensor], rows: Rows | None) -> None:
        explicit = self.loop.explicit
        units = explicit.mine if explicit else self.counts.get((rows.source, rows.batch), rows.mine) if rows else 1.0
        for root in roots:
            loss = float(root.detach().double().mean()) if units else 0.0
            if explicit and units:  # dt.weight has multiplied it
                loss *= (1.0 if explicit.summed else explicit.everywhere) / (units * self.loop.comm.world)
            self.losses.append((loss, units))

    def _exchanged(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.touched and member.closing:
                self.gradient |= self._gradients(member)

    def _stepped(self, members: Sequence[Member]) -> None:
        if self.complete:
            raise SystemExit(0)
        optimizer = members[0].sync.optimizer
        names = [self.names[id(param)] for member in members for param in member.sync.params]
        self._write(
            step=self.loop.steps,
            lr=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group] if optimizer else [],
            losses=self.losses,
            rows=self.rows,
            gradient={name: self.gradient[name] for name in names if name in self.gradient},
            used={name: sketched for member in members for name, sketched in self._gradients(member).items()},
            state=self._sketches(),
        )
        self.rows, self.losses, self.gradient = [], [], {}
        if self.loop.steps >= self.steps:
            self._finish()
            self.loop.comm.barrier("verify end")
            raise SystemExit(0)

    def _script_ended(self) -> None:
        """A script that ends by itself before all steps; one that failed leaves no final values."""
        if not self.complete and not ends.failed():
            self._finish()

    def _finish(self) -> None:
        self.complete = True
        tensors = {name: tensor.detach().clone().cpu().contiguous() for name, tensor in self._state()}
        if self.loop.comm.rank == 0 and self.loop.steps:
            save_file(tensors, self.folder / FINAL, metadata={"steps": str(self.loop.steps)})

    def _gradients(self, member: Member) -> dict[str, list[float]]:
        named = [(self.names[id(param)], param.grad) for param in member.sync.params]
        return {name: sketch(name, grad) for name, grad in named if grad is not None}

    def _sketches(self) -> dict[str, list[float]]:
        return {name: sketch(name, tensor) for name, tensor in self._state()}

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers of all models, whole under every plan."""
        for number, model in enumerate(self.models, start=1):
            for name, tensor in model.state_dict().items():
                if isinstance(tensor, Tensor):
                    yield _prefix(number) + name, tensor

    def _write(self, **fields: Any) -> None:
        self.file.write(json.dumps(fields) + "\n")


_recorder: list[Recorder] = []


def _prefix(number: int) -> str:
    return "" if number == 1 else f"model {number}: "


def hashes(batch: Any, rows: int) -> Iterator[str]:
    """One hash for each row of a batch, over all its tensors; of a list without tensors, one for each item."""
    fields = [_plain(array) for array in arrays(batch)]
    if not fields:
        items = batch if isinstance(batch, list | tuple) else [batch] * rows
        fields = [[repr(item).encode() for item in items]]
    for number in range(min(len(field) for field in fields)):
        digest = hashlib.blake2b(digest_size=8)
        for field in fields:
            row = field[number]
            digest.update(row if isinstance(row, bytes) else row.tobytes())
        yield digest.hexdigest()


def _plain(array: Any) -> Any:
    """A numpy array of the same bytes."""
    if not isinstance(array, Tensor):
        return array
    host = (array if array.layout == torch.strided else array.to_dense()).detach().cpu().contiguous()
    return host.numpy() if host.dtype.is_floating_point and host.element_size() >= 4 else _bytes(host)


def _bytes(host: Tensor) -> Any:
    """Types that numpy does not have (bfloat16) go as bytes."""
    return host.reshape(len(host), -1).contiguous().view(torch.uint8).numpy() if len(host) else host.float().numpy()
