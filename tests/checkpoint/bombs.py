"""Files of other libraries that say more than they hold: sources for `dtorch convert`, each of which is refused.

A few kilobytes to a few megabytes that could mean gigabytes, minutes, or an error without words.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20
HEAD = b"\x80\x02}("
STORAGE = b"X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x02tQK\0"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n((" + STORAGE + b"K\x02\x85K\x01\x85\x89NtR"


def text(said: str) -> bytes:
    return b"X" + struct.pack("<I", len(said)) + said.encode()


def zipped(path: Path, data: bytes) -> Path:
    """A file as torch.save lays it out, with this pickle in it and two floats."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/data/0", b"\0" * 8)
    return path


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def in_model(inside: bytes) -> bytes:
    """The pickle of a model's state with something else in it."""
    return HEAD + text("model") + b"}(" + text("w") + TENSOR + text("x") + inside + b"uu."


def empty(shape: tuple[int, ...]) -> bytes:
    """The pickle of a tensor of this shape in two floats."""
    sizes, strides = (pickle.dumps(some, 2)[2:-1] for some in (shape, (1,) * len(shape)))
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n((" + STORAGE + sizes + strides + b"\x89NtR"
    return HEAD + text("w") + tensor + b"u."


def over_each_other(path: Path, times: int) -> Path:
    """A zip whose entries all lie at one place: each is another storage of 4 MiB, and a tensor of its own shape."""
    tensors = b""
    for number in range(times):
        storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(str(number)) + text("cpu")
        storage += b"J" + struct.pack("<i", MIB) + b"tQ"
        size = b"J" + struct.pack("<i", MIB - number) + b"\x85"
        tensors += (
            text(f"w{number}") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + size + b"K\x01\x85\x89NtR"
        )
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", HEAD + tensors + b"u.")
        file.writestr("archive/data/0", b"\0" * (4 * MIB))
        first = file.getinfo("archive/data/0")
        for number in range(1, times):
            again = copy.copy(first)
            again.filename = again.orig_filename = f"archive/data/{number}"
            file.filelist.append(again)
            file.NameToInfo[again.filename] = again
    return path


def grown(size: int) -> dict[str, Callable[[Path], Path]]:
    """Pickles of about so many kilobytes."""
    times, long = size * 1000, text("a" * size * 1000) + b"q\x01"
    pairs = b"](" + b"K\x01K\x01\x86" * (times // 5) + b"eq\x01"
    return {
        "sets": lambda p: zipped(p, in_model(b"](" + b"\x8f" * times + b"e")),
        "dicts": lambda p: zipped(p, in_model(b"](" + b"}" * times + b"e")),
        "lists in lists": lambda p: zipped(p, b"\x80\x02" + b"]" * times + b"."),
        "marks": lambda p: zipped(p, b"\x80\x02" + b"(" * times + b"."),
        "a text many times": lambda p: zipped(p, in_model(b"](" + long + b"h\x01" * times + b"e")),
        "a text encoded many times": lambda p: zipped(
            p,
            in_model(
                b"]("
                + long
                + b"c_codecs\nencode\nq\x02"
                + text("latin1")
                + b"q\x030"
                + b"h\x02h\x01h\x03\x86R" * times
                + b"e"
            ),
        ),
        "a dict made of one list many times": lambda p: zipped(
            p, in_model(b"](" + pairs + b"ccollections\nOrderedDict\nq\x02" + b"h\x02h\x01\x85R" * (times // 8) + b"e")
        ),
        "tensors of a few bytes": lambda p: zipped(
            p,
            in_model(
                b"](ctorch._utils\n_rebuild_tensor_v2\nq\x01(("
                + STORAGE
                + b"K\x02\x85K\x01\x85\x89Ntq\x02R"
                + b"h\x01h\x02R" * (times // 5)
                + b"e"
            ),
        ),
        "a long key that is used again": lambda p: zipped(
            p, in_model(b"}((" + b"K\x01" * times + b"tq\x01N" + b"h\x01N" * times + b"u")
        ),
    }


def files(size: int = 300) -> dict[str, Callable[[Path], Path]]:
    """What torch.save might have written, by name: about so many kilobytes or tensors. Each is refused."""
    many, flat = size, torch.zeros(MIB // 4)
    return {
        "expanded tensors": lambda p: saved(p, {f"w{k}": torch.zeros(1).expand(MIB) for k in range(many)}),
        "expanded state": lambda p: saved(
            p,
            {
                "model": {"w": torch.zeros(3)},
                "optimizer": {
                    "state": {0: {f"x{k}": torch.zeros(1).expand(MIB) for k in range(many)}},
                    "param_groups": [{"params": [0]}],
                },
            },
        ),
        "views over each other": lambda p: saved(p, {f"w{k}": flat[k:] for k in range(4 * many)}),
        "a zip of one entry many times": lambda p: over_each_other(p, many),
        "a shape of 2**124 elements and none": lambda p: zipped(p, empty((0, 1 << 62, 1 << 62))),
        "a shape of 2**100": lambda p: zipped(p, empty((0, 1 << 100))),
        "70 dims": lambda p: zipped(p, empty((1,) * 70)),
        "50,000 dims": lambda p: zipped(p, empty((1,) * 50_000)),
        "everything twice, 30 times": lambda p: zipped(p, in_model(b")" + b"2\x86" * 30)),
        "everything twice, 16 times, many times": lambda p: zipped(
            p, in_model(b"](" + b")" + b"2\x86" * 16 + b"q\x09" + b"h\x09" * many * 10 + b"e")
        ),
        "a long name of many tensors": lambda p: saved(
            p, {"w": torch.zeros(2), "k" * 60_000: dict(enumerate(torch.zeros(10 * many).unbind()))}
        ),
        "a name of two million letters": lambda p: saved(p, {"w": torch.zeros(2), "module." * 300_000: torch.ones(2)}),
        "keys of one hash": lambda p: saved(
            p, {"w": torch.zeros(2), "x": {k * ((1 << 61) - 1): 0 for k in range(100)}}
        ),
        "steps below nothing": lambda p: saved(
            p,
            {
                "model": {"w": torch.zeros(2)},
                "optimizer": {"state": {0: {"step": -5}}, "param_groups": [{"params": [0]}]},
            },
        ),
        "steps without end": lambda p: saved(
            p,
            {
                "model": {"w": torch.zeros(2)},
                "optimizer": {"state": {0: {"step": 1 << 90}}, "param_groups": [{"params": [0]}]},
            },
        ),
        "a name that clears the screen": lambda p: saved(p, {"model": {"w": torch.zeros(2), "a\x1b[2J\nb": {1, 2}}}),
        "eight empty gigabytes": sparse,
        "a pipe": lambda p: (os.mkfifo(p), p)[1],
        **grown(size),
    }


def sparse(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(8 << 30)
    return path


# DCP.


def dcp(path: Path, source: Path, change: Callable[[Any, Path], None]) -> Path:
    """A copy of a folder of DCP's whose .metadata says something else."""
    shutil.copytree(source, path)
    said = pickle.loads((path / ".metadata").read_bytes())
    change(said, path)
    (path / ".metadata").write_bytes(pickle.dumps(said))
    return path


def _weight(said: Any) -> tuple[str, Any]:
    return next((name, one) for name, one in said.state_dict_metadata.items() if name.endswith("0.weight"))


def _add(said: Any, name: str, one: Any, places: dict[tuple[int, ...], tuple[str, int, int]]) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    said.state_dict_metadata[name] = one
    said.planner_data[name] = ("app", "model", name)
    for number, (offsets, place) in enumerate(places.items()):
        at = (
            MetadataIndex(name, torch.Size(offsets), number)
            if one.__class__.__name__ != "BytesStorageMetadata"
            else None
        )
        said.storage_data[at or MetadataIndex(name)] = _StorageInfo(*place)


def _stored(folder: Path, name: str, *values: Any) -> list[tuple[str, int, int]]:
    """Pieces in a file, and where they lie."""
    places, whole = [], b""
    for value in values:
        made = io.BytesIO()
        torch.save(value, made)
        places.append((name, len(whole), len(made.getvalue())))
        whole += made.getvalue()
    (folder / name).write_bytes(whole)
    return places


def one_piece(times: int) -> Callable[[Any, Path], None]:
    def change(said: Any, folder: Path) -> None:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

        (big,) = _stored(folder, "big.distcp", torch.zeros(MIB))
        nothing = _stored(folder, "none.distcp", *[torch.zeros(0)] * times)
        chunks = [
            ChunkStorageMetadata(torch.Size([0]), torch.Size([MIB])),
            ChunkStorageMetadata(torch.Size([MIB]), torch.Size([0])),
        ]
        for number in range(times):
            one = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([MIB]), chunks)
            _add(said, f"x{number}", one, {(0,): big, (MIB,): nothing[number]})

    return change


def expanded_bytes(said: Any, folder: Path) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    values = [{f"w{k}": torch.zeros(1).expand(MIB) for k in range(30)} for _ in range(20)]
    for number, place in enumerate(_stored(folder, "b.distcp", *values)):
        _add(said, f"y{number}", BytesStorageMetadata(), {(): place})


def _size(*size: int) -> Callable[[Any, Path], None]:
    return lambda said, _: setattr(_weight(said)[1], "size", torch.Size(size))


def deep_paths(said: Any, _: Path) -> None:
    one = _weight(said)[1]
    for number in range(3000):
        said.state_dict_metadata[f"q{number}"] = one
        said.planner_data[f"q{number}"] = (str(number), *["x"] * 58)


def to_pipe(said: Any, folder: Path) -> None:
    os.mkfifo(folder / "pipe.distcp")
    for info in said.storage_data.values():
        info.relative_path = "pipe.distcp"


def hashes_forever(said: Any, _: Path) -> None:
    key: Any = ()
    for _ in range(16):
        key = (key, key)
    for name in said.planner_data:
        said.planner_data[name] = ("app", "model", *[key] * 50)


DCP: dict[str, Callable[[Any, Path], None]] = {
    "one piece 160 times": one_piece(160),
    "expanded tensors in bytes": expanded_bytes,
    "size (0, 2**62)": _size(0, 1 << 62),
    "size (0, 2**62, 2**62)": _size(0, 1 << 62, 1 << 62),
    "size (2**62, 2**62)": _size(1 << 62, 1 << 62),
    "deep paths": deep_paths,
    "paths that take forever to hash": hashes_forever,
    "a pipe": to_pipe,
    "a name that clears the screen": lambda said, _: said.state_dict_metadata.update({"a\x1b[2J": 3}),
}


# DeepSpeed.


def deepspeed(path: Path, source: Path, change: Callable[[Any, str], None]) -> Path:
    """A copy of a folder of DeepSpeed's whose files say something else; `change` gets a file's content and its name."""
    shutil.copytree(source, path)
    for file in sorted(path.glob("global_step*/*.pt")):
        said = torch.load(file, weights_only=False)
        change(said, file.name)
        torch.save(said, file)
    return path


def _base(said: Any) -> Any:
    inside = said["optimizer_state_dict"]
    return (inside.get("base_optimizer_state") or inside["optimizer_state_dict"])["state"][0]


def _one_partition(said: Any, names: list[str], flat: torch.Tensor) -> None:
    """Each of the names is said to be all of it."""
    inside = said["optimizer_state_dict"]
    address = type(next(iter(inside["param_slice_mappings"][0].values())))
    inside["single_partition_of_fp32_groups"] = [flat]
    inside["param_slice_mappings"] = [{one: address(numel=flat.numel(), start=0) for one in names}]


def fragments(said: Any, name: str) -> None:
    names = [f"p{k}" for k in range(500)]
    if "model" in name:
        said["param_shapes"] = [{one: torch.Size([MIB // 2]) for one in names}]
    else:
        _one_partition(said, names, torch.zeros(MIB // 4))


def moments(said: Any, name: str) -> None:
    flat = torch.zeros(MIB // 4)
    if "model" in name:
        said["param_shapes"], said["module"] = [{"p": torch.Size([MIB // 2])}], {"p": torch.zeros(2)}
    else:
        _one_partition(said, ["p"], flat)
        _base(said).update({f"m{k}": flat for k in range(500)} | {"exp_avg": flat, "exp_avg_sq": flat})


def halves(said: Any, name: str) -> None:
    if "model" in name:
        said["module"].update(dict.fromkeys([f"h{k}" for k in range(500)], torch.zeros(MIB).bfloat16()))


def frozen(said: Any, name: str) -> None:
    if "model" in name:
        names = [f"f{k}" for k in range(300)]
        said["frozen_param_shapes"] = dict.fromkeys(names, torch.Size([MIB]))
        said["frozen_param_fragments"] = dict.fromkeys(names, torch.zeros(MIB))
        said["module"].update(dict.fromkeys(names, torch.zeros(1)))


def expanded_partitions(said: Any, name: str) -> None:
    if "model" in name:
        said["param_shapes"] = [{"p": torch.Size([MIB])}] * 500
    else:
        said["optimizer_state_dict"]["fp32_flat_groups"] = [torch.zeros(1).expand(MIB)] * 500


def entries(said: Any, name: str) -> None:
    """20,000 entries for each of 20,000 parameters."""
    none = torch.zeros(0)
    if "model" in name:
        said["param_shapes"] = [{f"p{k}": torch.Size([0]) for k in range(20_000)}]
    else:
        said["optimizer_state_dict"]["fp32_flat_groups"] = [none]
        _base(said).update({f"r{k}": 1 for k in range(20_000)} | {"exp_avg": none, "exp_avg_sq": none})


def shape(*size: Any) -> Callable[[Any, str], None]:
    return lambda said, name: said["param_shapes"][0].update({"0.weight": size}) if "model" in name else None


_SHAPES = [(-1,), (0, 1 << 62), (1 << 62, 1 << 62), (1 << 62,), (1.5,), ("x",)]
DEEPSPEED: dict[str, tuple[int, Callable[[Any, str], None]]] = {
    "fragments over each other": (2, fragments),
    "a partition as 500 moments": (2, moments),
    "one half as 500": (2, halves),
    "one frozen as 300": (2, frozen),
    "expanded partitions": (3, expanded_partitions),
    "20,000 times 20,000 entries": (3, entries),
    **{f"shape {size} in stage {stage}": (stage, shape(*size)) for stage in (2, 3) for size in _SHAPES},
}
QUICK = {  # what is tried every time; the rest is long
    "torch.save": (
        *("expanded tensors", "views over each other", "a zip of one entry many times", "a text many times"),
        *("a shape of 2**124 elements and none", "a shape of 2**100", "everything twice, 16 times, many times"),
        *("a text encoded many times", "a name that clears the screen", "eight empty gigabytes", "a pipe"),
        *("keys of one hash", "steps without end"),
    ),
    "dcp": ("one piece 160 times", "expanded tensors in bytes", "size (0, 2**62, 2**62)", "a pipe"),
    "deepspeed": ("fragments over each other", "a partition as 500 moments", "shape (-1,) in stage 2"),
}
