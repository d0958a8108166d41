"""Training in bf16 and fp16 gives the weights of one process in bf16 and fp16, as far as rounding lets it.

A rank's gradient is rounded to 8 (or 11) bits before it is summed with the others': the bound is 4 times what one
process shows when it computes its batches in parts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests import forked
from tests.conformance.cases import PLANS, difference
from tests.conformance.precision_pool import OVERFLOW, PARTS, WORDS


def run(world: int, folder: Path) -> None:
    ended = forked.run(world, "tests.conformance.precision_pool", str(folder), cwd=folder)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.timeout(200)
def test_precision_is_that_of_one_process(tmp_path: Path) -> None:
    def weights(text: str, world: int, parts: int = 1) -> dict[str, Tensor]:
        return load_file(tmp_path / f"{text}-{world}-{parts}.safetensors")

    run(1, tmp_path)
    run(3, tmp_path)
    for word in WORDS:
        truth = weights(f"ddp,{word}", 1)
        noise = max(difference(truth, weights(f"ddp,{word}", 1, parts))[0] for parts in PARTS[1:])
        for plan in PLANS:
            assert difference(truth, weights(f"{plan},{word}", 3))[0] <= 4 * noise, (plan, word, noise)
    assert difference(weights("ddp,bf16", 1), weights("ddp,fp16", 1))[0] > 1e-5  # the words do something
    left_out = weights(f"ddp,{OVERFLOW}", 1)
    assert difference(left_out, weights("ddp,fp16", 1))[0] > 1e-2  # and a step was left out
    for plan in PLANS:
        assert difference(left_out, weights(f"{plan},{OVERFLOW}", 3))[0] <= 1e-2, plan
