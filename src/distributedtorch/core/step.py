"""One training step, seen from outside the user's loop: which batch, which weight, when ranks exchange.

`Loop` stands around every `backward()`. Before it, gradients are made ready for autograd to write; inside it, a hook
per parameter hands finished gradients to the sync that keeps them; after it, one small control message per rank says
which batch each rank was at and which parameters got a gradient, so that a rank that is elsewhere is named at once and
a parameter unused on every rank stays without gradient.

Weights. A rank's gradient counts as rows of this rank x world / rows of the global batch, so that the mean over ranks
is the mean over the global batch. The weight is applied to the gradients of parameters (never to outputs: a generator
feeding a discriminator, or a gradient penalty, would meet it twice).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from distributedtorch.core.batches import Batches, Rows
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import DesyncError, UsageError, explain
from distributedtorch.core.loss import Seen, read, refuse_ones
from distributedtorch.core.proof import Drawn
from distributedtorch.core.scale import LossScale
from distributedtorch.core.sync import Sync
from distributedtorch.core.window import StandIn, Window


class Member:
    """One sync in the loop, with what the loop keeps about it."""

    def __init__(self, sync: Sync, accumulate: int, number: str = "") -> None:
        self.sync = sync
        self.accumulate = accumulate
        self.number = number
        """Tells the exchanges of its optimizer from those of others."""
        self.touched = False
        self.touched_since_step = False
        self.seen = [False] * len(sync.params)
        self.calls = 0
        """Times the user called `step` in the present window."""
        self.units: list[float] = []
        """Rows (units) of each batch of the present window, also of those that gave this member no gradient."""
        self.counted = -1
        """The last batch of the window that did give it one."""
        self.summed: bool | None = None
        """Whether the losses of the present window are sums (`dt.weight(…, sum=True)`); None before the first."""
        self.weight = 1.0
        self.closing = True
        """Whether the present batch ends the window, so that `step` is to act."""
        self.exchanging = True
        """Whether the present backward exchanges."""
        self.window = Window()
        self.fed: list[Rows] = []
        """Under `accumulate`, the batches that gave it gradients since `step` was called last."""
        self.hooks: list[RemovableHandle] = []
        self.let_go: Callable[[], None] = lambda: None
        """What makes the objects of its optimizer plain again. A group call."""

    def used(self) -> list[bool]:
        """Which parameters got a gradient on this rank that is still to be exchanged."""
        return [a or b for a, b in zip(self.seen, self.sync.filled, strict=True)]


class Loop:
    """Stands around the user's `backward()` for all syncs of this process."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.losses = Seen()
        """What the means of the present backward's losses are over on this rank."""
        self.share = 1.0
        """How much this rank's gradient counts in the present backward, 1 where all ranks have equal rows."""
        self.present_units = 1.0
        self.void = False
        """Whether the present loss is over no units on this rank: what is not a number in its gradient is zero."""
        self._own_hooks = 0
        self._of_loader = False
        """Whether the last proof is of a batch that a loader has handed out."""
        self._broken = False
        """A backward ended in an exception."""
        self.members: list[Member] = []
        self.batches = Batches()
        self.drawn: Drawn | None = None
        """What ranks compute, until a loader hands batches out."""
        self.own_batches = False
        """Whether each rank is to draw its own."""
        self.alike = False
        """Whether batches that no loader has handed out were the same on all ranks."""
        self._proof = -1.0
        self.explicit: Rows | None = None
        """Set by `dt.weight`: the loss is weighted already, parameters must not be again."""
        self.loss_scale: LossScale | None = None
        """Under float16: what backward starts from."""
        self.depth = 0
        self.steps = 0
        self.backwards = 0
        self.observers: list[Callable[[Sequence[Tensor], Rows | None], None]] = []
        """Called with the roots of every backward (verify listens here)."""
        self.after_exchange: list[Callable[[Sequence[Member]], None]] = []
        """Called when global gradients are in place, before anything (clipping) changes them."""
        self.after_backward: list[Callable[[], None]] = []
        """Called when a backward has ended, before the user goes on."""
        self.before_update: list[Callable[[], None]] = []
        """Called before an optimizer changes anything."""
        self.after_step: list[Callable[[Sequence[Member]], None]] = []
        """Called with an optimizer's members when it has stepped and all ranks agree."""
        self.requests: list[str] = []
        """What this rank alone asked for, to be carried out by all after a step (saves)."""
        self.requested = 0
        """The most such requests any rank had at the last exchange."""
        self.before_backward: list[Callable[[], None]] = []
        """Called once, before the next backward or step: what could not be made ready earlier."""
        self.updating = False
        """Whether an optimizer's own update runs: it may call others'."""
        self._original: Callable[..., None] | None = None

    def stepped(self, members: Sequence[Member]) -> None:
        """An optimizer has stepped: its window is over."""
        self.steps += 1
        if self.drawn is not None:
            self.drawn.stepped()
            if self.drawn.over and not self.own_batches:
                self.look_no_more()
        for member in members:
            member.calls, member.units, member.touched_since_step, member.closing = 0, [], False, True
            member.counted, member.summed, member.fed = -1, None, []
            member.seen = [False] * len(member.seen)
            member.window.stepped()
            member.sync.stepped()
        for observe in self.after_step:
            observe(members)

    @property
    def in_lockstep(self) -> bool:
        """Whether ranks are at the same batch in every forward now."""
        return not self.members or any(member.sync.lockstep for member in self.members)

    @property
    def idle(self) -> bool:
        """Whether this rank has no rows of its own in the present batch."""
        return self.rows is not None and self.rows.mine == 0

    @property
    def rows(self) -> Rows | None:
        """The batch in use."""
        return self.batches.latest

    # Attaching.

    def number(self) -> str:
        """What tells the exchanges of one more optimizer from those of others: the same on all ranks."""
        number, taken = len(self.members), {member.number for member in self.members}
        while str(number) in taken:
            number += 1
        return str(number)

    def add(self, sync: Sync, accumulate: int, number: str = "") -> Member:
        """Take a sync in: hook its parameters."""
        member = Member(sync, accumulate, number)
        sync.windowed = accumulate > 1
        self.members.append(member)
        for index, param in enumerate(sync.params):
            member.hooks.append(param.register_post_accumulate_grad_hook(self._hook(member, index)))
            if self._own_hooks:
                member.hooks.append(_hook_on(param, self._weigher(member)))
        self.stand()
        return member

    def stand(self) -> None:
        """Stand around every backward from now on."""
        if self._original is None:
            self._original = torch.autograd.backward
            torch.autograd.backward = self._around(self._original)

    @property
    def expects(self) -> bool:
        """Whether gradients are weighed or exchanged, or will be."""
        return bool(self.members or self.before_backward)

    def make_ready(self) -> None:
        """Do what is to be done before the next backward or step. A group call where there is something to do."""
        waiting, self.before_backward = self.before_backward, []
        for act in waiting:
            act()

    def remove(self, member: Member) -> None:
        """Let one sync go."""
        self.members.remove(member)
        for hook in member.hooks:
            hook.remove()

    def close(self) -> None:
        """Let go of everything: no hook is left, `backward` is torch's own again."""
        for member in self.members:
            for hook in member.hooks:
                hook.remove()
        self.batches.close()
        self.look_no_more()
        self.own_batches, self.alike, self._proof = False, False, -1.0
        self.members, self.batches, self.explicit, self._own_hooks = [], Batches(), None, 0
        self.requests, self.requested, self._broken, self.loss_scale = [], 0, False, None
        self.before_backward = []
        if self._original is not None:
            torch.autograd.backward, self._original = self._original, None

    def _hook(self, member: Member, index: int) -> Callable[[Tensor], None]:
        name, given = member.sync.names[index], member.sync.params[index]
        plain, dtype, device = type(given) is torch.nn.Parameter, given.dtype, given.device

        def hook(param: Tensor) -> None:
            if self.depth == 0:
                raise UsageError(_unseen_backward(name))
            if plain and (param.dtype is not dtype or param.device != device):  # others tell when they are changed
                raise UsageError(_converted(name, f"{dtype} on {device}", f"{param.dtype} on {param.device}"))
            foreign = len(param._backward_hooks or ()) - self._own_hooks
            if foreign > 0 and self.comm.world > 1:
                raise UsageError(_hooked(name))
            if not member.touched:
                self._touch(member)
            again = member.seen[index]
            member.seen[index] = True
            member.sync.ready(index, again=again)

        return hook

    def _weigh_parameters(self) -> None:
        """Install, once, the hooks that multiply gradients by the weight before they are accumulated."""
        if self._own_hooks:
            return
        self._own_hooks = 1

        for member in self.members:
            weigh = self._weigher(member)
            for param in member.sync.params:
                member.hooks.append(_hook_on(param, weigh))

    def _weigher(self, member: Member) -> Callable[[Tensor], Tensor | None]:
        def weigh(grad: Tensor) -> Tensor | None:
            if not self.depth:  # torch.autograd.grad stays as it is
                return None
            if self.void and not grad.is_sparse:
                return grad.nan_to_num(0.0, math.inf, -math.inf) * member.weight
            if member.weight == 1.0:
                return None
            return grad * member.weight if member.weight else torch.zeros_like(grad)

        return unserializable_hook(weigh)  # type: ignore[no-any-return]

    # Around a backward.

    def _around(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self.depth:
                for member in self.members:
                    member.sync.hold()
                self.depth += 1
                try:
                    return original(tensors, *args, **kwargs)
                finally:
                    self.depth -= 1
            self.make_ready()
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            given = args[0] if args else kwargs.get("grad_tensors")
            if self.loss_scale is not None:
                args, kwargs = self._scaled(roots, args, kwargs)
            self._begin(roots, given)
            self.depth = 1
            self._broken = True
            try:
                original(tensors, *args, **kwargs)
                self._broken = False
            finally:
                self.depth = 0
            self._end()
            for act in self.after_backward:
                act()
            return None

        return backward

    def _scaled(self, roots: list[Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a backward that starts from the loss scale."""
        assert self.loss_scale is not None
        given = args[0] if args else kwargs.get("grad_tensors")
        each = [given] * len(roots) if given is None or isinstance(given, Tensor) else list(given)
        kwargs = {key: value for key, value in kwargs.items() if key != "grad_tensors"}
        return (self.loss_scale.roots(roots, each), *args[1:]), kwargs

    def _begin(self, roots: Sequence[Tensor], given: Tensor | Sequence[Tensor | None] | None = None) -> None:
        if self._broken and self.comm.world > 1:
            raise DesyncError(_BROKEN)
        self.backwards += 1
        rows = self._own_rows() or self.batches.settle(explicit=self.explicit is not None)
        if rows is not None and rows.proof >= 0:
            self._proof = rows.proof
        rows = self.explicit or rows
        mine = 0 if rows is None else round(rows.mine * rows.copies)
        losses = [root for root in roots if not root.is_meta]
        self.losses = Seen() if self.explicit else read(losses, self.comm.world, mine)
        if given is not None and self.comm.world > 1 and self.explicit is None:
            for root, gradient in zip(losses, [given] if isinstance(given, Tensor) else given, strict=False):
                refuse_ones(root, gradient, mine)
        for observe in self.observers:
            observe(roots, rows)
        share = 1.0 if rows is None or self.explicit else rows.mine * self.comm.world / rows.everywhere
        self.share, self.void = share, self.explicit is not None and not self.explicit.mine
        self.present_units = rows.everywhere if rows else 1.0
        for member in self.members:
            member.touched = False
            member.seen = [False] * len(member.seen)
            member.closing = member.calls + 1 >= member.accumulate or bool(rows and rows.last)
            if member.fed and not member.sync.pending and all(param.grad is None for param in member.sync.params):
                member.fed = []  # the user has dropped what they gave
            self._count(member)
            windowed = member.units and not self._summed
            member.weight = share * self.present_units / member.units[0] if windowed else share
            self._stand_down(member)
            member.window.begin()
            defers = self._learns(member) and member.window.defers
            member.exchanging = member.closing and member.sync.lockstep and not defers
            member.window.open = member.sync.lockstep and (member.window.open or not member.exchanging)
            member.sync.root = self.loss_scale.value if self.loss_scale is not None and roots else 1.0
            shows = member.exchanging if member.sync.lockstep else member.closing
            member.sync.begin(exchange=member.exchanging, hide=not shows)
        if self.void or any(member.weight != 1.0 for member in self.members):
            self._weigh_parameters()

    @property
    def _summed(self) -> bool:
        """Whether the present loss is a sum over the units of all ranks, which counts in full in its window."""
        return self.explicit is not None and self.explicit.summed

    def look(self, models: Sequence[nn.Module]) -> None:
        """Look at what models are given, until loaders hand batches out."""
        if self.drawn is None:
            self.drawn = Drawn(lambda: self.depth > 0)
            self.batches.first = self.look_no_more
        if not self.own_batches:
            self.drawn.watch(models)

    def look_no_more(self) -> None:
        """Loaders hand batches out, or nobody distributes any more: do not look at what models are given."""
        if self.drawn is not None:
            self.drawn.close()
            self.drawn = None

    def _own_rows(self) -> Rows | None:
        """The batch that is in use, where each rank draws its own: as many rows on every rank."""
        mine = self.drawn.rows if self.own_batches and self.drawn is not None else None
        if mine is None:
            return None
        self.batches.settled = Rows(mine=mine, everywhere=mine * self.comm.world)
        return self.batches.settled

    def _count(self, member: Member) -> None:
        """A window grows by the present batch, whether or not that will give this member a gradient."""
        if member.accumulate > 1:
            while len(member.units) <= member.calls:
                member.units.append(self.present_units)
            if member.counted < member.calls:
                member.units[member.calls] = self.present_units

    def _touch(self, member: Member) -> None:
        """The first gradient of this backward for this member."""
        member.touched = member.touched_since_step = True
        if member.summed not in (None, self._summed) and member.accumulate > 1:
            raise UsageError(_SUM_AND_MEAN)
        member.counted, member.summed = member.calls, self._summed
        if member.accumulate > 1:
            self._one_batch_per_step(member)
        window = member.units[0] / sum(member.units) if member.units and not member.summed else 1.0
        member.sync.scale = window / self.comm.world / member.sync.root

    def _one_batch_per_step(self, member: Member) -> None:
        """Refuse a window that the loop makes by hand inside the plan's: `step` is called after every batch."""
        rows = self.batches.present
        if rows is None or any(rows is known for known in member.fed):
            return
        if any(rows.source == known.source for known in member.fed):
            raise UsageError(_by_hand(member.accumulate))
        member.fed.append(rows)

    def _end(self) -> None:
        exchanging = [m for m in self.members if m.sync.lockstep and (m.exchanging or m.sync.eager)]
        for member in exchanging:
            if member.accumulate == 1 and not member.touched and any(member.sync.filled):
                self._touch(member)
        if any(m.touched for m in exchanging):
            self._exchange(exchanging)
        for member in self.members:
            if member.touched and member not in exchanging:
                member.sync.finish(member.used())
            if not member.touched:
                member.sync.restore()
            if self._learns(member) and (member.window.defers or member.window.probes):
                self._stand_in(member)
        self.explicit = None

    # Windows of several backwards made by hand.

    def _learns(self, member: Member) -> bool:
        return member.accumulate == 1 and not member.sync.eager and self.comm.world > 1

    def _stand_in(self, member: Member) -> None:
        """Show stand-ins that tell when they are used."""
        filled = member.sync.filled
        for index, param in enumerate(member.sync.params):
            if filled[index] or param.grad is not None:
                resolve, clear = self._resolvers(member, index, param.grad)
                param.grad = StandIn(param, resolve, clear)

    def _resolvers(
        self, member: Member, index: int, shown: Tensor | None
    ) -> tuple[Callable[[], Tensor], Callable[[], None]]:
        serial = member.window.serial

        def resolve() -> Tensor:
            member.window.read = True
            if shown is not None:
                self._stand_down(member)
                return shown
            if member.window.serial != serial:
                raise UsageError(_HELD_TOO_LONG)
            self._stand_down(member)
            self.flush(member)
            grad = member.sync.params[index].grad
            assert grad is not None
            return grad

        def clear() -> None:
            if shown is None:
                member.sync.wipe(index)
            else:
                shown.zero_()

        resolve.shown = shown  # type: ignore[attr-defined]
        return resolve, clear

    def _stand_down(self, member: Member) -> None:
        """Put back what the stand-ins stood for; where the user dropped one, its gradient is dropped."""
        if not (self._learns(member) and (member.window.defers or member.window.probes)):
            return
        filled = member.sync.filled
        for index, param in enumerate(member.sync.params):
            grad = param.grad
            if isinstance(grad, StandIn):
                param.grad = grad.resolve.shown  # type: ignore[attr-defined]
            else:
                member.window.blocked = member.window.blocked or filled[index] or member.window.probes
                filled[index] = False

    def before_step(self, member: Member) -> None:
        """Exchange what is still local, unless the user has dropped it."""
        self._stand_down(member)
        self.flush(member)

    def settle(self) -> None:
        """Exchange what every member still has local, unless a backward failed: its gradients are nobody's."""
        for member in [] if self._broken else self.members:
            self.before_step(member)

    def flush(self, member: Member) -> None:
        """Exchange what earlier backwards of a window left local: before a step, or when `p.grad` is read."""
        if not member.window.open:
            return
        member.window.open = False
        member.exchanging, member.touched = True, member.sync.pending
        member.sync.begin(exchange=True, hide=False)
        member.seen = [False] * len(member.seen)
        if member.touched:
            self._touch(member)
        self._exchange([member])
        if not member.touched:
            member.sync.restore()

    def exchange_assigned(self, member: Member) -> None:
        """Gradients the user computed without `backward` (autograd.grad) and put into `p.grad`: exchange them now."""
        grads = [param.grad for param in member.sync.params]
        for param in member.sync.params:
            param.grad = None
        self._begin([])
        for index, (param, grad) in enumerate(zip(member.sync.params, grads, strict=True)):
            if grad is not None:
                param.grad = grad if member.weight == 1.0 else grad * member.weight
                if not member.touched:
                    self._touch(member)
                member.seen[index] = True
                member.sync.ready(index, again=False)
        self._end()

    def called(self, members: Sequence[Member]) -> bool:
        """The user calls `step`: exchange what was put into `p.grad` without a backward. Result: whether it acts."""
        for member in members:
            if not member.touched_since_step and member.sync.assigned():
                self.exchange_assigned(member)
            member.calls += 1
            member.fed = []
        return members[0].closing

    def meet(self, name: str, numbers: Sequence[float]) -> list[list[float]]:
        """Replicas that step alone come together: every rank's numbers, if all have taken as many steps."""
        head = [float(self.steps), float(len(self.requests))]
        rows = self.comm.exchange(name, torch.tensor([*head, *numbers], dtype=torch.float64)).tolist()
        if len({row[0] for row in rows}) > 1:
            self._same_batch([[self.rows.batch if self.rows else -1, row[0]] for row in rows])
        self.requested = int(max(row[1] for row in rows))
        return [row[2:] for row in rows]

    def _exchange(self, members: list[Member]) -> None:
        """Finish what hooks began: control message, the buckets left over, the gradients in place."""
        control = self.comm.exchange_begin("control", self._control(members)) if self.comm.world > 1 else None
        for member in members:
            if member.touched:
                member.sync.launch_rest()
        used, touched = [m.used() for m in members], [m.touched for m in members]
        if control is not None:
            used, touched = self._agree(members, control())
        for member, any_touched in zip(members, touched, strict=True):
            if any_touched and not member.touched:
                self._touch(member)
                member.sync.launch_rest()
        for member, flags in zip(members, used, strict=True):
            if member.touched:
                member.window.open = member.window.open and not member.exchanging
                member.sync.finish(flags)
        for observe in self.after_exchange:
            observe(members)

    def _told(self) -> Rows | None:
        """The batch that ranks compare; none where each has all of it, and may or may not still hold it."""
        rows = self.explicit or self.batches.settled
        return None if rows is not None and rows.copies > 1 else rows

    def _control(self, members: list[Member]) -> Tensor:
        rows = self._told()
        proof, self._proof = self._proof, -1.0
        self._of_loader = proof >= 0
        head = [
            float(rows.batch if rows else -1),
            float(self.steps),
            rows.mine if rows else 1.0,
            -1.0 if self.losses.kept is None else self.losses.kept,
            float(len(self.requests)),
            proof if self._of_loader or self.drawn is None else self.drawn.tell(),
            float(rows.within if rows else 0),
            *self._counts(),
        ]
        flags = [
            float(value)
            for member in members
            for value in (member.touched, member.window.vote(), member.window.position, *member.used())
        ]
        return torch.tensor(head + flags, dtype=torch.float64)

    def _counts(self) -> list[float]:
        """How many means other than over targets a loss is made of, and how many values the first ones are over."""
        counts = [] if self.batches.present is None else self.losses.counts
        return [float(len(counts)), *counts[:_MEANS], *[0.0] * (_MEANS - len(counts))]

    def _agree(self, members: list[Member], rows: Tensor) -> tuple[list[list[bool]], list[bool]]:
        self._same_batch(rows[:, [0, 1, 6]].tolist())
        self._every_row(rows[:, 2].tolist())
        self._same_units(rows[:, 2:4].tolist())
        self._same_counts(rows[:, 2].tolist(), rows[:, 7:_HEAD].tolist())
        self.requested = int(rows[:, 4].amax())
        self._same_proof(rows[:, 5].tolist())
        used, touched, at = [], [], _HEAD
        for member in members:
            votes, positions = rows[:, at + 1].tolist(), rows[:, at + 2].tolist()
            if min(positions) != max(positions):
                raise DesyncError(_uneven_windows(positions))
            member.window.agreed(votes)
            any_rank = rows[:, at : at + 3 + len(member.seen)].amax(dim=0).tolist()
            touched.append(bool(any_rank[0]))
            used.append([bool(flag) for flag in any_rank[3:]])
            at += 3 + len(member.seen)
        return used, touched

    def _same_batch(self, heads: list[list[float]]) -> None:
        if all(head == heads[0] for head in heads):
            return
        said = ", ".join(f"rank {k}: batch {int(b)}, after step {int(s)}" for k, (b, s, *_) in enumerate(heads))
        if len({(b, s) for b, s, *_ in heads}) == 1:
            raise DesyncError(_left_epoch([int(within) for *_, within in heads]))
        raise DesyncError(
            explain(
                f"the ranks are not at the same batch: {said}",
                "every rank takes every batch and every step",
                "look for a `continue`, a `break` or a swallowed exception that only some ranks meet",
            )
        )

    def _every_row(self, mine: list[float]) -> None:
        """Refuse a batch of which the ranks have more or fewer rows than it has."""
        rows = self._told()
        if rows is None or self.explicit is not None or math.isclose(sum(mine), rows.everywhere):
            return
        said = " + ".join(f"{count:g}" for count in mine)
        if self.own_batches:
            given = f"batches='own', and the ranks have drawn {said} rows"
            do = "draw batches of one size on all ranks, or loss = dt.weight(loss, rows here)"
            raise UsageError(explain(given, "the same on every rank: their gradients count alike", do))
        raise DesyncError(
            explain(
                f"the ranks have {said} rows of a batch of {rows.everywhere:g}",
                "every row on one rank",
                "start all ranks with the same Python; where they have it, this is an error of the library: report it",
            )
        )

    def _same_proof(self, proofs: list[float]) -> None:
        """Refuse a batch that ranks have read whole, or drawn by hand, each another one."""
        if min(proofs) < 0:
            return
        same = min(proofs) == max(proofs)
        self.alike = same and not self._of_loader
        if not same and not self.own_batches:
            raise UsageError(_OTHER_SAMPLES if self._of_loader else _DRAWN)

    def _same_units(self, heads: list[list[float]]) -> None:
        """Refuse a mean over units (tokens) that rows do not tell: uneven ignored targets or class weights."""
        ratios = [kept / mine for mine, kept in heads if kept >= 0 and mine > 0]
        if not ratios or max(ratios) - min(ratios) <= 1e-9 * max(ratios):
            return
        said = ", ".join(f"rank {k}: {kept:g} in {mine:g} rows" for k, (mine, kept) in enumerate(heads))
        raise UsageError(
            explain(
                f"the loss is a mean over targets that count unevenly ({said}): ignored targets or class weights",
                "the number of units each rank's mean is over, so that the global mean is exact",
                "loss = dt.weight(loss, n) before backward, n = this rank's number of targets that count",
            )
        )

    def _same_counts(self, mine: list[float], counts: list[list[float]]) -> None:
        """Refuse a mean over values of which ranks have unlike numbers, other than by their rows."""
        here = [(rows, counted) for rows, counted in zip(mine, counts, strict=True) if rows > 0]
        if len({int(counted[0]) for _, counted in here}) != 1:
            return
        for number in range(1, 1 + min(int(here[0][1][0]), _MEANS)):
            values = [counted[number] for _, counted in here]
            ratios = [counted[number] / rows for rows, counted in here]
            if max(values) != min(values) and max(ratios) - min(ratios) > 1e-9 * max(ratios):
                said = ", ".join(f"{value:g} in {rows:g} rows" for value, (rows, _) in zip(values, here, strict=True))
                raise UsageError(explain(f"the loss is a mean over unevenly many values ({said})", *_UNEVEN))


def _hook_on(param: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Hook a parameter's gradient; one that is frozen for a while will have it too."""
    trains = param.requires_grad
    param.requires_grad_(True)
    handle: RemovableHandle = param.register_hook(hook)
    param.requires_grad_(trains)
    return handle


_MEANS = 4
"""Of how many means in a loss the ranks compare the numbers of values."""
_HEAD = 8 + _MEANS
"""Numbers in a control message before those of each member."""
_UNEVEN = (
    "the number of values each rank's mean is over (chosen rows, masks, weights), so that the global mean is exact",
    "loss = dt.weight(loss, n) before backward, n = this rank's number of values; or divide by the rows at hand",
)
_SUM_AND_MEAN = explain(
    "one window of `accumulate` has losses that are sums (dt.weight(…, sum=True)) and others that are means",
    "one kind: a mean is over the rows of the window, a sum counts in full",
    "say sum=True for every loss of the window, or for none",
)
_OTHER_SAMPLES = explain(
    "the ranks have read different batches from one loader: a stream that divides itself by rank, or that draws from a "
    "random state of its own",
    "every sample on every rank: the library divides the rows, and would divide them twice",
    "yield all samples on every rank (no rank and no world size in the dataset), from a seed; or leave the loader out "
    "of the call, and dt.distribute(..., batches='own'): each rank trains on what it reads",
)
_DRAWN = explain(
    "no loader has handed out this batch, and every rank has another one: each draws its own",
    "one global batch, of which every rank computes its rows",
    "give the batches as the loader: `def batches(): while True: yield get_batch()`, "
    "`model, optimizer, loader = dt.distribute(model, optimizer, batches())`, `for x, y in loader:` (a DataLoader as "
    "it is, without a sampler that divides); or dt.distribute(..., batches='own'): each rank its own, as many times "
    "the batch",
)
_HELD_TOO_LONG = explain(
    "a p.grad that was kept from an earlier backward is used after another backward has begun",
    "the gradient of a backward that was not exchanged yet cannot be kept beyond it",
    "keep p.grad.clone(), on all ranks",
)
_BROKEN = explain(
    "an earlier backward on this rank ended in an exception that was swallowed (out of memory?)",
    "every rank to finish every backward: the others have waited for this one's gradients",
    "let the exception end the run, or make the batch smaller; skipping a batch on one rank cannot be exact",
)


def _by_hand(batches: int) -> str:
    return explain(
        f"a second batch gave gradients before optimizer.step() was called, under accumulate={batches}: the loop "
        "accumulates by hand too",
        f"optimizer.step() after every batch: the plan counts its calls, and acts once in {batches} of them",
        "take the condition around optimizer.step() out of the loop, or accumulate= out of the plan",
    )


def _converted(name: str, was: str, now: str) -> str:
    return explain(
        f"parameter {name!r} was {was} at dt.distribute and is {now} now (model.double(), .half(), .to(...))",
        "parameters that keep their type and device: gradients and optimizer state are laid out for them",
        "convert or move the model before dt.distribute",
    )


def _left_epoch(within: list[int]) -> str:
    """Names the ranks that have begun another epoch, while others are still in the one before."""
    early = [rank for rank, number in enumerate(within) if number == min(within)]
    ranks = f"rank {early[0]} has" if len(early) == 1 else f"ranks {', '.join(map(str, early))} have"
    said = ", ".join(f"rank {rank}: batch {number} of its epoch" for rank, number in enumerate(within))
    return explain(
        f"{ranks} left an epoch early and begun the next one, while others are still in it ({said})",
        "every rank to walk each epoch to the same batch: all ranks together compute one gradient",
        "let all ranks leave together: `if dt.any(flag): break`, with the flag by which this rank leaves",
    )


def _uneven_windows(positions: list[float]) -> str:
    said = ", ".join(f"rank {rank} after {int(count)}" for rank, count in enumerate(positions))
    return explain(
        f"gradients are exchanged at different backwards of one step: {said}",
        "the same backwards, steps and reads of p.grad on every rank",
        "read p.grad on all ranks or on none; look for a rank that skips a batch",
    )


def _unseen_backward(name: str) -> str:
    return explain(
        f"a backward reached {name!r} that was not started by Tensor.backward or torch.autograd.backward",
        "backward passes the library can stand around",
        "call loss.backward(), or import distributedtorch before `from torch.autograd import backward`",
    )


def _hooked(name: str) -> str:
    return explain(
        f"parameter {name!r} has a gradient hook (Tensor.register_hook)",
        "no hook on parameters: with several ranks it would see this rank's gradient, not the global one",
        "edit p.grad between backward() and step(), where it is the global gradient",
    )
