"""torchft's DiLoCo over gloo: every rank a replica group of its own, the word says the rest.

"every=20 outer=0.7 momentum=0.9 delay=0": `sync_every`, the outer optimizer (SGD with Nesterov momentum, as in its
example and in the paper), and `fragment_sync_delay`: how many steps the exchange may take beside training. The model is
one fragment; rank 0's process has the lighthouse; replicas begin alike, so nothing is copied at the start. Its
quantized exchange asks for triton. Limits of time are wide: the link is slow.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from benchmarks.peers.loop import Step, adamw, plain

LIMIT = timedelta(seconds=600)
_kept: list[Any] = []
"""What must live as long as the process."""


def build(word: str, model: nn.Module) -> Step:
    options = dict(pair.split("=") for pair in word.split())
    optimizer = adamw(model)
    outer = torch.optim.SGD(
        model.parameters(), lr=float(options["outer"]), momentum=float(options["momentum"]), nesterov=True
    )
    diloco = DiLoCo(
        _manager(model, optimizer),
        [model],
        optimizer,
        outer,
        sync_every=int(options["every"]),
        fragment_sync_delay=int(options["delay"]),
    )
    _kept.append(diloco.__enter__())
    return plain(model, optimizer)


def _manager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Manager:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if rank == 0:
        _kept.append(LighthouseServer(bind=f"[::]:{port}", min_replicas=world))
    address = _own_address(host)
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    _kept.append(store)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=world,
        use_async_quorum=False,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{host}:{port}",
        replica_id=f"replica_{rank}",
        hostname=address,
        init_sync=False,
    )


def _own_address(other: str) -> str:
    """The address of this host on the network that leads to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        return str(probe.getsockname()[0])
