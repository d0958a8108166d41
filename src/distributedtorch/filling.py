"""Values for models built on the meta device, a module at a time: no rank ever holds more than its share and one unit.

`place` gives every parameter a device but no memory; once the plan has laid the parameters out, `fill` runs each
module's own initialiser, in the order and with the random numbers of one process, or reads `weights=`. All ranks
compute the same values and keep their own pieces.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from distributedtorch.core.bucket import is_empty
from distributedtorch.core.errors import CheckpointError, UsageError, explain
from distributedtorch.core.world import World, accelerator

_INDEX = "model.safetensors.index.json"


def is_meta(model: nn.Module) -> bool:
    """Whether a model's parameters have no values yet."""
    return any(p.is_meta for p in model.parameters())


def check(model: nn.Module, weights: Mapping[str, Path] | None) -> None:
    """Refuse a model on the meta device for which there are no values."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if weights is not None:
        ids = {id(named[name]) for name in weights if name in named}
        missing = [name for name, p in named.items() if id(p) not in ids]
        if missing:
            given = f"weights= has no values for {missing[0]!r} ({len(missing)} parameters missing)"
            raise CheckpointError(explain(given, "a file made from this model", "check names and config"))
        _check_shapes(model, weights)
    buffers = [name for name in _untold_buffers(model, told=weights is None) if name not in (weights or {})]
    if buffers:
        given = f"buffer {buffers[0]!r} is on the meta device and nothing computes it again"
        do = "compute it outside the meta device, or pass weights= that has it"
        raise UsageError(explain(given, "buffers with values", do))
    if weights is not None:
        return
    without = [
        name or "the model itself" for name, m in model.named_modules() if _owns(m) and not _initialiser(model, m)
    ]
    if without:
        given = f"the model is on the meta device, and {without[0]!r} has no initialiser ({len(without)} such modules)"
        do = "write its reset_parameters(), or the model's _init_weights(module), or pass weights=, or build it on cpu"
        raise UsageError(explain(given, "a way to fill every parameter", do))


def place(model: nn.Module) -> None:
    """Give parameters on the meta device a real one, without memory; they stay the same objects."""
    device = torch.device(accelerator())
    for param in list(model.parameters()):
        if param.is_meta:
            there = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device)
            there.untyped_storage().resize_(0)
            torch.utils.swap_tensors(param, nn.Parameter(there, param.requires_grad))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))


def allocate(params: Iterable[nn.Parameter]) -> None:
    """Give memory to parameters that the plan keeps whole."""
    for param in params:
        if is_empty(param):
            param.untyped_storage().resize_(param.numel() * param.element_size())


def fill(model: nn.Module, weights: Mapping[str, Path] | None, world: World, after: Callable[[], None]) -> None:
    """Give every parameter its values; `after` is called after each module."""
    if weights is not None:
        _read(model, weights, after)
        return
    sources = [torch.random, torch.get_device_module(accelerator())] if accelerator() != "cpu" else [torch.random]
    mine = [source.get_rng_state() for source in sources]
    for source, state in zip(sources, mine, strict=True):
        world.comm.broadcast("random state", first := state.clone())
        source.set_rng_state(first)
    filled: set[int] = set()
    for module in model.modules():
        params = list(module.parameters(recurse=False))
        initialise = _initialiser(model, module)
        if initialise is not None and any(id(p) not in filled for p in params):
            with torch.no_grad():
                tied = {p: p.detach().clone() for p in params if id(p) in filled}
                initialise()
                for param, value in tied.items():  # the first module that has it gives a tied parameter its values
                    param.copy_(value)
            filled.update(map(id, params))
            after()
            _return_memory()
    if world.rank:
        for source, state in zip(sources, mine, strict=True):
            source.set_rng_state(state)


def files(path: str | os.PathLike[str]) -> dict[str, Path]:
    """Parameter name -> file, from one .safetensors file or a folder with one or with an index."""
    given = Path(path)
    if given.is_dir() and (given / _INDEX).is_file():
        index = json.loads((given / _INDEX).read_text())["weight_map"]
        return {name: given / Path(file).name for name, file in index.items()}
    found = sorted(given.glob("*.safetensors")) if given.is_dir() else [given]
    if not found or not all(file.is_file() for file in found):
        raise CheckpointError(
            explain(f"weights={str(path)!r}", "a .safetensors file or a folder with some", "check the path")
        )
    names: dict[str, Path] = {}
    for file in found:
        with _opened(file) as tensors:
            names.update(dict.fromkeys(tensors.keys(), file))
    return names


def _targets(model: nn.Module) -> dict[str, Tensor]:
    params = dict(model.named_parameters(remove_duplicate=False))
    return {**params, **dict(model.named_buffers(remove_duplicate=False))}


def _check_shapes(model: nn.Module, weights: Mapping[str, Path]) -> None:
    targets = _targets(model)
    for name, file in weights.items():
        if name in targets:
            with _opened(file) as tensors:
                shape = tuple(tensors.get_slice(name).get_shape())
            if shape != tuple(targets[name].shape):
                given = f"{file.name}: {name!r} is {shape}, the model's is {tuple(targets[name].shape)}"
                raise CheckpointError(explain(given, "the same shape", "check the model's config"))


def _read(model: nn.Module, weights: Mapping[str, Path], after: Callable[[], None]) -> None:
    targets = _targets(model)
    for name, file in weights.items():
        if name in targets:
            with _opened(file) as tensors, torch.no_grad():
                value = tensors.get_tensor(name)
                if value.shape != targets[name].shape:
                    given = (
                        f"{file.name}: {name!r} is {tuple(value.shape)}, the model's is {tuple(targets[name].shape)}"
                    )
                    raise CheckpointError(explain(given, "the same shape", "check the model's config"))
                targets[name].copy_(value)
            after()
            _return_memory()


def _return_memory() -> None:
    """Give freed memory back to the system: what is allocated for a module is of another size than for the next."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # musl has no such call
            ctypes.CDLL(None).malloc_trim(0)


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except Exception as error:
        given = f"{file} cannot be read: {error}"
        raise CheckpointError(explain(given, "a whole .safetensors file", "download or save it again")) from error


def _owns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _initialiser(model: nn.Module, module: nn.Module) -> Callable[[], Any] | None:
    """What fills a module: the model's `_init_weights(module)`, else the module's own `reset_parameters()`."""
    of_model: Callable[[nn.Module], Any] | None = getattr(model, "_init_weights", None)
    if of_model is not None:
        return lambda: of_model(module)
    for name in ("reset_parameters", "_reset_parameters"):
        own: Callable[[], Any] | None = getattr(module, name, None)
        if own is not None:
            return own
    return None


def _untold_buffers(model: nn.Module, *, told: bool) -> Iterator[str]:
    """Buffers on the meta device that nothing fills; `told`: initialisers run, which reset running statistics."""
    for prefix, module in model.named_modules():
        if not (told and hasattr(module, "reset_running_stats")):
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    yield f"{prefix}.{name}".lstrip(".")
