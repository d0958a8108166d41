"""DeepSpeed's ZeRO checkpoints, stages 1, 2 and 3: the fp32 weights and Adam's moments, put together from all ranks.

Stages 1 and 2: a group's parameters lie in a row, cut into one partition per rank; each rank says which fragment of
which parameter it has. Stage 3: every parameter is cut into one equal piece per rank, the last one padded, and a rank's
pieces lie in a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributedtorch.checkpoint import archive, portable
from distributedtorch.checkpoint.foreign import Room, wrong
from distributedtorch.checkpoint.names import Record
from distributedtorch.checkpoint.portable import WEIGHTS_ONLY, Group, Portable
from distributedtorch.core.errors import CheckpointError, explain

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError)
MASTER = "fp32"
_ENTRY = 100
"""Bytes of an entry of a dict, about."""


def is_one(folder: Path) -> bool:
    """Whether a folder looks like DeepSpeed's."""
    here = _step_folder(folder)
    return here is not None and any(_MODEL.fullmatch(path.name) for path in here.iterdir())


def load(folder: Path, *, optimizer: bool = True, room: Room | None = None) -> Portable:
    """The newest checkpoint in a folder, or the one that it is."""
    here, room = _step_folder(folder), room or Room()
    assert here is not None
    files = _files(here, _MODEL)
    states = [archive.load(path, room) for path in files]
    shards = [archive.load(path, room) for path in _files(here, _OPTIM)]
    try:
        if not shards:
            return portable.split(states[0], f"{here} (DeepSpeed without ZeRO)", optimizer=optimizer, room=room)
        shards = [shard["optimizer_state_dict"] for shard in shards]
        return _put_together(here, states, shards, optimizer=optimizer, room=room)
    except CheckpointError:
        raise
    except _WRONG as error:
        raise wrong(f"{here} does not fit together ({type(error).__name__}: {str(error)[:200]})") from None


def _step_folder(folder: Path) -> Path | None:
    """The folder with the files: given, or named by `latest` in the one given."""
    if not folder.is_dir():
        return None
    latest = folder / "latest"
    if latest.is_file():
        with latest.open(errors="replace") as file:
            named = file.read(200).strip()
        inside = folder / named
        return inside if named and Path(named).name == named and inside.is_dir() else None
    return folder


