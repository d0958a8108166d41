"""Plain aligned text for the terminal. What comes out of files is printed without its control characters."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

_WIDEST = 200
"""To how many characters a column is filled up; what is longer stands as it is."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES = ((86400 * 2, 86400, "days"), (3600 * 2, 3600, "h"), (60 * 2, 60, "min"), (0, 1, "s"))


def say(*lines: str) -> None:
    """Print lines, each safe for a terminal of whatever encoding."""
    encoding = sys.stdout.encoding or "utf-8"
    safe = ["".join(c if c.isprintable() else "?" for c in line) for line in lines]
    try:
        for line in safe:
            print(line.encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:  # `| head` has seen enough; nothing is to be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "") -> list[str]:
    """Rows as lines with aligned columns; those in `right` end at one edge. The last column may be of any length."""
    columns = max((len(row) for row in rows), default=0)
    lengths = ([len(row[column]) for row in rows if column < len(row)] for column in range(columns))
    widths = [min(max(column), _WIDEST) for column in lengths]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def size(num_bytes: int) -> str:
    """`12.3 MiB`."""
    value, unit = float(num_bytes), 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{num_bytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def when(seconds: float | None) -> str:
    """A moment and how long ago it was; nothing where it is not known."""
    if seconds is None:
        return ""
    ago = max(time.time() - seconds, 0.0)
    number, word = next((int(ago // unit), word) for least, unit, word in _AGES if ago >= least)
    return f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(seconds))} ({number} {word} ago)"


def count(number: int, word: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def clip(text: str, width: int) -> str:
    """A text of at most so many characters: what is too long loses its middle."""
    half = (width - 3) // 2
    return text if len(text) <= width else f"{text[: width - 3 - half]}...{text[-half:]}"
