"""One GPU: bf16, fp16 and fp8 with two ranks beside one process, against what one process shows in parts.

A GPT of 3M parameters, 20 steps of SGD with momentum. "noise" is the largest difference between one process and one
process that computes its batches in 2 parts: each part's gradient is rounded by itself, as on ranks.
`python benchmarks/gpu_precision.py OUT` writes OUT/gpu_precision.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
from benchmarks.step_time import Gpt, machine  # noqa: E402
from tests.conformance.cases import difference  # noqa: E402

PRECISIONS = ("bf16", "fp16", "fp8")
SYNCS = ("ddp", "zero1", "zero2", "zero3")


def train(plan: str, parts: int, file: Path) -> None:
    import distributedtorch as dt
    from distributedtorch.distribute import release

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Gpt(layers=3, d=256, vocabulary=2048, length=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.randint(0, 2048, (160, 65), generator=torch.Generator().manual_seed(1))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=16)  # type: ignore[arg-type]
    model, optimizer, loader = dt.distribute(model, optimizer, loader, plan=plan)
    losses = []
    for _ in range(2):
        for ids in loader:
            for some in ids.cuda().tensor_split(parts):
                loss = F.cross_entropy(model(some[:, :-1]).flatten(0, 1), some[:, 1:].flatten())
                (loss * len(some) / len(ids)).backward()
            losses.append(float(dt.mean(loss.detach())))
            optimizer.step()
            optimizer.zero_grad()
    state = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    state.pop("head.weight")
    if dt.is_main():
        save_file(state, file, metadata={"loss": f"{losses[0]:.4f} to {losses[-1]:.4f}"})
    release()


def inside(folder: Path) -> None:
    import distributedtorch as dt

    dt.barrier()
    for precision in PRECISIONS:
        for sync in SYNCS if dt.world() > 1 else SYNCS[:1]:
            for parts in (1,) if dt.world() > 1 else (1, 2):
                train(f"{sync},{precision}", parts, folder / f"{sync},{precision}-{dt.world()}-{parts}.safetensors")
    if dt.world() == 1:
        train("ddp,accumulate=1", 1, folder / "float32.safetensors")


def main(folder: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    for ranks in (1, 2):
        command = [sys.executable, "-m", "distributedtorch", "run", "--workers", str(ranks), __file__, "--inside"]
        subprocess.run([*command, str(folder)], env=environ, check=True)
    exact, rows = load_file(folder / "float32.safetensors"), []
    for precision in PRECISIONS:
        one = load_file(folder / f"ddp,{precision}-1-1.safetensors")
        noise = difference(one, load_file(folder / f"ddp,{precision}-1-2.safetensors"))[0]
        for sync in SYNCS:
            gap = difference(one, load_file(folder / f"{sync},{precision}-2-1.safetensors"))[0]
            rows.append({"plan": f"{sync},{precision}", "difference": gap, "noise": noise, "within": gap <= 4 * noise})
        rows.append({"plan": precision, "to float32": difference(exact, one)[0]})
        print(*rows[-5:], sep="\n", flush=True)
    result = {"machine": machine(), "gpu": torch.cuda.get_device_name(), "rows": rows}
    (folder / "gpu_precision.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    inside(Path(sys.argv[2])) if sys.argv[1] == "--inside" else main(Path(sys.argv[1]))
