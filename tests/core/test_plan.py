"""Plans: text and meaning, faults, and which source wins."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from distributedtorch.core import plan as plan_module
from distributedtorch.core.errors import PlanError
from distributedtorch.core.plan import Plan, Recipe, Traits, Word, resolve, sources, use_menu
from distributedtorch.core.words import WORDS, Arg, Name, OneOf, Range, Row, Value, read

BUILT = {
    "ddp": Traits(owns="whole"),
    "zero1": Traits(owns="flat"),
    "zero2": Traits(owns="flat"),
    "local": Traits(lockstep=False, owns="whole"),
    "accumulate": Traits(needs_lockstep=True),
    "batch": Traits(),
    "clip": Traits(),
    "tensor": Traits(),
    "pipeline": Traits(),
    "context": Traits(),
    "replicate": Traits(),
    "wire=int8": Traits(),
    "wire=topk": Traits(accepts=("whole",)),
    "share": Traits(places="host", accepts=("flat",)),
    "offload": Traits(places="device"),
}


@pytest.fixture(autouse=True)
def _menu() -> Iterator[None]:
    """A menu of this file's own, so that these tests do not change with what is built."""
    before = plan_module._menu
    use_menu({name: Recipe(traits=traits, summary="", holds="", travels="") for name, traits in BUILT.items()})
    yield
    use_menu(before)


def faults(text: str, world: int | None = None) -> list[str]:
    return Plan.parse(text).faults(world)


def number(draw: random.Random, legal: Range) -> int | float:
    return (
        draw.randint(int(legal.least), int(min(512, legal.most)))
        if legal.whole
        else draw.choice([1, 0.01, 1e-05, draw.random() + 1e-9])
    )


def option(draw: random.Random, legal: Range | Name | OneOf) -> Value:
    if isinstance(legal, Range):
        return number(draw, legal)
    return Word(draw.choice(legal.names if isinstance(legal, OneOf) else ["head", "embed"]))


def legal_word(draw: random.Random, row: Row) -> Word:
    if isinstance(row.takes, Name):
        return Word(row.name, value=Word(draw.choice(["Layer", "block", "_x9"])))
    if row.takes:
        return Word(row.name, value=number(draw, row.takes))
    args = tuple(Arg(number(draw, legal), key=draw.choice([key, None])) for key, legal in row.args.items())
    args += tuple(Arg(option(draw, legal), key=key) for key, legal in row.options.items() if draw.random() < 0.5)
    if row.kind == "wire":
        return Word("wire", value=Word(row.name.removeprefix("wire="), args=args))
    return Word(draw.choice(["zero", "zero3"]) if row.name == "zero3" else row.name, args=args)


def any_value(draw: random.Random, depth: int = 0) -> Value:
    if draw.random() < 0.5 or depth == 4:
        return draw.choice([draw.randint(-9, 10**20), draw.uniform(-1e9, 1e9), draw.random() * 1e-12])
    return Word(draw.choice("abc") + str(draw.randint(0, 9)), args=any_args(draw, depth + 1))


def any_args(draw: random.Random, depth: int = 0) -> tuple[Arg, ...]:
    count = draw.randint(0, 3)
    return tuple(Arg(any_value(draw, depth), key=draw.choice([None, "key", "k_2"])) for _ in range(count))


def any_word(draw: random.Random) -> Word:
    name = draw.choice(["ddp", "clip", "local", "wire", "nothing", "_x"])
    return Word(name, value=any_value(draw)) if draw.random() < 0.5 else Word(name, args=any_args(draw))


def spaced(draw: random.Random, text: str) -> str:
    return "".join(
        character + draw.choice(["", " ", "\t\n"]) if character in "=(,)" else character for character in text
    )


