"""Memory that ranks on the processor free is kept for their next step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import resource
import torch
from torch import nn
import distributedtorch as dt

model = nn.Linear(1024, 1024)
model, optimizer = dt.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3), workers=2)
for step in range(30):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model(torch.ones(512, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("faults", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
FEW, MANY = 2_000, 20_000
"""Pages of 4 KiB that twenty steps touch anew: each frees and asks for six blocks of 2 or 4 MiB."""


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ({}, True),
        ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, False),
        pytest.param({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"}, False, marks=pytest.mark.long),
    ],
    ids=["untold", "told by a variable", "told by a tunable"],
)
def test_freed_memory_is_kept_unless_malloc_was_told_otherwise(told: dict[str, str], kept: bool, tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | told
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    faults = int(done.stdout.split("faults")[1])
    assert ("freed memory kept" in done.stderr) == kept
    assert faults < FEW if kept else faults > MANY, f"{faults} pages in twenty steps"


def test_keeping_memory_can_be_switched_off():
    asked = "from distributedtorch.launch import heap; print(heap.keep_freed({heap.KEEP: '0'}), heap.keep_freed({}))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]


FORKED = """
import os
from pathlib import Path
import torch
from distributedtorch.launch import heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) // 256

assert heap.keep_freed()
for size in (1, 2, 4, 8, 16, 28):
    blocks = [torch.ones(size << 18) for _ in range(6)]
    del blocks
before = resident()
pid = os.fork()
if not pid:
    os._exit(0)
os.waitpid(pid, 0)
print(before - resident())
"""


def test_free_memory_goes_back_before_a_fork():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 100, "MiB that a child would hold a copy of"


MALLOC = """
#include <stddef.h>
extern void *__libc_malloc(size_t);
void *malloc(size_t size) { return __libc_malloc(size); }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="another allocator is made with a C compiler")
def test_another_allocator_is_left_alone(tmp_path: Path):
    (tmp_path / "other.c").write_text(MALLOC)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "other.so", "other.c"], cwd=tmp_path, timeout=60, check=True)
    asked = [sys.executable, "-c", "from distributedtorch.launch import heap; print(heap.keep_freed())"]
    for preload, kept in (("", "True"), (str(tmp_path / "other.so"), "False")):
        environ = {**os.environ, "LD_PRELOAD": preload}
        done = subprocess.run(asked, env=environ, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == kept
