"""Pickles of other libraries, read and never run: a small stack machine over the opcodes that builds plain values.

No class is looked up and nothing that a file names is called. What a file may name is listed in names.py, and tensors
are made of the file's own bytes by the caller. Any other name is an error that says it. A few bytes can say large
things (a text many times, a tensor expanded): all that is made of a source's files is counted, in its `Room`.
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from distributedtorch.checkpoint.names import DTYPES, MAKERS, NAMES, RECORDS, Maker, Name, Record, key, pairs
from distributedtorch.core.errors import CheckpointError, explain

MOST_BYTES = 1 << 28
"""Of one pickle, without its tensors."""
_MOST_DEPTH = 60
_MOST_BITS = 128
OBJECTS_TIMES, OBJECTS_BESIDE = 64, 16 << 20
"""Values may take so many times the bytes of the pickles that they are in, and so many bytes beside."""
TENSORS_TIMES, TENSORS_BESIDE = 4, 64 << 20
"""The same for tensors, by the bytes of the files."""
_MEMO = 1000
_CONTAINER, _TENSOR, _MARK, _SEEN = 256, 600, 64, 8
"""Bytes that one takes, about."""
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError, UnicodeError)


class Room:
    """What may still be made of a source's files, in bytes."""

    def __init__(self) -> None:
        self.objects, self.tensors = OBJECTS_BESIDE, TENSORS_BESIDE

    def open(self, num_bytes: int) -> None:
        """A file of so many bytes is one of the source's."""
        self.tensors += TENSORS_TIMES * num_bytes

    def unpickle(self, num_bytes: int) -> None:
        """A pickle of so many bytes is in it."""
        self.objects += OBJECTS_TIMES * num_bytes

    def hold(self, num_bytes: int) -> None:
        """Values of so many bytes are made.

        Raises:
            ValueError: There is no room for them.
        """
        self.objects -= num_bytes
        if self.objects < 0:
            raise ValueError("a few bytes that say too much, or the same parts over and over")

    def hold_tensors(self, num_bytes: int) -> None:
        """Tensors of so many bytes are made.

        Raises:
            ValueError: There is no room for them.
        """
        self.tensors -= num_bytes
        if self.tensors < 0:
            raise ValueError("tensors of far more bytes than the files have")


def read(
    data: bytes,
    what: str,
    tensors: Mapping[str, Maker] | None = None,
    storage: Maker | None = None,
    room: Room | None = None,
) -> Any:
    """The value that a pickle describes, as dicts, lists, tuples, numbers, text, tensors and records.

    Args:
        data: The pickle.
        what: How to call it in errors.
        tensors: What makes tensors, by the names that torch pickles them under.
        storage: Gives a tensor's memory from the description that torch.save writes for it.
        room: Of the source that the pickle is in, where that has more than one.

    Raises:
        CheckpointError: Not a whole pickle, too large or too deep, or it names what is not known.
    """
    if len(data) > MOST_BYTES:
        raise wrong(f"{what} has {len(data):,} bytes beside its tensors")
    room = room or Room()
    room.unpickle(len(data))
    machine = _Machine(what, {**MAKERS, **(tensors or {})}, storage, room)
    try:
        value = machine.run(data)
        _walk(value, room)
        return value
    except CheckpointError:
        raise
    except _WRONG as error:
        raise wrong(f"{what} is not a pickle that torch writes ({type(error).__name__}: {str(error)[:200]})") from None


def wrong(given: str) -> CheckpointError:
    """The error for a file that is not what it should be."""
    return CheckpointError(explain(given, "a whole file as torch.save, DCP or DeepSpeed write it", "check the file"))