def _files(here: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Files of all ranks in their order; none may be missing."""
    found = {path: match for path in here.iterdir() if (match := pattern.fullmatch(path.name))}
    if any(int(match[2]) for match in found.values()):
        given = f"{here} has parts of a model divided by tensor parallelism ({len(found)} files)"
        raise CheckpointError(explain(given, "mp_rank_00 alone", "merge it with DeepSpeed's universal checkpoint"))
    ranks = sorted(int(match[1] or 0) for match in found.values())
    if ranks != list(range(len(ranks))):
        given = f"{here} has the files of ranks {ranks}"
        raise CheckpointError(explain(given, "those of every rank", "copy the whole folder"))
    return sorted(found, key=lambda path: int(found[path][1] or 0))


def _put_together(here: Path, states: list[Any], shards: list[Any], *, optimizer: bool, room: Room) -> Portable:
    stage = _stage(shards[0])
    if stage == 3 and len(states) != len(shards):
        raise ValueError(f"{len(states)} model files, {len(shards)} of the optimizer")
    _check_count(here, shards)
    head = states[0]
    shapes: list[dict[str, tuple[int, ...]]] = head["param_shapes"]
    for name, shape in [pair for names in shapes for pair in names.items()]:
        if not archive.is_shape(shape):
            raise ValueError(f"shape of {name}")
    taken = partial(_of_stage_3 if stage == 3 else _of_stage_2, shards, shapes, room)
    made = Portable(found=f"{here} (DeepSpeed {head.get('ds_version', '')}, ZeRO {stage})", model={}, room=room)
    made.step = int(head.get("global_steps") or 0)
    _model(made, states, taken(MASTER), room)
    if optimizer:
        _optimizer(made, shapes, shards[0], taken, room)
        scheduler = head.get("lr_scheduler")
        made.scheduler = scheduler if isinstance(scheduler, dict) and "last_epoch" in scheduler else None
    return made


def _stage(shard: Mapping[str, Any]) -> int:
    said = shard.get("zero_stage")
    number = said.args[0] if isinstance(said, Record) else said
    if number not in (1, 2, 3):
        raise ValueError(f"ZeRO stage {number}")
    return int(number)


def _check_count(here: Path, shards: list[Any]) -> None:
    said = shards[0].get("partition_count", len(shards))
    counts = set(said) if isinstance(said, list) else {said}
    if counts != {len(shards)}:
        given = f"{here} has the optimizer files of {len(shards)} ranks, {max(counts)} wrote it"
        raise CheckpointError(explain(given, "those of every rank", "copy the whole folder"))


def _model(made: Portable, states: list[Any], master: dict[str, Tensor], room: Room) -> None:
    """Every entry of the model's state: master weights, frozen ones, buffers, tied names."""
    head = states[0]
    shared = head.get("shared_params") or {}
    frozen = head.get("frozen_param_shapes") or {}
    pieces = [state.get("frozen_param_fragments") or {} for state in states]
    missing = []
    for name, value in head["module"].items():
        if name in master:
            made.model[name] = master[name]
        elif name in shared and shared[name] in master:
            made.model[name] = master[shared[name]]
        elif name in frozen and name in pieces[0]:
            made.model[name] = _float(_cut(_joined([piece[name] for piece in pieces], room), frozen[name]), room)
        elif isinstance(value, Tensor) and not value.numel() and name not in head.get("buffer_names", ()):
            missing.append(name)
        elif not isinstance(value, Record):
            half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
            made.model[name] = _float(value, room) if half else value
    if missing:
        made.notes.append(
            f"no values for {', '.join(missing[:5])}: DeepSpeed wrote none (tied weights); say --tie {missing[0]}=OTHER"
        )


def _joined(parts: Sequence[Tensor], room: Room) -> Tensor:
    """Tensors in a row."""
    times = [1 if part.is_contiguous() else 2 for part in parts]
    room.hold_tensors(sum(k * part.numel() * part.element_size() for k, part in zip(times, parts, strict=True)))
    return torch.cat([part.reshape(-1) for part in parts])


def _float(value: Tensor, room: Room) -> Tensor:
    room.hold_tensors(value.numel() * torch.float32.itemsize)
    return value.float()


def _of_stage_2(shards: list[Any], shapes: list[dict[str, Any]], room: Room, kind: str) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {}
    for shard in shards:
        for number, (names, partition) in enumerate(zip(shapes, _flat(shard, kind), strict=True)):
            mapping = shard.get("param_slice_mappings")
            if mapping is None:
                found.setdefault(f"{number}", []).append(partition[: shard[_GROUPS][number].numel()])
                continue
            if sum(address.get("numel") for address in mapping[number].values()) > partition.numel():
                raise ValueError("fragments that lie over each other")
            for name, address in mapping[number].items():
                start, numel = address.get("start"), address.get("numel")
                if name not in names or min(start, numel) < 0 or start + numel > partition.numel():
                    raise ValueError(f"fragment of {name}")
                found.setdefault(name, []).append(partition[start : start + numel])
    if shards[0].get("param_slice_mappings") is None:  # written before DeepSpeed 0.7.1: in a row
        rows = [_in_a_row(_joined(found[f"{number}"], room), names) for number, names in enumerate(shapes)]
        return {name: tensor for row in rows for name, tensor in row.items()}
    shape_of = {name: shape for names in shapes for name, shape in names.items()}
    return {name: _exactly(name, _joined(found.get(name, []), room), shape) for name, shape in shape_of.items()}


def _in_a_row(flat: Tensor, names: Mapping[str, Any]) -> dict[str, Tensor]:
    made, at = {}, 0
    for name, shape in names.items():
        made[name] = _cut(flat[at:], shape)
        at += math.prod(shape)
    return made


def _of_stage_3(shards: list[Any], shapes: list[dict[str, Any]], room: Room, kind: str) -> dict[str, Tensor]:
    rows = [_joined(_flat(shard, kind), room) for shard in shards]
    made, at = {}, 0
    for name, shape in [pair for names in shapes for pair in names.items()]:
        length = -(-math.prod(shape) // len(shards))
        made[name] = _cut(_joined([row[at : at + length] for row in rows], room), shape)
        at += length
    if {row.numel() for row in rows} != {at}:
        raise ValueError(f"partitions of {[row.numel() for row in rows]} elements for {at}")
    return made


_GROUPS, _GROUPS_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"


def _flat(shard: Mapping[str, Any], kind: str) -> list[Tensor]:
    """One rank's partitions, a group at a time: of the master weights, or of one of the moments."""
    groups: list[Tensor] = shard[_GROUPS] if _GROUPS in shard else shard[_GROUPS_3]
    if kind == MASTER:
        return groups
    state = _base(shard)["state"]
    return [state[number][kind] for number in range(len(groups))]


def _base(shard: Mapping[str, Any]) -> dict[str, Any]:
    base = shard.get("base_optimizer_state", shard.get("optimizer_state_dict"))
    if not isinstance(base, dict) or "state" not in base or "param_groups" not in base:
        given = "the optimizer's state is not in torch's form (DeepSpeed's elastic checkpoint)"
        raise CheckpointError(explain(given, "'state' and 'param_groups'", WEIGHTS_ONLY))
    return base


def _optimizer(
    made: Portable, shapes: list[dict[str, Any]], shard: Any, taken: Callable[[str], Any], room: Room
) -> None:
    base = _base(shard)
    numbers = [number for group in base["param_groups"] for number in group["params"]]
    if numbers != list(range(len(shapes))):
        given = f"{made.found}: the optimizer's groups hold {str(numbers)[:200]}, there are {len(shapes)} parts"
        raise CheckpointError(explain(given, "each part once, in order", WEIGHTS_ONLY))
    for group in base["param_groups"]:  # in stage 3 a group may be in several parts
        names = [name for number in group["params"] for name in shapes[number]]
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        made.groups.append(Group(params=names, options=options))
    first: dict[str, Any] = next(iter(base["state"].values()), {})
    moments = [name for name, value in first.items() if isinstance(value, Tensor) and value.dim()]
    rest = {name: value for name, value in first.items() if name not in moments}
    room.hold(_ENTRY * (len(rest) + len(moments) + 1) * sum(len(group.params) for group in made.groups))
    made.state = {name: dict(rest) for group in made.groups for name in group.params} if first else {}
    for moment in moments:
        for name, tensor in taken(moment).items():
            made.state[name][moment] = tensor
    portable.check_state(made)


def _cut(flat: Tensor, shape: Any) -> Tensor:
    """The first elements in a shape."""
    if flat.numel() < math.prod(shape):
        raise ValueError(f"{flat.numel()} elements for {tuple(shape)}")
    return flat[: math.prod(shape)].reshape(tuple(shape))


def _exactly(name: str, flat: Tensor, shape: Any) -> Tensor:
    if flat.numel() != math.prod(shape):
        raise ValueError(f"{flat.numel()} elements of {name}, {tuple(shape)} needed")
    return flat.reshape(tuple(shape))
