"""`dtorch convert`: checkpoints to plain weights, and those of others to checkpoints. Files of others are never run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from distributedtorch.checkpoint import archive, dcp, deepspeed, index, place, portable, weights, writing
from distributedtorch.checkpoint.aligned import say
from distributedtorch.checkpoint.channel import Channel
from distributedtorch.checkpoint.foreign import Room
from distributedtorch.checkpoint.index import Reader
from distributedtorch.checkpoint.portable import Portable
from distributedtorch.checkpoint.weights import Weight
from distributedtorch.core.errors import CheckpointError, explain

_TARGETS = ("safetensors", "hf", "checkpoint")
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError, MemoryError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint of ours, torch.save's, DCP's or DeepSpeed's")
    parser.add_argument("target", metavar="TARGET", help="the file or folder to make; nothing is overwritten")
    parser.add_argument("--to", choices=_TARGETS, help="what to make (default: by TARGET's and SOURCE's kind)")
    parser.add_argument("--max-shard", default="5GB", metavar="SIZE", help="the largest file of --to hf (default 5GB)")
    parser.add_argument("--model", type=int, metavar="N", help="which model of a checkpoint that holds several")
    parser.add_argument("--no-optimizer", action="store_true", help="the weights alone")
    parser.add_argument(
        "--tie", action="append", default=[], metavar="NAME=OTHER", help="NAME is the same tensor as OTHER"
    )


def act(arguments: argparse.Namespace) -> int:
    """Convert, and say what was found and made."""
    max_shard = weights.size_of(arguments.max_shard)
    ours = _ours(arguments.source)
    to = arguments.to or _usual(arguments.target, ours=ours is not None)
    try:
        if ours is not None:
            if to == "checkpoint":
                given = f"{arguments.source} is a checkpoint of ours already"
                raise CheckpointError(explain(given, "--to safetensors or --to hf", "copy the folder to copy it"))
            found, tied = _of_ours(*ours, model=arguments.model)
        else:
            theirs = _theirs(Path(arguments.source), optimizer=not arguments.no_optimizer and to == "checkpoint")
            _tie(theirs, arguments.tie)
            _say(theirs)
            if to == "checkpoint":
                return _to_checkpoint(theirs, arguments.target)
            portable.bound(theirs)
            found, tied = weights.of_tensors(theirs.model)
        return _to_weights(found, tied, to, Path(arguments.target), max_shard)
    except OSError as error:
        given = f"{error.filename or arguments.target}: {error.strerror or error}"
        raise CheckpointError(explain(given, "files that can be read and written", "check the paths")) from None
    except CheckpointError:
        raise
    except _WRONG as error:  # whatever it is, it is what the files hold
        given = f"{arguments.source} cannot be converted ({type(error).__name__}: {str(error)[:200]})"
        raise CheckpointError(explain(given, "a whole checkpoint", "check the files")) from None


def _usual(target: str, *, ours: bool) -> str:
    if target.endswith(".safetensors"):
        return "safetensors"
    return "hf" if ours else "checkpoint"


# What is there.


def _ours(source: str) -> tuple[place.Place, str] | None:
    """The newest checkpoint of ours in a folder, or the one that it is; None where it is not ours."""
    root, one = place.split(source)
    if one is not None:
        return place.of(root), one
    if "://" not in source and not Path(source).is_dir():
        return None
    there = place.of(source)
    names = there.committed()
    return (there, names[0]) if names else None


def _of_ours(there: place.Place, folder: str, *, model: int | None) -> tuple[list[Weight], dict[str, str]]:
    """The weights of a checkpoint of ours: read and checked one at a time when they are written."""
    found = index.read(there, folder)
    reader = Reader(there, folder, found)
    models = found.content["run"]["models"]
    if model is None and len(models) == 1:
        model = 0
    if model is None or not 0 <= model < len(models):
        given = f"{there.file(folder, '')} holds {len(models)} models" + ("" if model is None else f", --model {model}")
        raise CheckpointError(explain(given, "which one to convert", f"say --model 0 to --model {len(models) - 1}"))
    made, left = [], []
    tied: dict[str, str] = {}
    first: dict[str, str] = {}
    for name, said in models[model]["state"].items():
        key = said.get("$tensor") if isinstance(said, dict) else None
        if key is None:
            left.append(name)
        elif first.setdefault(key, name) != name:
            tied[name] = first[key]
        else:
            entry = found.tensors[key]
            made.append(
                Weight(name=name, shape=entry.shape, dtype=entry.dtype, values=partial(reader.whole, key)),
            )
    say(f"found {there.file(folder, '')}: {models[model]['kind']}, step {found.content['step']}")
    if left:
        say(f"left out: {', '.join(left[:5])}, which are no tensors")
    return made, tied


def _theirs(source: Path, *, optimizer: bool) -> Portable:
    """What another library's files hold."""
    room = Room()
    if source.is_dir():
        if (source / dcp.METADATA).exists():
            nested, found = dcp.load(source, room), f"{source} (torch.distributed.checkpoint)"
            return portable.split(nested, found, optimizer=optimizer, room=room)
        if deepspeed.is_one(source):
            return deepspeed.load(source, optimizer=optimizer, room=room)
        files = sorted(source.glob("*.safetensors"))
        if files:
            return _of_weights(source, files)
        given = f"{source} holds no checkpoint that is known"
        needed = "checkpoint folders of dt.save, .metadata of DCP, latest of DeepSpeed, or .safetensors files"
        raise CheckpointError(explain(given, needed, "check the path"))
    if not source.is_file():
        do = "check the path"
        raise CheckpointError(explain(f"{source} is not there" if not source.exists() else f"{source}", "a file", do))
    if source.suffix == ".safetensors":
        return _of_weights(source, [source])
    return portable.split(archive.load(source, room), f"{source} (torch.save)", optimizer=optimizer, room=room)


