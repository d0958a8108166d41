"""Writing a checkpoint together: every rank its own parts, then one of them the index and the commit.

The ranks speak through a few short keys in the store, so that it can be done behind training, in a thread of each rank:
the leader opens a draft and names it, every rank writes its files and says their hashes, the leader writes
checkpoint.json, commits, removes what is older than to be kept, and says how it ended. A rank that fails says so: the
draft is dropped, and all ranks hear the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from distributedtorch.checkpoint import blocks, index
from distributedtorch.checkpoint.channel import Channel
from distributedtorch.checkpoint.place import INDEX, Place
from distributedtorch.core.errors import CheckpointError, explain


@dataclass(kw_only=True)
class Piece:
    """A range of a tensor that one rank writes."""

    key: str
    file: str
    """Which kind of file it goes into: "model" or "state"."""
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    """Where the range is counted in another order than row-major."""
    low: int
    high: int
    tensor: Tensor
    """Its values: flat, or the whole tensor in its shape."""
    steady: bool = False
    """Whether nothing changes it but an optimizer's step: it may be copied until then."""

    @property
    def whole(self) -> bool:
        return tuple(self.tensor.shape) == self.shape and self.stride is None

    @property
    def name(self) -> str:
        return self.key if self.whole else f"{self.key}@{self.low}:{self.high}"


@dataclass(kw_only=True)
class Content:
    """What one rank writes."""

    pieces: list[Piece] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    """Nested state. The leader's counts, but for the optimizers' state, which every rank adds to."""
    head: dict[str, Any] = field(default_factory=dict)
    """Step, plan, versions."""

    @property
    def bytes(self) -> int:
        return sum(piece.tensor.numel() * piece.tensor.element_size() for piece in self.pieces)


def carry_out(place: Place, content: Content | str, channel: Channel, *, keep: int, private: bool) -> str:
    """Write a checkpoint with all ranks of the channel. The result is its name, the same on all of them.

    `content` is what this rank writes, or in words why it cannot.

    Raises:
        CheckpointError: It could not be written, on whichever rank; what was there before is as it was.
    """
    ranks = len(channel.ranks)
    if channel.leads:
        channel.say("draft", _attempt(place, content, lambda mine: _open(place, mine, ranks)))
    opened = channel.hear("draft", channel.leader)
    if "fault" in opened:
        raise CheckpointError(opened["fault"])
    draft, name = opened["draft"], opened["name"]
    card = _attempt(place, content, lambda mine: _write(place, draft, channel.rank, mine, private=private))
    channel.say(f"card/{channel.rank}", card)
    if channel.leads:
        cards = [_card(channel, rank) for rank in channel.ranks]
        faults = [card["fault"] for card in cards if "fault" in card]
        verdict = {"fault": faults[0]} if faults else {}
        commit = partial(_commit, place, draft, name, cards=cards, private=private)
        verdict = verdict or _attempt(place, content, commit)
        if "fault" in verdict:
            place.drop(draft)
        else:
            _attempt(place, content, lambda _: _prune(place, keep))
        channel.say("verdict", verdict)
        channel.forget([f"card/{rank}" for rank in channel.ranks])
    verdict = channel.hear("verdict", channel.leader)
    if "fault" in verdict:
        raise CheckpointError(verdict["fault"])
    return str(name)


def _card(channel: Channel, rank: int) -> dict[str, Any]:
    try:
        card: dict[str, Any] = channel.hear(f"card/{rank}", rank)
        return card
    except CheckpointError as error:
        return {"fault": str(error)}


def _attempt(place: Place, content: Content | str, act: Callable[[Content], dict[str, Any]]) -> dict[str, Any]:
    """What `act` returns, or {"fault": why not}: the other ranks wait for it."""
    if isinstance(content, str):
        return {"fault": content}
    try:
        return act(content)
    except CheckpointError as error:
        return {"fault": str(error)}
    except Exception as error:
        given = f"{place.said} could not be written: {error}"
        do = "check its folder and its disk; training can go on, and earlier checkpoints are as they were"
        return {"fault": explain(given, "a place that every rank can write to", do)}


def _open(place: Place, content: Content, ranks: int) -> dict[str, Any]:
    place.lock()
    name = place.next_name(content.head["step"])
    return {"draft": place.begin(name, content.bytes * ranks), "name": name}


def _write(place: Place, draft: str, rank: int, content: Content, *, private: bool) -> dict[str, Any]:
    """Write this rank's files. The result says all about them that the index needs."""
    hashes: dict[str, blocks.Hashes] = {}
    tensors: dict[str, Any] = {}
    for kind in ("model", "state"):
        mine = [piece for piece in content.pieces if piece.file == kind]
        if not mine:
            continue
        twice = [name for name, times in Counter(piece.name for piece in mine).items() if times > 1]
        if twice:
            raise ValueError(f"two tensors are named {twice[0]!r}")
        file = f"{kind}-{rank:05d}.safetensors"
        with place.writing(draft, file, private=private) as sink:
            hashes[file] = blocks.write(sink, [(piece.name, piece.tensor) for piece in mine])
        for piece in mine:
            said = {"shape": list(piece.shape), "dtype": blocks.word(piece.tensor.dtype, piece.key)}
            said |= {} if piece.stride is None else {"stride": list(piece.stride)}
            tensors[piece.key] = {**said, "parts": [[file, piece.name, piece.low, piece.high]]}
    cards = {file: written.card() for file, written in hashes.items()}  # taken while the files were flushed
    files = {file: {"bytes": card.bytes, "blocks": list(card.blocks)} for file, card in cards.items()}
    return {"files": files, "tensors": tensors, "optimizers": content.run.get("optimizers", [])}


def _commit(
    place: Place, draft: str, name: str, content: Content, *, cards: Sequence[dict[str, Any]], private: bool
) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for key, said in [pair for card in cards for pair in card["tensors"].items()]:
        tensors.setdefault(key, {**said, "parts": []})["parts"] += said["parts"]
    for said in tensors.values():
        said["parts"].sort(key=lambda part: part[2:])
    run = dict(content.run)
    for card in cards:
        for mine, theirs in zip(run.get("optimizers", []), card["optimizers"], strict=True):
            for key, values in theirs.get("state", {}).items():
                mine["state"].setdefault(key, {}).update(values)
    files = {file: said for card in cards for file, said in card["files"].items()}
    text = index.text({**content.head, "run": run, "tensors": tensors, "files": files})
    index.check(files, tensors, run)
    seen = place.files(draft)
    for file, said in files.items():
        if seen.get(file) != said["bytes"]:
            given = f"{place.said}: {file} of another rank is not there as it was written"
            raise CheckpointError(explain(given, "one folder that all ranks see", "save to a disk all hosts share"))
    with place.writing(draft, INDEX, private=private) as sink:
        sink(memoryview(text))
    place.commit(draft, name)
    return {}


def _prune(place: Place, keep: int) -> dict[str, Any]:
    names = place.committed()
    needed = {place.leads_to(name) for name in names[:keep]}  # by links that stay, too
    for name in names[keep:]:
        if name not in needed:
            place.remove(name)
    return {}
