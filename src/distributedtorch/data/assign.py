"""Work that cannot be cut, given to ranks: files to read, folds to train, batches that are no rows.

List scheduling (Graham, 1969): pieces are looked at one after the other, and each goes to one rank at once. Every rank
computes the same from the same numbers; nothing travels. Rows of a batch need none of it: `balance` divides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from distributedtorch.core.errors import UsageError, explain

POLICIES = ("round-robin", "least-load", "most-idle", "priority")


def assign(
    costs: Sequence[float],
    ranks: int,
    policy: str = "most-idle",
    *,
    loads: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
    priorities: Sequence[float] | None = None,
) -> list[list[int]]:
    """Which pieces of work each rank takes. All ranks must pass the same numbers.

        mine = dt.assign([os.path.getsize(f) for f in files], dt.world())[dt.rank()]

    Args:
        costs: What each piece costs, in any unit.
        ranks: Over how many ranks.
        policy: "round-robin": in turn, whatever they cost. "least-load": each to the rank with the least work so far,
            whatever its speed. "most-idle": each to the rank that has nothing to do first. "priority": as "most-idle",
            the most urgent pieces first, and among equally urgent ones the largest.
        loads: By rank, the work that it has already; 0 without.
        speeds: By rank, work per second; for "most-idle" and "priority". The same without.
        priorities: For "priority", how urgent each piece is; the higher, the sooner.

    Returns:
        By rank, the numbers of its pieces in the order in which to do them. Ties go to the lower rank.

    Raises:
        UsageError: There is no such policy, or numbers are missing or cannot be meant.
    """
    loads = [0.0] * ranks if loads is None else list(loads)
    speeds = [1.0] * ranks if speeds is None else list(speeds)
    urgent = [0.0] * len(costs) if priorities is None else list(priorities)
    _check(policy, {"costs": costs, "loads": loads, "speeds": speeds, "priorities": urgent}, ranks)
    order = list(range(len(costs)))
    if policy == "priority":
        order.sort(key=lambda piece: (-urgent[piece], -costs[piece], piece))
    taken: list[list[int]] = [[] for _ in range(ranks)]
    for turn, piece in enumerate(order):
        rank = turn % ranks
        if policy == "least-load":
            rank = min(range(ranks), key=loads.__getitem__)
        elif policy != "round-robin":
            rank = min(range(ranks), key=lambda one: loads[one] / speeds[one])
        taken[rank].append(piece)
        loads[rank] += costs[piece]
    return taken


def _check(policy: str, numbers: dict[str, Sequence[float]], ranks: int) -> None:
    if policy not in POLICIES:
        raise UsageError(explain(f"assign(policy={policy!r})", f"one of {', '.join(POLICIES)}", "choose one of them"))
    if ranks < 1:
        raise UsageError(explain(f"assign over {ranks} ranks", "1 or more", "pass dt.world()"))
    lengths = {"loads": ranks, "speeds": ranks, "priorities": len(numbers["costs"])}
    for name, length in lengths.items():
        if len(numbers[name]) != length:
            given = f"assign with {len(numbers[name])} {name}"
            raise UsageError(explain(given, f"{length}: one for each", f"give {length} numbers, or leave {name} out"))
    for name in ("costs", "loads", "speeds"):
        least = min(numbers[name], default=inf)
        if not (least > 0 if name == "speeds" else least >= 0):
            needed = "above 0" if name == "speeds" else "0 or more"
            raise UsageError(explain(f"assign with {name} down to {least:g}", needed, f"correct {name}"))
