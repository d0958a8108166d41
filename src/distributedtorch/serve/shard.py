"""A shard: the parameters that one server keeps, as they travel and as its optimizer sees them."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributedtorch.core.bucket import is_empty
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.sync import require_like
from distributedtorch.serve import rates
from distributedtorch.serve.board import Push, Refused
from distributedtorch.serve.coded import Copies
from distributedtorch.serve.parcel import ABSENT, Form, Item, Part, joined, key, largest, parted, plain, rows
from distributedtorch.serve.rows import Changed, by_rows, different, mean
from distributedtorch.serve.terms import Terms
from distributedtorch.serve.whole import PIECE


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What one push brings, read and checked."""

    values: list[Tensor | None]
    """Gradients or changes, sparse for tables."""
    options: list[float]
    """Of the worker's optimizer, where they travel."""


class Shard:
    """Parameters, their optimizer, and the values that workers get."""

    def __init__(
        self, params: Sequence[nn.Parameter], optimizer: Optimizer, items: Sequence[Item], terms: Terms, world: int
    ) -> None:
        self.params, self.user, self.items, self.terms, self.world = params, optimizer, items, terms, world
        self.masters = [nn.Parameter(_on_host(param)) for param in params]
        self.optimizer = self._beside(optimizer)
        self.group = {id(p): k for k, one in enumerate(self.optimizer.param_groups) for p in one["params"]}
        """By the id of a master, the number of its group."""
        self.copies = Copies(items)
        self.changed = {k: Changed(item.shape[0]) for k, item in enumerate(items) if item.table}
        self.began: int | None = None
        """The version from which on changes of rows are known."""
        self.held: dict[int, int] = {}
        """By worker the version that it says it has."""
        self.given: dict[int, list[Tensor]] = {}
        """By worker what it was given last, where delays are compensated."""
        self.refill()

    def _beside(self, given: Optimizer) -> Optimizer:
        """An optimizer of the same kind for what is kept here, without the user's hooks; options are read at a step."""
        made = copy.copy(given)
        made.__dict__ = {key: value for key, value in given.__dict__.items() if key != "step"}
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(made, hooks, OrderedDict())
        place = {id(param): master for param, master in zip(self.params, self.masters, strict=True)}
        made.param_groups = [
            {**group, "params": [place[id(param)] for param in group["params"] if id(param) in place]}
            for group in given.param_groups
        ]
        return made

    @property
    def largest(self) -> int:
        """The most bytes that a push may have."""
        options = [8 * len(rates.numbers(self.user))] if self.terms.told else []
        return largest([*(item.most for item in self.items), *options])

    @property
    def most(self) -> int:
        """The most bytes that a message to this server may have."""
        return max(self.largest, PIECE) if self.terms.apart else self.largest

    @property
    def most_filled(self) -> int:
        """The most bytes that a worker may fill this server with: parameters, and more state than optimizers have."""
        return 256 * sum(item.bytes for item in self.items) + (64 << 20)

    def refill(self, *, state: bool = True) -> None:
        """Take over values that were put into the user's objects from outside, and optimizer state, if so."""
        states = [self.user.state.get(param, {}) for param in self.params] if state else None
        self._fill([param.detach() for param in self.params], states)

    def take_over(self, given: Mapping[str, Any]) -> None:
        """Have what a worker's objects have: values and, where they are given, state and options.

        Raises:
            CheckpointError: They are of another model.
        """
        values = [require_like("a parameter", v, m) for v, m in zip(given["values"], self.masters, strict=True)]
        self._fill(values, given["states"])
        for group, options in zip(self.user.param_groups, given["options"] or self.user.param_groups, strict=True):
            group.update({key: value for key, value in options.items() if key in group and key != "params"})

    def _fill(self, values: Sequence[Tensor], states: Sequence[Mapping[str, Any]] | None) -> None:
        if states is not None and self.terms.push == "gradients":
            pairs = zip(self.masters, states, strict=True)
            found: dict[Tensor, Any] = {one: copied(dict(state), torch.device("cpu")) for one, state in pairs if state}
            self.optimizer.state = defaultdict(dict, found)
        for value, master in zip(values, self.masters, strict=True):
            if not is_empty(value):
                master.data.copy_(value)
        self.given.clear()
        self.copies.of.clear()
        self.message: Tensor | None = None
        """What workers get where all get the same: the present version."""

    def publish(self) -> None:
        """Show the user's optimizer a copy of the state."""
        for param, master in zip(self.params, self.masters, strict=True):
            if self.optimizer.state.get(master):
                self.user.state[param] = copied(self.optimizer.state[master], param.device)

    def whole(self) -> dict[str, Any]:
        """What is kept here beside parameters."""
        found = [self.optimizer.state.get(master, {}) for master in self.masters]
        return {"states": [copied(dict(state), torch.device("cpu")) for state in found]}

    # What comes.

    def told(self, worker: int, held: int) -> None:
        """A worker says which version it has."""
        self.held[worker] = held
        self.copies.told(worker, held)

    def read(self, worker: int, step: int, message: Tensor) -> Brought:
        """What a push brings.

        Raises:
            Refused: Wrong sizes or rows, or numbers that are not finite: nothing of it is used.
        """
        told = self.terms.told
        parts = parted(message, len(self.items) + told)
        values: list[Tensor | None] = []
        for number, (item, (form, data)) in enumerate(zip(self.items, parts, strict=False)):
            if form not in (Form.NONE, item.pushed):
                raise Refused(f"parameter {number} of this server in the form {form.name}: of another model?")
            known = key("push", worker, number, step)
            values.append(None if form is Form.NONE else _finite(number, item.read(form, data, known)))
        return Brought(values=values, options=rates.read(parts[-1][1], self.user) if told else [])

    def apply(self, pushes: Sequence[Push], options: Sequence[float] | None = None) -> None:
        """One step with the mean of what was pushed, or the changes themselves.

        Options are the user's present ones, or those given.
        """
        before = pushes[0].pulled + pushes[0].late
        self.began = before if self.began is None else self.began
        if self.terms.push == "updates":
            self._add(pushes, before + 1)
        else:
            self._step(pushes, before + 1, options)
        self.message = None

    @torch.no_grad()
    def _add(self, pushes: Sequence[Push], version: int) -> None:
        """Add the mean of a round's changes, or one worker's share of a change."""
        count = len(pushes) if self.terms.rounds else self.world
        for number, master in enumerate(self.masters):
            for push in pushes:
                value = push.content.values[number]
                if value is not None:
                    master.add_(value, alpha=1 / count)
                    if value.is_sparse:
                        self.changed[number].mark(value.indices()[0], version)

    def _step(self, pushes: Sequence[Push], version: int, options: Sequence[float] | None) -> None:
        weights = self._set_options(pushes, options)
        grads = [push.content.values for push in pushes]
        for number, master in enumerate(self.masters):
            group = self.group[id(master)]
            all_ = [(one[number], each[group]) for one, each in zip(grads, weights, strict=True)]
            mine = [(grad, weight) for grad, weight in all_ if grad is not None]
            master.grad = _mean(master, mine, len(pushes)) if mine else None
        groups = [self.optimizer.param_groups[self.group[id(master)]] for master in self.masters]
        whole = [k for k in self.changed if not by_rows(self.optimizer, groups[k])]
        before = {k: self.masters[k].detach().clone() for k in whole}
        self.optimizer.step()
        for number, changed in self.changed.items():
            table = self.masters[number]
            if number in before:
                changed.mark(different(before[number], table.detach()), version)
            elif table.grad is not None:
                changed.mark(table.grad.coalesce().indices()[0], version)

    def _set_options(self, pushes: Sequence[Push], options: Sequence[float] | None) -> list[list[float]]:
        """Options for this step. Result: by push and group how much its gradients count."""
        if options is not None and self.terms.apart:
            rates.put(self.user, options)
        for group, user in zip(self.optimizer.param_groups, self.user.param_groups, strict=True):
            group.update({key: value for key, value in user.items() if key != "params"})
        if options is not None:
            rates.put(self.optimizer, options)
        if self.terms.rates == "own":
            given = [push.content.options for push in pushes]
            rates.put(self.optimizer, rates.mean(given))
            return rates.weights(self.optimizer, given)
        if self.terms.rates == "staleness":
            rates.divide(self.optimizer, max(push.late for push in pushes))
        return [[1.0] * len(self.optimizer.param_groups) for _ in pushes]

    def follow(self, pushes: Sequence[Push]) -> None:
        """Apart, the user's options are those that rank 0 had in its last push: schedulers run there."""
        for push in pushes:
            if push.worker == 0 and self.terms.told:
                rates.put(self.user, push.content.options)

    def options(self) -> list[float]:
        """The user's at present, as far as they are numbers."""
        return rates.numbers(self.user)

    def compensated(self, push: Push) -> Push:
        """Gradients moved to the present parameters to first order, the square of the gradient for the curvature."""
        before, grads = self.given.get(push.worker), push.content.values
        if not self.terms.compensate or before is None:
            return push
        had = self.copies.of[push.worker].values if push.worker in self.copies.of else {}
        moved = [master.detach() - had.get(k, before[k]) for k, master in enumerate(self.masters)]
        values = [
            None if grad is None else grad + self.terms.compensate * grad.square() * move
            for grad, move in zip(grads, moved, strict=True)
        ]
        return replace(push, content=replace(push.content, values=values))

    # What outlives the process.

    def state(self) -> dict[str, Any]:
        """Everything that is kept here.

        Raises:
            UsageError: The optimizer's state has something that cannot be read from a file without running it.
        """
        found = [self.optimizer.state.get(master, {}) for master in self.masters]
        if not _is_plain(found):
            given = f"{type(self.optimizer).__name__} keeps objects of its own in its state"
            do = "start without --restarts; checkpoints by dt.save are not concerned"
            raise UsageError(explain(given, "tensors, numbers and text, for a server that can be started again", do))
        parameters = [master.detach() for master in self.masters]
        return {"parameters": parameters, "optimizer": found, "options": self.options()}

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.optimizer.state = defaultdict(dict)
        for master, values, found in zip(self.masters, state["parameters"], state["optimizer"], strict=True):
            master.data.copy_(require_like("a server's parameter", values, master))
            if found:
                self.optimizer.state[master] = found
        if self.terms.apart:
            rates.put(self.user, state["options"])
        self.message = None

    def written(self, brought: Brought) -> Tensor:
        """What a push brings, as bytes; not coded."""
        parts = [ABSENT if one is None else rows(one) if one.is_sparse else plain(one) for one in brought.values]
        return joined([*parts, plain(torch.tensor(brought.options, dtype=torch.float64))])

    def reread(self, content: Tensor) -> Brought:
        """As `written` was given it."""
        *parts, (_, options) = parted(content, len(self.items) + 1)
        pairs = zip(self.items, parts, strict=True)
        values = [None if form is Form.NONE else item.read(form, data, 0) for item, (form, data) in pairs]
        return Brought(values=values, options=options.view(torch.float64).tolist())

    # What goes.

    def give(self, worker: int, version: int) -> Tensor:
        """The present version, for a worker."""
        if self.terms.compensate:
            parts = zip(self.items, parted(self._whole(), len(self.items)), strict=True)
            self.given[worker] = [item.read(form, data, 0) for item, (form, data) in parts]
        if not self.changed and not self.copies.items:
            return self._whole()
        return joined(self._news(worker, version))

    def _whole(self) -> Tensor:
        if self.message is None:
            self.message = joined([plain(master) for master in self.masters])
        return self.message

    def _news(self, worker: int, version: int) -> list[Part]:
        """What a worker does not have."""
        self.began = version if self.began is None else self.began
        codes, held = self.copies.give(worker, version, self.masters), self.held.get(worker, -1)
        known = self.began <= held <= version
        parts = []
        for number, (item, master) in enumerate(zip(self.items, self.masters, strict=True)):
            if item.table and known:
                parts.append(self.changed[number].since(item, master, held))
            else:
                parts.append(codes.get(number) or plain(master))
        return parts


