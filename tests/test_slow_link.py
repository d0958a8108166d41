"""The figures of benchmarks/slow_link.py follow from what was measured, and its language is the same for everybody."""

from __future__ import annotations

import pytest
import torch

from benchmarks import link_table
from benchmarks.language import FOLLOWS, HELD_OUT, Language
from benchmarks.links import period, reached, stages
from benchmarks.peers import IDEAL, PINS, Variant
from benchmarks.slow_link import PEERS, PLANS, SAME_STEPS
from benchmarks.turns import ORDINARY, SHORT, costs, seconds_of, shortened


def test_a_smooth_curve_is_met_between_its_points():
    line = [(5 * k, 9.0 - 0.1 * 5 * k) for k in range(1, 10)]
    assert reached(line, 7.25, smooth=True) == pytest.approx(17.5)
    assert reached(line, 1.0, smooth=True) is None
    dip = [(5, 9.0), (10, 6.9), (15, 9.0), (20, 8.0), (25, 7.0), (30, 6.0), (35, 5.0)]
    assert reached(dip, 7.0, smooth=True) == pytest.approx(25.0)  # one low point is not yet the target
    assert reached(dip[:5], 7.0, smooth=True) is None  # the last point has no neighbour yet


def test_between_exchanges_a_straight_line_counts():
    assert reached([(32, 8.0), (64, 6.0)], 7.0, smooth=False) == 48.0
    assert reached([(32, 8.0)], 7.0, smooth=False) is None


def test_a_period_is_read_from_the_word_and_shortened_for_a_turn():
    assert [period(word) for word in ("ddp", "diloco(every=100)", "every=20 outer=0.7 delay=5")] == [1, 100, 20]
    short = shortened(Variant(file="torchft", word="every=20 outer=0.7 delay=5"))
    assert short.word == f"every={SHORT} outer=0.7 delay=5"
    assert shortened(PEERS["torch DDP"]) == PEERS["torch DDP"]
    delays = [int(v.word.partition("delay=")[2] or 0) for v in PEERS.values()]
    assert max(delays) + ORDINARY <= SHORT  # ordinary steps have no exchange beside them


def test_what_takes_the_same_time_is_timed_once():
    ours = [
        Variant(file="ours", word=f"diloco(every={every}{more})") for every in (32, 100) for more in ("", ",lr=1.0")
    ]
    assert {costs(one) for one in ours} == {("ours", f"diloco(every={SHORT})", False)}
    assert costs(Variant(file="ours", word="local(every=8),wire=int8")) != costs(
        Variant(file="ours", word="local(every=8)")
    )
    torchft = {costs(one) for name, one in PEERS.items() if name.startswith("torchft")}
    assert len(torchft) == 4  # an exchange beside steps or not, memory kept or not


def test_an_exchange_now_and_then_costs_each_step_its_part():
    assert seconds_of(3.0, [[1.0, 2.0], [1.0, 2.0]], every=1) == (1.5, 0.0)
    told = [[1.0] * 7 + [11.0]] * 2  # 7 ordinary steps, and one with an exchange of 10 s
    assert seconds_of(18.0, told, every=SHORT) == pytest.approx((18.0 / SHORT, 10.0))
    assert seconds_of(18.0, told, every=100) == pytest.approx((1.1, 10.0))


def test_all_of_the_last_exchange_is_counted():
    one = variant(True, 2.0, 20.0) | {"word": "local(every=8)", "exchange": {"1gbit": [4.0] * 3}}
    assert link_table.charged(one, "1gbit") == [20.0 + 0.5 * 4.0 / 2.0] * 3  # 2.5 exchanges are in 20 average steps
    assert link_table.charged(one | {"word": "ddp", "exchange": {"1gbit": [0.0] * 3}}, "1gbit") == [20.0] * 3


def variant(ours: bool, times: float, steps: float | None, failed: str = "") -> dict[str, object]:
    ideal = [1.0, 2.0, 3.0]
    curves = {"0.001": {"points": [(5, 8.0), (10, 7.5)], "steps": steps}}
    measured = {"seconds": {"1gbit": [times * v for v in ideal]}, "relative": {"1gbit": [times] * 3}}
    measured |= {"bytes_sent": {"1gbit": [1e6, 3e6, 2e6]}, "exchange": {"1gbit": [0.0] * 3}}
    return {"ours": ours, "word": "", "failed": failed, "curves": curves, "seeds": {"1": steps, "2": steps}, **measured}


