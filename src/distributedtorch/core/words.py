"""The words of a plan: how one is written, which exist, and what each states about itself.

A word is `name`, `name=value` or `name(arg, ...)`; `read` turns text into words and points at the column where it
cannot. `WORDS` is the whole vocabulary as data, one row each; the order of its rows is the order of canonical text.
What a part states about itself are its `Traits`: contradictions between words are found from these alone.
"""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, NoReturn

from distributedtorch.core.errors import PlanError, explain

Kind = Literal["sync", "precision", "number", "data", "memory", "split", "wire", "auto"]
Form = Literal["bare", "value", "args"]
Owns = Literal["whole", "flat", "split", "served", "none"]
Places = Literal["rank", "host", "device"]

EXCLUSIVE: frozenset[Kind] = frozenset({"sync", "precision", "wire"})
"""Kinds of which a plan has at most one word."""
ALIASES = {"zero": "zero3"}
"""Short names and the words they stand for."""
LARGEST = 1e30
"""Numbers in a plan are smaller than this: beyond it, text and number no longer agree."""
DEEPEST = 8
"""Brackets nest no further than this."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TOKEN = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<mark>[=(),])"
)


@dataclass(frozen=True)
class Word:
    """One word of a plan, or the name inside one (`topk(0.01)` in `wire=topk(0.01)`)."""

    name: str
    """Letters, digits and underscores, not starting with a digit."""
    _: KW_ONLY
    value: Value | None = None
    """What stands after `=`; None without one."""
    args: tuple[Arg, ...] = ()
    """What stands in brackets; a word has a value or arguments, not both."""

    def __post_init__(self) -> None:
        """Refuse what has no text, so that every word can be written and read again."""
        if not NAME.fullmatch(self.name):
            given = f"a word named {self.name!r}"
            raise PlanError(explain(given, "letters, digits and underscores", "give a name such as 'ddp'"))
        if self.value is not None and self.args:
            given = f"the word {self.name!r} with two values"
            raise PlanError(explain(given, "`name=value` or `name(arg, ...)`", "give a value or arguments, not both"))
        if self.value is not None:
            _require_value(self.name, self.value)

    def __str__(self) -> str:
        """The word as text that reads back as the same word."""
        if self.value is not None:
            return f"{self.name}={self.value}"
        return f"{self.name}({','.join(map(str, self.args))})" if self.args else self.name


@dataclass(frozen=True)
class Arg:
    """One argument in a word's brackets."""

    value: Value
    """A number, or a name with or without brackets of its own."""
    key: str | None = None
    """What stands before `=`; None for an argument told by its position."""

    def __post_init__(self) -> None:
        """Refuse what has no text."""
        if self.key is not None and not NAME.fullmatch(self.key):
            given = f"an argument named {self.key!r}"
            raise PlanError(explain(given, "letters, digits and underscores", "give a name such as 'every'"))
        _require_value(self.key or "an argument", self.value)

    def __str__(self) -> str:
        """The argument as text."""
        return str(self.value) if self.key is None else f"{self.key}={self.value}"


Value = int | float | Word


