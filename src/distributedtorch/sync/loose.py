"""Replicas that step alone: what rounds of averaging share. `local`, `diloco` and `gossip` say what a round does.

Gradients stay on their rank, weighed as under ddp by how many rows of the global batch it had, so that averaging after
every step is ddp for plain SGD. Running statistics of BatchNorm are each replica's own, and averaged where all meet.
Parameters of 16 bits travel and are averaged in float32.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.core.bucket import once
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import CheckpointError, explain
from distributedtorch.core.override import hooked
from distributedtorch.core.sync import Trained, bytes_of, leaves
from distributedtorch.core.wire import Wire, sums, travelling
from distributedtorch.sync.alone import Alone

Meet = Callable[[str, Sequence[float]], list[list[float]]]
_PIECE = 1 << 17


class Loose(Alone):
    """Replicas that step alone between rounds."""

    lockstep = False
    optimizer: torch.optim.Optimizer

    def __init__(self, trained: Trained, comm: Comm, wire: Wire, period: int) -> None:
        super().__init__(trained.params, trained.names, trained.optimizer, comm)
        self.wire, self.period = wire, period
        self.name = f"round/{trained.name}"
        self.slabs = travelling([wide(param.detach()) for param in self.params], wire, comm.world)
        self.taken = 0
        """Steps since the last round."""
        self.rounds = 0
        self.drift: float | None = None
        """How far replicas were apart in the last round, relative to the size of the parameters."""
        mine = {id(param) for param in self.params}
        self.models = [model for model in trained.models if any(id(p) in mine for p in model.parameters())]
        self.refilled = False
        """Whether values were put into the parameters from outside since the last round."""
        self.hooks = watch_loads(self.models, self.loaded)
        self.told = False
        """Whether the user was told that replicas differ."""

    @property
    def buffers(self) -> list[Tensor]:
        """Running statistics of this replica."""
        return statistics_of(self.models)

    @property
    def differ(self) -> bool:
        """Whether replicas may differ now."""
        return self.taken > 0

    @abstractmethod
    def agree(self) -> None:
        """A round. A group call."""

    def settle(self) -> None:
        """Make replicas the same, if they can differ. A group call."""
        if self.taken:
            self._round()

    def loaded(self) -> None:
        self.refilled = True

    def close(self) -> None:
        """Let go of the models."""
        for remove in self.hooks:
            remove()

    def update(self, step: Callable[[], Any]) -> Any:
        result = step()
        self.taken += 1
        if self.taken >= self.period:
            self._round()
        return result

    def _round(self) -> None:
        self.agree()
        torch.autograd.graph.increment_version(self.params)
        self.taken = 0
        self.rounds += 1

    # What rounds are made of.

    @torch.no_grad()
    def average(self, wire: Wire) -> tuple[float, float]:
        """Give parameters their mean over ranks; squares of how far this replica was from it, and of its size."""
        apart, size = 0.0, 0.0

        def give(index: int, out: Tensor) -> None:
            torch.div(wide(self.params[index].detach()), self.comm.world, out=out)

        for slab, flat in sums(self.comm, wire, self.name, self.slabs, give):
            for slot in slab.slots:
                for mine, mean in pieces(self.params[slot.index].detach(), slot.view(flat)):
                    apart += power(mine - mean)
                    size += power(mean)
                    mine.copy_(mean)
        self.average_buffers()
        return apart, size

    def average_buffers(self) -> None:
        average(self.comm, f"{self.name}/buffers", self.buffers)

    # What a checkpoint holds of replicas.

    def own_state(self) -> dict[str, Tensor]:
        counts = torch.tensor([self.taken, self.rounds, self.period], dtype=torch.int64)
        wire = {f"wire/{name}": value for name, value in self.wire.state().items()}
        return {"counts": counts, **wire, **{name: value.detach() for name, value in self._replica()}}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        self.refilled = False
        self.taken, self.rounds, self.period = state["counts"].tolist()
        self.wire.take_state({k.removeprefix("wire/"): v for k, v in state.items() if k.startswith("wire/")})
        with torch.no_grad():
            for name, value in self._replica():
                once(value.detach()).copy_(once(state[name], value))

    def _replica(self) -> Iterator[tuple[str, Tensor]]:
        """What replicas have of their own: parameters, optimizer state, running statistics."""
        for index, param in enumerate(self.params):
            yield f"parameter/{index}", param
            for path, tensor in leaves(self.optimizer.state.get(param, {})):
                yield f"state/{index}/{'/'.join(map(str, path))}", tensor
        for index, buffer in enumerate(self.buffers):
            yield f"buffer/{index}", buffer

    def consensus(self) -> dict[int, Tensor]:
        return agreed(self.comm, self.name, list(self._replica()))

    def bytes_held(self) -> dict[str, int]:
        return {**super().bytes_held(), "left out": sum(map(bytes_of, self.wire.state().values()))}


def agreed(comm: Comm, name: str, replica: Sequence[tuple[str, Tensor]]) -> dict[int, Tensor]:
    """By the id of a tensor the mean of replicas; of what is no floating number, this rank's. A group call."""
    found, names = {}, " ".join(one for one, _ in replica)
    hashes = comm.exchange(f"{name}/names", torch.tensor(zlib.crc32(names.encode())))
    if len(set(hashes.tolist())) > 1:
        given = "the replicas' optimizers have state of different parameters: some were used on some ranks only"
        do = "save when every rank has used them all, or freeze those that are not used"
        raise CheckpointError(explain(given, "state of the same parameters on all ranks", do))
    for _, value in replica:
        if value.is_floating_point() and value.numel():
            flat = wide(value.detach().to("cpu")).contiguous().view(-1).clone() / comm.world
            bounds = [flat.numel() * k // comm.world for k in range(comm.world + 1)]
            comm.all_reduce(f"{name}/mean", flat, bounds).wait()
            found[id(value)] = flat.view(value.shape).to(value.dtype)
    return found


def average(comm: Comm, name: str, tensors: Sequence[Tensor]) -> None:
    """Give small tensors their mean over ranks."""
    places = [once(tensor.detach()) for tensor in tensors]
    if places:
        mine = torch.cat([place.double().reshape(-1).cpu() for place in places])
        mean = comm.exchange(name, mine).mean(dim=0)
        for place, values in zip(places, mean.split([place.numel() for place in places]), strict=True):
            place.copy_(values.view(place.shape))


def statistics_of(models: Sequence[nn.Module]) -> list[Tensor]:
    """Buffers that are averages: floating numbers."""
    found = {id(b): b for model in models for b in model.buffers() if b.is_floating_point() and b.numel()}
    return list(found.values())


def watch_loads(models: Sequence[nn.Module], act: Callable[[], None]) -> list[Callable[[], None]]:
    """Be told when values are loaded into a model or a part of it; copies of it do not count. Result: what ends it."""

    def told(here: nn.Module) -> Callable[..., None]:
        return lambda module, _: act() if module is here else None

    parts = [part for model in models for part in model.modules()]
    return [hooked(part, part.register_load_state_dict_post_hook(told(part))) for part in parts]


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape, on the processor a part of each after the other, so that what is made of them stays in its
    cache.
    """
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() <= _PIECE:
        return iter([tensors])
    rows = max(1, _PIECE * len(first) // first.numel())
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def power(tensor: Tensor) -> float:
    """The sum of squares, in parts: a long sum in float32 comes out too small."""
    parts = [torch.linalg.vector_norm(part) for part in tensor.reshape(-1).split(1 << 16)]
    return float(torch.stack(parts).double().square().sum())


def wide(tensor: Tensor) -> Tensor:
    """Numbers of 16 bits in float32, so that means are not rounded on the way; others as they are."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor
