"""What a loader is before it is divided: what cannot be divided is refused, the rest is described for comparison.

A fingerprint holds what decides the batches, so that ranks which built different loaders are found before the first
batch and not by a wrong loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterDataPipe, MapDataPipe, TensorDataset

from distributedtorch.core.errors import UsageError, explain

SHARD_FIELDS = (("num_replicas", "rank"), ("world_size", "rank"), ("num_shards", "shard_id"))
NODE_SPLITTERS = ("split_by_node", "single_node_only")
NESTED = ("dataset", "source", "source_datapipe", "datapipe", "nodesplitter")


def refuse(loader: Any, world: int) -> None:
    """Raise UsageError for a loader that already divides, or that cannot be divided."""
    if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
        given = f"a {type(loader).__name__} was given as loader"
        raise UsageError(explain(given, "an object that can be iterated", "pass the DataLoader itself"))
    for sampler in samplers(loader):
        _refuse_dividing_sampler(sampler, world)
    for dataset in _nested(getattr(loader, "dataset", None)):
        _refuse_dividing_dataset(dataset, world)
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:
        raise UsageError(
            explain(
                "a DataLoader with batch_size=None was given: it hands out samples as they come, not batches",
                "global batches whose rows can be divided over the ranks",
                "give the DataLoader a batch_size, and let the dataset yield single samples",
            )
        )


def check_rebatch(loader: Any, batch: int, customised: bool) -> None:
    """Raise UsageError when `loader` cannot be given batches of `batch` rows."""
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise UsageError(explain(f"batch={batch!r} was given", "a whole number of rows, at least 1", "change batch="))
    batches = getattr(loader, "batch_sampler", None)
    if customised or type(batches) is not torch.utils.data.BatchSampler:
        kind = type(loader).__name__ if customised else type(batches).__name__
        raise UsageError(
            explain(
                f"batch={batch} was given, but the batches are made by {kind}",
                "a torch DataLoader with a batch_size",
                f"set the size in {kind}, or leave batch= out",
            )
        )


def samplers(loader: Any) -> list[Any]:
    """The objects that decide the order, outermost first, each once."""
    batches = getattr(loader, "batch_sampler", None)
    found = [batches, getattr(batches, "sampler", None), getattr(loader, "sampler", None)]
    distinct = {id(sampler): sampler for sampler in found if sampler is not None}
    return list(distinct.values())


def fingerprint(loader: Any, batch_global: int | None) -> dict[str, str | int]:
    """What decides the batches of a loader, in plain values that must be equal on all ranks."""
    dataset = getattr(loader, "dataset", None)
    batches = getattr(loader, "batch_sampler", None)
    return {
        "loader": _name(loader),
        "dataset": _name(dataset),
        "dataset_length": _length(loader if dataset is None else dataset),
        "batch": -1 if batch_global is None else batch_global,
        "samplers": " < ".join(_name(sampler) for sampler in samplers(loader)),
        "drop_last": str(getattr(loader if batches is None else batches, "drop_last", "")),
        "num_workers": int(getattr(loader, "num_workers", 0)),
        "generators": _generators(loader),
        "samples": _samples(loader),
    }


def _refuse_dividing_sampler(sampler: Any, world: int) -> None:
    shards = next((getattr(sampler, count) for count, which in SHARD_FIELDS if _has(sampler, count, which)), None)
    if shards is None and not isinstance(sampler, DistributedSampler):
        return
    if world == 1 and shards == 1:
        return
    raise UsageError(
        explain(
            f"the loader's sampler {type(sampler).__name__} already divides the data ({shards} parts)",
            "the loader of the one-process script, which yields whole batches",
            "remove it: use shuffle=True or a plain sampler, and keep batch_size as the batch of all ranks together",
        )
    )


def _refuse_dividing_dataset(dataset: Any, world: int) -> None:
    name = getattr(dataset, "__name__", "")
    splits = name in NODE_SPLITTERS or getattr(dataset, "_distributed", None) is not None
    if world > 1 and isinstance(dataset, IterDataPipe | MapDataPipe):
        splits, name = True, "DataPipe"
    if splits:
        raise UsageError(
            explain(
                f"the dataset already divides itself between ranks ({name or 'split_dataset_by_node'})",
                "a dataset that yields every sample on every rank",
                "remove the split by node (webdataset: nodesplitter=lambda shards: shards); rows are divided here",
            )
        )


def _nested(dataset: Any, depth: int = 8) -> Iterator[Any]:
    """A dataset and the datasets, sources and pipeline stages inside it."""
    if dataset is None or depth == 0:
        return
    yield dataset
    fields = vars(dataset) if hasattr(dataset, "__dict__") else {}
    for name in NESTED:
        yield from _nested(fields.get(name), depth - 1)
    pipeline = fields.get("pipeline")
    for stage in pipeline if isinstance(pipeline, list | tuple) else ():
        yield from _nested(stage, depth - 1)


def _has(thing: Any, *names: str) -> bool:
    return all(isinstance(getattr(thing, name, None), int) for name in names)


def _name(thing: Any) -> str:
    return "" if thing is None else f"{type(thing).__module__}.{type(thing).__qualname__}"


def _length(thing: Any) -> int:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return -1


def _samples(loader: Any) -> str:
    """Digest of what says which samples there are, as far as that can be seen without loading one.

    Indices of subsets and samplers, and some rows of tensors: an unseeded random_split draws others on every rank.
    """
    digest = hashlib.blake2b(digest_size=8)
    datasets = list(_nested(getattr(loader, "dataset", None)))
    for thing in [*datasets, *samplers(loader)]:
        fields = vars(thing) if hasattr(thing, "__dict__") else {}
        for name in ("indices", "weights"):
            _digest(digest, fields.get(name))
    for dataset in datasets:
        for tensor in dataset.tensors if isinstance(dataset, TensorDataset) else ():
            if len(tensor) and tensor.layout == torch.strided:
                _digest(digest, tensor[[0, len(tensor) // 2, -1]])
        length = _length(dataset)
        for value in vars(dataset).values() if hasattr(dataset, "__dict__") and length > 0 else ():
            if isinstance(value, torch.Tensor | list | tuple) or type(value).__module__ == "numpy":
                _digest_some(digest, value, length)
    return digest.hexdigest()


def _digest_some(digest: Any, kept: Any, length: int) -> None:
    """Take in the first, the middle and the last of what a dataset keeps for its samples, as far as it is plain."""
    if _length(kept) != length or getattr(kept, "layout", torch.strided) != torch.strided:
        return
    for number in (0, length // 2, length - 1):
        for one in kept[number] if isinstance(kept[number], list | tuple) else [kept[number]]:
            if isinstance(one, str):  # a host may keep its files elsewhere
                digest.update(one.replace("\\", "/").rpartition("/")[2].encode())
            else:
                _digest(digest, one)


def _digest(digest: Any, value: Any) -> None:
    try:
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
        digest.update(bytes(tensor.flatten().view(torch.uint8).numpy()) if tensor.numel() else b"")
    except (TypeError, ValueError, RuntimeError):  # nothing, or nothing that is numbers
        return


def _generators(loader: Any) -> str:
    """Digest of the user's own generators: they must stand at the same state on all ranks."""
    owners = [loader, *samplers(loader)]
    found = {
        id(g): g for g in (getattr(owner, "generator", None) for owner in owners) if isinstance(g, torch.Generator)
    }
    states = b"".join(bytes(generator.get_state().tolist()) for generator in found.values())
    return hashlib.blake2b(states, digest_size=8).hexdigest() if states else ""