def _of_weights(source: Path, files: list[Path]) -> Portable:
    made = Portable(found=f"{source} (safetensors)", model={})
    for file in files:
        try:
            made.room.open(file.stat().st_size)
            with safe_open(str(file), framework="pt") as opened:
                made.model |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except Exception as error:
            given = f"{file} cannot be read: {error}"
            raise CheckpointError(explain(given, "a whole .safetensors file", "download or save it again")) from None
    return made


def _tie(theirs: Portable, said: list[str]) -> None:
    for one in said:
        name, _, other = one.partition("=")
        if other not in theirs.model or not name or name in theirs.model:
            given = f"--tie {one}"
            needed = "NAME=OTHER, where OTHER has values and NAME has none"
            raise CheckpointError(explain(given, needed, f"OTHER is one of {', '.join(list(theirs.model)[:5])}, ..."))
        theirs.model[name] = theirs.model[other]
        theirs.notes = [note for note in theirs.notes if f"--tie {name}=" not in note]


def _say(theirs: Portable) -> None:
    tensors = [value for value in theirs.model.values() if isinstance(value, torch.Tensor)]
    numel = sum(tensor.numel() for tensor in tensors)
    state = f", optimizer state of {len(theirs.state)} parameters" if theirs.state else ""
    say(f"found {theirs.found}: {len(tensors)} tensors, {numel:,} elements{state}, step {theirs.step}")
    for note in theirs.notes:
        say(f"  {note}")


# What is made.


def _to_checkpoint(theirs: Portable, target: str) -> int:
    there = place.of(target)
    if there.committed():
        given = f"{target} holds checkpoints already"
        raise CheckpointError(explain(given, "a new folder", "give another TARGET"))
    name = writing.carry_out(there, portable.content(theirs), Channel(0, [0], None, ""), keep=1, private=True)
    say(f"made {there.file(name, '')}: go on with dt.load or dt.resume")
    return 0


def _to_weights(found: list[Weight], tied: Mapping[str, str], to: str, target: Path, max_shard: int) -> int:
    if not found:
        raise CheckpointError(explain("a model without tensors", "some", "check SOURCE"))
    made: Any = target
    if to == "safetensors":
        weights.write_file(target, found, tied)
    else:
        names = weights.write_folder(target, found, tied, max_shard)
        made = f"{target}/{names[0]}" + (f" and {len(names) - 1} more files" if len(names) > 1 else "")
    size = sum(weight.bytes for weight in found)
    say(f"made {made}: {len(found)} tensors, {size:,} bytes")
    for name, first in tied.items():
        say(f"  {name} is tied to {first} and written once")
    return 0
