"""Parameters that tell when they are used, so that divided ones are there in time.

Outside the blocks of its model a divided parameter has the class `Watched`, a subclass of `nn.Parameter` by which torch
tells of every use: the parameter's memory is filled first, what was written is kept, and a view that was handed out is
remembered. Inside its block (between the hooks on the block's forward) it is a plain `nn.Parameter`: nothing is in the
way of `torch.compile` or of fast paths. What autograd saves of a parameter is its place, not its memory; it is fetched
when backward comes to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.override import hooked
from distributedtorch.sync.divided import AT, Divided, Unit
from distributedtorch.sync.memory import checksum

_UNITS: dict[int, Unit] = {}
"""Divided parameters of this process, by id."""


class Watched(nn.Parameter):
    """A divided parameter outside its block."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        params = list(_watched(args)) + list(_watched(tuple(kwargs.values())))
        if func in _AUTOGRAD:
            with _plain(params):
                return func(*args, **kwargs)
        if func == _SET_DATA:
            unit = _UNITS[id(args[0])]
            return unit.memory.assign(args[0], unit, args[1])
        return _use(params, lambda: func(*args, **kwargs), fills=func in _FILLS)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(_pickled_beside(_UNITS[id(self)].memory.names[id(self)]))
        plain = nn.Parameter(self.clone().detach(), self.requires_grad)
        plain.__dict__.update(vars(self))
        starting = get_spawning_popen()
        if starting is not None:  # a process that takes over its memory: it must be there until then
            vars(starting).setdefault("parameters", []).append(plain)
        return plain.__reduce_ex__(protocol)


def _use(params: Sequence[nn.Parameter], call: Callable[[], Any], *, fills: bool) -> Any:
    """Make a call that needs the values of `params`; `fills`: where it writes to one, it writes every element."""
    units = list({id(unit): unit for unit in (_UNITS[id(p)] for p in params)}.values())
    versions = [p._version for p in params]
    for unit in units:
        unit.hold()
    try:
        for unit in units:  # without gradients it may be an edit of several steps: it goes on from what was written
            unit.memory.take(unit, "used", fresh=torch.is_grad_enabled())
        with _plain(params):
            result = call()
    finally:
        for unit in units:
            unit.inside -= 1
    wrote = [p for p, was in zip(params, versions, strict=True) if p._version != was]
    for unit in units:
        unit.memory.used(unit, [p for p in wrote if _UNITS[id(p)] is unit], filled=fills)
    return result


class _plain:
    """A block in which parameters are plain ones."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params

    def __enter__(self) -> None:
        for param in self.params:
            param.__class__ = nn.Parameter

    def __exit__(self, *_: object) -> None:
        for param in self.params:
            param.__class__ = Watched


def _watched(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, Watched):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _watched(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _watched(item)


def _getters(*names: str) -> list[Any]:
    """How torch tells that an attribute is read; releases differ in which there are."""
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_AUTOGRAD = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_FILLS = {Tensor.copy_, Tensor.zero_, Tensor.fill_, Tensor.normal_, Tensor.uniform_}
"""What writes every element of the tensor it is called on."""
_NO_VALUES = {
    *_getters("shape", "dtype", "device", "layout", "ndim", "grad", "requires_grad", "is_leaf", "grad_fn", "_version"),
    *_getters("_backward_hooks", "_base", "output_nr", "names", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_mps"),
    *_getters("is_quantized", "is_nested", "is_mkldnn", "is_xpu", "itemsize", "nbytes", "retains_grad", "name"),
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.ndimension),
    *(Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.storage_offset),
    *(Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
    *(Tensor.__hash__, Tensor.__len__, Tensor.is_same_size, Tensor.new_empty, Tensor.new_zeros, Tensor.new_tensor),
    *(Tensor.new_ones, Tensor.new_full, torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
    *(torch.rand_like, torch.randn_like, torch.is_floating_point, torch.is_complex, torch.numel),
}
"""What is asked of a parameter without its values."""


# Attaching.


def watch(memory: Divided, models: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> Callable[[], None]:
    """Watch the parameters of `memory`; within `blocks` and the modules around them, they are plain. Result: undo."""
    for unit in memory.units:
        for param in unit.params:
            if type(param) is not nn.Parameter:
                raise UsageError(_strange(memory.names[id(param)], type(param).__name__))
            _UNITS[id(param)] = unit
            param.__class__ = Watched
    hooks = [remove for module, params in _places(memory, models, blocks) for remove in _hook(module, params)]
    saved = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
    saved.__enter__()

    def undo() -> None:
        saved.__exit__()
        for remove in hooks:
            remove()
        for unit in memory.units:
            _become(nn.Parameter, unit.params)
            for param in unit.params:
                _UNITS.pop(id(param), None)
                _seen.discard(id(param))
        memory.release()

    return undo


def _places(
    memory: Divided, models: Sequence[nn.Module], blocks: Sequence[nn.Module]
) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Modules within which parameters are plain, with these parameters: blocks, and what owns the others."""
    mine = {id(param) for unit in memory.units for param in unit.params}
    within = {id(m) for block in blocks for m in block.modules() if m is not block}
    tops = {id(block) for block in blocks}
    seen: set[int] = set()
    for model in models:
        for module in model.modules():
            if id(module) in within or id(module) in seen:
                continue
            seen.add(id(module))
            params = [p for p in module.parameters(recurse=id(module) in tops) if id(p) in mine]
            if params:
                yield module, params


