"""A plan: the strategy as data, written as a short string, checked before anything starts.

`Plan.parse("zero1,accumulate=4")` reads one and `str` writes it back in canonical form; `check` lists every fault at
once, each with what to change; `resolve` merges what the command line, the environment and the call say. This module
knows words (`core.words`) but no parts: `menu` tells it through `use_menu` which words are built.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Literal, NamedTuple, cast

from distributedtorch.core.errors import PlanError, explain
from distributedtorch.core.words import ALIASES, EXCLUSIVE, WORDS, Arg, Row, Traits, Word, read

__all__ = ["Plan", "Recipe", "Traits", "Word", "clash", "key", "resolve", "sources", "traits", "use_menu"]

DEFAULT_SYNC = "ddp"
AXES = {"tensor": "tensor", "pipeline": "pipeline", "context": "context", "replicas": "replicate"}
"""What the sizes of a mesh are called, and the words that say them."""
OWNING = {
    "whole": "whole tensors",
    "flat": "flat ranges, with all parameters kept",
    "split": "flat ranges, with the parameters split too",
    "served": "nothing, servers do",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a built word is carried out, and what that costs. Bytes: Ψ for all parameters; N ranks."""

    traits: Traits
    """What the part states about itself."""
    summary: str
    """What happens, in one sentence."""
    holds: str
    """What each rank holds."""
    travels: str
    """What each rank sends per optimizer step."""


_menu: Mapping[str, Recipe] = {}