def _require_value(name: str, value: object) -> None:
    """Refuse what the grammar's rule for values cannot write."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST < value < LARGEST
    if not number and not (isinstance(value, Word) and value.value is None):
        needed = f"a number below {LARGEST:g}, or a Word without a value of its own"
        raise PlanError(explain(f"{value!r} as the value of {name}", needed, "give such a value"))


class Token(NamedTuple):
    """A piece of text: its kind (`number`, `name`, `mark`, `end`), itself, and where it starts."""

    kind: str
    text: str
    column: int


def read(text: str) -> tuple[Word, ...]:
    """The words of a plan's text.

    Raises:
        PlanError: The text does not follow the grammar; the message points at the column.
    """
    return _Reader(re.sub(r"\s", " ", text)).plan()


class _Reader:
    """Recursive descent over the grammar: one method per rule."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.next = self._token(0)

    def plan(self) -> tuple[Word, ...]:
        words = [self._word()]
        while self._take(","):
            words.append(self._word())
        if self.next.kind != "end":
            self._fail('"," and another word, or the end')
        return tuple(words)

    def _word(self) -> Word:
        name = self._name("a word")
        if self._take("="):
            return Word(name, value=self._value(depth=0))
        return Word(name, args=self._args(depth=1))

    def _value(self, depth: int) -> Value:
        if self.next.kind == "number":
            return self._number()
        return Word(self._name("a number or a name"), args=self._args(depth + 1))

    def _args(self, depth: int) -> tuple[Arg, ...]:
        if self.next.text == "(" and depth > DEEPEST:
            self._fail(f"brackets nested at most {DEEPEST} deep")
        if not self._take("("):
            return ()
        args = [self._arg(depth)]
        while self._take(","):
            args.append(self._arg(depth))
        if not self._take(")"):
            self._fail('"," and another argument, or ")"')
        return tuple(args)

    def _arg(self, depth: int) -> Arg:
        value = self._value(depth)
        if isinstance(value, Word) and not value.args and self._take("="):
            return Arg(self._value(depth), key=value.name)
        return Arg(value)

    def _name(self, expected: str) -> str:
        if self.next.kind != "name":
            self._fail(expected)
        return self._advance().text

    def _number(self) -> int | float:
        text = self.next.text
        if len(text) > 40 or abs(float(text)) >= LARGEST:
            self._fail(f"a number below {LARGEST:g} in at most 40 characters")
        self._advance()
        return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else float(text)

    def _take(self, mark: str) -> bool:
        found = self.next.text == mark
        if found:
            self._advance()
        return found

    def _advance(self) -> Token:
        token = self.next
        self.next = self._token(token.column + len(token.text))
        return token

    def _token(self, start: int) -> Token:
        column = len(self.text) - len(self.text[start:].lstrip(" "))
        if column == len(self.text):
            return Token("end", "", column)
        match = TOKEN.match(self.text, column)
        return Token(match.lastgroup or "", match[0], column) if match else Token("unknown", self.text[column], column)

    def _fail(self, expected: str) -> NoReturn:
        found = f'"{self.next.text}"' if self.next.text else "the end"
        pointer = f"  {self.text}\n  {' ' * self.next.column}^"
        given = f"the plan cannot be read at column {self.next.column + 1}, where {found} stands\n{pointer}"
        raise PlanError(explain(given, f"{expected} here", "write words separated by commas: zero1,accumulate=4"))


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a part states about itself; words are judged against each other by these and nothing else."""

    exact: bool = True
    """Whether the result is that of one process, up to rounding."""
    lockstep: bool = True
    """Whether replicas take optimizer steps together; False only for syncs whose replicas step alone."""
    owns: Owns = "none"
    """What a rank updates: `whole` tensors; a `flat` range, keeping all parameters; a range, with the parameters
    `split` too; nothing, what is `served` from elsewhere; `none` where the part has no say in it."""
    places: Places = "rank"
    """Where tensors live: with each `rank`; once per `host`, for all its ranks; moved on and off the `device`."""
    needs_lockstep: bool = False
    """Whether it works only where replicas take steps together."""
    accepts: tuple[Owns, ...] = ("whole", "flat", "split", "served")
    """The kinds of ownership it works with."""
    repeats: bool = True
    """Whether the same sums over ranks travel in every round, so that what one leaves out can be added to the next."""
    needs_repeats: bool = False
    """Whether it works only then."""
    in_groups: bool = False
    """Whether ranks divide what they own in groups that each have all of it."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """The legal numbers of a word."""

    whole: bool = True
    """Whether only whole numbers are meant."""
    least: float = 1
    """The smallest legal number, itself legal only if `whole`."""
    most: float = LARGEST
    """The largest legal number, itself legal."""

    def settle(self, value: Value) -> Value:
        """The number in its canonical type, anything else as it is."""
        if isinstance(value, float) and self.whole and value.is_integer():
            return int(value)
        return float(value) if isinstance(value, int) and not self.whole else value

    def accepts(self, value: Value | None) -> bool:
        """Whether a settled value is legal."""
        if self.whole:
            return isinstance(value, int) and self.least <= value <= self.most
        return isinstance(value, float) and self.least < value <= self.most

    def __str__(self) -> str:
        """The range in words."""
        lower = f"a whole number of at least {self.least:g}" if self.whole else f"a number above {self.least:g}"
        return lower if self.most == LARGEST else f"{lower} and at most {self.most:g}"


class Name:
    """A word whose value is a name."""

    def settle(self, value: Value) -> Value:
        """The name as it is."""
        return value

    def accepts(self, value: Value | None) -> bool:
        """Whether it is a name alone."""
        return isinstance(value, Word) and not value.args

    def __str__(self) -> str:
        """What is needed, in words."""
        return "a name"


@dataclass(frozen=True, kw_only=True)
class OneOf:
    """An argument that is one of a few names."""

    names: tuple[str, ...]

    def settle(self, value: Value) -> Value:
        """The name as it is."""
        return value

    def accepts(self, value: Value | None) -> bool:
        """Whether it is one of them, alone."""
        return isinstance(value, Word) and not value.args and value.name in self.names

    def __str__(self) -> str:
        """What is needed, in words."""
        return " or ".join(self.names)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One word of the vocabulary."""

    name: str
    """The word; for a wire, together with its way: `wire=int8`."""
    kind: Kind
    """What it is about."""
    meaning: str
    """What it says, in one line."""
    example: str
    """A legal way to write it."""
    takes: Range | Name | None = None
    """The legal values after `=`, for a word that takes one."""
    args: dict[str, Range]
    """The legal values of each argument in brackets that must be there."""
    options: dict[str, Range | Name | OneOf]
    """The legal values of those that may be left out, told by their keys."""
    positional: bool = False
    """Whether canonical text leaves the arguments' keys out."""
    numerics: bool = False
    """Whether it changes the result, and so acts in one process too."""
    planned: Traits | None = None
    """What its part will state, for words not built yet; built parts state it themselves, in the menu."""

    @property
    def form(self) -> Form:
        """How it is written: alone, with a value, or with arguments."""
        if self.args or self.options:
            return "args"
        return "value" if self.takes else "bare"

    @property
    def needed(self) -> str:
        """How it must be written, for messages."""
        if self.takes:
            return f"`{self.name}=` and {self.takes}"
        if self.args or self.options:
            keys = ", ".join(f"{key}=..." for key in self.args)
            said = [f"{key} {legal}" for key, legal in self.args.items()]
            said += [
                f"perhaps {legal if self.is_flag(key) else f'{key} {legal}'}" for key, legal in self.options.items()
            ]
            return f"`{self.name}{f'({keys})' if keys else ''}` with {', '.join(said)}"
        return f"`{self.name}` alone, without a value"

    def bind(self, args: tuple[Arg, ...]) -> dict[str, Value] | None:
        """The arguments by key, settled; None if one has no place or stands twice."""
        bound: dict[str, Value] = {}
        legal = self.args | self.options
        places = [*self.args, *(self.options if self.positional else ()), *[""] * len(args)]
        for arg, place in zip(args, places, strict=False):
            key = arg.key or place or self._flag(arg.value)
            if key not in legal or key in bound:
                return None
            bound[key] = legal[key].settle(arg.value)
        return bound

    def is_flag(self, key: str) -> bool:
        """Whether an option has one legal name, so that it needs no key."""
        legal = self.options.get(key)
        return isinstance(legal, OneOf) and len(legal.names) == 1

    def _flag(self, value: Value) -> str:
        """The key of the flag that a name stands for; empty if there is none."""
        return next((key for key, legal in self.options.items() if self.is_flag(key) and legal.accepts(value)), "")

    def accepts(self, bound: dict[str, Value] | None) -> bool:
        """Whether bound arguments are legal and none that is needed is missing."""
        legal = self.args | self.options
        return bound is not None and set(self.args) <= set(bound) and all(legal[k].accepts(v) for k, v in bound.items())


