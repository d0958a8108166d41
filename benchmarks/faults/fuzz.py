"""C5 and X9: hostile checkpoint.json and tensor headers, with right hashes too, and pickles in every file's place.

Each is given to `dt.load` in one process: refused by a CheckpointError, or loaded where what was changed says nothing
wrong. Nothing else may be raised, no code run, no load take 5 s or twice the memory of a good one.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import pickle
import random
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributedtorch as dt
from benchmarks.faults import states
from benchmarks.faults.states import Memory
from distributedtorch.checkpoint import index, place
from distributedtorch.checkpoint.blocks import BLOCK, DTYPES
from distributedtorch.launch import record
from tests.checkpoint import job

ENDS = ("refused", "refused late", "loaded")
_CHUNK, _SECONDS, _MIB = 250, 5, 1 << 20
_MORE_ADDRESSES = 512 * _MIB
Files = dict[str, bytearray]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)


# What is made of a good checkpoint.


def rehashed(rest: bytes) -> bytearray:
    """A checkpoint.json whose own hash is right, whatever is in it."""
    return bytearray(b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + rest)


def forged(content: Any) -> bytearray:
    return rehashed(b'", "checkpoint": ' + json.dumps(content).encode() + b"}\n")


def content_of(files: Files) -> dict[str, Any]:
    return json.loads(files["checkpoint.json"])["checkpoint"]


def hostile(draw: random.Random, old: Any) -> Any:
    deep: Any = 1
    for _ in range(draw.choice((10, 150, 600))):
        deep = draw.choice(([deep], {"$tuple": [deep]}))
    same = [old, [old], {"x": old}, [old, old]]
    if isinstance(old, int) and abs(old) < 1 << 64:
        same += [old + 1, -old, float(old), bool(old), str(old), old << 60]
    numbers = [0, -1, 1, 1.5, 1 << 31, 1 << 63, 1 << 64, 10**400, 1e308, float("nan"), float("inf"), True]
    texts = [
        "",
        "x",
        "../../../etc/passwd",
        "/etc/passwd",
        "\ud800",
        "a" * 5000,
        "1" * 5000,
        "F32",
        "model-00000.safetensors",
    ]
    nests = [[], {}, [[]], None, deep, {"$tensor": "nowhere"}, {"$tensor": []}, {"$tuple": 5}, {"$float": "x"}]
    nests += [{"$dict": [[[], 1]]}, {"$dict": 5}, {"$dict": [[1]]}, {"$counter": [["a", "b"]]}, {"$tuple": {"a": 1}}]
    return draw.choice(draw.choice((same, numbers, texts, nests)))


def mutated(draw: random.Random, root: Any) -> Any:
    """One node of a nested value replaced, removed, doubled, renamed or swapped with another."""
    nodes: list[tuple[Any, Any]] = []
    todo = [root]
    while todo:
        one = todo.pop()
        inside = list(one.items()) if isinstance(one, dict) else list(enumerate(one))
        nodes += [(one, key) for key, _ in inside]
        todo += [item for _, item in inside if isinstance(item, dict | list)]
    if not nodes:
        return root
    depth_first = draw.random() < 0.5  # large tables would otherwise take all the hits
    holder, key = draw.choice(nodes[: 60 if depth_first else None])
    deed = draw.random()
    if deed < 0.6:
        holder[key] = hostile(draw, holder[key])
    elif deed < 0.75:
        del holder[key]
    elif deed < 0.85 and isinstance(holder, dict):
        holder[draw.choice(("x", "", "$tensor", "../x.safetensors", "__metadata__"))] = holder.pop(key)
    elif deed < 0.85:
        holder.insert(draw.randrange(len(holder) + 1), holder[key])
    else:
        other, place_there = draw.choice(nodes)
        if place_there in (other if isinstance(other, dict) else range(len(other))):
            holder[key] = json.loads(json.dumps(other[place_there]))
    return root


def garbled(draw: random.Random, text: bytes) -> bytes:
    """Text with a few places flipped, cut out, doubled, moved, or exchanged for what parsers stumble over."""
    made = bytearray(text)
    tokens = (
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"9" * 5000,
        b"[" * 100_000,
        b'{"a":' * 5000,
        b"\xff\xfe",
        b"\0",
        b"\\ud800",
    )
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(made) + 1)
        far = min(len(made), at + draw.randint(1, 200))
        deed = draw.randrange(6)
        if deed == 0 and at < len(made):
            made[at] ^= 1 << draw.randrange(8)
        elif deed == 1:
            del made[at:far]
        elif deed == 2:
            made[at:at] = made[at:far]
        elif deed == 3:
            piece = made[at:far]
            del made[at:far]
            made[draw.randrange(len(made) + 1) :][:0] = piece
        elif deed == 4:
            made[at:far] = draw.choice(tokens)
        else:
            del made[at:]
    return bytes(made)


def doubled_keys(draw: random.Random, text: str) -> str:
    """A key given twice, the second time for something else."""
    commas = [at for at, sign in enumerate(text) if sign == ","]
    at = draw.choice(commas)
    key = draw.choice(("files", "tensors", "format", "run", "step", "bytes", "blocks", "shape", "parts", "dtype"))
    return text[:at] + f', "{key}": {json.dumps(hostile(draw, 1))}' + text[at:]


def index_without_hash(draw: random.Random, files: Files) -> None:
    files["checkpoint.json"] = bytearray(garbled(draw, bytes(files["checkpoint.json"])))


def index_with_hash(draw: random.Random, files: Files) -> None:
    content = content_of(files)
    for _ in range(draw.randint(1, 3)):
        part = draw.choice(("files", "tensors", "run", "")) if isinstance(content, dict) else ""
        mutated(draw, content[part] if isinstance(content.get(part), dict | list) else content)
    files["checkpoint.json"] = forged(content)


def index_text_with_hash(draw: random.Random, files: Files) -> None:
    rest = bytes(files["checkpoint.json"])[76:]
    made = doubled_keys(draw, rest.decode()).encode() if draw.random() < 0.4 else garbled(draw, rest)
    files["checkpoint.json"] = rehashed(made)


def with_hashes(files: Files) -> None:
    """Make checkpoint.json say of every file what is in it now."""
    content = content_of(files)
    for name in content["files"]:
        whole = files[name]
        hashes = [hashlib.sha256(whole[at : at + BLOCK]).hexdigest() for at in range(0, len(whole), BLOCK)]
        content["files"][name] = {"bytes": len(whole), "blocks": hashes}
    files["checkpoint.json"] = forged(content)


def header(draw: random.Random, files: Files) -> None:
    """A tensor file's header, with hashes that are right."""
    name = draw.choice([name for name in files if name != "checkpoint.json"])
    length = int.from_bytes(files[name][:8], "little")
    text, data = bytes(files[name][8 : 8 + length]), files[name][8 + length :]
    deed = draw.randrange(3)
    if deed == 0:
        said = json.loads(text)
        for _ in range(draw.randint(1, 3)):
            mutated(draw, said)
        text = json.dumps(said).encode()
    elif deed == 1:
        text = garbled(draw, text)
    sizes = [len(text), len(text) + 1, 0, 1 << 63, (1 << 64) - 1, len(text) + len(data), 100_000_001]
    size = len(text) if deed < 2 else draw.choice(sizes)
    files[name] = bytearray(size.to_bytes(8, "little") + text + data)
    with_hashes(files)


