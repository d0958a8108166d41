"""A checkpoint beside the run that it is to go into: does it fit, and then everything put back, under any plan.

Every rank reads the ranges it keeps and nothing else. Whatever can be understood before anything is changed is.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributedtorch import replicas, sound
from distributedtorch.attach import own_randomness
from distributedtorch.checkpoint.blocks import bytes_of, damaged
from distributedtorch.checkpoint.index import _WRONG, Reader
from distributedtorch.checkpoint.place import INDEX
from distributedtorch.checkpoint.plain import unpack
from distributedtorch.contents import (
    batches_of,
    kept_of,
    keys_of,
    kind_of,
    loaders,
    names_in,
    not_row_major,
    own_way,
    schedulers,
)
from distributedtorch.core.bucket import once
from distributedtorch.core.errors import CheckpointError, explain
from distributedtorch.core.sync import Kept
from distributedtorch.core.world import accelerator, here
from distributedtorch.data.cursor import Cursor
from distributedtorch.data.stream import State, install
from distributedtorch.looks import difference, looks
from distributedtorch.run import RUN
from distributedtorch.sync import divided
from distributedtorch.sync import once as once_per_host

_MOST_RANDOM = 1 << 20
"""Bytes of one rank's random states."""


class Stored:
    """A checkpoint beside the run that it is to go into."""

    def __init__(self, reader: Reader, model: nn.Module | None, state: Mapping[str, Any]) -> None:
        self.reader, self.part, self.user = reader, model is not None, state
        self.run = reader.index.content["run"]
        self.models = RUN.models if model is None else [model]
        saved: list[dict[str, Any]] = self.run["models"]
        self.saved = saved
        if model is not None and len(saved) > 1:
            number = next(k for k, known in enumerate(RUN.models) if known is model)
            self.saved = saved[number : number + 1]
        self.step = 0
        self.order: State | None = None
        """Random states, where `prepare` has found them: all ranks' for the order of data, and this rank's own."""
        self.mine: dict[str, Any] | None = None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Its tensors, each read when it is asked for; of what is asked for again from one of these, the same."""
        return _Lazily(self.reader, self.reader.whole)

    def misfit(self) -> str:
        """Why it is not of this run, or nothing."""
        if len(self.models) != len(self.saved):
            given = f"the checkpoint holds {len(self.saved)} models, {len(self.models)} are to be loaded"
            do = "distribute the same models in the same order, or dt.load(path, model=...)"
            return explain(given, "as many", do)
        for number, (model, saved) in enumerate(zip(self.models, self.saved, strict=True)):
            lines = difference(self._looks_here(model), self._looks_saved(saved["state"]))
            if lines:
                given = f"model {number} ({kind_of(model)}) is not the one that was saved ({saved['kind']}):\n"
                needed, do = "the same parameters and buffers", "build the model as it was when saved"
                return explain(given + "\n".join(lines), needed, do)
        return "" if self.part else self._other_misfit()

    def _looks_here(self, model: nn.Module) -> dict[str, str]:
        return {name: looks(value) for name, value in model.state_dict(keep_vars=True).items()}

    def _looks_saved(self, state: dict[str, Any]) -> dict[str, str]:
        entries = self.reader.index.tensors
        return {
            name: looks(entries[value["$tensor"]]) if isinstance(value, dict) and "$tensor" in value else looks(value)
            for name, value in state.items()
        }

    def _other_misfit(self) -> str:
        keys = keys_of(RUN.models)
        mine = [names_in(o, keys) for o in RUN.optimizers]
        theirs = [_names_saved(o) if o["kind"] else [] for o in self.run["optimizers"]]
        shapes = {
            "optimizers": (
                [
                    _groups(kind, [g["params"] for g in o.get("groups", [])])
                    for kind, o in _kinds(self.run["optimizers"], RUN.optimizers)
                ],
                [_groups(kind_of(o), [] if own_way(o) else n) for o, n in zip(RUN.optimizers, mine, strict=True)],
            ),
            "schedulers": (
                [kind for kind, _ in _kinds(self.run["schedulers"], schedulers())],
                [kind_of(s) for s in schedulers()],
            ),
            "loaders": (
                _given([one.get("met") for one in self.run["loaders"]]),
                _given([one.place.met for one in loaders()]),
            ),
        }
        for word, (saved, have) in shapes.items():
            if saved and have and saved != have:
                given = f"the checkpoint's {word} are: {', '.join(saved)}"
                return explain(given, f"as here: {', '.join(have)}", f"distribute the same {word}")
        if moved := _moved(theirs, mine):
            return moved
        for loader, stored in zip(loaders(), self.run["loaders"], strict=False):
            if "began" in stored and stored.get("batch", batches_of(loader)) != batches_of(loader):
                rows, count = stored["batch"]
                given = f"the checkpoint lies in the middle of an epoch of {count} batches of {rows} rows"
                here_ = f"as here: {batches_of(loader)[1]} of {batches_of(loader)[0]}"
                return explain(
                    given, here_, "use the same data and batch size, or a checkpoint from the end of an epoch"
                )
        missing = [name for name in self.user if name not in self.run["user"]]
        if missing:
            given = f"state= names {missing[0]!r}, and the checkpoint has {sorted(self.run['user']) or 'none'}"
            return explain(given, "what was saved under that name", "leave it out, or load a checkpoint that has it")
        return ""

    def prepare(self) -> None:
        """See, before anything is changed, that all of it can be taken over.

        Raises:
            CheckpointError: It cannot.
        """
        for name, buffer, value in self._expanded():
            if not torch.equal(once(value, buffer).expand_as(value), value):
                given = f"the buffer {name!r} is expanded (one memory for many elements), and the saved one is not"
                raise CheckpointError(explain(given, "values that repeat as here", "register it with .contiguous()"))
        try:
            self._see()
        except CheckpointError:
            raise
        except (*_WRONG, RuntimeError) as error:
            where = self.reader.place.file(self.reader.folder, INDEX)
            raise damaged(f"{where} is not what dt.save writes ({type(error).__name__}: {error})") from None

    def _see(self) -> None:
        content, run, shown = self.reader.index.content, self.run, sound.Shown(self.reader.index.tensors)
        sound.head(content)
        sound.models(self.saved, shown)
        if self.part:
            return
        sound.unfolding(run, shown.entries)
        keys = keys_of(RUN.models)
        for optimizer, saved in zip(RUN.optimizers, run["optimizers"], strict=False):
            sound.optimizer(saved, optimizer, keys, shown)
        kept = [*RUN.models, *RUN.loaders]
        for scheduler, saved in zip(schedulers(), run["schedulers"], strict=False):
            sound.scheduler(saved["state"], scheduler, kept, shown)
        unpack(run["user"], shown)
        for name, one in self.user.items():
            sound.user(run["user"][name], one, shown)
        for number, saved in enumerate(run["loaders"]):
            sound.loader(saved, RUN.loaders[number] if number < len(RUN.loaders) else None)
        sound.see(sound.is_count(run.get("fed", 0)), "which loader feeds the model")
        if run["loss scale"] is not None:
            sound.loss_scale(run["loss scale"])
        self.step = content["step"]
        self.order = None if run["order"] is None else sound.order(run["order"])
        self.mine = self._own_randomness(f"random/{here().rank}")

    def _own_randomness(self, key: str) -> dict[str, Any] | None:
        """This rank's own random states, where it had any."""
        index = self.reader.index
        if key not in index.tensors or here().size != index.content["world"]:
            return None
        entry = index.tensors[key]
        sound.see(entry.dtype == torch.uint8 and entry.numel <= _MOST_RANDOM, f"the tensor {key!r}")
        states = json.loads(bytes(bytes_of(self.reader.whole(key))))
        if "device" in states and accelerator() != "cpu":
            states["device"] = torch.tensor(states["device"], dtype=torch.uint8, device="cpu")
            torch.Generator(accelerator()).set_state(states["device"])
        return {**states, "host": sound.order(states["host"])}

    def apply_user(self) -> None:
        """Let the user's own objects take their state: the one part that nobody can check for them, so the first.

        Raises:
            CheckpointError: One of them cannot.
        """
        for name, one in () if self.part else self.user.items():
            try:
                one.load_state_dict(unpack(self.run["user"][name], self.tensors))
            except Exception as error:
                raise CheckpointError(_not_taken_back(name, one, error)) from error

    def apply(self) -> None:
        """Take everything else over. A group call where something is divided."""
        self._models()
        filled = {id(param) for model in self.models for param in model.parameters()}
        for member in here().loop.members:
            if any(id(param) in filled for param in member.sync.params):
                member.sync.loaded()
        if self.part:
            return
        for number, optimizer in enumerate(RUN.optimizers):
            if number < len(self.run["optimizers"]):
                self._optimizer(optimizer, self.run["optimizers"][number])
                for sync in [member.sync for member in here().loop.members if member.sync.optimizer is optimizer]:
                    sync.state_loaded()
        for scheduler, saved in zip(schedulers(), self.run["schedulers"], strict=False):
            scheduler.load_state_dict(unpack(saved["state"], self.tensors))
        self._loaders()
        scale = here().loop.loss_scale
        if scale is not None and self.run["loss scale"] is not None:
            scale.load_state_dict(self.run["loss scale"])
        here().loop.steps = self.step
        replicas.take_over(self.reader, keys_of(RUN.models))
        self._random()

    def _loaders(self) -> None:
        """Put loaders where they were; of those that were met in the loop, keep that for when they are met again."""
        known, saved = loaders(), self.run["loaders"]
        for loader, one in zip(known, saved, strict=False):
            loader.place.load_state_dict(one)
        RUN.unclaimed = saved[len(known) :]
        fed = min(int(self.run.get("fed", 0)), max(len(saved) - 1, 0))
        RUN.fed = RUN.loaders.index(known[fed]) if fed < len(known) else fed
        if saved:
            cursor = Cursor(**saved[fed]["cursor"])
            RUN.pace.goes_on(self.run.get("pace", {}), cursor, inside="began" in saved[fed])

    def _models(self) -> None:
        places = [part for part in (divided, once_per_host) if part.ALL]
        kept = {key: place for part in places for key, place in part.kept().items()}
        params: dict[str, nn.Parameter] = {}
        for model, saved in zip(self.models, self.saved, strict=True):
            named = dict(model.named_parameters(remove_duplicate=False))
            filled = named.keys() & saved["state"].keys()
            # Where hooks on state_dict give parameters other names, only the model itself can take them back.
            filled = filled if len(filled) == len(named) else set()
            params |= {saved["state"][name]["$tensor"]: named[name] for name in filled}
            filled |= {
                name for name, buffer in model.named_buffers(remove_duplicate=False) if once(buffer) is not buffer
            }
            rest = OrderedDict((name, value) for name, value in saved["state"].items() if name not in filled)
            given = OrderedDict(unpack(dict(rest), self.tensors))
            given._metadata = unpack(saved.get("metadata", {}), self.tensors)  # type: ignore[attr-defined]
            result = model.load_state_dict(given, strict=False)
            left = [name for name in result.missing_keys if name not in filled] + list(result.unexpected_keys)
            if left:
                said = f"{left[0]!r} of model {kind_of(model)} finds no place (a hook on state_dict only?)"
                raise CheckpointError(explain(said, "a state_dict that load_state_dict takes back", "mend the hooks"))
        for _, buffer, value in self._expanded():
            once(buffer.detach()).copy_(once(value, buffer))
        for part in places:
            part.fence()
        for key in sorted(params, key=self.reader.where):
            param = params[key]
            if id(param) in kept:
                slot, low, high, values = kept[id(param)]
                if low < high:
                    self._fill(key, tuple(slot.stride), low, values)
            else:
                with torch.no_grad():
                    flat = param.detach().view(-1) if param.is_contiguous() else None
                    if flat is not None:
                        self._fill(key, tuple(param.stride()), 0, flat)
                    else:
                        param.copy_(self.reader.whole(key))
        for part in places:
            part.refilled()
        torch.autograd.graph.increment_version(list(params.values()))

    def _expanded(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Buffers that torch cannot load because many of their elements share memory, each with what was saved."""
        for model, saved in zip(self.models, self.saved, strict=True):
            for name, buffer in model.named_buffers(remove_duplicate=False):
                if name in saved["state"] and once(buffer) is not buffer:
                    yield name, buffer, self.tensors[saved["state"][name]["$tensor"]]

    def _fill(self, key: str, stride: tuple[int, ...], low: int, values: Tensor) -> None:
        entry = self.reader.index.tensors[key]
        if values.device.type == "cpu" and entry.stride is None and not_row_major(entry.shape, stride) is None:
            self.reader.read_into(key, low, values)
        else:
            values.copy_(self.reader.ordered(key, stride, low, low + values.numel()))

    def _optimizer(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        keys = keys_of(RUN.models)
        if "whole" in saved:
            with _in_order(optimizer, saved.get("order", []), keys):
                optimizer.load_state_dict(unpack(saved["whole"], self.tensors))
            return
        kept = kept_of(optimizer)
        state: dict[Any, dict[str, Any]] = {}
        wanted = []
        for group, given in zip(optimizer.param_groups, saved["groups"], strict=True):
            options = unpack(given["options"], self.tensors)
            group.update({name: value for name, value in options.items() if name != "param_names"})
            for param in group["params"]:
                values = saved["state"].get(keys[id(param)], {})
                mine = kept.get(id(param))
                if values and (mine is None or mine.low < mine.high):
                    state[param] = dict.fromkeys(values)
                    wanted += [(param, group, mine, name, value) for name, value in values.items()]
        for param, group, mine, name, value in sorted(wanted, key=self._order):
            state[param][name] = self._value(param, group, mine, name, value)
        state |= unpack(saved.get("other", {}), self.tensors)
        optimizer.__setstate__({"state": _Default(optimizer, state), "param_groups": optimizer.param_groups})

    def _order(self, wanted: tuple[Any, ...]) -> tuple[str, int]:
        value = wanted[-1]
        return self.reader.where(value["$tensor"]) if isinstance(value, dict) and "$tensor" in value else ("", 0)

    def _value(self, param: Tensor, group: dict[str, Any], kept: Kept | None, name: str, value: Any) -> Any:
        return unpack(value, _Lazily(self.reader, lambda key: self._state_tensor(param, group, kept, name, key)))

    def _state_tensor(self, param: Tensor, group: dict[str, Any], kept: Kept | None, name: str, key: str) -> Tensor:
        entry = self.reader.index.tensors[key]
        divided_ = entry.shape == tuple(param.shape) and (entry.shape or name != "step")
        if kept is not None and kept.shape is not None and divided_:
            found = self.reader.ordered(key, kept.stride, kept.low, kept.high).view(kept.shape)
        else:
            found = self.reader.whole(key)
        stays = name == "step" and not (group.get("capturable") or group.get("fused"))  # as torch's own loading has it
        return found if stays else found.to(param.device)

    def _random(self) -> None:
        """The order of data goes on; each rank's own numbers too, where it had any."""
        if self.order is None:  # imported, or a part: it has no random states, and the run keeps its own
            return
        if RUN.stream is not None:
            RUN.stream.state = self.order
        if self.mine is None:
            install(self.order, full=True)
            own_randomness(here().rank, self.step)
            return
        install(self.mine["host"], full=True)
        if "device" in self.mine and accelerator() != "cpu":
            torch.get_device_module(accelerator()).set_rng_state(self.mine["device"])


class _Lazily(Mapping[str, Tensor]):
    """A checkpoint's tensors, each read when it is asked for."""

    def __init__(self, reader: Reader, read: Callable[[str], Tensor]) -> None:
        self.reader, self.read = reader, read
        self.found: dict[str, Tensor] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key not in self.found:
            self.found[key] = self.read(key)
        return self.found[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reader.index.tensors)

    def __len__(self) -> int:
        return len(self.reader.index.tensors)


def _Default(optimizer: Optimizer, state: dict[Any, dict[str, Any]]) -> Any:
    """A state of the kind that the optimizer has."""
    kind: Callable[..., Any] = type(optimizer.state)
    made = kind(dict) if hasattr(optimizer.state, "default_factory") else kind()
    made.update(state)
    return made


def _given(met: Sequence[bool | None]) -> list[str]:
    """The loaders that were given, as words to compare."""
    return ["a loader" for one in met if not one]


def _kinds(saved: list[dict[str, Any]], have: Sequence[object]) -> list[tuple[str, dict[str, Any]]]:
    """What was saved with its kind; an imported one does not say it, and takes that of its counterpart here."""
    kinds = [kind_of(one) for one in have] + ["an imported one"] * len(saved)
    return [(one["kind"] or kind, one) for one, kind in zip(saved, kinds, strict=False)]


def _groups(kind: str, names: list[list[str]]) -> str:
    said = " + ".join(f"{len(group)} ({min(group)} ...)" if group else "0" for group in names)
    return f"{kind} over {said} parameters" if names else kind


def _names_saved(saved: dict[str, Any]) -> list[list[str]]:
    """By group the names that a checkpoint has of an optimizer's parameters, in the order of the one who saved."""
    return saved.get("order") or [group["params"] for group in saved.get("groups", [])]


def _moved(saved: list[list[list[str]]], have: list[list[list[str]]]) -> str:
    """Refuses groups that hold other parameters than those saved; their order within a group says nothing."""
    for groups, mine in zip(saved, have, strict=False):
        before, now = ({name: k for k, names in enumerate(of) for name in names} for of in (groups, mine))
        for name in sorted(before.keys() | now.keys()) if groups else ():
            if before.get(name) != now.get(name):
                places = [f"group {of[name]}" if name in of else "no group" for of in (before, now)]
                given = f"{name!r} is in {places[0]} of the checkpoint's optimizer"
                return explain(given, f"as here: {places[1]}", "make the groups as they were when saved")
    return ""


@contextmanager
def _in_order(optimizer: Optimizer, names: list[list[str]], keys: Mapping[int, str]) -> Iterator[None]:
    """Within, the optimizer's groups have the order in which their state was saved: it is numbered by position."""
    by_name = {keys[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    own = [group["params"] for group in optimizer.param_groups]
    for group, saved in zip(optimizer.param_groups, names, strict=False):
        group["params"] = [by_name[name] for name in saved]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, own, strict=True):
            group["params"] = params


def _not_taken_back(name: str, one: object, error: Exception) -> str:
    said = f"load_state_dict of state={{{name!r}: a {kind_of(one)}}} has raised {type(error).__name__}: {error}"
    do = "mend it, and start again: objects in state= are perhaps changed, nothing else is"
    return explain(said, "an object that takes back what its state_dict gave", do)