def use_menu(menu: Mapping[str, Recipe]) -> None:
    """Say which words are built: `menu` calls this when it is imported."""
    global _menu
    unknown = [name for name in menu if name not in WORDS]
    assert not unknown, f"a menu of words that do not exist: {unknown}"
    _menu = menu


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A strategy: words in canonical order. Equal plans mean the same, however they were written."""

    words: tuple[Word, ...] = ()
    """The words; given in any order and form, kept in canonical ones. Repetitions stay, for `check` to name."""

    def __post_init__(self) -> None:
        """Bring the words into canonical form and order."""
        order = {name: place for place, name in enumerate(WORDS)}
        words = sorted(map(canonical, self.words), key=lambda word: order.get(key(word), len(order)))
        object.__setattr__(self, "words", tuple(words))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that a text says; whether it can be carried out is `check`'s question.

        Raises:
            PlanError: The text does not follow the grammar; the message points at the column.
        """
        return cls(words=read(text))

    @classmethod
    def of(cls, value: str | Plan) -> Plan:
        """A plan from a plan or its text."""
        if isinstance(value, Plan):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        given = f"a plan of type {type(value).__name__}"
        raise PlanError(explain(given, "a text such as 'zero1,accumulate=4', or a Plan", "pass one of these"))

    def __str__(self) -> str:
        """Canonical text, which `parse` reads back as an equal plan."""
        return ",".join(map(str, self.words)) or DEFAULT_SYNC

    def __eq__(self, other: object) -> bool:
        """Whether both mean the same: a plan without a sync means the default one."""
        return self._meaning() == other._meaning() if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        """Equal plans have equal hashes."""
        return hash(self._meaning())

    def _meaning(self) -> tuple[Word, ...]:
        """The words together with the sync that is meant where none is said."""
        open_ = not any(_kind(word) in ("sync", "auto") for word in self.words)
        return (Word(DEFAULT_SYNC), *self.words) if open_ else self.words

    def get(self, name: str) -> Word | None:
        """The word of that name, if the plan has it."""
        name = ALIASES.get(name, name)
        return next((word for word in self.words if word.name == name), None)

    @property
    def sync(self) -> str:
        """How replicas agree: `ddp` unless said otherwise."""
        return self._name_of_kind("sync") or DEFAULT_SYNC

    @property
    def lockstep(self) -> bool:
        """Whether replicas take steps together, so that what they compute is what one process would."""
        return traits(self.sync).lockstep

    @property
    def begins_in_lockstep(self) -> bool:
        """Whether they do at least at first: `local(after=...)`."""
        return self.lockstep or bool(self.options("local").get("after"))

    @property
    def exact(self) -> bool:
        """Whether the result is that of one process, up to rounding."""
        return all(traits(key(word)).exact for word in self.words if _known(word))

    def same_exchange(self, other: Plan) -> bool:
        """Whether both exchange the same things in the same form: what one has left out the other can go on with."""
        kept = [
            [w for w in plan._meaning() if _kind(w) in ("sync", "wire") or w.name == "delay"] for plan in (self, other)
        ]
        return kept[0] == kept[1]

    def options(self, name: str) -> dict[str, float | str]:
        """The arguments of a word as plain numbers and names; for a wire, of its way. Empty without the word."""
        word = self.get(name)
        if word is None:
            return {}
        bound = WORDS[key(word)].bind(_inner(word).args) or {}
        return {name: value.name if isinstance(value, Word) else value for name, value in bound.items()}

    @property
    def apart(self) -> int:
        """How many processes only serve: the last ones."""
        given = self.options("server")
        servers = given.get("servers", 1)
        return servers if given.get("where") == "apart" and isinstance(servers, int) else 0

    @property
    def precision(self) -> Literal["bf16", "fp16", "fp8"] | None:
        """The type to compute in, None for the model's own."""
        return cast(Literal["bf16", "fp16", "fp8"] | None, self._name_of_kind("precision"))

    @property
    def accumulate(self) -> int:
        """Loader batches per optimizer step."""
        return int(self._number("accumulate") or 1)

    @property
    def delay(self) -> int:
        """Steps that what is exchanged has to travel before it is applied."""
        return int(self._number("delay") or 0)

    @property
    def batch(self) -> int | None:
        """Rows per loader batch over all ranks."""
        return cast(int | None, self._number("batch"))

    @property
    def micro(self) -> int | None:
        """Rows per micro-batch."""
        return cast(int | None, self._number("micro"))

    @property
    def clip(self) -> float | None:
        """Largest norm of the global gradient."""
        return self._number("clip")

    @property
    def balance(self) -> Literal["dynamic", "static"] | None:
        """Whether rows follow speeds all along or as measured once; None: every rank takes the same."""
        word = self.get("balance")
        return None if word is None else "static" if word.args else "dynamic"

    @property
    def recompute(self) -> bool:
        """Whether activations are computed again in backward."""
        return self.get("recompute") is not None

    @property
    def replicas(self) -> int:
        """In how many groups of ranks parameters are divided, each group having all of them."""
        return int(self._number("replicate") or 1)

    @property
    def share(self) -> bool:
        """Whether parameters are kept once per host."""
        return self.get("share") is not None

    @property
    def block(self) -> str | None:
        """The class of the modules that are gathered or recomputed one at a time; None to find them."""
        word = self.get("block")
        return word.value.name if word and isinstance(word.value, Word) else None

    @property
    def wire(self) -> Word | None:
        """How bytes travel: `topk(0.01)` for `wire=topk(0.01)`; None for plain."""
        word = self.get("wire")
        return word.value if word and isinstance(word.value, Word) else None

    def _name_of_kind(self, kind: str) -> str | None:
        return next((word.name for word in self.words if _kind(word) == kind), None)

    def _number(self, name: str) -> float | None:
        word = self.get(name)
        if word is None:
            return None
        if not legal(word):
            raise PlanError(_spelling_fault(word))
        assert isinstance(word.value, (int, float))
        return word.value

    def numerics(self) -> Plan:
        """Only the words that change the result: what one process does to be the truth for this plan."""
        rows = [(word, WORDS.get(key(word))) for word in self.words]
        return Plan(words=tuple(word for word, row in rows if row and row.numerics))

    def faults(self, world: int | None = None, local_world: int | None = None) -> list[str]:
        """Everything that keeps this plan from running, each with what to change.

        Args:
            world: Number of processes, if known.
            local_world: Number of processes on this host, if known.
        """
        spelled = [_spelling_fault(word) for word in self.words if not _known(word) or not legal(word)]
        return [
            *spelled,
            *_repeat_faults(self.words),
            *_clash_faults(self),
            *_unbuilt_faults(self.words),
            *_idle_faults(self),
            *_delay_faults(self),
            *_server_faults(self),
            *_across_faults(self),
            *_world_faults(self, world, local_world),
        ]

    def check(self, world: int | None = None, local_world: int | None = None) -> None:
        """Refuse a plan that cannot run, with every fault in one message.

        Raises:
            PlanError: The plan has faults; they are numbered.
        """
        faults = self.faults(world, local_world)
        if faults:
            count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
            lines = [f"{number}. " + fault.replace("\n", "\n ") for number, fault in enumerate(faults, start=1)]
            raise PlanError("\n".join([f'the plan "{self}" has {count}:', *lines]))


