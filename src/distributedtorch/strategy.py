"""The documents' other face, over the same parts: `Strategy` around a step.

`scope` starts or joins the processes and lets all of them draw alike. The first `run`, or the end of the block, gives
the optimizers made in it, and the models that own their parameters (`owners`), to `dt.distribute`. `run` cuts this
rank's rows out of a batch, and averages what the step returns over all rows.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_flatten, tree_unflatten

from distributedtorch import values
from distributedtorch.core.batches import Rows
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.plan import Plan
from distributedtorch.core.world import here
from distributedtorch.data.cut import arrays
from distributedtorch.data.stream import State, Stream, capture, install
from distributedtorch.distribute import distribute, enter
from distributedtorch.launch.start import join_world
from distributedtorch.owners import around, named, owners, trained
from distributedtorch.run import RUN

_LOOKED_AT = 64
"""Numbers of each array of a batch that are compared between ranks."""


class _Args:
    """The arguments of a step, as a loader of one batch."""

    def __init__(self) -> None:
        self.given: tuple[Any, ...] = ()

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        yield self.given


class Strategy:
    """Distributes a step: what the optimizers made inside `scope` train is trained by `run`.

    ```python
    strategy = dt.Strategy("mirrored", workers=4)
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(num_epochs):
            for inputs, labels in loader:
                loss = strategy.run(train_step, args=(inputs, labels))
            print(loss.numpy())
    strategy.sync()
    ```

    The model may be made before the block or in it, and the loop may stand in it or after it. The loader stays whole:
    every rank takes the same batches from it, and trains on its rows of them.

    Args:
        kind: "mirrored" (every rank holds everything, gradients are averaged), "server" (workers push gradients to a
            server, which averages them and takes the step), or "topk" (gradients are added up inside each host, and
            the largest entries of these sums are exchanged between hosts).
        workers: How many processes to start where none were started.

    Raises:
        UsageError: There is no such kind.
    """

    KINDS: ClassVar[dict[str, str]] = {
        "mirrored": "ddp",
        "server": "server(staleness=0)",
        "topk": "ddp,wire=topk(0.01,hosts)",
    }
    """The plan of each kind; the command line and the environment go before it."""

    def __init__(self, kind: str = "mirrored", workers: int | None = None) -> None:
        if kind not in self.KINDS:
            do = "choose one of them, or a plan by dt.distribute(..., plan=...)"
            raise UsageError(explain(f"Strategy({kind!r})", " or ".join(self.KINDS), do))
        self.plan = Plan.parse(self.KINDS[kind])
        self.plan.check()
        self.workers = workers
        self.iterator = SimpleNamespace(as_default=nullcontext)
        """`with strategy.iterator.as_default():` around `run` changes nothing: `run` divides the batch by itself."""
        self._entered = False
        self._made: list[weakref.ref[Any]] = []
        """Optimizers and schedulers made in the scope that are not distributed yet."""
        self._args = _Args()
        self._batches: Any = None
        self._own: State | None = None
        """Where this rank's own random numbers come from, inside of `run`; None where it is the only one."""

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A block that makes optimizers, and perhaps their models and the whole loop. A group call.

        Raises:
            LaunchError: The processes cannot be started.
        """
        enter(self.plan, self.workers)
        join_world()
        _draw_alike()
        self._entered = True
        undo = [_notice(kind, self._made) for kind in (Optimizer, LRScheduler)]
        try:
            yield
        finally:
            for act in undo:
                act()
        self._attach(None)

    def run(self, step: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        """Call `step` with this rank's rows of `args`, a global batch. A group call.

        Args:
            step: Forward, backward and optimizer step.
            args: Its arguments; tensors are cut by their first dimension, other values pass unchanged.

        Returns:
            What `step` returns, with the mean over the global batch for each number: a loss comes back as a tensor on
            the host without a graph, the same on every rank. Tensors with dimensions are this rank's own rows.

        Raises:
            UsageError: It comes before `scope`; no optimizer is found, or not which model it trains; the ranks have
                different batches; or `step` returns whole numbers, which may be counts of this rank's rows.
        """
        if not isinstance(args, list | tuple):
            given = f"run(step, args) with a {type(args).__name__} as args"
            raise UsageError(explain(given, "a tuple of the step's arguments", "run(step, args=(inputs, labels))"))
        if not self._entered:
            do = "make the optimizer inside `with strategy.scope():`"
            raise UsageError(explain("run() before scope()", "a model and an optimizer", do))
        first, mark = self._batches is None, _mark(tuple(args))
        if first or self._made:
            self._attach(step)
        world = here()
        if world.size == 1:
            return _global(step(*self._mine(args)), None)
        if first:
            _exchanged([], mark, None, [])  # before anything is trained on other batches
        divided = next(arrays(tuple(args)), None) is not None
        mine = self._mine(args)
        rows = world.loop.rows if divided else None
        with _weighed() as weighed, self._own_draws() if divided else nullcontext():
            result = step(*mine)
        world.loop.batches.done()
        return _global(result, lambda numbers: _exchanged(numbers, mark, rows, weighed))

    def _mine(self, args: Sequence[Any]) -> Sequence[Any]:
        """This rank's rows of arguments; all of them where they have no rows."""
        self._args.given = tuple(args)
        return args if next(arrays(tuple(args)), None) is None else next(self._batches.epoch())

    def sync(self) -> None:
        """Make all replicas the same, where they step alone, and return when every rank has come here. A group call."""
        values.sync()
        values.barrier()

    def _attach(self, step: Callable[..., Any] | None) -> None:
        """Distribute what was made and, if there is one, what a step names.

        At the end of the block, without a step, what cannot be told yet is left for the first `run`.
        """
        made = [thing for ref in self._made if (thing := ref()) is not None]
        spoken = around() if step is None else named(step)
        found = [thing for thing in ([*made, *spoken] if step else made) if isinstance(thing, Optimizer)]
        optimizers = list({id(one): one for one in found if all(one is not known for known in RUN.optimizers)}.values())
        if not optimizers:
            if step is not None and self._batches is None:
                raise UsageError(_NO_OPTIMIZER)
            self._made.clear()
            return
        known = {id(param) for model in RUN.models for param in model.parameters()}
        params = {key: param for key, param in trained(optimizers).items() if key not in known}
        try:
            models = owners(params, spoken)
        except UsageError:
            if step is not None:
                raise
            return
        schedulers = [one for one in made if isinstance(one, LRScheduler) and one.optimizer in optimizers]
        self._made.clear()
        self._distribute([*models, *optimizers, *schedulers])

    def _distribute(self, objects: list[Any]) -> None:
        shared, seed = capture(full=True), torch.initial_seed()
        if self._batches is None:
            *_, self._batches = distribute(*objects, self._args, plan=self.plan, workers=self.workers)
        else:
            distribute(*objects, plan=self.plan, workers=self.workers)
        if here().size > 1 and (self._own is None or torch.initial_seed() != seed):
            self._own = capture(full=True)
            install(shared, full=True)

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Random layers draw from this rank's own state; everything around `run` draws alike on all ranks."""
        if self._own is None:
            yield
            return
        shared = capture(full=True)
        install(self._own, full=True)
        try:
            yield
        finally:
            self._own = capture(full=True)
            install(shared, full=True)


