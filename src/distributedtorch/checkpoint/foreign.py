"""Pickles of other libraries, read and never run: a small stack machine over the opcodes that builds plain values.

No class is looked up and nothing that a file names is called. What a file may name is listed in names.py, and tensors
are made of the file's own bytes by the caller. Any other name is an error that says it.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from distributedtorch.checkpoint.names import DTYPES, MAKERS, NAMES, RECORDS, Maker, Name, Record, key, pairs
from distributedtorch.core.errors import CheckpointError, explain

MOST_BYTES = 1 << 28
"""Of one pickle, without its tensors."""
_MOST_DEPTH = 60
_MOST_BITS = 128
_TIMES = 32
"""How many values may be reached per byte of the pickle: shared ones count each time they are met."""
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, UnicodeError)


def read(data: bytes, what: str, tensors: Mapping[str, Maker] | None = None, storage: Maker | None = None) -> Any:
    """The value that a pickle describes, as dicts, lists, tuples, numbers, text, tensors and records.

    Args:
        data: The pickle.
        what: How to call it in errors.
        tensors: What makes tensors, by the names that torch pickles them under.
        storage: Gives a tensor's memory from the description that torch.save writes for it.

    Raises:
        CheckpointError: Not a whole pickle, too large or too deep, or it names what is not known.
    """
    if len(data) > MOST_BYTES:
        raise wrong(f"{what} has {len(data):,} bytes beside its tensors")
    machine = _Machine(what, {**MAKERS, **(tensors or {})}, storage)
    try:
        value = machine.run(data)
        _limit(value, _TIMES * len(data) + 1000)
        return value
    except _WRONG as error:
        raise wrong(f"{what} is not a pickle that torch writes ({type(error).__name__}: {str(error)[:200]})") from None


def wrong(given: str) -> CheckpointError:
    """The error for a file that is not what it should be."""
    return CheckpointError(explain(given, "a whole file as torch.save, DCP or DeepSpeed write it", "check the file"))


class _Machine:
    """The stack, the marks in it, and the memo."""

    def __init__(self, what: str, makers: Mapping[str, Maker], storage: Maker | None) -> None:
        self.what, self.makers, self.storage = what, makers, storage
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        """What lies under each mark."""
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, arg, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                break
            if name in _VALUES:
                self.stack.append(_small(arg))
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name]())
            elif name in _TUPLES:
                self.stack.append(tuple(self.taken(_TUPLES[name])))
            elif name in _STEPS:
                _STEPS[name](self, arg)
            elif name not in ("PROTO", "FRAME"):
                raise ValueError(f"opcode {name}")
        if len(self.stack) != 1 or self.below:
            raise ValueError("more or less than one value")
        return self.stack[0]

    def taken(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise ValueError("the stack is empty")
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def marked(self) -> list[Any]:
        """What was put after the last mark."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def since_mark(self, make: Maker) -> None:
        items = self.marked()
        self.stack.append(make(items))

    def append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("appends to what is not a list")
        self.stack[-1].extend(items)

    def set(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise ValueError("sets an item of what is not a dict")
        self.stack[-1].update(pairs(items))

    def add(self, _: Any) -> None:
        items = self.marked()
        if type(self.stack[-1]) is not set:
            raise ValueError("adds to what is not a set")
        self.stack[-1].update(map(key, items))

    def put(self, number: int | None) -> None:
        self.memo[len(self.memo) if number is None else int(number)] = self.stack[-1]

    def get(self, number: int) -> None:
        self.stack.append(self.memo[int(number)])

    def name(self, arg: str | None) -> None:
        """Push what a name stands for, where it is one of those known."""
        module, attribute = self.taken(2) if arg is None else str(arg).split(" ", 1)
        if type(module) is not str or type(attribute) is not str:
            raise ValueError("a name that is not text")
        text = f"{module}.{attribute}"
        found = getattr(torch, attribute, None) if module == "torch" and attribute in DTYPES else None
        if found is None and text not in self.makers and text not in NAMES:
            given = f"{self.what} names {text[:200]!r}, which is not read (and nothing in the file was run)"
            do = "save tensors, numbers, text, lists and dicts only: state_dict() of the model and the optimizer"
            raise CheckpointError(explain(given, "a checkpoint of plain state", do))
        self.stack.append(Name(text) if found is None else found)

    def make(self, _: Any) -> None:
        """REDUCE, NEWOBJ: a known name with arguments."""
        named, args = self.taken(2)
        if type(named) is not Name or type(args) is not tuple:
            raise ValueError("a call of what is not a name")
        if named.text in self.makers:
            self.stack.append(self.makers[named.text](*args))
        elif named.text in RECORDS:
            self.stack.append(Record(named.text, args))
        else:
            raise ValueError(f"a call of {named.text}")

    def make_with_words(self, _: Any) -> None:
        named, args, words = self.taken(3)
        if type(words) is not dict or words:
            raise ValueError("an object made with keywords")
        self.stack += [named, args]
        self.make(None)

    def build(self, _: Any) -> None:
        """Give the fields of a record; those of containers (state_dict's `_metadata`) and tensors are left out."""
        (fields,) = self.taken(1)
        if type(self.stack[-1]) is Record:
            if type(fields) is tuple and len(fields) == 2 and fields[0] is None and type(fields[1]) is dict:
                fields = fields[1]  # a class with slots
            self.stack[-1].fields = fields
        elif not isinstance(self.stack[-1], dict | Tensor):
            raise ValueError("gives fields to what has none")

    def stored(self, _: Any) -> None:
        (said,) = self.taken(1)
        if self.storage is None:
            raise ValueError("a tensor where none can be")
        self.stack.append(self.storage(said))


def _small(value: Any) -> Any:
    if type(value) is int and value.bit_length() > _MOST_BITS:
        raise ValueError(f"a number of {value.bit_length()} bits")
    return value


def _limit(value: Any, most: int) -> None:
    """Refuse what cannot be walked through: too deep, circular, or the same parts shared over and over."""
    todo, seen = [(value, 0)], 0
    while todo:
        one, depth = todo.pop()
        seen += 1
        inside: list[Any] = []
        if isinstance(one, dict):
            inside = [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            inside = list(one)
        elif isinstance(one, Record):
            inside = [one.args, one.fields]
        if seen + len(todo) + len(inside) > most or depth > _MOST_DEPTH:
            raise ValueError("nested too deeply" if depth > _MOST_DEPTH else "the same parts over and over")
        todo += [(item, depth + 1) for item in inside]


_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_STEPS: dict[str, Callable[[_Machine, Any], Any]] = {
    "MARK": _Machine.mark,
    "POP": lambda machine, _: machine.taken(1),
    "POP_MARK": lambda machine, _: machine.marked(),
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    "TUPLE": lambda machine, _: machine.since_mark(tuple),
    "LIST": lambda machine, _: machine.since_mark(list),
    "DICT": lambda machine, _: machine.since_mark(pairs),
    "FROZENSET": lambda machine, _: machine.since_mark(lambda items: set(map(key, items))),
    "APPEND": lambda machine, _: machine.append(machine.taken(1)),
    "APPENDS": lambda machine, _: machine.append(machine.marked()),
    "SETITEM": lambda machine, _: machine.set(machine.taken(2)),
    "SETITEMS": lambda machine, _: machine.set(machine.marked()),
    "ADDITEMS": _Machine.add,
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.put,
    "GET": _Machine.get,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": lambda machine, _: machine.name(None),
    "REDUCE": _Machine.make,
    "NEWOBJ": _Machine.make,
    "NEWOBJ_EX": _Machine.make_with_words,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.stored,
}