@pytest.mark.parametrize("seed", range(5))
def test_round_trip(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        words = [legal_word(draw, row) for row in draw.sample(list(WORDS.values()), draw.randint(0, 6))]
        words += [any_word(draw) for _ in range(draw.randint(0, 2))]
        plan = Plan(words=tuple(words))
        again = Plan.parse(spaced(draw, str(plan)))
        assert again == plan and hash(again) == hash(plan) and str(again) == str(plan)
        assert Plan(words=plan.words).words == plan.words
        written = ",".join(map(str, words))
        assert not words or Plan.parse(written) == plan


def test_legal_words_are_spelled_right() -> None:
    draw = random.Random(7)
    for row in list(WORDS.values()) * 5:
        found = Plan(words=(legal_word(draw, row),)).faults()
        assert not [fault for fault in found if "given\n" in fault or "no word" in fault], found


def test_canonical_text() -> None:
    assert str(Plan.parse(" clip = 1 ,accumulate=4.0 , zero,wire=topk( ratio = 0.01 ),batch=1e3")) == (
        "zero3,accumulate=4,batch=1000,clip=1.0,wire=topk(0.01)"
    )
    assert str(Plan.parse("local(8)")) == "local(every=8)"
    assert str(Plan()) == "ddp"


def test_equality_is_by_meaning() -> None:
    assert Plan.parse("bf16,zero") == Plan.parse("zero3, bf16")
    assert Plan.parse("accumulate=4") == Plan.parse("ddp,accumulate=4")
    assert len({Plan.parse("clip=1"), Plan.parse("clip=1.0")}) == 1
    assert Plan.parse("accumulate=4") != Plan.parse("accumulate=2")
    assert Plan.parse("auto") != Plan.parse("auto,ddp")
    assert Plan.parse("ddp") != "ddp"


def test_accessors() -> None:
    plan = Plan.parse("zero,bf16,accumulate=4,batch=256,micro=8,clip=1,recompute,wire=powersgd(rank=4)")
    assert (plan.sync, plan.precision, plan.accumulate, plan.batch, plan.micro) == ("zero3", "bf16", 4, 256, 8)
    assert plan.clip == 1.0 and isinstance(plan.clip, float) and plan.recompute
    assert plan.wire == Word("powersgd", args=(Arg(4, key="rank"),))
    assert plan.get("zero") == plan.get("zero3") == Word("zero3") and plan.get("tensor") is None
    assert str(plan.numerics()) == "bf16,accumulate=4,batch=256,clip=1.0,recompute"


def test_accessor_defaults() -> None:
    plan = Plan()
    assert (plan.sync, plan.accumulate, plan.recompute) == ("ddp", 1, False)
    assert (plan.precision, plan.batch, plan.micro, plan.clip, plan.wire) == (None,) * 5
    assert plan.numerics() == Plan.parse("zero1").numerics() == plan
    with pytest.raises(PlanError, match="whole number of at least 1"):
        _ = Plan.parse("accumulate=0").accumulate


def test_of() -> None:
    plan = Plan.parse("zero1")
    assert Plan.of(plan) is plan and Plan.of("zero1") == plan
    with pytest.raises(PlanError, match="of type int"):
        Plan.of(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("", 1, "a word"),
        ("   ", 4, "a word"),
        ("ddp,", 5, "a word"),
        (",ddp", 1, "a word"),
        ("4", 1, "a word"),
        ("zero2,clip=,bf16", 12, "a number or a name"),
        ("clip==1", 6, "a number or a name"),
        ("gossip()", 8, "a number or a name"),
        ("zero 2", 6, "the end"),
        ("clip=1=2", 7, "the end"),
        ("accumulate=8x", 13, "the end"),
        ("local(every=3", 14, '")"'),
        ("local(1=3)", 8, '")"'),
        ("ddp;bf16", 4, "the end"),
        ("clip=1e99", 6, "a number below"),
        ("clip=" + "9" * 5000, 6, "a number below"),
        ("a=" + "b(" * 5000, 20, "at most 8 deep"),
    ],
)
def test_what_cannot_be_read(text: str, column: int, expected: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    message = str(caught.value)
    assert f"column {column}," in message and expected in message.split("needed:")[1]
    assert f"\n  {' ' * (column - 1)}^\n" in message


@pytest.mark.parametrize(
    "build",
    [
        lambda: Word("two words"),
        lambda: Word("clip", value=True),
        lambda: Word("clip", value=float("nan")),
        lambda: Word("clip", value=10**400),
        lambda: Word("clip", value=1, args=(Arg(1),)),
        lambda: Word("wire", value=Word("topk", value=1)),
        lambda: Arg(1, key="a b"),
        lambda: Arg(Word("a", value=1)),
    ],
)
def test_words_without_text_are_refused(build: object) -> None:
    assert callable(build)
    with pytest.raises(PlanError, match="needed"):
        build()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("acumulate=4", ["no word of a plan", "write `accumulate=4`"]),
        ("int8", ["write `wire=int8`"]),
        ("wire=int9", ["no word of a plan", "write `wire=int8`"]),
        ("wire=3", ["no word of a plan", "wire=int8"]),
        ("qqq", ["leave it out"]),
        ("zero1,zero1", ["`zero1` and `zero1`", "at most once"]),
        ("clip=1,clip=2", ["`clip=1.0` and `clip=2.0`", "at most once"]),
        ("wire=int8,wire=topk(0.1)", ["one wire word", "keep `wire=int8` or `wire=topk`"]),
        ("ddp,zero1", ["one sync word", "keep `ddp` or `zero1`"]),
        ("accumulate", ["whole number of at least 1", "write `accumulate=4`"]),
        ("accumulate=0", ["whole number of at least 1"]),
        ("accumulate=1.5", ["whole number of at least 1"]),
        ("accumulate=many", ["whole number of at least 1"]),
        ("accumulate(4)", ["whole number of at least 1"]),
        ("batch=-1", ["whole number of at least 1"]),
        ("clip=0", ["a number above 0"]),
        ("ddp=3", ["`ddp` alone"]),
        ("ddp(3)", ["`ddp` alone"]),
        ("local", ["`local(every=...)`", "write `local(every=32)`"]),
        ("local(each=3)", ["`local(every=...)`"]),
        ("local(1,2)", ["`local(every=...)`"]),
        ("local=3", ["`local(every=...)`"]),
        ("wire=topk(2)", ["above 0 and at most 1"]),
        ("share", ["`ddp` (the default) together with `share`", "zero1 or zero2"]),
        ("zero2,wire=topk(0.01)", ["for `wire=topk`, ranks that own whole tensors", "use ddp or local"]),
        ("local(every=8),accumulate=2", ["steps together", "drop `accumulate`"]),
        ("zero1,share,offload", ["one place for tensors"]),
        ("zero3", ["not built yet", "ddp, zero1, zero2", "use ddp, zero1, zero2 or local"]),
        ("recompute", ["not built yet", "leave it out"]),
    ],
)
def test_each_fault(text: str, parts: list[str]) -> None:
    found = faults(text)
    assert len(found) == 1, found
    assert all(part in found[0] for part in [*parts, "needed:", "do:"]), found[0]