def _notice(kind: type[Any], made: list[weakref.ref[Any]]) -> Callable[[], None]:
    """Note every object of a class that is made from now on. Result: undo."""
    original = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(weakref.ref(self))

    kind.__init__ = init
    return lambda: setattr(kind, "__init__", original)


def _draw_alike() -> None:
    """Give every rank rank 0's random state: what is made and drawn from now on is the same on all of them."""
    world = here()
    if world.size > 1 and RUN.stream is None:
        stream = Stream()
        mine = stream.state_bytes() if world.rank == 0 else b""
        stream.load_bytes(world.comm.bytes_of_all("random state", mine)[0])
        stream.hand_back()


# What a step returns.


@contextmanager
def _weighed() -> Iterator[list[Tensor]]:
    """The losses that `dt.weight` has weighted, of those that a backward starts from in the block."""
    loop, found = here().loop, list[Tensor]()

    def note(roots: Sequence[Tensor], _: Rows | None) -> None:
        if loop.explicit is not None:
            found.extend(roots)

    loop.observers.append(note)
    try:
        yield found
    finally:
        loop.observers.remove(note)


def _global(result: Any, over_ranks: Callable[[list[Any]], list[float]] | None) -> Any:
    """A step's result with a global number for each number in it, on the host and without a graph."""
    leaves, shape = tree_flatten(result)
    single = [k for k, leaf in enumerate(leaves) if _is_number(leaf)]
    numbers = [] if over_ranks is None else over_ranks([leaves[k] for k in single])
    for k in single:
        leaves[k] = _apart(leaves[k])
    for k, number in zip(single, numbers, strict=False):
        if not _is_whole(leaf := leaves[k]):
            leaves[k] = torch.full_like(leaf, number) if isinstance(leaf, Tensor) else type(leaf)(number)
    return tree_unflatten(leaves, shape)


