"""What a checkpoint of this run holds, taken from the run under any plan; `stored.py` puts it back.

Every rank gives the pieces it keeps: its part of divided parameters and optimizer state, and its share of what all
ranks have in common. Put back, every rank reads the ranges it keeps and nothing else.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from distributedtorch.attach import made
from distributedtorch.checkpoint.plain import Packer
from distributedtorch.checkpoint.writing import Content, Piece
from distributedtorch.core.errors import CheckpointError, explain
from distributedtorch.core.sync import Kept, leaves, share
from distributedtorch.core.world import accelerator, here
from distributedtorch.data.loader import Loader
from distributedtorch.data.stream import as_plain, capture
from distributedtorch.replicas import BUCKET_BYTES
from distributedtorch.run import RUN
from distributedtorch.sync import divided


def keys_of(models: list[nn.Module]) -> dict[int, str]:
    """By a parameter's id the name of its tensor in a checkpoint: the first it is met under."""
    keys: dict[int, str] = {}
    for number, model in enumerate(models):
        for name, param in model.named_parameters(remove_duplicate=False):
            keys.setdefault(id(param), f"model.{number}/{name}")
    return keys


def names_in(optimizer: Optimizer, keys: Mapping[int, str]) -> list[list[str]]:
    """By group of an optimizer the names of its parameters, in its own order."""
    return [[keys[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def kept_of(optimizer: Optimizer) -> dict[int, Kept]:
    """By a parameter's id what this rank keeps of its state, where the plan divides that."""
    syncs = [member.sync for member in here().loop.members if member.sync.optimizer is optimizer]
    return {id(p): sync.keeps(k) for sync in syncs if sync.divided for k, p in enumerate(sync.params)}


# Taken from the run.


def collect(model: int | None, state: Mapping[str, Any], *, writers: list[int]) -> Content:
    """What this rank writes where `writers` write together."""
    return _Collector(model, state, writers).content


class _Collector:
    def __init__(self, model: int | None, state: Mapping[str, Any], writers: list[int]) -> None:
        self.leads = here().rank == writers[0]
        self.share = (writers.index(here().rank), len(writers))
        self.models = RUN.models if model is None else [RUN.models[model]]
        self.keys = keys_of(self.models)
        self.divided = divided.kept(once=True) if divided.ALL else {}
        others = here().size > 1 or here().servers > 0
        syncs = [member.sync for member in here().loop.members] if len(writers) == here().size and others else []
        self.agreed = {key: value for sync in syncs for key, value in sync.consensus().items()}
        """By the id of a tensor that replicas have each in its own way what is written for all of them."""
        self.common: list[Piece] = []
        """What all ranks have: each writes a share of it."""
        self.content = Content(head=_head())
        run = self.content.run
        run["models"] = [self._model(number, one) for number, one in enumerate(self.models)]
        run |= {"optimizers": [], "schedulers": [], "user": {}, "loaders": [], "loss scale": None, "order": None}
        if model is None:
            run["optimizers"] = [self._optimizer(number, one) for number, one in enumerate(RUN.optimizers)]
            self._rest(state)
            for number, sync in enumerate(syncs):
                for name, value in sync.own_state().items():
                    self.content.pieces.append(_whole(f"rank.{here().rank}/sync.{number}/{name}", value, "state"))
            run["syncs"] = [[self.keys[id(param)] for param in sync.params] for sync in syncs]
        self.content.pieces += _share(self.common, *self.share)

    def _model(self, number: int, model: nn.Module) -> dict[str, Any]:
        for param in model.parameters():
            key = self.keys[id(param)]
            if key.startswith(f"model.{number}/"):
                self._parameter(key, param)
        named = dict(model.named_parameters(remove_duplicate=False))
        state = model.state_dict(keep_vars=True)
        metadata = getattr(state, "_metadata", {})
        # By name, not only by object: a hook on state_dict may have put copies in their places.
        agreed = {name: self.agreed.get(id(value), value) for name, value in state.items()}
        values = {name: named.get(name, agreed[name]) for name in state}
        packed = self._packed(f"model.{number}", values, "model")
        return {
            "kind": kind_of(model),
            "state": packed,
            "metadata": self._packed(f"model.{number}/metadata", dict(metadata)),
        }

    def _parameter(self, key: str, param: nn.Parameter) -> None:
        if id(param) not in self.divided:
            self.common.append(self._one_for_all(key, param, "model"))
            return
        slot, low, high, values = self.divided[id(param)]
        if low < high or (slot.numel == 0 and self.leads):
            self.content.pieces.append(
                Piece(
                    key=key,
                    file="model",
                    shape=tuple(slot.shape),
                    stride=not_row_major(tuple(slot.shape), tuple(slot.stride)),
                    low=low,
                    high=high,
                    tensor=values,
                    steady=True,
                )
            )

    def _packed(self, prefix: str, value: Any, file: str = "state") -> Any:
        """Nested state as JSON; the leader writes its tensors."""
        packer = Packer(prefix, f"{prefix}/", self.keys)
        packed = packer.pack(value)
        if self.leads:
            self.content.pieces += [_whole(name, tensor, file) for name, tensor in packer.tensors.items()]
        return packed

    def _optimizer(self, number: int, optimizer: Optimizer) -> dict[str, Any]:
        said: dict[str, Any] = {"kind": kind_of(optimizer), "state": {}}
        if own_way(optimizer):
            order = names_in(optimizer, self.keys)
            return {**said, "order": order, "whole": self._packed(f"optimizer.{number}", optimizer.state_dict())}
        said["groups"] = []
        for group, names in zip(optimizer.param_groups, names_in(optimizer, self.keys), strict=True):
            options = {name: value for name, value in group.items() if name != "params"}
            place = f"optimizer.{number}/groups/{len(said['groups'])}"
            said["groups"].append({"params": names, "options": self._packed(place, options)})
        other = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        said["other"] = self._packed(f"optimizer.{number}/other", other)
        kept = kept_of(optimizer)
        mine = {id(param): param for group in optimizer.param_groups for param in group["params"]}
        for one in [one for one in self.keys if one in mine]:  # in the models' order: the same on all ranks
            values = optimizer.state.get(mine[one])
            if values:
                key = self.keys[one]
                said["state"][key] = self._state(f"optimizer.{number}/{key}", mine[one], values, kept.get(one))
        return said

    def _state(self, prefix: str, param: Tensor, values: Mapping[str, Any], kept: Kept | None) -> dict[str, Any]:
        """One parameter's state: in pieces where it has the parameter's shape, else written by who has the first."""
        if kept is None:
            return {name: self._common_state(prefix, param, name, value) for name, value in values.items()}
        pieces: dict[int, str] = {}
        for path, tensor in leaves(values):
            if kept.shape is not None and _has_shape(tensor, kept.shape) and id(tensor) not in pieces:
                key = pieces[id(tensor)] = f"{prefix}/{'.'.join(map(str, path))}"
                self.content.pieces += _piece(key, param, tensor, kept)
        if kept.low > 0 or kept.copy[0] > 0:
            return {}
        packer = Packer(prefix, f"{prefix}/", pieces)
        packed = {name: packer.pack(value, name) for name, value in values.items()}
        self.content.pieces += [_whole(key, one, "state", steady=True) for key, one in packer.tensors.items()]
        return packed

    def _common_state(self, prefix: str, param: Tensor, name: str, value: Any) -> Any:
        if not _has_shape(value, tuple(param.shape)):
            return self._packed(prefix, {name: value})[name]
        self.common.append(self._one_for_all(f"{prefix}/{name}", value, "state"))
        return {"$tensor": f"{prefix}/{name}"}

    def _one_for_all(self, key: str, tensor: Tensor, file: str) -> Piece:
        """What all ranks have, or agree on."""
        agreed = self.agreed.get(id(tensor))
        return _whole(key, tensor, file, steady=True) if agreed is None else _whole(key, agreed, file)

    def _rest(self, state: Mapping[str, Any]) -> None:
        run, world = self.content.run, here()
        run["schedulers"] = [
            {"kind": kind_of(one), "state": self._packed(f"scheduler.{number}", one.state_dict())}
            for number, one in enumerate(schedulers())
        ]
        run["user"] = {
            name: self._packed(f"user.{number}", state[name].state_dict()) for number, name in enumerate(sorted(state))
        }
        known = loaders()
        run["loaders"] = [{**loader.place.state_dict(), "batch": batches_of(loader)} for loader in known]
        run["loaders"] += RUN.unclaimed
        run["fed"] = known.index(RUN.loaders[RUN.fed]) if RUN.fed < len(known) else RUN.fed
        run["pace"] = RUN.pace.state_dict()
        scale = world.loop.loss_scale
        run["loss scale"] = None if scale is None else scale.state_dict()
        run["order"] = as_plain(capture(full=True) if RUN.stream is None else RUN.stream.state)
        mine = torch.frombuffer(bytearray(json.dumps(_random()).encode()), dtype=torch.uint8)
        self.content.pieces.append(_whole(f"random/{world.rank}", mine, "state"))


def batches_of(loader: Loader) -> list[int | None]:
    """What an epoch of a loader is made of: rows of a batch, number of batches; None where it does not say."""
    try:
        return [loader.batch_global, len(loader)]
    except TypeError:
        return [loader.batch_global, None]


def loaders() -> list[Loader]:
    """Those that were given, and then those that were met in the loop."""
    return sorted(RUN.loaders, key=lambda loader: loader.place.met)


def schedulers() -> list[LRScheduler]:
    """Those that were given, and those that `dt.schedule` has made for an optimizer of the run."""
    more = [one for one in made() if any(one.optimizer is o for o in RUN.optimizers)]
    return [*RUN.schedulers, *(one for one in more if all(one is not given for given in RUN.schedulers))]


def forgotten(more: Iterable[object]) -> Iterator[str]:
    """The kinds of schedulers and loss scales in use that neither this run nor `more` knows."""
    known = [*RUN.schedulers, *made(), *more]
    for one in known:  # schedulers made of others
        known += getattr(one, "_schedulers", [])
    for one in gc.get_objects():
        kind = type(one)  # not isinstance: asking an object for its class may run code of its own
        ours = issubclass(kind, LRScheduler) and any(getattr(one, "optimizer", None) is o for o in RUN.optimizers)
        scales = issubclass(kind, torch.amp.GradScaler) and one.is_enabled()
        if (ours or scales) and not any(one is other for other in known):
            yield kind.__name__


def _head() -> dict[str, Any]:
    versions = {"distributedtorch": sys.modules["distributedtorch"].__version__, "torch": torch.__version__}
    head = {"versions": versions, "plan": str(RUN.plan), "world": here().size, "step": here().loop.steps}
    return {**head, "bucket bytes": os.environ.get(BUCKET_BYTES)}


def _random() -> dict[str, Any]:
    """This rank's own random states."""
    states: dict[str, Any] = {"host": as_plain(capture(full=True))}
    if accelerator() != "cpu":
        states["device"] = torch.get_device_module(accelerator()).get_rng_state().tolist()
    return states


def _whole(key: str, tensor: Tensor, file: str, *, steady: bool = False) -> Piece:
    tensor = tensor.detach()
    shape, high = tuple(tensor.shape), tensor.numel()
    return Piece(key=key, file=file, shape=shape, stride=None, low=0, high=high, tensor=tensor, steady=steady)


def _piece(key: str, param: Tensor, values: Tensor, kept: Kept) -> Iterator[Piece]:
    low, high = share(kept.low, kept.high, kept.copy)
    if low == high:
        return
    yield Piece(
        key=key,
        file="state",
        shape=tuple(param.shape),
        stride=not_row_major(tuple(param.shape), kept.stride),
        low=low,
        high=high,
        tensor=values.detach().reshape(-1)[low - kept.low : high - kept.low],
        steady=True,
    )


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) == shape


def not_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if torch.empty(shape, device="meta").as_strided(shape, stride).is_contiguous() else stride


def _share(common: list[Piece], mine: int, shares: int) -> Iterator[Piece]:
    """This rank's share of what all have: the ranges that lie in its part of all bytes put in a row."""
    total = sum(piece.tensor.numel() * piece.tensor.element_size() for piece in common)
    low, high, at = total * mine // shares, total * (mine + 1) // shares, 0
    for piece in common:
        size, numel = piece.tensor.element_size(), piece.tensor.numel()
        bounds = [min(max(-(-(edge - at) // size), 0), numel) for edge in (low, high)]
        at += numel * size
        if numel == 0:
            if mine == 0:
                yield piece
        elif bounds == [0, numel]:
            yield piece
        elif bounds[0] < bounds[1]:
            flat = piece.tensor.contiguous().reshape(-1)[bounds[0] : bounds[1]]
            yield replace(piece, low=bounds[0], high=bounds[1], tensor=flat)


def own_way(optimizer: Optimizer) -> bool:
    """Whether an optimizer's state is more than torch's frame says: then it is kept as its `state_dict` gives it."""
    kind = type(optimizer)
    return kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict


def kind_of(thing: object) -> str:
    return type(thing).__name__


def check_state(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's own objects, or an error that says what they lack."""
    given = dict(state or {})
    for name, one in given.items():
        if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
            said = f"state={{{name!r}: a {type(one).__name__}}}"
            do = "give it both methods, of plain numbers, text and tensors"
            raise CheckpointError(explain(said, "objects with state_dict() and load_state_dict()", do))
    return given