def test_two_precisions() -> None:
    assert any("one precision word" in fault for fault in faults("bf16,fp16"))


@pytest.mark.parametrize(
    ("text", "world", "fault"),
    [
        (
            "tensor=2,pipeline=2,replicate=2",
            6,
            "6 processes given, but tensor 2 x pipeline 2 x replicas 2 needs a multiple of 8: start 8",
        ),
        ("zero1,replicate=2", 3, "3 processes given, but replicas 2 needs a multiple of 2: start 2 or 4"),
        ("zero1,replicate=4", 2, "2 processes given, but replicas 4 needs a multiple of 4: start 4"),
        ("tensor=2,context=2", 6, "6 processes given, but tensor 2 x context 2 needs a multiple of 4: start 4 or 8"),
        ("tensor=4", 3, "3 processes given, but tensor 4 needs a multiple of 4: start 4"),
    ],
)
def test_world_that_does_not_fit(text: str, world: int, fault: str) -> None:
    assert faults(text, world) == [fault]


def test_world_that_fits() -> None:
    assert faults("tensor=2,pipeline=2,replicate=2", 8) == faults("tensor=2", 6) == faults("ddp", 7) == []
    assert faults("zero1,replicate=2", 6) == faults("zero1,replicate=3", 3) == faults("zero1,replicate=1", 2) == []
    assert faults("tensor=0", 6) == faults("tensor=0")
    assert "at least 1" in faults("ddp", 0)[0]
    assert "on this host" in Plan.parse("ddp").faults(2, 4)[0]