def key(word: Word) -> str:
    """The word's name in `WORDS` and in the menu: `wire` together with its way."""
    return f"wire={word.value.name}" if word.name == "wire" and isinstance(word.value, Word) else word.name


def canonical(word: Word) -> Word:
    """The same meaning in its one canonical form; a word that is not legal stays as it is."""
    word = Word(ALIASES.get(word.name, word.name), value=word.value, args=word.args)
    row = WORDS.get(key(word))
    if row is None:
        return word
    if row.takes:
        settled = None if word.value is None else row.takes.settle(word.value)
        return Word(word.name, value=settled, args=word.args)
    if row.kind == "wire":
        return Word(word.name, value=_canonical_args(_inner(word), row))
    return _canonical_args(word, row)


def _canonical_args(word: Word, row: Row) -> Word:
    bound = row.bind(word.args)
    if not bound or not set(row.args) <= set(bound):
        return word
    given = [name for name in row.args | row.options if name in bound]
    args = tuple(Arg(bound[name], key=None if row.positional or row.is_flag(name) else name) for name in given)
    return Word(word.name, value=word.value, args=args)


def legal(word: Word) -> bool:
    """Whether a canonical word of the vocabulary is written as its row says."""
    row = WORDS[key(word)]
    if row.takes:
        return word.value is not None and row.takes.accepts(word.value)
    inner = _inner(word)
    return inner.value is None and row.accepts(row.bind(inner.args))


def _inner(word: Word) -> Word:
    """The word that carries the arguments: for a wire, its way."""
    return word.value if word.name == "wire" and isinstance(word.value, Word) else word


def _known(word: Word) -> bool:
    return key(word) in WORDS


def _kind(word: Word) -> str | None:
    return WORDS[key(word)].kind if _known(word) else None


def _listed(names: list[str], last: str = "or") -> str:
    return f" {last} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _spelling_fault(word: Word) -> str:
    """What is wrong with an unknown word, or with the value of a known one."""
    if _known(word):
        row = WORDS[key(word)]
        return explain(f"`{word}` given", row.needed, f"write `{row.example}`")
    near = _nearest(word)
    names = [name for name, row in WORDS.items() if (row.kind == "wire") == (word.name == "wire")]
    instead = f"write `{WORDS[near].example}`" if near else "leave it out, or write one of these"
    return explain(f"`{word}` given, which is no word of a plan", f"one of {', '.join(names)}", instead)


def _nearest(word: Word) -> str | None:
    """The known word that was probably meant."""
    given = key(word).removeprefix("wire=").lower()
    ways = {name.removeprefix("wire="): name for name, row in WORDS.items() if row.kind == "wire"}
    names = ways if word.name == "wire" else ways | {name: name for name in WORDS} | ALIASES
    close = [names[found] for found in difflib.get_close_matches(given, names, n=4)]
    return next((name for name in close if name in _menu), close[0] if close else None)


def _repeat_faults(words: tuple[Word, ...]) -> Iterator[str]:
    for name, count in Counter(map(key, words)).items():
        if count > 1:
            given = " and ".join(f"`{word}`" for word in words if key(word) == name)
            yield explain(f"{given} given", f"`{name}` at most once", "keep one of them")


class Clash(NamedTuple):
    """Why two words cannot stand together, and what to do."""

    needed: str
    do: str


def traits(name: str) -> Traits:
    """What the part behind a word states: in the menu if it is built, otherwise as planned."""
    return _menu[name].traits if name in _menu else WORDS[name].planned or Traits()


def clash(left: str, right: str) -> Clash | None:
    """Why two words of `WORDS` contradict each other, from their kinds and traits alone; None if they do not."""
    kind = WORDS[left].kind
    if kind == WORDS[right].kind and kind in EXCLUSIVE:
        return Clash(f"one {kind} word", f"keep `{left}` or `{right}`")
    places = {traits(left).places, traits(right).places} - {"rank"}
    if len(places) > 1:
        return Clash(f"one place for tensors: `{left}` and `{right}` each move them", f"keep `{left}` or `{right}`")
    for asking, other in ((left, right), (right, left)):
        needed = _unmet(asking, other)
        if needed and WORDS[other].kind != "sync":
            return Clash(needed, f"keep `{left}` or `{right}`")
        if needed:
            fitting = [row.name for row in WORDS.values() if row.kind == "sync" and not _unmet(asking, row.name)]
            built = [name for name in fitting if name in _menu]
            return Clash(needed, f"drop `{asking}`, or use {_listed(built or fitting)} in place of `{other}`")
    syncs = [row.name for row in WORDS.values() if row.kind == "sync"]
    if not {left, right} & set(syncs) and all(_unmet(left, name) or _unmet(right, name) for name in syncs):
        return Clash(f"a sync that goes with both `{left}` and `{right}`", f"keep `{left}` or `{right}`")
    return None


