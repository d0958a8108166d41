"""Shared memory: every exchange to the bit, blocks that come free, ranks that end or stop, where it cannot be had."""

from __future__ import annotations

import gc
import os
import subprocess

import pytest
import torch

from distributedtorch.core import segment
from tests import forked


def pool(world: int, *words: str, hosts: str = "") -> subprocess.CompletedProcess[str]:
    return forked.run(world, *(["tests.hosts", hosts] if hosts else []), "tests.core.shared_pool", *words)


@pytest.mark.timeout(120)
def test_every_exchange_to_the_bit() -> None:
    runs = ((2, ("gloo", "disorder")), (3, ("gloo",)), (4, ("disorder",)))
    for world, words in runs:
        one = pool(world, *words)
        assert one.returncode == 0, one.stderr
        assert f"{348 if 'gloo' in words else 174} exchanges, all to the bit" in one.stdout


@pytest.mark.timeout(120)
def test_every_exchange_to_the_bit_on_several_hosts() -> None:
    for hosts in ("0,1,0,1", "0,1,1"):
        one = pool(len(hosts) // 2 + 1, "disorder", hosts=hosts)
        assert one.returncode == 0, one.stderr
        assert "174 exchanges, all to the bit" in one.stdout


@pytest.mark.timeout(120)
def test_a_wrong_sum_is_seen() -> None:
    ended = pool(2, "sabotage")
    assert ended.returncode != 0
    assert "all-reduce of 1 torch.float64" in ended.stderr


def test_blocks_come_free_when_no_tensor_uses_them() -> None:
    own = segment.Own()
    whole = own._free[0]
    one, two, three = (own.zeros(1000, torch.float32) for _ in range(3))
    assert own.offset_of(torch.zeros(3)) is None
    places = [own.offset_of(block) for block in (one, two, three)]
    two.fill_(1.0)
    view = two[10:20]
    del two
    assert own.offset_of(own.zeros(1000, torch.float32)) not in places  # a view still looks at it
    del view
    gc.collect()
    again = own.zeros(1000, torch.float32)
    assert own.offset_of(again) == places[1]
    assert not again.any()  # and comes back as zeros
    del one, three, again
    gc.collect()
    own.zeros(1, torch.uint8)
    gc.collect()
    own.zeros(1, torch.uint8)
    assert len(own._free) <= 2
    assert own._free[-1][0] - whole[0] <= 2 * 4096


def test_a_forked_process_takes_nothing_from_its_parent() -> None:
    own = segment.Own()
    block = own.zeros(1000, torch.float32).fill_(1.0)
    child = os.fork()
    if not child:
        del block
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert block.sum() == 1000


def test_a_segment_of_another_make_is_not_opened() -> None:
    own, card = segment.make()
    assert own is not None
    assert segment.open_all(1, own, [card, card])[0].words[4] == own.words[4]
    with pytest.raises(OSError, match="another one"):
        segment.open_all(1, own, [{**card, "token": "00" * 16}, card])
    with pytest.raises(OSError, match="not what its card says"):
        segment.open_all(1, own, [{**card, "size": 4096}, card])
    with open("/dev/zero", "rb") as other, pytest.raises(OSError, match=r"Permission|Invalid|not what"):
        segment.open_all(1, own, [{**card, "fd": other.fileno()}, card])