STORED = {
    "rates": ["1gbit"],
    "at_most": 300,
    "confirmed": [{"variant": "ddp", "rate": "1gbit", "steps": 80, "seconds": 240.4, "loss": 6.0}],
    "variants": {
        IDEAL: variant(False, 1.0, None) | {"curves": {}},
        "torch DDP": variant(False, 2.0, 80.0),
        "a hook": variant(False, 1.2, None),
        "refused one": variant(False, 1.0, 80.0, failed="refused: ValueError: no"),
        "ddp": variant(True, 1.5, 80.0),
        "local(every=32)": variant(True, 1.1, 160.0),
    },
}


def test_seconds_to_the_target_are_steps_times_seconds():
    rows = link_table.summary(STORED)
    assert rows["torch DDP"]["rates"]["1gbit"]["seconds to target"] == 80 * 2.0 * 2.0
    assert rows["torch DDP"]["bytes_a_step"] == 2_000_000
    assert "seconds to target" not in rows["a hook"]["rates"]["1gbit"]
    assert "refused one" not in rows
    assert link_table.ratios(STORED, "1gbit") == {
        "ddp": {"torch DDP": [0.75, 0.75, 0.75]},
        "local(every=32)": {"torch DDP": [1.1, 1.1, 1.1]},
    }
    assert link_table.soonest(STORED, "1gbit", ours=True) == ["ddp", "local(every=32)"]
    assert link_table.soonest(STORED, "1gbit", ours=False) == ["torch DDP"]


def test_a_plan_that_begins_as_ddp_takes_the_time_of_both():
    assert stages("local(every=8,after=20),wire=int4") == ("ddp,wire=int4", "local(every=8),wire=int4", 20)
    assert stages("local(every=8),wire=int4") is None
    words = {"ddp": (2.0, None), "local(every=8)": (1.0, None), "local(every=8,after=20)": (0.0, 80.0)}
    found = {word: variant(True, *told) | {"word": word} for word, told in words.items()}
    stored = {"rates": ["1gbit"], "variants": found}
    link_table.mix(stored)
    assert found["local(every=8,after=20)"]["relative"] == {"1gbit": [1.25] * 3}
    assert found["ddp"]["relative"] == {"1gbit": [2.0] * 3}
    found["local(every=8)"]["exchange"] = {"1gbit": [3.0] * 3}
    link_table.mix(stored)
    assert found["local(every=8,after=20)"]["exchange"] == {"1gbit": [3.0] * 3}, "the last one is a whole one"


def test_what_failed_or_did_not_arrive_stays_in_the_table():
    text = link_table.markdown(STORED)
    assert "| refused one | refused: ValueError: no |" in text
    assert "| a hook | not in 300 (lowest 7.50) at 0.001 | 2.00 |" in text
    assert "| **ddp** | 80 at 0.001 | 2.00 | 3000 (1500–4500) | 1.50 (1.50–1.50) | 240.0 |" in text  # noqa: RUF001
    assert "Run as a whole at 1gbit: ddp, 80 steps in 240 s, held-out loss 6.000." in text


def test_a_quotient_has_the_spread_of_both():
    assert link_table.quotient([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [(5.0, 5.0)]) == (2.0, 1.0, 3.0)
    assert link_table.quotient([1.0], [1.0], [(10.0, 5.0), (5.0, 5.0)]) == (1.5, 1.0, 2.0)


def test_rows_are_the_same_for_everybody_and_no_step_has_the_held_out_ones():
    one, other = Language(512), Language(512)
    assert torch.equal(one.rows(3, 8, 33), other.rows(3, 8, 33))
    assert not torch.equal(one.rows(3, 8, 33), one.rows(4, 8, 33))
    assert not any(torch.equal(one.rows(HELD_OUT, 8, 33), one.rows(step, 8, 33)) for step in range(100))


def test_the_language_can_be_learned():
    language = Language(512)
    ids = language.rows(0, 64, 129)
    assert int(ids.min()) >= 0 and int(ids.max()) < 512
    follows = (language.follower[ids[:, :-1]] == ids[:, 1:]).float().mean()
    assert FOLLOWS - 0.03 < follows < FOLLOWS + 0.06  # some are followers by chance


def test_every_variant_has_its_file_and_its_environment():
    assert all(v.home in PINS for v in PEERS.values() if v.home)
    assert SAME_STEPS.keys() | set(SAME_STEPS.values()) <= PEERS.keys() | set(PLANS)
    assert not set(PLANS) & PEERS.keys()