def bomb(draw: random.Random, files: Files) -> None:
    """A tensor said to be many times what is stored: its one stored part again and again."""
    content = content_of(files)
    key = draw.choice([key for key in content["tensors"] if key.startswith("random/") or "user" in key])
    entry = content["tensors"][key]
    (file, name, _, size), times = entry["parts"][0], draw.choice((50, 500, 5000))
    entry["parts"] = [[file, name, k * size, (k + 1) * size] for k in range(times)]
    entry["shape"] = [size * times]
    files["checkpoint.json"] = forged(content)


def dtype(draw: random.Random, files: Files) -> None:
    """Every type and shape that a tensor can be said to have."""
    content = content_of(files)
    entry = content["tensors"][draw.choice(list(content["tensors"]))]
    entry["dtype"] = draw.choice(list(DTYPES))
    entry["shape"] = draw.choice(([1, *entry["shape"]], [0, 1 << 62], [1 << 32, 1 << 32, 0], entry["shape"], [1] * 70))
    if draw.random() < 0.5:
        entry["stride"] = [draw.choice((0, 1, 1.0, -1, True, "1", 1 << 63, None)) for _ in entry["shape"]]
    files["checkpoint.json"] = forged(content)


KINDS: dict[str, tuple[Callable[[random.Random, Files], None], int]] = {
    "index, hash wrong": (index_without_hash, 15),
    "index, hash right": (index_with_hash, 45),
    "index text, hash right": (index_text_with_hash, 14),
    "header, hashes right": (header, 20),
    "types and shapes": (dtype, 5),
    "more than is stored": (bomb, 1),
}