def _unmet(asking: str, other: str) -> str | None:
    """What one word asks of the other and does not get."""
    asks, has = traits(asking), traits(other)
    if asks.needs_lockstep and not has.lockstep:
        return f"for `{asking}`, replicas that take steps together; under `{other}` they step alone"
    if asks.needs_repeats and not has.repeats:
        return f"for `{asking}`, the same sums over ranks in every round; under `{other}` others travel each time"
    if WORDS[asking].kind == "wire" and has.places == "host":
        return f"for `{asking}`, parameters with each rank; under `{other}` they are once per host"
    if has.in_groups and asks.needs_repeats:
        return f"for `{asking}`, sums over all ranks at once; under `{other}` they are made in groups, and then across"
    if has.in_groups and asks.places == "host":
        return f"for `{asking}`, a range of its own for each rank; under `{other}` ranks of other groups have the same"
    if has.owns != "none" and has.owns not in asks.accepts:
        return f"for `{asking}`, ranks that own {_listed([OWNING[owns] for owns in asks.accepts])}; " + (
            f"under `{other}` they own {OWNING[has.owns]}"
        )
    return None


def _clash_faults(plan: Plan) -> Iterator[str]:
    shown = {word: f"`{word}`" for word in plan.words}
    known = [word for word in plan._meaning() if _known(word)]
    for left, right in combinations(known, 2):
        found = clash(key(left), key(right)) if key(left) != key(right) else None
        if found:
            both = " together with ".join(shown.get(word, f"`{word}` (the default)") for word in (left, right))
            yield explain(both, found.needed, found.do)


def _unbuilt_faults(words: tuple[Word, ...]) -> Iterator[str]:
    for word in words:
        if _known(word) and key(word) not in _menu:
            kin = [name for name in _menu if WORDS[name].kind == _kind(word) and _kind(word) in EXCLUSIVE]
            instead = f"leave it out, or use {_listed(kin)}" if kin else "leave it out"
            yield explain(f"`{word}` given, which is not built yet", f"one of {', '.join(_menu)}", instead)


BLOCKWISE = "`zero3` or `recompute` with it"


def _idle_faults(plan: Plan) -> Iterator[str]:
    if plan.get("block") and plan.sync != "zero3" and not plan.recompute:
        given = f"`{plan.get('block')}` under a plan that does nothing block by block"
        yield explain(given, BLOCKWISE, "add one of them, or leave it out")


def _delay_faults(plan: Plan) -> Iterator[str]:
    word = plan.get("delay")
    if word is None or not legal(word) or plan.delay == 1:
        return
    if plan.lockstep:
        needed = "`delay=1`: a gradient is applied at the next step; rounds of local and diloco may travel for longer"
        yield explain(f"`{word}` with `{plan.sync}`", needed, "write delay=1")
    elif (every := plan.options(plan.sync).get("every")) is not None and plan.delay > int(every):
        given = f"`{word}` with `{plan.get(plan.sync)}`"
        yield explain(given, "a round that has ended when the next one begins", f"write delay={every} or less")


def _server_faults(plan: Plan) -> Iterator[str]:
    given = plan.options("server")
    updates = given.get("push") == "updates"
    if "every" in given and not updates:
        said = f"`every={given['every']}` under a server to which gradients are pushed"
        yield explain(said, "`push=updates` with it: workers that step alone", "add push=updates, or leave it out")
    for name in ("compensate", "rates"):
        if name in given and updates:
            said = f"`{name}={given[name]}` together with `push=updates`"
            yield explain(said, "gradients, for an optimizer on the server", f"leave {name} or push=updates out")


