"""Where a loader stands: counted in global batches and global samples, so the same at every number of ranks.

Each rank holds a few integers per loader; nothing travels, because every rank counts the same global batches. Saved in
a checkpoint they say what was seen, and another number of ranks reads them unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one handed-out batch is: this rank's part of which global batch."""

    batch: int
    """Global batches this loader handed out before this one in the whole run."""
    epoch: int
    """Iterations over this loader begun before this one; one left early counts."""
    rows: float
    """Real rows of this rank; 0 when the batch holds one repeated row that must count for nothing."""
    rows_global: int
    """Rows of the global batch."""
    first_sample: int
    """Samples of the whole run before this global batch."""
    copies: int = 1
    """How many ranks have each row; `rows` counts them in parts."""
    proof: float = -1.0
    """What must be the same on all ranks, where each has read the whole batch; below 0: nothing."""

    @property
    def idle(self) -> bool:
        """Whether this rank has no row of its own in this batch."""
        return self.rows == 0


@dataclass(kw_only=True)
class Cursor:
    """How far one loader has been read, over all ranks together."""

    epoch: int = -1
    """The epoch under way, from 0; -1 before the first."""
    batch: int = 0
    """Global batches handed out in this epoch."""
    batches: int = 0
    """Global batches handed out in the run."""
    samples: int = 0
    """Samples of all ranks handed out in the run."""
    ended: bool = True
    """Whether the epoch is over: walked to its end, or left. Before the first one, too."""

    def begin(self) -> int:
        """Start the next epoch and return its number."""
        self.epoch += 1
        self.batch, self.ended = 0, False
        return self.epoch

    def advance(self, rows: float, rows_global: int, epoch: int, *, copies: int = 1, proof: float = -1.0) -> Share:
        """Count one global batch and describe this rank's share of it."""
        share = Share(
            batch=self.batches,
            epoch=epoch,
            rows=rows,
            rows_global=rows_global,
            first_sample=self.samples,
            copies=copies,
            proof=proof,
        )
        self.batch += 1
        self.batches += 1
        self.samples += rows_global
        return share

    def state_dict(self) -> dict[str, int]:
        """Plain numbers, ready for JSON."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over the counts of `state_dict`."""
        for field in fields(self):
            setattr(self, field.name, state[field.name])