class Payload:
    """Runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def poisoned(files: Files, payload: bytes) -> list[Files]:
    """The payload in the place of every file, of a header, of the data, of an added file, with right hashes or not."""
    made = []
    for name in files:
        copy = {**files, name: bytearray(payload)}
        made.append(copy)
        if name == "checkpoint.json":
            made.append({**files, name: rehashed(payload)})
            continue
        made.append(dict(copy))
        with_hashes(made[-1])
        length = int.from_bytes(files[name][:8], "little")
        inside = [bytearray(files[name]), bytearray(files[name])]
        inside[0][8 : 8 + len(payload)] = payload
        inside[1][8 + length : 8 + length + len(payload)] = payload
        for content in inside:
            made.append({**files, name: content})
            with_hashes(made[-1])
    for extra in ("model-00009.safetensors", "model.pt", "optimizer.bin", ".metadata", "rng.pkl"):
        made.append({**files, extra: bytearray(payload)})
    return made


# What a load does with it.


class Load:
    """`dt.load` of files in memory, in this process, with its time and memory."""

    def __init__(self, good: Files) -> None:
        self.good, self.libc = good, ctypes.CDLL(None)
        record.say = lambda _: None
        self.training = job.Training("ddp", width=4096)
        signal.signal(signal.SIGALRM, self._late)
        self.most = 0

    def _late(self, *_: object) -> None:
        raise TimeoutError(f"{_SECONDS} s")

    def __call__(self, files: Files) -> str:
        """How it ended: "refused", "refused late" (when something was changed), "loaded", or what nobody should see."""
        place.of = lambda _: Memory({"000001-step-1": files})  # type: ignore[assignment,return-value]
        self.libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        signal.alarm(_SECONDS)
        try:
            dt.load("anywhere")
            end = "loaded"
        except dt.CheckpointError as error:
            self.most = _status("VmHWM") - before
            end = "refused late" if "cannot be taken over" in str(error) else "refused"
        except BaseException as error:
            self.most = _status("VmHWM") - before
            frame = [one for one in traceback.extract_tb(error.__traceback__) if "distributedtorch" in one.filename][-1]
            end = f"{type(error).__name__} in {Path(frame.filename).name} {frame.name}: {str(error)[:100]}"
        else:
            self.most = _status("VmHWM") - before
        finally:
            signal.alarm(0)
        return end


def _status(word: str) -> int:
    """Bytes of this process's memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word))
    return int(line.split()[1]) * 1024


def trial(number: int, seed: int, good: Files) -> tuple[str, Files]:
    draw, files = random.Random(f"{seed}/{number}"), dict(good)
    kind = draw.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # for what is made here; loaded under the usual one
    KINDS[kind][0](draw, files)
    sys.setrecursionlimit(limit)
    return kind, files


