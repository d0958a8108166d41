"""A method or a hook given to one object, and taken away again.

Copies and pickles of the object have none of it: they are what they would be without the library, in this process and
in one that does not have it.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

Change = Callable[[dict[str, Any]], dict[str, Any]]


def override(thing: Any, name: str, function: Callable[..., Any], *, deep: bool = False) -> Callable[[], None]:
    """Let `function` be the method `name` of this one object; the class and its other objects keep theirs.

    Args:
        thing: The object.
        name: The method's name.
        function: What it does, from `self` on.
        deep: Whether deep copies made in this process have it too.

    Returns:
        What puts back the method the object had: its class's, or one of its own.
    """
    own = {name: vars(thing)[name]} if name in vars(thing) else {}
    given = _given(thing)
    first = name not in given.methods
    given.methods.setdefault(name, own)
    if deep:
        given.deep[name] = function
    setattr(thing, name, types.MethodType(function, thing))
    given.stand(thing)

    def undo() -> None:
        delattr(thing, name)
        for key, method in own.items():
            setattr(thing, key, method)
        given.deep.pop(name, None)
        if first:
            del given.methods[name]
        given.stand(thing)

    return undo


def hooked(thing: Any, handle: RemovableHandle) -> Callable[[], None]:
    """Leave a hook out of copies and pickles of its module. Result: what removes it."""
    given = _given(thing)
    given.hooks.add(handle.id)
    given.stand(thing)

    def undo() -> None:
        handle.remove()
        given.hooks.discard(handle.id)
        given.stand(thing)

    return undo


def in_copies(thing: Any, change: Change) -> Callable[[], None]:
    """Let copies and pickles of an object have another state: what `change` makes of its own. Result: undo."""
    given = _given(thing)
    given.changes.append(change)
    given.stand(thing)

    def undo() -> None:
        given.changes.remove(change)
        given.stand(thing)

    return undo


def without(thing: Any, state: Any) -> Any:
    """A dict of an object's attributes (its own one, or a copy), without what it was given: another dict."""
    return _given(thing).without(state)


class _Given:
    """What one object was given. Python asks the object itself how it is to be copied and pickled."""

    def __init__(self) -> None:
        self.methods: dict[str, dict[str, Any]] = {}
        """By name what the object had of its own there."""
        self.hooks: set[int] = set()
        self.deep: dict[str, Callable[..., Any]] = {}
        self.changes: list[Change] = []

    def stand(self, thing: Any) -> None:
        """Answer in the object's place while it has anything that was given."""
        for name in _ASKED:
            vars(thing).pop(name, None)
        if self.methods or self.hooks or self.changes:
            acts: list[Callable[..., Any]] = [self.state, self.reduced]
            if self.deep or hasattr(type(thing), "__deepcopy__"):
                acts.append(self.copied)
            vars(thing).update({n: types.MethodType(act, thing) for n, act in zip(_ASKED, acts, strict=False)})

    def state(self, thing: Any) -> Any:
        """The object's state as its class gives it, without what was given."""
        kind: Any = type(thing)
        found = self.without(kind.__getstate__(thing))
        for change in self.changes:
            found = change(found)
        return found

    def reduced(self, thing: Any, protocol: Any) -> Any:
        """How to make it anew; some classes put the state among the arguments."""
        kind: Any = type(thing)
        found = kind.__reduce_ex__(thing, protocol)
        return self.without(found, depth=2) if isinstance(found, tuple) else found

    def copied(self, thing: Any, memo: dict[int, Any]) -> Any:
        """A deep copy, with what these have too."""
        kind: Any = type(thing)
        if hasattr(kind, "__deepcopy__"):
            twin = kind.__deepcopy__(thing, memo)
            state = self.without(vars(twin))
            vars(twin).clear()
        else:
            make, args, state = self.reduced(thing, 4)[:3]
            twin = memo[id(thing)] = make(*args)
            state = copy.deepcopy(state, memo)
        vars(twin).update(state)
        for name, function in self.deep.items():
            override(twin, name, function, deep=True)
        return twin

    def without(self, state: Any, depth: int = 1) -> Any:
        """The same in other dicts."""
        if type(state) is tuple and depth:
            return tuple(self.without(one, depth - 1) for one in state)
        if type(state) is not dict:
            return state
        found: dict[str, Any] = {}
        for name, value in state.items():
            if name in self.methods:
                found |= self.methods[name]
            elif name not in _ASKED:
                found[name] = self._unhooked(name, value)
        return found

    def _unhooked(self, name: str, value: Any) -> Any:
        if not (self.hooks and isinstance(value, dict) and "_hooks" in str(name)):
            return value
        return type(value)((key, hook) for key, hook in value.items() if key not in self.hooks)


_ASKED = ("__getstate__", "__reduce_ex__", "__deepcopy__")
"""What Python asks an object for when it is copied or pickled."""


def _given(thing: Any) -> _Given:
    """What an object was given so far."""
    known = getattr(getattr(vars(thing).get("__getstate__"), "__func__", None), "__self__", None)
    return known if isinstance(known, _Given) else _Given()
