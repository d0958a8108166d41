"""What is measured beside each other: one file per library, each with `build(word, model) -> Step`.

A file's docstring is its card: what its words mean and which options were chosen. Everything a card does not name is
the library's default; the optimizer is always `torch.optim.AdamW(lr=1e-4)` with torch's defaults, the type float32
(another learning rate where a loss is the figure: `loop.LEARNING_RATE`).
A library that is not ours or torch's lives in a virtual environment of its own, so no import here may need it.
"""

from __future__ import annotations

from dataclasses import dataclass

IDEAL = "no exchange"
"""The same ranks doing the same work without talking to each other. Less is possible: under zero each rank updates a
part of the parameters, and gradients in memory of their own cost no page faults."""

BASES = (IDEAL, "torch DDP")
"""What every other variant is compared with, within the same round."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the table."""

    file: str
    """The file in this folder that builds it."""
    word: str = ""
    """Which of the file's modes."""
    home: str = ""
    """The environment under .peers/ that it runs in; empty: the one of this project."""
    kept: bool = False
    """Whether malloc is told by variables to keep freed memory, as ours does by itself."""


PINS = {
    "accelerate": ("torch==2.13.0", "numpy==2.4.6", "accelerate==1.15.0"),
    "lightning": ("torch==2.13.0", "numpy==2.4.6", "lightning==2.6.6"),
    "deepspeed": ("torch==2.13.0", "numpy==2.4.6", "setuptools", "ninja", "deepspeed==0.19.8"),
    "torchft": ("torch==2.13.0", "numpy==2.4.6", "torchft==0.2.0"),
    "exchange": (
        "torch==2.13.0",
        "numpy==2.4.6",
        "safetensors",
        "setuptools",
        "ninja",
        "deepspeed==0.19.8",
        "mpi4py==4.1.2",
    ),
}
"""Environment -> what is installed in it. torch is named, or pip would choose another one."""

VARIANTS = {
    IDEAL: Variant(file="alone"),
    "ddp": Variant(file="ours", word="ddp"),
    "zero1": Variant(file="ours", word="zero1"),
    "zero2": Variant(file="ours", word="zero2"),
    "zero3": Variant(file="ours", word="zero3"),
    "torch DDP": Variant(file="torch_own", word="ddp"),
    "torch ZeroRedundancyOptimizer": Variant(file="torch_own", word="zero"),
    "torch fully_shard": Variant(file="torch_own", word="shard"),
    "torch fully_shard (kept)": Variant(file="torch_own", word="shard, kept"),
    "Accelerate": Variant(file="accelerate", home="accelerate"),
    "Lightning Fabric": Variant(file="fabric", home="lightning"),
    "DeepSpeed 0": Variant(file="deepspeed", word="0", home="deepspeed"),
    "DeepSpeed 1": Variant(file="deepspeed", word="1", home="deepspeed"),
    "DeepSpeed 2": Variant(file="deepspeed", word="2", home="deepspeed"),
    "DeepSpeed 3": Variant(file="deepspeed", word="3", home="deepspeed"),
}