def _row(
    kind: Kind,
    example: str,
    meaning: str,
    planned: Traits | None = None,
    *,
    takes: Range | Name | None = None,
    args: dict[str, Range] | None = None,
    options: dict[str, Range | Name | OneOf] | None = None,
    positional: bool = False,
    numerics: bool = False,
) -> Row:
    """A row from its example: the name is what stands before the value or the brackets."""
    name = example.split("(", maxsplit=1)[0] if kind == "wire" else re.split(r"[=(]", example)[0]
    return Row(
        name=name,
        kind=kind,
        meaning=meaning,
        example=example,
        takes=takes,
        args=args or {},
        options=options or {},
        positional=positional,
        numerics=numerics,
        planned=planned,
    )


COUNT = Range()
POSITIVE = Range(whole=False, least=0)
RATIO = Range(whole=False, least=0, most=1)
EVERY = {"every": COUNT}
ROWS = OneOf(names=("all", "used"))
PLAIN = Traits()
SPARSE: dict[str, Any] = {"args": {"ratio": RATIO}, "positional": True}

_ROWS = (
    _row("sync", "ddp", "every rank holds everything; gradients are averaged each step"),
    _row("sync", "zero1", "each rank keeps the optimizer state of its share only"),
    _row("sync", "zero2", "zero1, and each rank keeps the gradients of its share only"),
    _row("sync", "zero3", "zero2, and each rank keeps the parameters of its share only"),
    _row(
        "sync",
        "local(every=32)",
        "replicas step alone and average parameters every so many steps",
        args=EVERY,
        options={"after": Range(least=0), "seconds": POSITIVE, "drift": POSITIVE, "rows": ROWS},
    ),
    _row(
        "sync",
        "diloco(every=100)",
        "local, with an outer optimizer over what moved (DiLoCo)",
        args=EVERY,
        options={"lr": POSITIVE, "momentum": RATIO, "drift": POSITIVE, "rows": ROWS},
    ),
    _row(
        "sync",
        "server(staleness=4)",
        "workers push gradients, pull parameters at most so many versions old; `apart`: servers are processes",
        options={
            "where": OneOf(names=("apart",)),
            "staleness": Range(least=0),
            "ahead": Range(least=0),
            "servers": COUNT,
            "compensate": POSITIVE,
            "rates": OneOf(names=("server", "own", "staleness")),
            "push": OneOf(names=("gradients", "updates")),
            "every": COUNT,
        },
    ),
    _row(
        "sync",
        "gossip",
        "each replica averages with one other at a time",
        options={"every": COUNT, "pairs": OneOf(names=("ring", "random"))},
    ),
    _row(
        "sync",
        "groups(every=8)",
        "parameters that hardly move are exchanged every so many steps, the others at every step",
        args=EVERY,
        options={"drift": POSITIVE, "fixed": Name(), "combine": OneOf(names=("mean", "sum"))},
    ),
    _row("precision", "bf16", "compute in bfloat16, keep parameters in float32", numerics=True),
    _row("precision", "fp16", "compute in float16 with a loss scale, keep parameters in float32", numerics=True),
    _row("precision", "fp8", "bf16, with the products of linear layers in 8-bit floats", numerics=True),
    _row("number", "accumulate=4", "loader batches per optimizer step", takes=COUNT, numerics=True),
    _row(
        "number",
        "delay=1",
        "apply what is exchanged so many steps later, so that it has them to travel; one step with ddp and zero",
        takes=COUNT,
    ),
    _row("number", "micro=8", "rows per micro-batch", PLAIN, takes=COUNT),
    _row("number", "batch=256", "rows per loader batch over all ranks", takes=COUNT, numerics=True),
    _row("number", "clip=1.0", "largest norm of the global gradient", takes=POSITIVE, numerics=True),
    _row(
        "data",
        "balance",
        "rows by each rank's measured speed; `balance(static)`: measured once",
        options={"policy": OneOf(names=("static",))},
        positional=True,
    ),
    _row("memory", "recompute", "compute activations again in backward rather than keep them", numerics=True),
    _row("memory", "block=Layer", "the class of the modules that zero3 gathers and recompute recomputes", takes=Name()),
    _row("memory", "offload", "keep optimizer state in host memory", Traits(places="device")),
    _row("memory", "share", "keep parameters once per host"),
    _row("split", "tensor=2", "ranks that divide each layer", PLAIN, takes=COUNT),
    _row("split", "pipeline=4", "ranks that divide the layers into stages", PLAIN, takes=COUNT),
    _row("split", "context=2", "ranks that divide each sequence", PLAIN, takes=COUNT),
    _row("split", "replicate=2", "replicas, each divided over a group of neighbouring ranks", takes=COUNT),
    _row("wire", "wire=bf16", "exchange in bfloat16"),
    _row("wire", "wire=fp16", "exchange in float16, with a scale per block"),
    _row("wire", "wire=int8", "exchange in 8-bit integers with a scale per block, rounded at random"),
    _row("wire", "wire=int4", "exchange the nearest of 16 levels, with a scale per block"),
    _row("wire", "wire=int2", "exchange the nearest of four levels, with a scale per block"),
    _row("wire", "wire=sign", "exchange signs and a scale per block"),
    _row(
        "wire",
        "wire=topk(0.01)",
        "exchange the largest entries only, this part of them; `topk(0.01,hosts)`: of what each host has summed",
        options={"across": OneOf(names=("hosts",))},
        **SPARSE,
    ),
    _row("wire", "wire=randomk(0.01)", "exchange entries drawn at random, this part of them", **SPARSE),
    _row(
        "wire",
        "wire=powersgd(rank=4)",
        "exchange two thin factors of each matrix (PowerSGD)",
        args={"rank": COUNT},
    ),
    _row("auto", "auto", "choose by prediction whatever is left open", PLAIN),
)

WORDS: dict[str, Row] = {row.name: row for row in _ROWS}
"""Every word there is, in canonical order."""