def _apart(leaf: Any) -> Any:
    """A number as numpy can have it: without a graph, on the host, not in bfloat16."""
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach().cpu()
    return leaf.float() if leaf.dtype is torch.bfloat16 else leaf


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.ndim == 0 and not leaf.is_complex()
    return isinstance(leaf, Real)


def _is_whole(number: Any) -> bool:
    if isinstance(number, Tensor):
        return not number.is_floating_point()
    return isinstance(number, Integral)


def _is_bool(number: Any) -> bool:
    return number.dtype is torch.bool if isinstance(number, Tensor) else isinstance(number, bool)


def _exchanged(mine: list[Any], mark: int, rows: Rows | None, weighed: list[Tensor]) -> list[float]:
    """The mean of each number over the global batch; a bool must be the same on all ranks."""
    for number in mine:
        if _is_whole(number) and not _is_bool(number):
            raise UsageError(_whole(number))
    head = [float(mark), rows.mine if rows else 1.0]
    vector = torch.tensor(head + [float(_apart(number)) for number in mine], dtype=torch.float64)
    every = here().comm.exchange(f"run, {len(mine)} numbers", vector)
    if (every[:, 0] != every[0, 0]).any():
        raise UsageError(_OTHER_BATCH)
    found = []
    for number, column in zip(mine, every[:, 2:].unbind(1), strict=True):
        if _is_bool(number) and (column != column[0]).any():
            raise UsageError(_uneven([bool(value) for value in column]))
        weights = torch.ones_like(column) if any(number is root for root in weighed) else every[:, 1]
        found.append(float(torch.where(weights > 0, column * weights, 0.0).sum() / weights.sum()))
    return found


def _mark(args: tuple[Any, ...]) -> int:
    """A number that batches of other rows do not have: of some numbers of every array."""
    mark = 0
    for array in arrays(args):
        mark = zlib.crc32(repr(tuple(array.shape)).encode(), mark)
        try:
            flat = torch.as_tensor(array).detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _LOOKED_AT)].cpu().contiguous()
            mark = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), mark)
        except (TypeError, RuntimeError):  # not numbers, or sparse
            continue
    return mark


def _whole(number: Any) -> str:
    return explain(
        f"the step returned a whole number ({int(number)}) on rank {here().rank}",
        "means over rows (floats), which run() averages over all of them: whole numbers may count rows of this rank",
        "return a mean, such as (output.argmax(1) == labels).float().mean(), and count batches and rows around run()",
    )


def _uneven(found: list[bool]) -> str:
    said = ", ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(found))
    do = "return dt.any(flag) or dt.all(flag)"
    return explain(f"the step returned another bool on each rank ({said})", "one answer on all ranks", do)


_NO_OPTIMIZER = explain(
    "run() of a step for which no optimizer is known",
    "an optimizer made inside `with strategy.scope():`, or one that the step names, that is not distributed yet",
    "make the optimizer inside the scope",
)
_OTHER_BATCH = explain(
    "the ranks came to run() with different batches",
    "the same global batch on every rank: run() takes this rank's rows of it",
    "draw data, order and augmentation from torch's, Python's or numpy's global random state, seeded at the top of the "
    "script, and give run() whole batches (no DistributedSampler, no loader that dt.distribute returned)",
)