def _hook(place: nn.Module, params: list[nn.Parameter]) -> list[Callable[[], None]]:
    units = list({id(unit): unit for unit in (_UNITS[id(param)] for param in params)}.values())
    before: list[list[tuple[int, int]]] = []
    """For each call under way, what tells whether it has changed parameters."""
    compared = iter(range(_COMPARED))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(module: nn.Module, args: Any) -> None:
        if module is not place:  # what takes part of the module's place has parameters of its own
            return
        for unit in units:
            unit.hold()
        for unit in units:
            unit.memory.take(unit, "used")
        _become(nn.Parameter, params)
        compare = next(compared, None) is not None
        before.append([(param._version, _bytes_of(param) if compare else 0) for param in params])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if module is not place:
            return
        for unit in units:
            unit.inside -= 1
        was = before.pop() if before else []  # none where entering has failed
        changed = [param for param, (version, _) in zip(params, was, strict=False) if param._version != version]
        changed += [param for param, (_, held) in zip(params, was, strict=False) if held and _bytes_of(param) != held]
        if not before:
            _become(Watched, params)
        if changed:
            raise UsageError(_changed_inside(_UNITS[id(changed[0])].memory.names[id(changed[0])]))
        for unit in units:
            unit.memory.used(unit)

    return [
        hooked(place, place.register_forward_pre_hook(enter)),
        hooked(place, place.register_forward_hook(leave, always_call=True)),
    ]


def _become(kind: type[nn.Parameter], params: Sequence[nn.Parameter]) -> None:
    for param in params:
        param.__class__ = kind


_COMPARED = 2
"""In how many forwards of a module values are compared: `p.data` hides changes from torch's own count of them."""


def _bytes_of(param: nn.Parameter) -> int:
    return checksum(param.detach().contiguous())


def _changed_inside(name: str) -> str:
    """Refuses parameters that their own block's forward has changed: that would be lost."""
    given = f"parameters around {name!r} were changed inside the forward of their block"
    do = 'change them before or after the forward, or use plan="zero2"'
    return explain(given, "parameters that a forward under zero3 only reads", do)


def _pickled_beside(name: str) -> str:
    """Refuses to gather a parameter while the main thread may change it."""
    given = f"parameter {name!r} is pickled in {threading.current_thread().name}, a thread beside training, under zero3"
    do = "pickle it in the main thread, or give the thread (the queue) model.state_dict() or copy.deepcopy(model)"
    return explain(given, "values that no step changes meanwhile", do)


class _Saved(NamedTuple):
    """A tensor autograd saved that lies in a divided parameter: its place."""

    unit: Unit
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    edition: int
    copied: nn.Parameter | None
    """Where it lies not in the parameter's memory but in a copy of that in another type (autocast): of which one."""
    dtype: torch.dtype


def _pack(tensor: Tensor) -> Tensor | _Saved:
    if type(tensor) not in (Tensor, nn.Parameter, Watched):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        try:
            unit = AT.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # tensors without memory of their own (vmap)
            return tensor
        copied = _copied(tensor) if unit is None else None
        unit = unit or ((copied is not None and _UNITS.get(id(copied))) or None)
        if unit is None or tensor.is_conj() or tensor.is_neg() or (copied is None and tensor.dtype != unit.own.dtype):
            return tensor
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        return _Saved(unit, size, stride, offset, unit.edition, copied, tensor.dtype)


def _copied(tensor: Tensor) -> nn.Parameter | None:
    """The divided parameter of which a tensor is, or looks at, a copy in a narrower type (as autocast makes them)."""
    if tensor.dtype not in _NARROW:
        return None
    copy = tensor._base if tensor._base is not None else tensor
    made = copy.grad_fn
    if made is None or made.name() != "ToCopyBackward0" or copy._version:  # changed since
        return None
    source = getattr(made.next_functions[0][0], "variable", None)
    if source is None or id(source) not in _UNITS or copy.storage_offset():
        return None
    same = copy.dtype == tensor.dtype and copy.device == source.device and copy.stride() == source.stride()
    return source if same and _is_cast(copy, source) else None


_NARROW = (torch.bfloat16, torch.float16)
_seen: set[int] = set()
"""Parameters whose copies have been compared: `data` hides changes from torch's own count of them."""


def _is_cast(copy: Tensor, source: nn.Parameter) -> bool:
    """Whether a copy has the parameter's values; looked at once for each parameter."""
    if id(source) in _seen:
        return True
    if not torch.equal(copy.detach(), source.detach().to(copy.dtype)):
        return False
    _seen.add(id(source))
    return True


def _unpack(saved: Tensor | _Saved) -> Tensor:
    if not isinstance(saved, _Saved):
        return saved
    unit = saved.unit
    if unit.edition != saved.edition:
        raise RuntimeError(_CHANGED.format(unit.memory.names[id(unit.params[0])]))
    unit.memory.take(unit, "saved")
    flat = unit.arrive()
    if saved.copied is not None:
        number = next(k for k, param in enumerate(unit.params) if param is saved.copied)
        flat = unit.slab.slots[number].view(flat).to(saved.dtype)
    return flat.as_strided(saved.size, saved.stride, saved.offset)


_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: parameters around "
    "{!r} were changed between forward and backward"
)


def _strange(name: str, kind: str) -> str:
    given = f"parameter {name!r} is a {kind} under zero3"
    return explain(given, "plain nn.Parameter objects", 'use plan="zero2" for this model')
