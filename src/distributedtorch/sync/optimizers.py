"""Which optimizers may work on a flat piece of a parameter, which need it whole, which cannot be divided at all."""

from __future__ import annotations

import torch

from distributedtorch.core.errors import UsageError, explain

_NAMES = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "Rprop", "ASGD"]
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = tuple(getattr(torch.optim, name) for name in _NAMES)
"""Exact on flat pieces: each element's update depends on that element's history alone. By exact type: a subclass may
differ, and works on whole parameters."""

REFUSED = {
    "LBFGS": "its line search calls the model again and needs the gradient of all parameters at once",
}


SUMS_ALL = ("Prodigy", "DAdapt")
"""Beginnings of the names of optimizers whose step size is a sum over all parameters."""


def owns_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer needs whole parameters; refuses one that needs all of them."""
    if any(kind.__name__.startswith(SUMS_ALL) for kind in type(optimizer).__mro__):
        given = f"{type(optimizer).__name__} under a plan that divides the optimizer's work"
        needed = "an optimizer that updates each parameter by itself (this one's step size is a sum over all of them)"
        raise UsageError(explain(given, needed, 'use plan="ddp", or another optimizer'))
    return type(optimizer) not in ELEMENTWISE


def refuse(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that several ranks cannot carry out."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in REFUSED:
            raise UsageError(
                explain(
                    f"the optimizer is {type(optimizer).__name__}: {REFUSED[kind.__name__]}",
                    "an optimizer that steps once per backward",
                    "use AdamW, SGD or another first-order optimizer, or one worker",
                )
            )
