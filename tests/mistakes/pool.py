"""What each process of a pool runs: scripts as in one process, then distributed; every rank says what came of it."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import distributedtorch as dt
from distributedtorch.distribute import release
from tests.conformance.cases import difference
from tests.mistakes.table import Script, scripts


class Library:
    """The library as a script sees it, under a plan of the table's."""

    def __init__(self, plan: str) -> None:
        self.plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(dt, name)

    def distribute(self, *objects: Any, plan: str = "", **rest: Any) -> Any:
        """`dt.distribute` under the table's plan and the script's own words."""
        return dt.distribute(*objects, plan=",".join(word for word in (self.plan, plan) if word), **rest)


class Plain:
    """What the library's names mean in one process without it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dt, name)

    @staticmethod
    def distribute(*objects: Any, plan: str = "", **rest: Any) -> Any:
        """The objects as they are."""
        return objects[0] if len(objects) == 1 else objects

    @staticmethod
    def same(value: Any, *rest: Any, **more: Any) -> Any:
        """The value as it is."""
        return value

    weight = mean = total = any = all = same

    @staticmethod
    def is_main() -> bool:
        """True: one process is the first."""
        return True

    @staticmethod
    def rank() -> int:
        """0."""
        return 0

    @staticmethod
    def world() -> int:
        """1."""
        return 1


def outcome(space: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a script has come to: its model's state, and the numbers it names."""
    tensors = {} if space["model"] is None else dict(space["model"].state_dict())
    tensors |= {f"result {k}": torch.as_tensor(v).double() for k, v in (space.get("result") or {}).items()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def tried(script: Script, library: Any) -> tuple[dict[str, torch.Tensor], str]:
    """What a script comes to, or what it is told."""
    space: dict[str, Any] = {"dt": library, "__name__": "__main__", "model": None}
    try:
        exec(compile(script.text, script.name, "exec"), space)
        return outcome(space), ""
    except dt.DistributedTorchError as error:
        return {}, str(error)
    except Exception:
        return {}, f"failed: {traceback.format_exc()}"


def main(done: Path, named: Callable[[Script], bool], plan: str) -> None:
    """Run the scripts asked for under a plan."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for script in filter(named, scripts()):
        truth, failed = tried(script, Plain())
        found, said = tried(script, Library(plan))
        gap, where = (None, "") if said else difference(truth, found)
        row = {"name": script.name, "plan": plan, "gap": gap, "where": where, "said": said, "truth": failed}
        with (done / f"{dt.rank()}.jsonl").open("a") as file:
            print(json.dumps(row), file=file)
        release()


if __name__ == "__main__":
    dt.barrier()
    folder, plans, only = Path(sys.argv[1]), sys.argv[2].split(";"), sys.argv[3:]

    for word in plans:

        def wanted(script: Script, word: str = word) -> bool:
            if only:
                return script.name in only
            return not script.alone and word in script.plans and dt.world() in script.worlds

        main(folder, wanted, word)