def _on_host(param: Tensor) -> Tensor:
    """A copy in host memory; without values where there are none yet."""
    if is_empty(param):
        return torch.empty_strided(param.shape, param.stride(), dtype=param.dtype)
    return param.detach().to("cpu", copy=True)


def _finite(number: int, value: Tensor) -> Tensor:
    if not bool(torch.isfinite(value.values() if value.is_sparse else value).all()):
        raise Refused(f"the gradient of parameter {number} of this server has NaN or infinite numbers")
    return value


def _mean(master: Tensor, grads: Sequence[tuple[Tensor, float]], count: int) -> Tensor:
    """The sum of gradients, each with its weight, over a number of pushes."""
    if all(grad.is_sparse for grad, _ in grads):
        return mean(grads, count)
    total = torch.zeros_like(master)
    for grad, weight in grads:
        total.add_(grad, alpha=weight)
    return total.div_(count)


def _is_plain(state: Any) -> bool:
    if isinstance(state, dict):
        return all(map(_is_plain, state)) and all(map(_is_plain, state.values()))
    if type(state) in (list, tuple):
        return all(map(_is_plain, state))
    return type(state) in (Tensor, nn.Parameter, int, float, bool, str, type(None))


def copied(state: Any, device: torch.device) -> Any:
    """Nested state with tensors of its own, dense ones as checkpoints have them; single numbers stay on the host."""
    if isinstance(state, Tensor):
        dense = state.detach().to_dense() if state.is_sparse else state.detach()
        return dense.to(device if state.dim() else "cpu", copy=True)
    if isinstance(state, dict):
        return {key: copied(value, device) for key, value in state.items()}
    return type(state)(copied(value, device) for value in state) if type(state) in (list, tuple) else state