def chunk(load: Load, numbers: range, seed: int, only: str) -> dict[str, Any]:
    """Some trials in a child with little room for more memory: what they came to."""
    ear, mouth = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(_chunk(load, numbers, seed, only, mouth))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(4)
    os.close(mouth)
    with open(ear) as pipe:
        rows = [json.loads(line) for line in pipe]
    return {"rows": rows, "code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}


def _chunk(load: Load, numbers: range, seed: int, only: str, mouth: int) -> int:
    room = _status("VmSize") + _MORE_ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    load(load.good)  # a new process's first load touches pages that all later ones have
    for number in numbers:
        kind, files = trial(number, seed, load.good)
        if only not in kind:
            continue
        end = load(files)
        os.write(mouth, (json.dumps([number, kind, end, load.most]) + "\n").encode())
        if end != "refused" and load(load.good) != "loaded":
            return 3  # this process can load no more: the next one goes on
    return 0


def many(load: Load, trials: int, seed: int, only: str = "") -> list[tuple[int, str, str, int]]:
    rows: list[tuple[int, str, str, int]] = []
    number = 0
    while number < trials:
        done = chunk(load, range(number, min(trials, number + _CHUNK)), seed, only)
        rows += done["rows"]
        if done["code"] == 0:
            number += _CHUNK
            continue
        number = max([number, *(row[0] + 1 for row in done["rows"])])
        if done["code"] != 3:
            rows.append((number, "?", f"the process died with code {done['code']}", 0))
            number += 1
    return rows


def run(given: argparse.Namespace, folder: Path, _: dict[str, Any]) -> dict[str, Any]:
    training = job.Training("ddp", width=4096)
    training.epoch()
    dt.save(folder / "c")
    ((_, good),) = states.held(folder / "c").folders.items()
    from distributedtorch.distribute import release

    release()
    load = Load(good)
    normal = max((load(dict(good)), load.most)[1] for _ in range(5))
    rows = many(load, given.trials, given.seed)
    marker = folder / "it ran"
    payload = pickle.dumps(Payload(marker))
    poison = poisoned(good, payload)
    ends = [(load(files), load.most) for files in poison]
    ran = int(marker.exists())
    pickle.loads(payload)
    alive = int(marker.exists())
    crashes = [(number, kind, end) for number, kind, end, _ in rows if end not in ENDS]
    crashes += [(-1, "pickle", end) for end, _ in ends if end not in ENDS]
    fat = [(number, kind, most) for number, kind, _, most in rows if most > 2 * normal]
    wrong = [f"{kind} {number}: {end}" for number, kind, end in crashes]
    wrong += [f"{kind} {number}: {most:,} bytes, a good load takes {normal:,}" for number, kind, most in fat]
    honest = index._entry, index._once
    index._entry = _unchecked  # type: ignore[assignment]
    twin = many(load, 500, given.seed)
    index._entry, index._once = honest[0], lambda _: None
    bombs = many(load, 1000, given.seed, "more than is stored")
    index._once = honest[1]
    late = sum(end != "refused" for *_, end, _ in twin) - sum(end != "refused" for *_, end, _ in rows[: len(twin)])
    unfolded = sum(most > 2 * normal for *_, most in bombs)
    return {
        "trials": len(rows) + len(poison),
        "failed": len(wrong) + ran,
        "crashes": len(crashes),
        "code runs": ran,
        "refused when something was changed": sum(end == "refused late" for _, _, end, _ in rows),
        "over twice the memory": len(fat),
        "peak bytes": {"good load": normal, "largest": max(most for *_, most in rows)},
        "kinds": dict(Counter(f"{kind}: {end}" for _, kind, end, _ in rows if end in ENDS)),
        "pickles": {"places": len(poison), **Counter(end for end, _ in ends)},
        "wrong": sorted(wrong, key=lambda one: one.split(":", 1)[1])[:40],
        "different": dict(Counter(end for _, _, end in crashes)),
        "sabotaged": {
            "entries not checked": [late, len(twin)],
            "parts used twice": [unfolded, len(bombs)],
            "payload unpickled": [alive, 1],
        },
        "said": f"{len(crashes)} crashes, {ran} code runs, {len(fat)} over twice a good load's memory",
    }


def _unchecked(_: str, said: dict[str, Any], files: Any) -> index.Entry:
    """Sabotage: what checkpoint.json says of tensors is believed."""
    parts = tuple(index.Part(file=file, name=name, start=a, stop=b) for file, name, a, b in said["parts"])
    stride = tuple(said["stride"]) if "stride" in said else None
    return index.Entry(shape=tuple(said["shape"]), dtype=DTYPES[said["dtype"]], stride=stride, parts=parts)
