"""The documents' other face, over the same parts: `Strategy` around a step.

What is made inside `scope` is given to `dt.distribute` when the block ends; `run` cuts this rank's rows out of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.plan import Plan
from distributedtorch.data.cut import arrays
from distributedtorch.distribute import distribute
from distributedtorch.values import barrier


class _Args:
    """The arguments of a step, as a loader of one batch."""

    def __init__(self) -> None:
        self.given: tuple[Any, ...] = ()

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        yield self.given


class Strategy:
    """Distributes a step: what is made inside `scope` is trained by `run`.

    ```python
    strategy = dt.Strategy("mirrored")
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader:
        loss = strategy.run(train_step, (inputs, labels))
    strategy.sync()
    ```

    Args:
        kind: "mirrored" (every rank holds everything, gradients are averaged), "server" or "topk".
        workers: How many processes to start where none were started.

    Raises:
        UsageError: There is no such kind.
        PlanError: Its plan is not built yet.
    """

    KINDS: ClassVar[dict[str, str]] = {
        "mirrored": "ddp",
        "server": "server(staleness=4)",
        "topk": "ddp,wire=topk(0.01)",
    }
    """The plan of each kind."""

    def __init__(self, kind: str = "mirrored", workers: int | None = None) -> None:
        if kind not in self.KINDS:
            do = "choose one of them, or a plan by dt.distribute(..., plan=...)"
            raise UsageError(explain(f"Strategy({kind!r})", " or ".join(self.KINDS), do))
        self.plan = Plan.parse(self.KINDS[kind])
        self.plan.check()
        self.workers = workers
        self._args = _Args()
        self._batches: Any = None

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A block that makes models and their optimizers: when it ends, they are distributed.

        Raises:
            UsageError: No model, or no optimizer, was made in it.
        """
        made: list[Any] = []
        undo = [_notice(kind, made) for kind in (nn.Module, Optimizer)]
        try:
            yield
        finally:
            for act in undo:
                act()
        self._attach(made)

    def run(self, step: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        """Call `step` with this rank's rows of `args`, a global batch.

        Args:
            step: Forward, backward and optimizer step.
            args: Its arguments; tensors are cut by their first dimension, other values pass unchanged.

        Returns:
            What `step` returns on this rank; `dt.mean` makes the global mean of a loss.

        Raises:
            UsageError: It comes before `scope`.
        """
        if self._batches is None:
            do = "make the model and its optimizer inside `with strategy.scope():`"
            raise UsageError(explain("run() before scope()", "a model and an optimizer", do))
        if next(arrays(tuple(args)), None) is None:
            return step(*args)
        self._args.given = tuple(args)
        return step(*next(self._batches.epoch()))

    def sync(self) -> None:
        """Return when every rank has come here: mirrored replicas agree after every step."""
        barrier()

    def _attach(self, made: list[Any]) -> None:
        optimizers = [thing for thing in made if isinstance(thing, Optimizer)]
        modules = [thing for thing in made if isinstance(thing, nn.Module)]
        inner = {id(child) for module in modules for child in module.modules() if child is not module}
        models = [m for m in modules if id(m) not in inner and any(True for _ in m.parameters())]
        if not models or not optimizers:
            given = f"scope() made {len(models)} models and {len(optimizers)} optimizers"
            raise UsageError(explain(given, "both", "make the model and its optimizer in one `with strategy.scope():`"))
        feed = [] if self._batches is not None else [self._args]
        *_, last = distribute(*models, *optimizers, *feed, plan=self.plan, workers=self.workers)
        self._batches = self._batches or last


def _notice(kind: type[Any], made: list[Any]) -> Callable[[], None]:
    """Keep every object of a class that is made from now on. Result: undo."""
    original = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    kind.__init__ = init
    return lambda: setattr(kind, "__init__", original)
