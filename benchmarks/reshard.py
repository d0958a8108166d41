"""Every plan and world to every other, to the bit; writes benchmarks/results/reshard.json.

Plans come from the menu, so a new one joins by itself. One process is `ddp-1`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.step_time import machine  # noqa: E402

WORLDS = (1, 2, 3, 4)


def pool(what: str, folder: Path, world: int) -> None:
    start = [] if world == 1 else ["distributedtorch", "run", "--workers", str(world), "-m"]
    command = [sys.executable, "-m", *start, "tests.checkpoint.reshard_pool", what, str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=580)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what in ("save", "load"):
            for world in WORLDS:
                pool(what, folder, world)
        tables = [json.loads(file.read_text()) for file in sorted(folder.glob("table.*.json"))]
    pairs = {pair for table in tables for pair in table}
    wrong = {pair: found for table in tables for pair, found in table.items() if found}
    print(f"{len(pairs)} pairs of saved and loaded, on every rank of each world: {len(wrong)} differ {list(wrong)[:5]}")
    found = {"machine": machine(), "worlds": WORLDS, "pairs": sorted(pairs), "differ": wrong}
    (ROOT / "benchmarks/results/reshard.json").write_text(json.dumps(found, indent=1))
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
