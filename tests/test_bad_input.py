"""Bad input: refused as soon as it can be known, in words (given, needed, do), with a code not 0 and nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import distributedtorch as dt
from distributedtorch.distribute import release
from distributedtorch.inspect import check_index
from tests import forked

HEAD = """
import os, sys
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import distributedtorch as dt
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(12, 4), torch.randint(0, 2, (12,)))
loader = DataLoader(data, batch_size=4)
rank = int(os.environ.get("RANK", 0))
"""
LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


@dataclass(frozen=True)
class Bad:
    name: str
    script: str
    says: tuple[str, ...]
    """Fragments the message must have."""
    workers: int = 0
    """0: plain `python script.py`."""
    plan: str | None = None
    head: bool = True
    environ: tuple[tuple[str, str], ...] = ()
    alone: bool = False
    """Needs processes of its own: they end, or differ, or it shows that all of them end."""

    @property
    def apart(self) -> bool:
        """Whether it is tried in ranks of its own that the command has not started."""
        joined = "init_process_group" not in self.script  # forked ranks have joined before the script begins
        return bool(self.workers and self.head and self.alone and not self.environ and joined)

    @property
    def together(self) -> bool:
        """Whether all ranks raise it, so that it is tried in the pool of `refused_pool`."""
        return bool(self.workers and self.head and not self.alone and not self.plan and not self.environ)


WEIGHTS = "import tempfile\nfrom safetensors.torch import save_file\nfile = tempfile.mkdtemp() + '/w.safetensors'\n"
CALL = "model, optimizer, loader = dt.distribute(model, optimizer, loader)\n"
CASES = [
    Bad("unknown word", "dt.distribute(model, plan='zero22')", ("zero22", "zero2")),
    Bad("contradictory words", "dt.distribute(model, plan='ddp,zero1,clip=-1')", ("ddp", "zero1", "clip")),
    Bad("not built yet", "dt.distribute(model, plan='tensor=2')", ("tensor", "not built yet")),
    Bad("unknown word on the command line", CALL, ("zer1", "zero1"), workers=2, plan="zer1"),
    Bad("no workers", "dt.distribute(model, workers=0)", ("workers=0", "1 or more")),
    Bad("batch size none", "dt.distribute(DataLoader(data, batch_size=None))", ("batch_size", "do:"), workers=2),
    Bad("batch size 0", "dt.distribute(loader, plan='batch=0')", ("batch", "1")),
    Bad(
        "optimizer not over the model",
        "dt.distribute(nn.Linear(2, 2), optimizer)",
        ("in no model given", "optimizer after model.to"),
    ),
    Bad("same object twice", "dt.distribute(model, model)", ("twice", "each once")),
    Bad("same object in two calls", "dt.distribute(model); dt.distribute(model)", ("twice", "each once")),
    Bad("not a thing to distribute", "dt.distribute(model, 3)", ("int", "models, optimizers")),
    Bad("nothing", "dt.distribute()", ("a model",)),
    Bad(
        "model on two devices",
        "dt.distribute(model.append(nn.Linear(2, 2, device='meta')))",
        ("cpu and meta", "one device"),
    ),
    Bad(
        "after training began",
        "F.cross_entropy(model(data[:][0]), data[:][1]).backward()\ndt.distribute(model)",
        ("has a gradient already", "before the first backward"),
    ),
    Bad(
        "one parameter in two optimizers of two calls",
        CALL + "dt.distribute(torch.optim.Adam(model.parameters()))",
        ("in two optimizers", "SGD and Adam"),
        workers=2,
    ),
    Bad(
        "parameters added to the optimizer later",
        CALL + "optimizer.add_param_group({'params': nn.Linear(2, 2).parameters()})" + LOOP,
        ("add_param_group", "before dt.distribute"),
        workers=2,
    ),
    Bad(
        "a swallowed exception in backward",
        CALL
        + """
class Burst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("out of memory")
for number, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x if number or not rank else Burst.apply(x.requires_grad_())), y)
    try:
        loss.backward()
    except MemoryError:
        continue
    optimizer.step()
