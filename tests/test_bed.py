"""Each feature of the bed is seen to act, and not to act where it is switched off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests import bed as beds
from tests.bed import Bed

JOB = [sys.executable, "-S", str(Path(__file__).with_name("bed_job.py"))]
MEGABYTE = 1_000_000
LINE = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

pytestmark = [
    pytest.mark.skipif(bool(why := beds.missing("tc")), reason=why or "-"),
    pytest.mark.timeout(60),
]
needs_nft = pytest.mark.skipif(bool(without := beds.missing("nft")), reason=without or "-")


def started(bed: Bed, host: int, *words: object) -> subprocess.Popen[str]:
    """A job that has said it is ready."""
    process = bed.popen(host, *JOB, *words, **LINE)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Bed]:
    """Two hosts, the second of which serves."""
    with Bed(hosts=2) as bed:
        started(bed, 1, "serve")
        yield bed


@pytest.fixture
def bed(two_hosts: Bed) -> Iterator[Bed]:
    """The two hosts, put right again after a test that failed in the middle."""
    yield two_hosts
    two_hosts.rate(None)
    two_hosts.heal(1)
    two_hosts.delay(0)


def seconds_of_copy(bed: Bed, num_bytes: int = MEGABYTE) -> float:
    seconds, counted = bed.run(0, *JOB, "copy", bed.address(1), num_bytes).stdout.split()
    assert int(counted) == num_bytes
    return float(seconds)


@pytest.fixture
def ask(bed: Bed) -> Iterator[object]:
    """Round trips on one connection: seconds, or None where there was no answer within those given."""
    talk = started(bed, 0, "talk", bed.address(1))

    def ask(within: float) -> float | None:
        print(within, file=talk.stdin, flush=True)
        said = talk.stdout.readline().strip()
        return None if said == "silent" else float(said)

    yield ask
    talk.stdin.close()
    assert talk.wait(10) == 0


def test_a_rate_limits_a_transfer(bed):
    due = MEGABYTE * 8 / 20e6
    assert seconds_of_copy(bed) < 0.5 * due
    bed.rate("20mbit")
    limited = seconds_of_copy(bed)
    bed.rate(None)
    assert 0.9 * due < limited < 1.6 * due
    assert seconds_of_copy(bed) < 0.5 * due


def test_a_rate_in_other_words_is_refused(bed):
    with pytest.raises(ValueError, match="'20 MB/s' given\n  needed: a number with kbit, mbit or gbit"):
        bed.rate("20 MB/s")


@pytest.mark.parametrize("seconds", [0.0, 0.02], ids=["bridge", "switch"])
def test_nothing_passes_a_cut_cable_until_it_is_healed(bed, ask, seconds):
    bed.delay(seconds)
    assert ask(5) is not None
    bed.cut(1)
    assert ask(0.3) is None
    bed.heal(1)
    assert ask(5) is not None
    bed.delay(0)


def arrived(bed: Bed, num_datagrams: int) -> int:
    counting = started(bed, 1, "count")
    bed.run(0, *JOB, "send", bed.address(1), num_datagrams)
    return int(counting.communicate(timeout=30)[0])


@needs_nft
def test_loss_takes_its_part_of_400_datagrams(bed, ask):
    assert ask(5) is not None  # the hosts know each other's addresses: datagrams do not wait for that
    assert arrived(bed, 400) == 400
    bed.loss(20)
    lost = 400 - arrived(bed, 400)
    bed.loss(0)
    assert 40 <= lost <= 120  # 5 standard deviations around 80
    assert arrived(bed, 400) == 400


def test_a_delay_lengthens_the_round_trip_by_twice_itself(bed, ask):
    plain = median(ask(5) for _ in range(5))
    bed.delay(0.04)
    slow = median(ask(5) for _ in range(5))
    assert seconds_of_copy(bed, 200_000) > 0.08  # and streams pass whole
    bed.delay(0)
    assert plain < 0.02
    assert 0.08 <= slow - plain < 0.12
    assert median(ask(5) for _ in range(5)) < 0.02


def test_three_hosts_meet_through_the_switch_in_user_space():
    with Bed(hosts=3) as bed:
        bed.delay(0.01)
        for host in (1, 2):
            started(bed, host, "serve")
            assert bed.run(0, *JOB, "copy", bed.address(host), 1000).stdout.split()[1] == "1000"
        before = bed.bytes_received(1)
        assert bed.run(0, *JOB, "copy", bed.address(2), MEGABYTE).stdout.split()[1] == str(MEGABYTE)
        assert bed.bytes_received(1) - before < 10_000  # what is meant for one goes to one


def test_the_interfaces_count_what_is_sent(bed):
    def counters() -> list[int]:
        return [bed.bytes_sent(0), bed.bytes_received(1), bed.bytes_sent(1)]

    before = counters()
    assert [b - a for a, b in zip(before, counters(), strict=True)] == pytest.approx([0, 0, 0], abs=1000)
    seconds_of_copy(bed)
    sent, received, answered = (b - a for a, b in zip(before, counters(), strict=True))
    assert MEGABYTE < sent < 1.1 * MEGABYTE
    assert received == pytest.approx(sent, abs=1000)
    assert answered < 0.1 * MEGABYTE


def test_two_beds_stand_at_once_and_do_not_meet(bed):
    with Bed(hosts=2) as other:
        before = bed.bytes_received(1)
        started(other, 1, "serve")
        seconds_of_copy(other)
        assert other.bytes_received(1) > MEGABYTE
        assert bed.bytes_received(1) - before < 10_000
    seconds_of_copy(bed)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # ended, and not yet waited for


def test_after_an_error_nothing_is_left():
    with pytest.raises(ZeroDivisionError), Bed(hosts=1) as bed:
        bed.rate("1gbit")
        bed.delay(0.01)
        shell = bed.popen(0, "sh", "-c", "sleep 600 & echo $! && wait", stdout=subprocess.PIPE, text=True)
        pids = [shell.pid, int(shell.stdout.readline()), *(space.holder.pid for space in bed._spaces)]
        assert all(map(is_alive, pids))
        _ = 1 / 0
    assert not any(map(is_alive, pids))


def test_a_bed_that_cannot_be_made_whole_leaves_nothing(monkeypatch):
    made = []
    monkeypatch.setattr(Bed, "_lay_cables", lambda self: made.extend(self._spaces) or 1 / 0)
    with pytest.raises(ZeroDivisionError), Bed(hosts=1):
        pass
    assert len(made) == 2
    assert not any(is_alive(space.holder.pid) for space in made)


def test_namespaces_end_with_a_killed_process():
    make = "import sys; from tests.bed import Bed; bed = Bed(hosts=1).__enter__(); "
    make += "print(*(space.holder.pid for space in bed._spaces), flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", make], cwd=Path(__file__).parents[1], **LINE)
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, pids))


def test_what_is_missing_is_named(monkeypatch):
    assert beds.missing("no-such-tool").startswith("no-such-tool not found: install ")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert beds.missing() == "network namespaces need root"
