"""What an object was given is gone when it is taken away, and is in no copy or pickle of it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import nn

from distributedtorch.core.override import hooked, in_copies, override, without


def doubled(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return type(self).forward(self, x) * 2  # type: ignore[no-any-return]


def users(module: nn.Module, args: Any) -> None:
    """A hook of the user's."""


def given(layer: nn.Module, *, deep: bool = False) -> list[Any]:
    hook = layer.register_forward_hook(lambda *_: None, always_call=True)
    return [override(layer, "forward", doubled, deep=deep), hooked(layer, hook)]


def plain(layer: nn.Module) -> bool:
    return vars(layer).keys() == vars(nn.Linear(2, 2)).keys() and not layer._forward_hooks


def test_copies_and_pickles_have_nothing_of_it() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    own = layer(x)
    layer.register_forward_pre_hook(users)  # the user's stays
    given(layer)
    for twin in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert plain(twin) and torch.equal(twin(x), own)
        assert len(twin._forward_pre_hooks) == 1
    assert torch.equal(layer(x), 2 * own)


def test_everything_can_be_taken_away() -> None:
    layer = nn.Linear(2, 2)
    for undo in reversed([*given(layer), *given(layer, deep=True)]):
        assert not plain(layer)
        undo()
    assert plain(layer)


def test_a_method_of_the_objects_own_comes_back_and_is_in_copies() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    layer.forward = layer.extra_repr  # type: ignore[assignment]
    undo = override(layer, "forward", doubled)
    assert copy.deepcopy(layer).forward() == layer.extra_repr()
    undo()
    assert layer.forward() == layer.extra_repr()
    assert x.sum() == 2


def test_deep_copies_can_have_it_too_but_no_pickle() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    own = layer(x)
    given(layer, deep=True)
    twin = copy.deepcopy(copy.deepcopy(layer))
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    assert not twin(x).any(), "a copy computes with what is its own"
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), 2 * own)
    for pickled in (pickle.loads(pickle.dumps(twin)), copy.copy(twin)):
        assert plain(pickled) and torch.equal(pickled(x), own)


def test_the_state_of_copies_can_be_another() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    undo = in_copies(optimizer, lambda state: {**state, "state": "whole"})
    assert pickle.loads(pickle.dumps(optimizer)).state == copy.deepcopy(optimizer).state == "whole"
    undo()
    assert pickle.loads(pickle.dumps(optimizer)).state == {}


def test_a_dict_of_attributes_is_freed_of_it() -> None:
    layer = nn.Linear(2, 2)
    before = dict(vars(layer))
    given(layer)
    assert without(layer, dict(vars(layer))).keys() == before.keys()