""",
        ("rank 1", "ended in an exception that was swallowed"),
        workers=2,
        alone=True,
    ),
    Bad(
        "one parameter in two optimizers",
        "dt.distribute(model, optimizer, torch.optim.Adam(model.parameters()))",
        ("two opt",),
    ),
    Bad(
        "an optimizer that sums over all parameters",
        "class Prodigy(torch.optim.SGD): ...\ndt.distribute(model, Prodigy(model.parameters()), plan='zero1')",
        ("Prodigy", 'plan="ddp"'),
        workers=2,
    ),
    Bad(
        "lbfgs in one process, clipped",
        "dt.distribute(model, torch.optim.LBFGS(model.parameters()), plan='clip=1.0')",
        ("LBFGS", "line search"),
    ),
    Bad(
        "optimizer state without values",
        "model = nn.Linear(4, 2, device='meta')\ndt.distribute(model, torch.optim.Adagrad(model.parameters()))",
        ("Adagrad", "meta device"),
    ),
    Bad(
        "a parameter of two models in two calls",
        "dt.distribute(model, optimizer)\ndt.distribute(nn.Sequential(model[0], nn.Linear(8, 1)))",
        ("'0.weight' is distributed already", "one call"),
        workers=2,
    ),
    Bad("lbfgs", "dt.distribute(model, torch.optim.LBFGS(model.parameters()))", ("LBFGS", "line search"), workers=2),
    Bad("no such block", "dt.distribute(model, plan='recompute,block=Linea')", ("block=Linea", "write `block=Linear`")),
    Bad("blocks of nothing", "dt.distribute(model, plan='zero2,block=Linear')", ("block by block", "zero3")),
    Bad("a block that is a number", "dt.distribute(model, plan='zero3,block=3')", ("a name", "block=Layer")),
    Bad(
        "clipped twice",
        "from torch.nn.utils import clip_grad_norm_ as clip\n"
        "dt.distribute(model, optimizer, plan='clip=1.0')\n"
        "F.cross_entropy(model(data[:][0]), data[:][1]).backward()\n"
        "clip(model.parameters(), 1.0)",
        ("clip=1", "out of the loop"),
    ),
    Bad(
        "a split drawn without a seed",
        "dt.distribute(DataLoader(torch.utils.data.Subset(data, [rank, 2, 3]), batch_size=2))",
        ("loader 0 samples", "torch.manual_seed(0)"),
        workers=2,
    ),
    Bad(
        "made-up data without a seed",
        "dt.distribute(DataLoader(TensorDataset(torch.full((4, 2), 0.5 + rank)), batch_size=2))",
        ("loader 0 samples", "torch.manual_seed(0)"),
        workers=2,
    ),
    Bad(
        "a tuple of numbers as a batch",
        "for batch in dt.distribute([(0.5, 2)]): pass",
        ("a tuple without tensors", "leading dimension"),
        workers=2,
    ),
    Bad(
        "a plateau that every rank judges for itself",
        CALL + "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).step(0.5 + rank)",
        ("ReduceLROnPlateau", "give the scheduler to dt.distribute"),
        workers=2,
    ),
    Bad(
        "rows shortened in the forward",
        "dt.distribute(nn.Embedding(4, 2, max_norm=1.0))",
        ("max_norm=1.0", "renorm"),
        workers=2,
    ),
    Bad(
        "gradients by frequency",
        "dt.distribute(nn.Sequential(nn.EmbeddingBag(4, 2, mode='sum', scale_grad_by_freq=True)))",
        ("'0'", "scale_grad_by_freq=False"),
        workers=2,
    ),
    Bad(
        "a sparse gradient without a table",
        "model = nn.ParameterList([nn.Parameter(torch.zeros(4, 2))])\n"
        "dt.distribute(model, torch.optim.SGD(model.parameters()))\n"
        "F.embedding(torch.tensor([1, 2]), model[0], sparse=True).mean().backward()",
        ("sparse gradient", "nn.Embedding(..., sparse=True)"),
        workers=2,
    ),
    Bad(
        "a sparse gradient edited on one rank",
        "model = nn.Embedding(9, 2, sparse=True)\n"
        "dt.distribute(model, optimizer := torch.optim.SparseAdam(list(model.parameters())), plan='zero1')\n"
        "model(torch.tensor([1, 2])).mean().backward()\n"
        "model.weight.grad = None if rank else model.weight.grad\n"
        "optimizer.step()",
        ("'weight'", "rank 0 2, rank 1 0"),
        workers=2,
    ),
    Bad(
        "a table that is used as a matrix too",
        "model = nn.Sequential(nn.Embedding(4, 2, sparse=True))\n"
        "dt.distribute(model, torch.optim.SGD(model.parameters()))\n"
        "(model(torch.tensor([1, 2])).mean() + model[0].weight.mean()).backward()",
        ("'0.weight' is dense", "sparse=False"),
        workers=2,
    ),
    Bad("float64 in fp16", "dt.distribute(model.double(), plan='fp16')", ("torch.float64", "model.float()")),
    Bad(
        "a GradScaler under bf16",
        "dt.distribute(model, optimizer, plan='bf16')\n"
        "torch.amp.GradScaler('cpu').scale(F.cross_entropy(model(data[:][0]), data[:][1])).backward()",
        ("GradScaler", "out of the plan"),
    ),
    Bad("fp8 without such a GPU", "dt.distribute(model, plan='fp8')", ("compute capability 8.9", "bf16 instead")),
    Bad(
        "a GradScaler in windows",
        "dt.distribute(model, optimizer, plan='accumulate=2')\n"
        "torch.amp.GradScaler('cpu').scale(F.cross_entropy(model(data[:][0]), data[:][1])).backward()",
        ("GradScaler", "accumulate=2 out of the plan"),
    ),
    *(
        Bad(
            f"a flat buffer of gradients under {plan}",
            f"dt.distribute(model, optimizer, plan='{plan}')\n"
            "buffer = torch.zeros(16)\n"
            "model[1].weight.grad = buffer.view(2, 8)\n"
            "F.cross_entropy(model(data[:][0]), data[:][1]).backward()",
            ("view of a larger tensor", "leave p.grad"),
            workers=2,
        )
        for plan in ("ddp", "zero2")
    ),
    Bad("two precisions", "dt.distribute(model, plan='bf16,fp16')", ("bf16", "fp16")),
    Bad(
        "a meta model without an initialiser",
        "class Own(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = nn.Parameter(torch.zeros(2, device='meta'))\n"
        "dt.distribute(nn.Sequential(Own()))",
        ("'0' has no initialiser", "reset_parameters"),
    ),
    Bad(
        "a meta buffer that nothing fills",
        "class Own(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(2, 2, device='meta')\n"
        "        self.register_buffer('table', torch.zeros(2, device='meta'))\n"
        "dt.distribute(nn.Sequential(Own()))",
        ("buffer '0.table'", "do:"),
    ),
    Bad("weights that are not there", "dt.distribute(model, weights='none.safetensors')", ("none.safetensors", "path")),
    Bad(
        "weights that are no safetensors",
        WEIGHTS + "open(file, 'w').write('x' * 99)\ndt.distribute(model, weights=file)",
        ("cannot be read", "save it again"),
    ),
    Bad(
        "weights of another model",
        WEIGHTS + "save_file({'0.weight': torch.zeros(8, 4)}, file)\ndt.distribute(model.to('meta'), weights=file)",
        ("no values for '0.bias'", "names and config"),
    ),
    Bad(
        "a meta buffer that the weights do not have",
        WEIGHTS + "norm = nn.BatchNorm1d(2)\nsave_file(dict(norm.named_parameters()), file)\n"
        "dt.distribute(norm.to('meta'), weights=file)",
        ("buffer 'running_mean'", "do:"),
    ),
    Bad(
        "weights of another shape",
        WEIGHTS
        + "save_file({k: v[:1] for k, v in model.state_dict().items()}, file)\ndt.distribute(model, weights=file)",
        ("is (1,)", "the model's is (8,)"),
    ),
    Bad(
        "converted after distribute under zero3",
        "dt.distribute(model, optimizer, plan='zero3')\nmodel.double()",
        ("torch.float64", "before dt.distribute"),
        workers=2,
    ),
    Bad("wrapped in DataParallel", "dt.distribute(nn.DataParallel(model))", ("DataParallel", "plain")),
    Bad(
        "models differ between ranks",
        "model[1] = nn.Linear(8, 2 + rank)\ndt.distribute(model)",
        ("rank 0", "rank 1", "1.weight", "(2, 8)", "(3, 8)"),
        workers=2,
        alone=True,
    ),
    Bad(
        "dataset lengths differ",
        "loader = DataLoader(TensorDataset(torch.randn(12 + rank, 4)), batch_size=4)\ndt.distribute(loader)",
        ("rank 0", "rank 1", "12", "13"),
        workers=2,
    ),
    Bad(
        "sum-reduced loss",
        CALL + LOOP.replace("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y, reduction='sum')"),
        ("the loss is a sum", "mean"),
        workers=2,
        alone=True,
    ),
    Bad(
        "uneven token mean",
        CALL + LOOP.replace("y)", "y.where(torch.arange(len(y)) < 2 - rank, -100))"),
        ("unevenly", "dt.weight"),
        workers=2,
    ),
    Bad(
        "a gradient hook on a parameter",
        CALL + "model[0].weight.register_hook(lambda g: g.clamp(-1, 1))\n" + LOOP,
        ("gradient hook", "0.weight"),
        workers=2,
    ),
    Bad(
        "already divided",
        "from torch.utils.data import DistributedSampler as D\n"
        "dt.distribute(DataLoader(data, batch_size=4, sampler=D(data, num_replicas=2, rank=rank)))",
        ("DistributedSampler", "do:"),
        workers=2,
    ),
    Bad(
        "a process group of its own that is not the world",
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\n"
        "dt.distribute(model)",
        ("initialised as rank 0 of 1", "remove init_process_group"),
        workers=2,
        alone=True,
    ),
    Bad("never distributed", "import torch\nprint('hello')", ("never call", "dt.distribute"), workers=2, head=False),
    Bad(
        "a Trainer that starts its own",
        "from transformers import Trainer, TrainingArguments\nTrainer(args=TrainingArguments('x'))",
        ("Trainer", "dt.distribute"),
        workers=2,
        head=False,
    ),
    Bad("a number above the world", CALL, ("RANK",), environ=(("RANK", "2"), ("WORLD_SIZE", "2"))),
    Bad(
        "a batch skipped on one rank",
        CALL
        + LOOP.replace(
            "x, y in loader:",
            "x, y in loader:\n    if rank and len(x) and x is not None and loader.cursor.batches == 2: continue",
        ),
        ("same batch", "rank 1"),
        workers=2,
        alone=True,
    ),
]


def left_running(marker: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("bad", [bad for bad in CASES if not bad.workers and not bad.environ], ids=lambda bad: bad.name)
def test_refused_in_one_process(bad: Bad) -> None:
    try:
        with pytest.raises(dt.DistributedTorchError) as refused:
            exec(HEAD + textwrap.dedent(bad.script), {})
    finally:
        release()
    for fragment in (*bad.says, "do:"):
        assert fragment in str(refused.value)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank of a pool was told, by case."""
    folder = tmp_path_factory.mktemp("refused")
    ended = forked.run(2, "tests.refused_pool", str(folder), cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bad", [bad for bad in CASES if bad.together], ids=lambda bad: bad.name)
def test_refused_on_every_rank(bad: Bad, refused: list[dict[str, str]]) -> None:
    for said in refused:
        for fragment in (*bad.says, "do:"):
            assert fragment in said[bad.name]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bad", [bad for bad in CASES if bad.apart], ids=lambda bad: bad.name)
def test_refused_in_ranks_of_its_own(bad: Bad, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + textwrap.dedent(bad.script))
    ended = forked.run(bad.workers, str(script), cwd=tmp_path, timeout=50)
    assert ended.returncode != 0
    for fragment in (*bad.says, "do:"):
        assert fragment in ended.stderr


STARTED = [bad for bad in CASES if (bad.workers or bad.environ) and not bad.together and not bad.apart]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bad", STARTED, ids=lambda bad: bad.name)
def test_refused_and_ended(bad: Bad, tmp_path: Path) -> None:
    script, marker = tmp_path / "train.py", uuid.uuid4().hex
    script.write_text((HEAD if bad.head else "") + textwrap.dedent(bad.script))
    command = [sys.executable, str(script)]
    if bad.workers:
        plan = ["--plan", bad.plan] if bad.plan else []
        command = [sys.executable, "-m", "distributedtorch", "run", "--workers", str(bad.workers), *plan, str(script)]
    environ = {**os.environ, "UNIQUE": marker, **dict(bad.environ)}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode != 0
    for fragment in (*bad.says, "do:"):
        assert fragment in ended.stderr
    assert left_running(marker) == []


def test_the_accelerator_of_another_rank() -> None:
    check_index(torch.device("cuda", 1), 1)
    with pytest.raises(dt.UsageError, match="own is cuda:1"):
        check_index(torch.device("cuda", 0), 1)


def test_batch_smaller_than_the_world_is_no_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD.replace("batch_size=4", "batch_size=1") + CALL + LOOP + "print('trained')")
    ended = forked.run(2, str(script), cwd=tmp_path, timeout=50)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "trained\n"
    assert "1 global = 1 + 0" in ended.stderr
