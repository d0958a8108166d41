"""A process group of the script's own: adopted only where it is the whole world and has gloo for the CPU."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distributedtorch as dt
from distributedtorch.core.errors import LaunchError
from distributedtorch.launch import adopt
from distributedtorch.launch.place import Place


@pytest.fixture
def group():
    """A group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def place(rank=0, world=2):
    return Place(rank=rank, world=world, local_rank=rank, local_world=world, launcher="torchrun", run_folder=None)


def refused(here, words):
    with pytest.raises(LaunchError, match=words) as error:
        adopt.check(here)
    assert "needed: " in str(error.value) and "do: " in str(error.value)


def test_another_world_than_the_starters_is_refused(group):
    refused(place(), r"initialised as rank 0 of 1, but the starter \(torchrun\) says rank 0 of 2")


def test_a_world_without_a_starter_is_refused_by_the_call(group, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(LaunchError, match=r"rank 0 of 2, but the starter \(none\) says rank 0 of 1"):
        dt.distribute(nn.Linear(1, 1))


def test_two_groups_are_refused(group, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    adopt.check(place())
    dist.new_group([0])
    refused(place(), "torch.distributed has 2 process groups already")


def test_a_group_without_gloo_is_refused(group, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    refused(place(), "initialised with cuda:nccl")


def test_what_must_happen_before_the_group_ends_does(group, monkeypatch):
    monkeypatch.setattr(dist, "destroy_process_group", dist.destroy_process_group)
    seen = []
    adopt.before_destroy(lambda: seen.append(dist.is_initialized()))
    dist.destroy_process_group()
    assert seen == [True]


def test_the_model_comes_out_of_its_wrapper_without_its_hooks(group, capsys):
    inner = nn.Linear(2, 1)
    wrapper = nn.parallel.DistributedDataParallel(inner)
    assert adopt.unwrapped(wrapper, place()) is inner
    assert "DistributedDataParallel is taken off Linear" in capsys.readouterr().err
    inner(torch.ones(1, 2)).sum().backward()
    assert inner.weight.grad is not None
    assert adopt.unwrapped(inner, place()) is inner


@pytest.mark.parametrize(
    ("args", "words", "through"),
    [
        ((), {}, True),
        (("gloo", "env://"), {}, True),
        (("gloo", None, None, 2, 1), {}, True),
        (("gloo",), {"init_method": "tcp://127.0.0.1:1"}, False),
        (("gloo",), {"store": "its own"}, False),
        (("gloo",), {"rank": 0, "world_size": 1}, False),
    ],
)
def test_a_group_of_all_ranks_is_found_without_a_port(monkeypatch, args, words, through):
    truth, made = dist.init_process_group, []

    @functools.wraps(truth)
    def make(*args, **words):
        made.append(inspect.signature(truth).bind(*args, **words).arguments)

    monkeypatch.setattr(dist, "init_process_group", make)
    store = dist.HashStore()
    adopt.without_port(place(rank=1), lambda timeout: store)
    dist.init_process_group(*args, **words)
    dist.init_process_group(*args, **words)
    if not through:
        assert made == [inspect.signature(truth).bind(*args, **words).arguments] * 2
        return
    assert [(given["rank"], given["world_size"], given["init_method"]) for given in made] == [(1, 2, None)] * 2
    for given in made:
        given["store"].set("key", "")
    assert store.num_keys() == 2, "a second group finds nothing of the first one's"


def test_a_wrapper_that_the_loop_may_go_on_with_exchanges_nothing(group):
    inner, other = nn.Sequential(nn.Linear(2, 1)), nn.Linear(2, 1)
    around, part, apart = map(nn.parallel.DistributedDataParallel, (inner, inner[0], other))
    adopt.switch_off_around([inner])
    assert "forward" in vars(around) and "forward" in vars(part) and "forward" not in vars(apart)
    around(torch.ones(1, 2)).sum().backward()
    assert inner[0].weight.grad is not None
