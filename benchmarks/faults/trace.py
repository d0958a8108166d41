"""C9: the system calls of a commit by two ranks, as strace sees them: files, draft, rename, folder, then prune."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import distributedtorch as dt
from benchmarks.faults import states
from distributedtorch.checkpoint import place, writing
from distributedtorch.checkpoint.place import Local

CALLS = "openat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat"
SABOTAGES = ("no fsync", "rename before fsync", "prune before commit")
_SAVES = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--inside", nargs=2, metavar=("PATH", "SABOTAGE"), help=argparse.SUPPRESS)


class Call(NamedTuple):
    """A system call, with the lines of the trace at which it began and ended."""

    process: str
    name: str
    what: str
    began: int
    ended: int


def inside(path: str, sabotage: str) -> None:
    """What is traced: two ranks save three times and keep two."""
    if sabotage == "no fsync":
        os.fsync = lambda _: None  # type: ignore[assignment]
    if sabotage == "rename before fsync":
        Local.commit = lambda self, draft, name: (  # type: ignore[method-assign]
            os.rename(self.root / draft, self.root / name),
            place._flush(self.root / name),
            place._flush(self.root),
        )[0]
    if sabotage == "prune before commit":
        begin, prune = Local.begin, writing._prune
        Local.begin = lambda self, *args: (prune(self, 1), begin(self, *args))[1]  # type: ignore[method-assign]
    states.warm()
    dt.launch(_rank, path, workers=2)


def _rank(path: str) -> None:
    training = states.Training("zero1", 500)
    for _ in range(_SAVES):
        training.step()
        dt.save(path, state=training.state)


def traced(folder: Path, sabotage: str) -> list[Call]:
    """The calls of the last save on what is in its folder, in words without paths."""
    out, root = folder / "strace", folder / f"c-{sabotage.replace(' ', '-')}"
    script = str(Path(__file__).parents[1] / "checkpoint_faults.py")
    command = [
        "strace",
        "-f",
        "-y",
        "-qq",
        "--seccomp-bpf",
        "-e",
        f"trace={CALLS}",
        "-e",
        "signal=none",
        "-o",
        str(out),
    ]
    command += [sys.executable, script, "trace", "--inside", str(root), sabotage]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=180)
    calls = parsed(out.read_text().splitlines(), str(root))
    drafts = [number for number, call in enumerate(calls) if call.name == "mkdir" and call.what.startswith("draft")]
    first = drafts[-1]
    if sabotage == "prune before commit":  # what it does before its draft belongs to it
        first = max(n for n, c in enumerate(calls[: drafts[-1]]) if c.name == "rename") + 2
    return calls[first:]


def parsed(lines: list[str], root: str) -> list[Call]:
    calls: list[Call] = []
    waiting: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(lines):
        process, text = line.split(maxsplit=1)
        began = number
        if text.endswith("<unfinished ...>"):
            waiting[process] = text.removesuffix("<unfinished ...>"), number
            continue
        if text.startswith("<..."):
            head, began = waiting.pop(process, ("", number))
            text = head + re.sub(r"<\.\.\. \w+ resumed>", "", text)
        found = re.match(r"(\w+)\((.*)\)\s+= (-?\d+)", text)
        if found and int(found[3]) >= 0 and root in found[2]:
            name = {"unlinkat": "unlink", "mkdirat": "mkdir", "openat": "open"}.get(found[1], found[1])
            what = _words(name, found[2], root)
            name = "rmdir" if name == "unlink" and "AT_REMOVEDIR" in found[2] else name
            calls.append(Call(process, name, what, began, number))
    names = {process: f"process {k}" for k, process in enumerate(dict.fromkeys(call.process for call in calls))}
    ordered = sorted(calls, key=lambda call: call.began)
    return [call._replace(process=names[call.process]) for call in ordered if call.what != ".lock"]


def _words(name: str, args: str, root: str) -> str:
    """The files a call is about: `draft/model-00000.safetensors`, `old/checkpoint.json`, `folder`."""
    handle = re.match(rf"\d+<{re.escape(root)}/?([^>]*)>", args)
    folder = re.search(rf"^\d+<{re.escape(root)}/?([^>]*)>, \"([^/\"]+)\"", args)
    if name in ("write", "pwrite64", "fsync", "fdatasync"):
        found = [handle[1]] if handle else [".lock"]  # else it only speaks of the folder
    elif folder:
        found = [f"{folder[1]}/{folder[2]}".strip("/")]
    else:
        found = re.findall(rf"{re.escape(root)}/?([^>\",]*)[>\"]", args)[: 2 if '", "' in args else 1]
    said = [re.sub(r"\.draft-[0-9a-f]+", "draft", one) or "folder" for one in found]
    return " -> ".join(said)


def faults(calls: list[Call]) -> list[str]:
    """What is out of order in one save."""
    wrong: list[str] = []

    def times(name: str, what: str) -> list[Call]:
        return [call for call in calls if call.name == name and what in (call.what, "*")]

    def before(said: str, one: list[Call], other: list[Call]) -> None:
        if not one or not other or max(call.ended for call in one) > min(call.began for call in other):
            wrong.append(said)

    files = sorted({call.what for call in calls if call.name == "write" and call.what.startswith("draft/")})
    rename = times("rename", "*")
    for file in files:
        before(f"write, then fsync: {file}", times("write", file), times("fsync", file))
        before(f"fsync of {file}, then of the draft", times("fsync", file), times("fsync", "draft"))
    data = [call for file in files if "checkpoint" not in file for call in times("fsync", file)]
    before("every file, then checkpoint.json", data, times("write", "draft/checkpoint.json"))
    before("fsync of the draft, then rename", times("fsync", "draft"), rename)
    before("rename, then fsync of the folder", rename, times("fsync", "folder"))
    gone = [call for call in calls if call.name in ("unlink", "rmdir")]
    before("fsync of the folder, then prune", times("fsync", "folder"), gone)
    index = [call for call in gone if call.what.endswith("checkpoint.json")]
    before("checkpoint.json of the old one first", index, [call for call in gone if call not in index])
    return wrong + ([] if len(files) == 5 else [f"files {files}"])


def run(given: argparse.Namespace, folder: Path, _: dict[str, Any]) -> dict[str, Any]:
    if given.inside:
        inside(*given.inside)
        sys.exit(0)
    calls = traced(folder, "none")
    wrong = faults(calls)
    twins = {sabotage: [int(bool(faults(traced(folder, sabotage)))), 1] for sabotage in SABOTAGES}
    lines = [f"{call.process}: {call.name} {call.what}" for call in calls if call.name != "open"]
    return {
        "trials": 1,
        "failed": len(wrong),
        "trace": lines,
        "wrong": wrong,
        "sabotaged": twins,
        "said": f"{len(calls)} calls in order",
    }