def test_check_lists_every_fault() -> None:
    plan = Plan.parse("zero1,ddp,acumulate=2,clip=-1,batch=1,batch=2,zero3,tensor=4")
    with pytest.raises(PlanError) as caught:
        plan.check(world=6)
    message = str(caught.value)
    count = len(plan.faults(6))
    assert count == 8 and f"has {count} faults:" in message and all(f"\n{n}. " in message for n in range(1, count + 1))
    for part in ("no word", "above 0", "at most once", "one sync word", "not built yet", "needs a multiple of 4"):
        assert part in message


def test_good_plans_pass() -> None:
    for text in ("ddp", "zero1,accumulate=4,batch=8,clip=1.0", "zero2,share", "local(every=8),wire=topk(0.1)"):
        Plan.parse(text).check(world=4, local_world=2)


def test_nothing_but_the_traits_decides() -> None:
    """The same plan is refused or accepted as its parts state, so the judgement has no list of its own."""
    menu = dict(plan_module._menu)
    assert faults("local(every=8),accumulate=2")
    use_menu(menu | {"local": Recipe(traits=Traits(owns="whole"), summary="", holds="", travels="")})
    assert not faults("local(every=8),accumulate=2")


def test_menu_of_unknown_words_is_refused() -> None:
    with pytest.raises(AssertionError, match="nonsense"):
        use_menu({"nonsense": Recipe(traits=Traits(), summary="", holds="", travels="")})


def test_resolve_order() -> None:
    plan, origin = resolve("zero2", "clip=2,accumulate=2", "zero1,bf16,clip=1,accumulate=8,batch=64")
    assert str(plan) == "zero2,bf16,accumulate=2,batch=64,clip=2.0"
    environment = "DISTRIBUTEDTORCH_PLAN"
    assert origin == {
        "zero2": "command line",
        "clip": environment,
        "accumulate": environment,
        "bf16": "call",
        "batch": "call",
    }


def test_resolve_replaces_by_kind() -> None:
    assert str(resolve("fp16,wire=int8", None, Plan.parse("bf16,wire=sign"))[0]) == "ddp,fp16,wire=int8"
    assert resolve(None, "", None) == (Plan(), {"ddp": "default"})
    assert resolve(None, None, "accumulate=2")[1] == {"accumulate": "call", "ddp": "default"}
    assert str(resolve(None, None, "auto")[0]) == "auto"
    assert str(resolve("auto", None, "zero1")[0]) == "zero1,auto"


def test_resolve_keeps_faults_and_names_the_source() -> None:
    assert str(resolve("ddp,zero1", None, "zero2")[0]) == "ddp,zero1"
    with pytest.raises(PlanError, match=r"from DISTRIBUTEDTORCH_PLAN: .*column 5"):
        resolve(None, "ddp,", "zero1")


def test_sources() -> None:
    assert sources({}) == sources({"DISTRIBUTEDTORCH_PLAN": " "}) == (None, None)
    assert sources({"DISTRIBUTEDTORCH_PLAN": "zero1"}) == (None, "zero1")
    passed = {"DISTRIBUTEDTORCH_PLAN": "ddp", "DISTRIBUTEDTORCH_RUN_PLAN": "zero1"}
    assert sources(passed) == ("zero1", "ddp")


def test_table() -> None:
    for name, row in WORDS.items():
        (word,) = Plan.parse(row.example).words
        assert str(word) == row.example and plan_module.key(word) == name and plan_module.legal(word)
        assert read(row.example) == (word,)


def test_servers_of_their_own() -> None:
    plan = Plan.parse("server(servers=2,apart,staleness=0)")
    assert str(plan) == "server(apart,staleness=0,servers=2)" and plan == Plan.parse(str(plan)) and plan.apart == 2
    assert Plan.parse("server(where=apart)") == Plan.parse("server(apart)") != Plan.parse("server")
    assert Plan.parse("server(servers=2)").apart == Plan.parse("ddp").apart == 0
    for world, fits in ((1, True), (2, False), (3, True)):  # one process alone trains alone
        said = [fault for fault in plan.faults(world) if "2 servers apart" in fault]
        assert bool(said) is not fits
    assert any("start 3 or more" in fault for fault in plan.faults(2))
    assert not plan_module.legal(Plan.parse("server(apart,apart)").words[0])
    assert not plan_module.legal(Plan.parse("server(aside)").words[0])
