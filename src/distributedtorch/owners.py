"""Finding the models behind an optimizer that nobody gave: modules that own its parameters, and what a step names."""

from __future__ import annotations

import functools
import gc
import inspect
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distributedtorch.core import where
from distributedtorch.core.errors import UsageError, explain


def named(step: Callable[..., Any]) -> list[Any]:
    """The objects that a step names: its globals, the variables around it, and what it is a method of.

    Those that the user's functions among them name are found too.
    """
    found: list[Any] = []
    queue, seen = [step], set[int]()
    while queue:
        at = queue.pop(0)
        if id(at) in seen:
            continue
        seen.add(id(at))
        more = _named(at)
        found += more
        queue += [thing for thing in more if _is_users(thing)]
    return found


def _is_users(thing: Any) -> bool:
    function = inspect.unwrap(getattr(thing, "__func__", thing)) if inspect.isroutine(thing) else None
    return isinstance(thing, functools.partial) or (
        inspect.isfunction(function) and where.is_users(function.__code__.co_filename)
    )


def _named(step: Callable[..., Any]) -> list[Any]:
    if isinstance(step, functools.partial):
        return [step.func, *step.args, *step.keywords.values()]
    if not inspect.isroutine(step):
        step = getattr(step, "__call__", step)  # noqa: B004 (an object that can be called: its method is wanted)
    found: list[Any] = []
    if inspect.ismethod(step):
        found += [step.__self__, *getattr(step.__self__, "__dict__", {}).values()]
        step = step.__func__
    step = inspect.unwrap(step)
    if not inspect.isfunction(step):
        return found
    try:
        seen = inspect.getclosurevars(step)
    except ValueError:  # a variable around it has no value yet
        return found
    return [*found, *seen.nonlocals.values(), *seen.globals.values()]


def around() -> list[Any]:
    """The objects that the user's code has a name for where it is now: in the innermost function, and in its module."""
    frames = (frame for frame, _ in traceback.walk_stack(None) if where.is_users(frame.f_code.co_filename))
    frame = next(frames, None)
    return [] if frame is None else [*frame.f_locals.values(), *frame.f_globals.values()]


def trained(optimizers: Sequence[Optimizer]) -> dict[int, nn.Parameter]:
    """The parameters of optimizers, each once, in their order."""
    return {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def owners(params: dict[int, nn.Parameter], known: Sequence[Any]) -> list[nn.Module]:
    """The models that own parameters: of those `known` where they have them, else the outermost modules there are.

    Args:
        params: The parameters, by id.
        known: Objects that may be models; others are passed over.

    Returns:
        Models in the order in which their parameters come, the same on all ranks.

    Raises:
        UsageError: More than one model that is not known has the same parameter, and neither has all of the other's.
    """
    models = _outermost([thing for thing in known if isinstance(thing, nn.Module) and _has(thing, params)])
    left = {key: param for key, param in params.items() if all(key not in _has(model, params) for model in models)}
    if left:
        models = _outermost([*models, *_alone(_roots(left), left)])
    order = {key: place for place, key in enumerate(params)}
    return sorted(models, key=lambda model: min(order[key] for key in _has(model, params)))


def _has(model: nn.Module, params: dict[int, nn.Parameter]) -> set[int]:
    """Which of the parameters a model has."""
    return {id(param) for param in model.parameters() if id(param) in params}


def _outermost(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Each model once, without those that are parts of others."""
    parts = {id(part) for model in models for part in model.modules() if part is not model}
    return list({id(model): model for model in models if id(model) not in parts}.values())


def _roots(params: dict[int, nn.Parameter]) -> list[nn.Module]:
    """All modules that have some of the parameters and are part of no other module."""
    gc.collect()  # or modules that nobody can reach any more would be found
    above: dict[int, list[nn.Module]] = defaultdict(list)
    found: list[nn.Module] = []
    for module in [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]:
        try:
            own, children = [*module.parameters(recurse=False)], [*module.children()]
        except AttributeError:  # its __init__ has not been called
            continue
        for child in children:
            above[id(child)].append(module)
        if any(id(param) in params for param in own):
            found.append(module)
    roots: dict[int, nn.Module] = {}
    seen: set[int] = set()
    while found:
        module = found.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found += above[id(module)]
            roots |= {} if above[id(module)] else {id(module): module}
    return list(roots.values())


def _alone(roots: Sequence[nn.Module], params: dict[int, nn.Parameter]) -> list[nn.Module]:
    """Those of which no other has all the parameters, and more; refuses where two still have the same one."""
    sets = [_has(root, params) for root in roots]
    kept = [(root, mine) for root, mine in zip(roots, sets, strict=True) if not any(mine < other for other in sets)]
    taken: dict[int, nn.Module] = {}
    for root, mine in kept:
        for key in mine:
            if key in taken:
                kinds = " and ".join(sorted(type(one).__name__ for one in (root, taken[key])))
                name = next(name for name, param in root.named_parameters() if id(param) == key)
                given = f"two models have the optimizer's parameter {name!r}, neither is part of the other ({kinds})"
                do = "call the model by its own name in the step function, or use dt.distribute(model, optimizer)"
                raise UsageError(explain(given, "to know which one is trained", do))
            taken[key] = root
    return [root for root, _ in kept]
