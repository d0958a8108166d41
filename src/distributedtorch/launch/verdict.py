"""Who failed first: from the records the ranks left and the statuses the supervisor saw, one cause and one exit code.

Evidence, earliest first: an error raised that is not the consequence of another's end; a death by a signal that the
supervisor did not send; an exit with a code. Where there is none, a rank that ended well while another still needed
it left early. Times are monotonic, so they compare between the processes of one host.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distributedtorch.launch.ranks import Rank
from distributedtorch.launch.record import End, is_server, name_of, read, step_of

_LINES = 8


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The first cause of a failed run."""

    rank: int
    time: float
    """Monotonic."""
    text: str
    """What it did, after "rank R failed first: "."""
    code: int
    """What the run exits with; never 0."""
    detail: str = ""
    """The lines to print under it."""
    advice: str = ""
    """What is needed, and what to do, where that is known."""
    shown: str = ""
    """Where the user has seen the error and its traceback already: what to print in place of `text`."""
    hung_at: int | None = None
    """The step at which the rank did not come, where that is what it did."""


def judge(ranks: Sequence[Rank], folder: Path) -> Verdict:
    """Name the first cause."""
    ends = {rank.number: read(folder, rank.number) for rank in ranks}
    causes = [cause for rank in ranks if (cause := _cause(rank, ends[rank.number], folder)) is not None]
    trained = [rank for rank in ranks if not is_server(folder, rank.number)]
    if not causes and (early := _left_early(trained, ends)) is not None:
        return early
    if not causes:  # every rank blames another: the earliest is the nearest to the cause
        causes = [_blamed(end, ends) for end in ends.values() if end is not None and end.kind == "raised"]
    if not causes:
        return Verdict(rank=0, time=0.0, text="ended without leaving a reason", code=1)
    first = min(causes, key=lambda cause: cause.time)
    return _said_once(first, ends[first.rank], [end for end in ends.values() if end is not None and end.shown])


def _said_once(verdict: Verdict, end: End | None, shown: Sequence[End]) -> Verdict:
    """The same, without what stands on the user's terminal."""
    told = end is not None and any(_looks(one) == _looks(end) for one in shown)
    if end is None or not told or not verdict.text.startswith(end.type):
        return verdict
    return replace(verdict, shown=f"{end.type}, see above", detail=verdict.detail.splitlines()[0])


def _looks(end: End) -> tuple[str, list[str]]:
    """What an error is known by; further lines may be about this rank alone."""
    return end.type, end.message.splitlines()[:1]


def headline(verdict: Verdict, folder: Path) -> str:
    """The block printed when a run fails."""
    lines = [f"dtorch: {name_of(folder, verdict.rank)} failed first: {verdict.shown or verdict.text}"]
    lines += [f"  {line}" for line in (*verdict.detail.splitlines(), *verdict.advice.splitlines())]
    return "\n".join([*lines, f"  logs: {folder}"])


def _cause(rank: Rank, end: End | None, folder: Path) -> Verdict | None:
    """What speaks for this rank being the first to fail, if anything."""
    if end is not None and end.missing is not None:
        return _hung(end, step_of(folder, end.missing))
    if end is not None and end.kind == "raised":
        return None if end.consequence else _raised(end, rank.status or 0)
    step = "" if is_server(folder, rank.number) else _step(step_of(folder, rank.number), joined=rank.joined)
    detail = step + _tail(rank.log)
    if end is not None and end.kind == "exit" and end.code:  # also where it was stopped on its way out
        text = f"exited with code {end.code} at {end.where}"
        return Verdict(rank=rank.number, time=end.time, text=text, code=end.code, detail=detail)
    if not rank.status or rank.stopped:
        return None
    text = killed(-rank.status) if rank.status < 0 else f"exited with code {rank.status}"
    code = rank.status if rank.status > 0 else 128 - rank.status
    return Verdict(rank=rank.number, time=rank.ended or 0.0, text=text, code=code, detail=detail)


