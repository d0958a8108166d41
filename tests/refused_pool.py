"""What each process of a pool runs: bad input that all ranks refuse, one case after the other; what it was told."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import distributedtorch as dt
from distributedtorch.distribute import release
from tests.test_bad_input import CASES, HEAD


def main(folder: Path) -> None:
    said = {}
    for bad in [bad for bad in CASES if bad.together]:
        try:
            exec(HEAD + textwrap.dedent(bad.script), {})
            said[bad.name] = ""
        except dt.DistributedTorchError as error:
            said[bad.name] = str(error)
        release()
    (folder / f"{dt.rank()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]))
