"""An independent look at a server's history: what it says of itself is not asked."""

from __future__ import annotations

from collections.abc import Iterable

from distributedtorch.serve.board import Event


def staleness(events: Iterable[Event]) -> list[int]:
    """Of every push, in the order in which they came: versions applied between its worker's last pull and itself.

    Raises:
        AssertionError: The history cannot be: a push without a pull, a step applied twice, versions that jump.
    """
    pulled: dict[int, int] = {}
    applied: set[tuple[int, int]] = set()
    version, found = 0, []
    for event in events:
        if event.kind == "pull":
            assert event.worker not in pulled or pulled[event.worker] <= event.version
            pulled[event.worker] = version
        elif event.kind == "push":
            found.append(version - pulled.pop(event.worker))
        elif event.kind == "apply":
            assert event.version - version in (0, 1), "versions jump"
            assert (event.worker, event.step) not in applied, "a push was applied twice"
            applied.add((event.worker, event.step))
            version = event.version
        elif event.kind == "leave":
            pulled.pop(event.worker, None)
    return found
