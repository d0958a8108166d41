"""The menu: which words of a plan are built, what each costs, and which go together.

Importing it tells `core.plan` what is built; `recipes` says how. The tests run over its tables, and
`python -m distributedtorch.menu > docs/plans.md` writes the page made from them. It needs no torch: `dtorch` answers at
once.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from itertools import combinations

from distributedtorch.core.errors import PlanError
from distributedtorch.core.plan import BLOCKWISE, Plan, Recipe, Traits, clash, key, resolve, use_menu
from distributedtorch.core.words import WORDS

UNCHANGED = "as without it"
LEFT_OUT = "what was left out, Ψ, kept for the next time"
VALUES = ("bf16", "fp16", "int8")
"""Wires whose codes are near the values themselves, so that parameters can be computed with after them."""
PAIR_TEST: str | None = "tests/conformance/test_words.py"
"""The test that trains under every pair of built words; None while there is none."""

MENU: dict[str, Recipe] = {
    "ddp": Recipe(
        traits=Traits(owns="whole"),
        summary="Every rank holds everything and gradients are averaged by all-reduce.",
        holds="parameters Ψ, gradients Ψ, optimizer state K·Ψ",
        travels="2Ψ(N-1)/N: all-reduce of gradients",
    ),
    "zero1": Recipe(
        traits=Traits(owns="flat"),
        summary="Each rank updates one flat range and keeps the optimizer state of that range only.",
        holds="parameters Ψ, gradients Ψ, optimizer state K·Ψ/N",
        travels="Ψ(N-1)/N: reduce-scatter of gradients; Ψ(N-1)/N: gather of parameters",
    ),
    "zero2": Recipe(
        traits=Traits(owns="flat"),
        summary="As zero1, and each rank keeps the gradients of its range only.",
        holds="parameters Ψ, gradients Ψ/N and a few buckets, optimizer state K·Ψ/N",
        travels="Ψ(N-1)/N: reduce-scatter of gradients, k times with accumulate=k; Ψ(N-1)/N: gather of parameters",
    ),
    "zero3": Recipe(
        traits=Traits(owns="split"),
        summary="As zero2, and each rank keeps the parameters of its range only: blocks are gathered when used.",
        holds="parameters Ψ/N and the blocks in use, gradients Ψ/N and a few buckets, optimizer state K·Ψ/N",
        travels="Ψ(N-1)/N: reduce-scatter of gradients; 2Ψ(N-1)/N: gather of parameters; k times with accumulate=k",
    ),
    "local": Recipe(
        traits=Traits(exact=False, lockstep=False, owns="whole"),
        summary="Replicas step alone and average their parameters every so many steps (or seconds, or by their drift).",
        holds="parameters Ψ (2Ψ with a wire, `delay` or `rows=used`), gradients Ψ, optimizer state K·Ψ",
        travels="2Ψ(N-1)/N per round: all-reduce of parameters, with a wire of changes; at first per step with `after`",
    ),
    "diloco": Recipe(
        traits=Traits(exact=False, lockstep=False, owns="whole"),
        summary="Replicas step alone; an outer optimizer (Nesterov) follows what they moved on average.",
        holds="parameters Ψ, gradients Ψ, optimizer state K·Ψ, outer parameters and momentum 2Ψ",
        travels="2Ψ(N-1)/N per round: all-reduce of what moved",
    ),
    "gossip": Recipe(
        traits=Traits(exact=False, lockstep=False, owns="whole", repeats=False),
        summary="Each replica averages its parameters with one other at a time.",
        holds="parameters Ψ, gradients Ψ, optimizer state K·Ψ",
        travels="Ψ per round, to one other rank",
    ),
    "groups": Recipe(
        traits=Traits(exact=False, owns="whole", repeats=False),
        summary="As ddp for parameters that move; those that hardly do add gradients up and exchange every k steps.",
        holds="parameters 2Ψ, gradients Ψ and the sums of those that hardly move, optimizer state K·Ψ",
        travels="2Ψ(N-1)/N for the part that moves at every step, for the rest at every k-th",
    ),
    "server": Recipe(
        traits=Traits(exact=False, lockstep=False, owns="served"),
        summary="Workers push gradients to servers, which run the optimizer, or changes, and pull parameters.",
        holds="parameters Ψ, gradients Ψ; servers together parameters 2Ψ, optimizer state K·Ψ, NΨ more with a wire",
        travels="Ψ to the servers, Ψ from them; of tables with sparse gradients, rows; every k steps with every=k",
    ),
    "bf16": Recipe(
        traits=Traits(),
        summary="Forward and backward compute in bfloat16 where that is safe (autocast).",
        holds="parameters, gradients and optimizer state in float32 as without it; activations in bfloat16",
        travels=UNCHANGED,
    ),
    "fp16": Recipe(
        traits=Traits(needs_lockstep=True),
        summary="Forward and backward compute in float16 where that is safe, from a loss scale all ranks share.",
        holds="parameters, gradients and optimizer state in float32 as without it; activations in float16",
        travels="as without it, and one number per step: whether all gradients are finite",
    ),
    "fp8": Recipe(
        traits=Traits(),
        summary="As bf16, with the products of linear layers in 8-bit floats; refused where the GPU has none.",
        holds="parameters, gradients and optimizer state in float32 as without it; activations in bfloat16",
        travels=UNCHANGED,
    ),
    "accumulate": Recipe(
        traits=Traits(),
        summary="k loader batches make one optimizer step.",
        holds=UNCHANGED,
        travels="as without it, once per k batches; under zero2 the gradient half k times",
    ),
    "delay": Recipe(
        traits=Traits(exact=False, needs_repeats=True, accepts=("whole", "flat", "split")),
        summary="A gradient is applied one step later; under local and diloco a round ends so many steps later.",
        holds="gradients Ψ more; under zero2, zero3 Ψ/N and what travels, up to Ψ; under local, diloco up to 3Ψ more",
        travels="as without it, beside the whole next step, or so many",
    ),
    "batch": Recipe(
        traits=Traits(),
        summary="A loader batch has this many rows over all ranks.",
        holds="activations of its share of the rows",
        travels=UNCHANGED,
    ),
    "clip": Recipe(
        traits=Traits(),
        summary="Gradients are scaled so that the norm over all of them is at most this.",
        holds=UNCHANGED,
        travels="under zero1, zero2 and zero3 one number more: the sum of squares",
    ),
    "balance": Recipe(
        traits=Traits(needs_lockstep=True),
        summary="A rank takes rows of each batch by its measured speed, up to DISTRIBUTEDTORCH_MAX_ROWS of them.",
        holds="activations of its share of the rows",
        travels="as without it, and every 8 steps 16 bytes to every other rank",
    ),
    "recompute": Recipe(
        traits=Traits(),
        summary="Activations are computed again in backward rather than kept.",
        holds="fewer activations: those inside recomputed modules are not kept",
        travels=UNCHANGED,
    ),
    "share": Recipe(
        traits=Traits(places="host", accepts=("flat",)),
        summary="The ranks of a host look at the same parameters; each updates its range of them in place.",
        holds="parameters Ψ over the ranks of its host",
        travels="as without it, less the gather of parameters inside a host; two fences around the update",
    ),
    "block": Recipe(
        traits=Traits(),
        summary="Which modules are gathered under zero3, and recomputed under recompute, one at a time.",
        holds="under zero3 the blocks in use: larger ones, more memory and fewer exchanges",
        travels=UNCHANGED,
    ),
    "replicate": Recipe(
        traits=Traits(accepts=("flat", "split"), in_groups=True),
        summary="R groups of neighbouring ranks; each group divides the model between its ranks, and has all of it.",
        holds="Ψ/S wherever it is Ψ/N without it, for S = N/R ranks of a group",
        travels="(S-1)/S for (N-1)/N, inside a group; and 2Ψ/S·(R-1)/R across groups: all-reduce of gradients",
    ),
    **{
        f"wire={name}": Recipe(
            traits=Traits(
                exact=False,
                accepts=(
                    *(("whole",) if name == "powersgd" else ("whole", "flat", "served")),
                    *(("split",) if name in VALUES else ()),
                ),
                needs_repeats=True,
            ),
            summary=summary,
            holds=holds,
            travels=travels,
        )
        for name, summary, holds, travels in (
            ("bf16", "Numbers travel in bfloat16.", UNCHANGED, "half of it in float32"),
            ("fp16", "Numbers travel in float16, scaled block by block.", UNCHANGED, "half of it in float32"),
            ("int8", "Numbers travel in 8 bits, rounded at random.", UNCHANGED, "0.254 of it in float32"),
            ("int4", "Numbers travel in 4 bits, to the nearest of 16 levels.", LEFT_OUT, "0.129 of it in float32"),
            ("int2", "Numbers travel in 2 bits, to the nearest of 4 levels.", LEFT_OUT, "0.066 of it in float32"),
            ("sign", "Signs travel, and a scale per 2048 of them.", LEFT_OUT, "0.032 of it in float32"),
            (
                "topk",
                "The largest numbers travel, a part r of them; with `hosts` across hosts only, of each host's sum.",
                LEFT_OUT,
                "2r of it in float32; with `hosts` that much from host to host, and all of it inside",
            ),
            ("randomk", "Numbers at random places travel, a part r of them.", LEFT_OUT, "r of it"),
            (
                "powersgd",
                "Two factors of rank r travel of each matrix.",
                f"{LEFT_OUT}; the second factors",
                "r(n+m)/nm of it for a matrix of n x m",
            ),
        )
    },
}
"""Word -> how it is carried out. What is not here is not built yet."""

use_menu(MENU)


def pairs() -> list[tuple[str, str, str]]:
    """Every pair of words and what becomes of it: works, refused with the reason, or not built yet."""
    return [(left, right, _verdict(left, right)) for left, right in combinations(WORDS, 2)]


def _verdict(left: str, right: str) -> str:
    found = clash(left, right)
    if found:
        return f"refused: {found.needed}"
    if left not in MENU or right not in MENU:
        return "not built yet"
    if "block" in (left, right) and not {"zero3", "recompute"} & {left, right}:
        return f"refused: {BLOCKWISE}"
    return f"works ({PAIR_TEST})" if PAIR_TEST else "works (accepted by check; no training test named yet)"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]], padded: bool = True) -> str:
    """A Markdown table; padded, it reads well as plain text too."""
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) if padded else 0 for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * max(3, width + 2) for width in widths) + "|", *lines[1:]])


def _costs(names: Iterable[str]) -> str:
    rows = ([name, MENU[name].holds, MENU[name].travels] for name in names)
    return _table(["word", "each rank holds", "each rank sends per optimizer step"], rows)


def _vocabulary() -> str:
    rows = ([f"`{row.example}`", row.kind, row.meaning, _status(name)] for name, row in WORDS.items())
    return _table(["word", "kind", "says", "state"], rows)


def _status(name: str) -> str:
    return "built" if name in MENU else "not built yet"


def _partners() -> str:
    """One row per word: the other words by verdict."""
    rows = []
    verdicts = pairs()
    for name in WORDS:
        by_verdict: dict[str, list[str]] = {"works": [], "not": [], "refused": []}
        for left, right, verdict in verdicts:
            if name in (left, right):
                by_verdict[verdict.split(" ", 1)[0].rstrip(":")].append(f"`{right if name == left else left}`")
        rows.append([f"`{name}`", *(" ".join(others) or "-" for others in by_verdict.values())])
    return _table(["word", "works with", "not built yet with", "refused with"], rows, padded=False)


def _reasons() -> str:
    """One line per thing asked for, with the pairs that do not give it."""
    refused: dict[str, list[str]] = {}
    for left, right, verdict in pairs():
        if verdict.startswith("refused"):
            asked = verdict.removeprefix("refused: ").split(";")[0]
            refused.setdefault(asked, []).append(f"`{left}` + `{right}`")
    return "\n".join(f"- Needed {asked}: {', '.join(found)}" for asked, found in refused.items())


def page() -> str:
    """The text of docs/plans.md."""
    proof = f"`{PAIR_TEST}`" if PAIR_TEST else "acceptance by `Plan.check` only: no training test is named yet"
    return f"""# Plans