class _Machine:
    """The stack, the marks in it, and the memo."""

    def __init__(self, what: str, makers: Mapping[str, Maker], storage: Maker | None, room: Room) -> None:
        self.what, self.makers, self.storage, self.room = what, makers, storage, room
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        """What lies under each mark."""
        self.memo: list[Any] = []
        self.most = 0
        """Places there: each takes a byte of the pickle at least, numbered from 0."""

    def run(self, data: bytes) -> Any:
        self.most = len(data) + _MEMO
        for opcode, arg, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                break
            if name in _VALUES:
                self.push(_small(arg))
            elif name in _CONSTANTS:
                self.push(_CONSTANTS[name]())
            elif name in _TUPLES:
                self.push(tuple(self.taken(_TUPLES[name])))
            elif name in _STEPS:
                _STEPS[name](self, arg)
            elif name not in ("PROTO", "FRAME"):
                raise ValueError(f"opcode {name}")
        if len(self.stack) != 1 or self.below:
            raise ValueError("more or less than one value")
        return self.stack[0]

    def push(self, value: Any) -> None:
        """Put a new value on the stack."""
        self.room.hold(_TENSOR if isinstance(value, Tensor) else sys.getsizeof(value))
        self.stack.append(value)

    def taken(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise ValueError("the stack is empty")
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def mark(self, _: Any) -> None:
        self.room.hold(_MARK)
        self.below.append(self.stack)
        self.stack = []

    def marked(self) -> list[Any]:
        """What was put after the last mark."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def since_mark(self, make: Maker) -> None:
        items = self.marked()
        self.push(make(items))

    def append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("appends to what is not a list")
        self.grow(lambda found: found.extend(items))

    def set(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise ValueError("sets an item of what is not a dict")
        self.grow(lambda found: found.update(pairs(items)))

    def add(self, _: Any) -> None:
        items = self.marked()
        if type(self.stack[-1]) is not set:
            raise ValueError("adds to what is not a set")
        self.grow(lambda found: found.update(map(key, items)))

    def grow(self, act: Callable[[Any], None]) -> None:
        """Let the container on the stack take more."""
        before = sys.getsizeof(self.stack[-1])
        act(self.stack[-1])
        self.room.hold(sys.getsizeof(self.stack[-1]) - before)

    def put(self, number: int | None) -> None:
        place = len(self.memo) if number is None else int(number)
        if not 0 <= place <= self.most:
            raise ValueError(f"a place {place} of the memo")
        self.memo += [_NOTHING] * (place + 1 - len(self.memo))
        self.memo[place] = self.stack[-1]

    def get(self, number: int) -> None:
        place = int(number)
        if not 0 <= place < len(self.memo) or self.memo[place] is _NOTHING:
            raise ValueError(f"nothing at place {place} of the memo")
        self.stack.append(self.memo[place])

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
        self.push(Name(text) if found is None else found)

    def make(self, _: Any) -> None:
        """REDUCE, NEWOBJ: a known name with arguments."""
        named, args = self.taken(2)
        if type(named) is not Name or type(args) is not tuple:
            raise ValueError("a call of what is not a name")
        self.room.hold(_CONTAINER + 8 * sum(len(arg) for arg in args if isinstance(arg, _SIZED)))
        if named.text in self.makers:
            self.push(self.makers[named.text](*args))
        elif named.text in RECORDS:
            self.push(Record(named.text, args))
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


def _walk(value: Any, room: Room) -> None:
    """Walk through all of it, as those do who use it: what is shared counts each time that it is met.

    Raises:
        ValueError: It is too deep, circular, or the same parts are shared over and over.
    """
    todo: list[tuple[Iterator[Any], bool]] = [(iter((value,)), True)]
    while todo:
        items, written = todo[-1]
        inside = None
        for one in items:
            room.hold(_weight(one) if written else 2 * _SEEN)
            inside = _inside(one)
            if inside is not None:
                todo.append((inside, written and not isinstance(one, Record)))
                break
        if inside is None:
            todo.pop()
        elif len(todo) > _MOST_DEPTH + 1:
            raise ValueError("nested too deeply")


def _inside(one: Any) -> Iterator[Any] | None:
    if isinstance(one, dict):
        return chain(one.keys(), one.values())
    if isinstance(one, list | tuple | set):
        return iter(one)
    return iter((one.args, one.fields)) if isinstance(one, Record) else None


def _weight(one: Any) -> int:
    """Bytes that a value takes as JSON and in a copy, about; a record is never written."""
    if isinstance(one, str):
        return _SEEN + (len(one) if one.isascii() else 12 * len(one))
    return _CONTAINER if isinstance(one, dict | list | tuple | set | bytes) else _SEEN


_NOTHING, _SIZED = object(), str | bytes | list | tuple | dict | set
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
