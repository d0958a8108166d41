"""One checkpoint as a picture in plain text: what it holds, and which rank's file has which part of every tensor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distributedtorch.checkpoint import index
from distributedtorch.checkpoint.aligned import clip, count, say, size, table, when
from distributedtorch.checkpoint.blocks import damaged
from distributedtorch.checkpoint.index import _WRONG, Entry, Index, named
from distributedtorch.checkpoint.place import INDEX, Place
from distributedtorch.checkpoint.plain import unpack

_ROWS, _PARTS, _WIDE, _OPTIONS = 10, 2, 44, 200
_COLUMNS = 16
_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"


def show(there: Place, committed: Sequence[str], name: str, *, whole: bool) -> None:
    """Print what a checkpoint holds. Only checkpoint.json is read.

    Args:
        there: Where it lies.
        committed: All that lie there.
        name: Which one.
        whole: Shorten nothing.

    Raises:
        CheckpointError: checkpoint.json cannot be read, or is of a later version.
    """
    read = index.read(there, name)
    try:
        lines = [_title(there, committed, name), *_head(there, name, read), *_Picture(read, whole=whole).lines()]
    except _WRONG as error:
        given = f"{there.file(name, INDEX)} is not what dt.save writes ({type(error).__name__}: {error})"
        raise damaged(given) from None
    say(*lines)


def _title(there: Place, committed: Sequence[str], name: str) -> str:
    return f"{name}, {'the newest' if name == committed[0] else 'one'} of {len(committed)} in {there.said}"


def _head(there: Place, name: str, read: Index) -> list[str]:
    said = read.content
    files = there.files(name)
    rows = {
        "step": str(said["step"]),
        "plan": str(said["plan"]),
        "world": count(int(said["world"]), "rank"),
        "size": f"{size(sum(files.values()))} in {count(len(files), 'file')}, {count(len(read.tensors), 'tensor')}",
        "written": when(there.written(name)),
        "format": str(said["format"]),
        "versions": ", ".join(f"{what} {number}" for what, number in said["versions"].items()) or "not said",
    }
    return table([*rows.items()], indent="  ")


class _Picture:
    """What checkpoint.json says beneath its head."""

    def __init__(self, read: Index, *, whole: bool) -> None:
        self.read, self.whole = read, whole
        self.run: dict[str, Any] = read.content["run"]
        self.names: Any = dict.fromkeys(read.tensors, "a tensor")
        self.groups: dict[str, dict[str, Entry]] = {}
        """Tensors by what they belong to (`model.0`), then by name in it."""
        for key, entry in read.tensors.items():
            owner, _, name = key.partition("/")
            self.groups.setdefault(owner, {})[name or key] = entry

    def lines(self) -> list[str]:
        """All of it."""
        lines: list[str] = []
        parts = (self._models(), self._optimizers(), self._schedulers(), self._loaders(), self._user(), self._rest())
        for part in (*parts, *(self._tensors(owner) for owner in self.groups)):
            lines += ["", *part] if part else []
        return lines

    def _models(self) -> list[str]:
        rows = []
        for number, model in enumerate(self.run.get("models", [])):
            mine = self.groups.get(f"model.{number}", {})
            numel = sum(entry.numel for entry in mine.values())
            rows.append(
                [
                    f"model.{number}",
                    str(model["kind"]),
                    f"{numel:,} values in {count(len(mine), 'tensor')} (parameters and buffers)",
                    f"{self._trained(number):,} with an optimizer",
                    _bytes(mine.values()),
                ]
            )
        return _titled("models", table(rows, indent="  "))

    def _trained(self, number: int) -> int:
        """How many values of a model are in a group of an optimizer."""
        groups = [group for one in self.run.get("optimizers", []) for group in one.get("groups", [])]
        keys = {key for group in groups for key in group["params"] if key.startswith(f"model.{number}/")}
        return sum(self.read.tensors[key].numel for key in keys)

    def _optimizers(self) -> list[str]:
        lines = []
        for number, one in enumerate(self.run.get("optimizers", [])):
            mine = self.groups.get(f"optimizer.{number}", {})
            lines.append(
                f"  optimizer.{number}  {one['kind']}  {count(len(mine), 'tensor')} of state, {_bytes(mine.values())}"
            )
            if "whole" in one:
                lines.append("    kept as its own state_dict() gives it")
            for place, group in enumerate(one.get("groups", [])):
                options = self._plain(group["options"])
                lines.append(f"    group {place}: {count(len(group['params']), 'parameter')}; {options}")
            keys = dict.fromkeys(name for values in one["state"].values() for name in values)
            lines.append(f"    state of {count(len(one['state']), 'parameter')}: {', '.join(keys) or 'none yet'}")
        return _titled("optimizers", lines)

    def _schedulers(self) -> list[str]:
        rows = [
            [f"scheduler.{number}", str(one["kind"]), self._plain(one["state"])]
            for number, one in enumerate(self.run.get("schedulers", []))
        ]
        return _titled("schedulers", table(rows, indent="  "))

    def _loaders(self) -> list[str]:
        rows = []
        for number, one in enumerate(self.run.get("loaders", [])):
            cursor = one["cursor"]
            inside = "at its end" if cursor["ended"] else f"after batch {cursor['batch']}"
            rows.append([f"loader.{number}", f"epoch {cursor['epoch']}, {inside}"])
        return _titled("loaders", table(rows, indent="  "))

    def _user(self) -> list[str]:
        rows = []
        for name in self.run.get("user", {}):
            mine = [self.read.tensors[key] for key in dict.fromkeys(named(self.run["user"][name]))]
            rows.append([str(name), f"{count(len(mine), 'tensor')}, {_bytes(mine)}"])
        return _titled("user state", table(rows, indent="  "))

    def _rest(self) -> list[str]:
        scale, ranks = self.run.get("loss scale"), len(self.groups.get("random", {}))
        lines = [] if scale is None else [f"loss scale {scale['value']:g}"]
        return lines + ([f"random numbers of {count(ranks, 'rank')}"] if ranks else [])

    def _plain(self, value: Any) -> str:
        """What a packed state says, in a line; what is None or False is left out."""
        state = unpack(value, self.names)
        text = ", ".join(f"{key} {item}" for key, item in state.items() if item is not None and item is not False)
        return text if self.whole else clip(text, _OPTIONS)

    def _tensors(self, owner: str) -> list[str]:
        if owner == "random" and not self.whole:
            return []
        mine = self.groups[owner]
        shown = len(mine) if self.whole else _ROWS
        rows = [["name", "shape", "type", "bytes", "whose file", "files and elements"]]
        rows += [self._tensor(name, entry) for name, entry in list(mine.items())[:shown]]
        lines = table(rows, right=(3,), indent="  ")
        left = list(mine.values())[shown:]
        if left:
            lines.append(f"  and {count(len(left), 'tensor')} more, {_bytes(left)}: --all shows them")
        return [f"tensors of {owner}", *lines, *self._tied(owner)]

    def _tensor(self, name: str, entry: Entry) -> list[str]:
        shape = " x ".join(map(str, entry.shape)) or "one value"
        dtype = str(entry.dtype).removeprefix("torch.")
        name = name if self.whole else clip(name, _WIDE)
        return [name, shape, dtype, _bytes([entry]), bar(entry), self._parts(entry)]

    def _parts(self, entry: Entry) -> str:
        files = [part.file.removesuffix(".safetensors") for part in entry.parts]
        if len(files) == 1:
            return files[0]
        shown = len(files) if self.whole else _PARTS
        said = [f"{file} {part.start}:{part.stop}" for file, part in zip(files, entry.parts, strict=True)]
        more = len(said) - shown
        return ", ".join(said[:shown]) + (f" and {more} more" if more > 0 else "")

    def _tied(self, owner: str) -> list[str]:
        """Names in a model that stand for a tensor stored under another."""
        models = {f"model.{number}": one["state"] for number, one in enumerate(self.run.get("models", []))}
        keys: Mapping[str, Any] = {name: _tensor_of(value) for name, value in models.get(owner, {}).items()}
        return [
            f"  {name} is {key.removeprefix(f'{owner}/')}"
            for name, key in keys.items()
            if key is not None and key != f"{owner}/{name}"
        ]


def bar(entry: Entry) -> str:
    """A tensor's elements from the first to the last, each column the rank whose file holds it: `[0000111122223333]`.

    After rank z (35) the marks begin again.
    """
    if not entry.numel:
        return "[" + " " * _COLUMNS + "]"
    stops = [part.stop for part in entry.parts]
    middles = [(2 * column + 1) * entry.numel // (2 * _COLUMNS) for column in range(_COLUMNS)]
    files = [entry.parts[bisect_right(stops, element)].file for element in middles]
    return "[" + "".join(_MARKS[_rank(file) % len(_MARKS)] for file in files) + "]"


def _rank(file: str) -> int:
    """Who wrote a file: `state-00002.safetensors` is rank 2's."""
    return int(file.partition("-")[2].partition(".")[0])


def _bytes(entries: Iterable[Entry]) -> str:
    return size(sum(entry.numel * entry.dtype.itemsize for entry in entries))


def _tensor_of(value: Any) -> str | None:
    return str(value["$tensor"]) if isinstance(value, dict) and "$tensor" in value else None


def _titled(title: str, lines: list[str]) -> list[str]:
    return [title, *lines] if lines else []