def _across_faults(plan: Plan) -> Iterator[str]:
    word = plan.get("wire")
    if word and _known(word) and "across" in plan.options("wire") and traits(plan.sync).owns != "whole":
        owned = OWNING[traits(plan.sync).owns]
        needed = f"ranks that own {OWNING['whole']}; under `{plan.sync}` they own {owned}"
        bare = Word("wire", value=Word(_inner(word).name, args=_inner(word).args[:1]))
        yield explain(f"`{word}` with `{plan.sync}`", needed, f"write `{bare}`, or use ddp, local or diloco")


def _world_faults(plan: Plan, world: int | None, local_world: int | None) -> Iterator[str]:
    for given in (world, local_world):
        if given is not None and given < 1:
            yield explain(f"{given} processes given", "at least 1", "start 1 or more")
            return
    if world is None:
        return
    if local_world is not None and local_world > world:
        given_text = f"{local_world} processes on this host given, of {world} in all"
        yield explain(given_text, "no more on one host than in all", "count this host's processes in")
    yield from _too_many_servers(plan, world)
    fault = _product_fault(world, {said: size for said, axis in AXES.items() if (size := _axis(plan, axis))})
    if fault:
        yield fault


def _too_many_servers(plan: Plan, world: int) -> Iterator[str]:
    servers = plan.options("server").get("servers", 1) if plan.sync == "server" else 1
    if plan.apart and 1 < world <= plan.apart:
        given = f"{plan.apart} server{'s' if plan.apart > 1 else ''} apart, and {world} processes in all"
        do = f"start {plan.apart + 1} or more (`workers` counts servers too), give fewer, or leave apart out"
        yield explain(given, "more processes than servers: the last ones serve, the others train", do)
    elif isinstance(servers, int) and servers > world and not plan.apart:
        yield explain(f"{servers} servers given for {world} processes", "at most one beside each", "give fewer servers")


def _axis(plan: Plan, name: str) -> int | None:
    """The size of a mesh axis, None if it is not said or not legal."""
    word = plan.get(name)
    return word.value if word and legal(word) and isinstance(word.value, int) else None


def _product_fault(world: int, sizes: dict[str, int]) -> str | None:
    """The product of the axes spelled out, if the world is no multiple of it."""
    each = prod(sizes.values())
    if world % each == 0:
        return None
    spelled = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    start = f"{world // each * each} or {world // each * each + each}" if world > each else f"{each}"
    given = "1 process" if world == 1 else f"{world} processes"
    return f"{given} given, but {spelled} needs a multiple of {each}: start {start}"


def sources(environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """What the environment says as (command line, DISTRIBUTEDTORCH_PLAN): `dtorch run --plan` travels beside it."""
    launched, own = (environ.get(f"DISTRIBUTEDTORCH_{name}", "").strip() or None for name in ("RUN_PLAN", "PLAN"))
    return launched, own


def resolve(
    command_line: str | None, environment: str | None, call: str | Plan | None, default: str = DEFAULT_SYNC
) -> tuple[Plan, dict[str, str]]:
    """The plan in force, and for each of its words where it came from.

    Authority is word by word, highest first as the parameters stand; a word replaces lower words of its name, and of
    its kind where a plan has only one of that kind. `auto` also leaves the default's sync open.

    Raises:
        PlanError: A text does not follow the grammar; the message names the source.
    """
    given = {"command line": command_line, "DISTRIBUTEDTORCH_PLAN": environment, "call": call, "default": default}
    words: list[Word] = []
    origin: dict[str, str] = {}
    taken: set[str] = set()
    for source, text in given.items():
        if text is None or not str(text).strip():
            continue
        kept = [word for word in _plan_from(source, text).words if not taken & _slots(word)]
        if source == "default" and "auto" in origin:
            kept = [word for word in kept if _kind(word) != "sync"]
        words += kept
        origin |= {word.name: source for word in kept}
        taken = taken.union(*map(_slots, kept))
    return Plan(words=tuple(words)), origin


def _plan_from(source: str, value: str | Plan) -> Plan:
    try:
        return Plan.of(value)
    except PlanError as error:
        raise PlanError(f"plan from {source}: {error}") from error


def _slots(word: Word) -> set[str]:
    """What a word takes from lower sources: its name, and its kind where a plan has one of it."""
    kind = _kind(word)
    return {f"word {word.name}"} | ({f"kind {kind}"} if kind in EXCLUSIVE else set())
