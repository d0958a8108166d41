"""A method given to one object, and taken away again."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def override(thing: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Let `function` be the method `name` of this one object; the class and its other objects keep theirs.

    Returns:
        What puts back the method the object had: its class's, or one of its own.
    """
    own = {name: vars(thing)[name]} if name in vars(thing) else {}
    setattr(thing, name, types.MethodType(function, thing))

    def undo() -> None:
        delattr(thing, name)
        for key, method in own.items():
            setattr(thing, key, method)

    return undo