def _hung(end: End, step: int | None) -> Verdict:
    """A rank that did not come, as the one says that waited for it first."""
    rank, at = end.rank if end.missing is None else end.missing, end.step if step is None else step
    return Verdict(rank=rank, time=end.time, text=end.message, code=1, hung_at=at)


def _blamed(end: End, ends: dict[int, End | None]) -> Verdict:
    """A rank that ended because of another, which left nothing behind: that one did not come, or is out of reach."""
    found = _raised(end, 1)
    if end.peer is None or end.peer not in ends or ends[end.peer] is not None:
        return found
    at = f" at {end.where}" if end.where else ""
    text = f"rank {end.rank} gave up waiting for it (step {end.step}{at}): {end.message}"
    return replace(found, rank=end.peer, text=text)


def _raised(end: End, status: int) -> Verdict:
    trace = "\n".join(end.traceback.splitlines()[-_LINES:])
    code = status if status > 0 else 1
    text = f"{end.type}: {end.message}" if end.message else end.type
    at = f", {end.where}" if end.where else ""
    said, detail = advice(end) if end.rank else "", f"at step {end.step}{at}\n{trace}"
    return Verdict(rank=end.rank, time=end.time, text=text, code=code, detail=detail, advice=said)


def advice(end: End) -> str:
    """What to do about an error of a rank without a terminal."""
    if end.type == "EOFError" and end.message == "EOF when reading a line":
        return (
            "needed: standard input, which only rank 0 of `dtorch run` has\n"
            "do: take what is asked for there from an argument or a file"
        )
    if end.type == "BdbQuit":
        return (
            "needed: a terminal, which only rank 0 of `dtorch run` has\n"
            "do: call breakpoint(), where the other ranks wait, not pdb.set_trace()"
        )
    return ""


def _left_early(ranks: Sequence[Rank], ends: dict[int, End | None]) -> Verdict | None:
    """A rank that ended well while another still needed it."""
    left = [rank for rank in ranks if rank.status == 0 or _came_to_its_end(ends[rank.number])]
    met = [end for end in ends.values() if end is not None and end.kind == "raised"]
    if not left or len(left) == len(ranks):
        return None
    first = min(left, key=lambda rank: _left_at(rank, ends[rank.number]))
    end = ends[first.number]
    step = end.step if end is not None else 0
    stayed = next(rank.number for rank in ranks if rank not in left)
    other = met[0] if met else End(rank=stayed, kind="ended")
    text = (
        f"rank {first.number} left the loop after step {step} (its script ended with code 0) "
        f"while rank {other.rank} went on to step {max(other.step, step + 1)}"
    )
    detail = f"rank {other.rank} waited at {other.where}" if other.where else ""
    said = (
        "needed: the same number of steps on every rank\n"
        "do: let all ranks break, return or exit together: where each judges by its own numbers, "
        "`if dt.any(flag): break`"
    )
    return Verdict(rank=first.number, time=first.ended or 0.0, text=text, code=1, detail=detail, advice=said)


def _came_to_its_end(end: End | None) -> bool:
    """Whether its script ended by itself, even if the process was still on its way out (stopping data workers)."""
    return end is not None and end.kind == "ended"


def _left_at(rank: Rank, end: End | None) -> float:
    return end.time if end is not None else rank.ended or 0.0


def killed(number: int) -> str:
    """A death by signal in words."""
    name = signal.Signals(number).name if number in set(signal.Signals) else "a signal"
    hint = ", often the out-of-memory killer" if number == signal.SIGKILL else ""
    return f"was killed by {name} (signal {number}){hint}"


def _step(step: int | None, *, joined: bool) -> str:
    if step is None and joined:  # what it had noted was cleared away
        return ""
    return f"at step {step}\n" if step is not None else "before it joined\n"


def _tail(log: Path | None) -> str:
    """The last lines of a rank's log, where it left no traceback."""
    if log is None or not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").splitlines()[-_LINES:]
    return "\n".join(["its last lines:", *(f"  {line}" for line in lines)]) if lines else ""