Made from the tables in `core/words.py` and `menu.py` by `python -m distributedtorch.menu > docs/plans.md`.

A plan is words separated by commas: `zero1,accumulate=4,clip=1.0`. Order and spaces do not matter. `zero` alone is
`zero3`, and without a sync word `ddp` is meant. `dtorch plan TEXT --workers N` shows what a plan costs, or every fault.

## What each rank holds and sends

Ψ is the bytes of all parameters, K the optimizer's state in parameters (2 for Adam, 1 for momentum), N the ranks.

{_costs(MENU)}

## Every word

{_vocabulary()}

## Every pair of words

Found from what each part states about itself. What stands behind "works": {proof}.

{_partners()}

### Why pairs are refused

{_reasons()}
"""


def add_arguments(parser: ArgumentParser) -> None:
    """The arguments of `dtorch plan`."""
    parser.add_argument("plan", metavar="TEXT", help="words separated by commas, such as zero1,accumulate=4")
    parser.add_argument("--workers", type=int, metavar="N", help="number of processes the plan is meant for")


def act(namespace: Namespace) -> int:
    """`dtorch plan`: what a plan holds and sends, or every fault and exit code 2."""
    workers: int | None = namespace.workers
    try:
        plan, origin = resolve(namespace.plan, os.environ.get("DISTRIBUTEDTORCH_PLAN"), None)
        plan.check(workers)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"plan: {plan}")
    print("from: " + ", ".join(f"{word} ({origin[word.name]})" for word in plan.words))
    print(_costs(map(key, plan.words)))
    print(_legend(plan, workers))
    return 0


def _legend(plan: Plan, workers: int | None) -> str:
    """What the letters of the table stand for, as numbers where they are known."""
    ranks = "N: ranks" if workers is None else f"N = {workers} ranks, so (N-1)/N = {(workers - 1) / workers:.3g}"
    if plan.replicas > 1:
        ranks += f"; R = {plan.replicas} groups" + (f" of S = {workers // plan.replicas}" if workers else " of S = N/R")
    batches = f"; k = {plan.accumulate} batches per optimizer step" if plan.accumulate > 1 else ""
    return f"Ψ: bytes of all parameters; K: optimizer state in parameters (Adam 2); {ranks}{batches}"


if __name__ == "__main__":
    print(page(), end="")
