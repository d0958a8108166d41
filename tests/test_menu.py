"""The menu, the pairs made from it, the page, and `dtorch plan`."""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path

import pytest

from distributedtorch import menu, recipes
from distributedtorch.core.plan import Plan
from distributedtorch.core.words import WORDS

ROOT = Path(__file__).parents[1]


def dtorch_plan(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    menu.add_arguments(parser)
    return menu.act(parser.parse_args(arguments))


@pytest.fixture(autouse=True)
def _no_plan_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTRIBUTEDTORCH_PLAN", raising=False)


def test_every_sync_on_the_menu_can_be_made() -> None:
    assert {name for name in menu.MENU if WORDS[name].kind == "sync"} == set(recipes.SYNCS)


def test_traits_are_stated_once() -> None:
    """By the menu for what is built, by the vocabulary for what is only planned."""
    for name, row in WORDS.items():
        assert (name in menu.MENU) == (row.planned is None), name


def test_pairs_are_complete() -> None:
    assert [pair[:2] for pair in menu.pairs()] == list(combinations(WORDS, 2))
    allowed = ("works (", "refused: ", "not built yet")
    assert all(verdict.startswith(allowed) for _, _, verdict in menu.pairs())


def test_pairs_agree_with_check() -> None:
    """A pair that works is accepted; one that is refused, or not built, is not."""
    for left, right, verdict in menu.pairs():
        names = [left, right]
        if {"share", "replicate"} & set(names) and not {WORDS[name].kind for name in names} & {"sync"}:
            names.append("zero1")  # with the default, ddp, it is refused
        found = Plan.parse(",".join(WORDS[name].example for name in names)).faults()
        assert verdict.startswith("works") == (not found), (left, right, found)
        reason = verdict.removeprefix("refused: ")
        assert not verdict.startswith("refused") or any(reason in fault for fault in found)


@pytest.mark.parametrize(
    "pair",
    [
        ("ddp", "zero1"),
        ("bf16", "fp16"),
        ("share", "ddp"),
        ("zero3", "wire=topk"),
        ("delay", "groups"),
        ("gossip", "wire=sign"),
    ],
)
def test_refused_pairs(pair: tuple[str, str]) -> None:
    verdict = next(verdict for left, right, verdict in menu.pairs() if {left, right} == set(pair))
    assert verdict.startswith("refused: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server(every=4)", "`push=updates` with it"),
        ("server(push=gradients,every=4)", "`push=updates` with it"),
        ("server(push=updates,compensate=0.1)", "leave compensate or push=updates out"),
        ("server(push=updates,rates=own)", "leave rates or push=updates out"),
        ("server(rates=mine)", "server or own or staleness"),
        ("server,wire=powersgd(rank=2)", "ranks that own whole tensors"),
    ],
)
def test_what_servers_cannot_be_told(text: str, said: str) -> None:
    assert any(said in fault for fault in Plan.parse(text).faults()), Plan.parse(text).faults()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("delay=2", "`delay=1`: a gradient is applied at the next step"),
        ("zero2,delay=3", "write delay=1"),
        ("local(every=4),delay=5", "write delay=4 or less"),
    ],
)
def test_how_long_an_exchange_may_travel(text: str, said: str) -> None:
    assert any(said in fault for fault in Plan.parse(text).faults()), Plan.parse(text).faults()
    assert Plan.parse("diloco(every=4),delay=4,wire=int4").faults() == []


@pytest.mark.parametrize(
    "text",
    [
        "server(staleness=2,compensate=0.1,rates=own),wire=topk(0.1)",
        "server(staleness=0,push=updates,every=4),wire=int8",
        "server(rates=staleness,push=gradients)",
    ],
)
def test_what_servers_can_be_told(text: str) -> None:
    assert Plan.parse(text).faults() == [] and str(Plan.parse(text)).startswith("server(")


def test_named_pair_test_exists() -> None:
    assert menu.PAIR_TEST is None or (ROOT / menu.PAIR_TEST.split("::")[0]).exists()


def test_page_is_up_to_date() -> None:
    stored = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")
    assert stored == menu.page(), "run: python -m distributedtorch.menu > docs/plans.md"


def test_command_shows_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert dtorch_plan(" clip=1,zero2, accumulate=4", "--workers", "4") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("plan: zero2,accumulate=4,clip=1.0\n")
    assert menu.MENU["zero2"].holds in shown and menu.MENU["zero2"].travels in shown
    assert "N = 4 ranks, so (N-1)/N = 0.75" in shown and "k = 4" in shown


def test_command_merges_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTEDTORCH_PLAN", "zero1,clip=2")
    assert dtorch_plan("clip=1") == 0
    assert "from: zero1 (DISTRIBUTEDTORCH_PLAN), clip=1.0 (command line)" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["ddp,,", "ddp,zero1,acumulate=2", "tensor=2"])
def test_command_lists_faults(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dtorch_plan(text, "--workers", "2") == 2
    shown = capsys.readouterr()
    assert not shown.out and "needed:" in shown.err and "do:" in shown.err
