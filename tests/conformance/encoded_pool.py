"""What each process of a pool runs: zero3 whose parameters travel as codes, beside the algorithm written out.

`-m tests.conformance.encoded_pool FOLDER`: faults raise. In two ranks, that wrong codes are seen is checked too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.bucket import Slab
from distributedtorch.core.errors import DesyncError
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.sync.divided import Unit
from distributedtorch.sync.encoded import Encoded
from distributedtorch.sync.late import Late
from distributedtorch.sync.memory import checksum
from tests.conformance.loose_pool import compare
from tests.conformance.wires_pool import CODES, STEPS, ByHand, apply, gradients, laid_out, loss_of, rows_of

WIRES = ("bf16", "fp16", "int8")
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def net(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(1)
    with torch.device(device):
        return nn.Sequential(nn.Linear(48, 50), nn.Tanh(), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 3))


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def whole(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that needs whole parameters."""
    return torch.optim.Adafactor(params, lr=1e-2)


def decoded(wire: str, values: Tensor) -> Tensor:
    """What is computed with: int8 to the nearest, the others as they round anyway."""
    if wire != "int8":
        return CODES[wire][0](values, 0, torch.Generator())
    out = values.clone()
    for k in range(0, len(values), 256):
        step = (values[k : k + 256].abs().max() / 127).float().double()
        out[k : k + 256] = (values[k : k + 256] / step + 0.5).floor() * step if step else 0.0
    return out


def by_hand(wire: str, slabs: list[Slab], make: Make, delay: int) -> tuple[list[Tensor], list[Tensor]]:
    """What ranks compute with at the end, and what owners have."""
    model = net()
    params = list(model.parameters())[::-1]
    exact = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer, gradient = make(exact), ByHand(CODES[wire][0], feedback=False)
    flying: list[dict[int, Tensor]] = [{}] * delay

    def spread() -> None:
        for slab in slabs:
            flat = laid_out(slab.numel, slab.slots, [one.detach() for one in exact])
            if max(slot.numel for slot in slab.slots) >= 1024:
                for low, high in pairwise(slab.bounds):
                    if high > low:
                        flat[low:high] = decoded(wire, flat[low:high])
            for slot in slab.slots:
                params[slot.index].data.copy_(slot.view(flat))

    spread()
    for step in range(STEPS):
        every, new = gradients(model, step), dict[int, Tensor]()
        for number, slab in enumerate(slabs):
            flats = [laid_out(slab.numel, slab.slots, grads) for grads in every]
            total: Tensor = sum(flats)  # type: ignore[assignment]
            if max(slot.numel for slot in slab.slots) >= 1024:
                for k, bucket in enumerate(slab.buckets):
                    span = slice(bucket.bounds[0], bucket.bounds[-1])
                    name = f"gradients/0/{number}.{k}"
                    total[span] = gradient(name, step + 1, flats, bucket.bounds, half=True)[span]
            new |= {slot.index: slot.view(total).clone() for slot in slab.slots}
        flying.append(new)
        apply(optimizer, exact, flying.pop(0))
        spread()
    return list(model.parameters()), exact[::-1]


def start(
    wire: str, make: Make = adamw, model: nn.Module | None = None, more: str = ""
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model or net()
    optimizer = make(list(model.parameters()))
    dt.distribute(model, optimizer, plan=f"zero3,wire={wire}{more}", batches="own")
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, last: int = STEPS) -> None:
    for step in range(first, last):
        loss_of(model, rows_of(step, dt.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def let_go(model: nn.Module) -> list[Tensor]:
    """What owners have."""
    release()
    return values(model)


def units() -> list[Unit]:
    sync = here().loop.members[0].sync
    return (sync.now if isinstance(sync, Late) else sync).memory.units  # type: ignore[union-attr,no-any-return]


def same_everywhere(found: list[Tensor]) -> None:
    sums = here().comm.exchange("sums", torch.tensor([checksum(one.contiguous()) for one in found]))
    assert all(torch.equal(sums[0], other) for other in sums), "ranks compute with different numbers"


def as_written_out(wire: str, make: Make = adamw, delay: int = 0) -> None:
    model, optimizer = start(wire, make, more=",delay=1" if delay else "")
    assert sum(isinstance(unit, Encoded) for unit in units()) >= 2
    slabs = [unit.slab for unit in units()]
    train(model, optimizer)
    seen, kept = values(model), let_go(model)
    shown, exact = by_hand(wire, slabs, make, delay)
    compare(f"zero3,wire={wire}", shown, seen)
    same_everywhere(seen)
    compare(f"what owners have under zero3,wire={wire}", exact, kept)


def saved(folder: Path) -> None:
    """A run goes on to the bit, and under another plan from what owners have."""
    model, optimizer = start("int8")
    train(model, optimizer, 0, 3)
    dt.save(folder)
    train(model, optimizer, 3)
    seen, kept = values(model), let_go(model)
    model, optimizer = start("int8")
    train(model, optimizer, 0, 1)
    dt.load(folder)
    train(model, optimizer, 3)
    assert all(map(torch.equal, seen, values(model))), "another run after dt.load"
    assert all(map(torch.equal, kept, let_go(model)))
    model, optimizer = start("int8")
    train(model, optimizer, 0, 3)
    kept = let_go(model)
    model = net()
    dt.distribute(model, adamw(list(model.parameters())), plan="zero2", batches="own")
    dt.load(folder)
    assert all(map(torch.equal, kept, values(model))), "a checkpoint has not what owners have"
    release()


def edited() -> None:
    """What was written counts exactly, what was not stays exact, and all ranks compute with codes of it."""
    model, _ = start("int8")
    before = values(net())
    torch.manual_seed(5)
    with torch.no_grad():
        model[0].weight[:7].mul_(3.0)
        nn.init.trunc_normal_(model[2].weight, std=0.3)  # in several steps
    seen = values(model)
    kept = let_go(model)
    same_everywhere(seen)
    torch.manual_seed(5)
    drawn = nn.init.trunc_normal_(torch.empty_like(before[2]), std=0.3)
    assert torch.equal(kept[2], drawn), "values drawn in several steps were rounded on the way"
    assert 0 < (seen[2] - drawn).abs().max() <= drawn.abs().max() / 127, "not a code of what was written"
    assert torch.equal(kept[0][7:], before[0][7:]), "what nobody wrote was rounded"
    assert (kept[0][:7] - 3 * before[0][:7]).abs().max() <= 3 * before[0].abs().max() / 127


def zeroed() -> None:
    """Zeros count where a value was seen as zero before; a second edit leaves alone what the first did."""
    model, _ = start("int8")
    before, mask = values(net()), (torch.arange(50 * 48) % 3 > 0).view(50, 48)
    rest = mask & (model[0].weight.detach() != 0)  # what is too small for the code is seen as zero
    assert (rest != mask).any() and not model[2].weight.detach().all(), "no value is too small for the code"
    with torch.no_grad():
        model[0].weight.mul_(mask)
        model[0].weight[:2].add_(0.25)
        model[0].weight.mul_(mask)
        nn.init.zeros_(model[2].weight)
    seen, kept = values(model), let_go(model)
    assert not kept[2].any() and not seen[2].any(), "what was set to zero is not"
    assert not kept[0][~mask].any(), "what was masked is not zero"
    assert torch.equal(kept[0][2:][rest[2:]], before[0][2:][rest[2:]]), "a second edit rounds what nobody wrote"
    model, _ = start("bf16")
    copy = model[2].weight.detach().clone()
    model[2].weight.data = copy
    model[0].weight.data.mul_(mask)
    kept = let_go(model)
    assert torch.equal(kept[2], copy), "what was written as it was seen is not what was kept"
    assert not kept[0][~mask].any() and torch.equal(kept[0][mask], before[0][mask])


def filled() -> None:
    """A model on the meta device."""
    torch.manual_seed(3)
    model, optimizer = start("bf16", model=net("meta"))
    train(model, optimizer, 0, 2)
    torch.manual_seed(3)
    plain = net("meta").to_empty(device="cpu")
    for module in plain:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    kept = let_go(model)
    model, optimizer = start("bf16", model=plain)
    train(model, optimizer, 0, 2)
    assert all(map(torch.equal, kept, let_go(model)))


def frozen_and_whole_numbers() -> None:
    """Parameters that nothing trains travel as codes too; those that are no floating numbers as they are."""
    model = net()
    model[2].weight.requires_grad_(False)
    model.places = nn.Parameter(torch.arange(3000) * 1001, requires_grad=False)
    dt.distribute(
        model, adamw([p for p in model.parameters() if p.requires_grad]), plan="zero3,wire=bf16", batches="own"
    )
    rounded = net()[2].weight.bfloat16().double()
    assert torch.equal(model[2].weight.detach(), rounded) and torch.equal(model.places, torch.arange(3000) * 1001)
    assert torch.equal(let_go(model)[3], net()[2].weight)


def recomputed() -> None:
    """A second forward in backward sees the same values."""
    found = []
    for more in ("", ",recompute"):
        model, optimizer = start("int8", more=more)
        train(model, optimizer)
        found.append(let_go(model))
    assert all(map(torch.equal, *found))


def changes_on_one_rank_are_named() -> None:
    model, optimizer = start("int8")
    if dt.is_main():
        with torch.no_grad():
            model[0].weight.add_(1.0)  # type: ignore[index]
    with pytest.raises(DesyncError, match="some ranks only"):
        optimizer.step()


def fewer_bytes() -> None:
    sent = {}
    for plan in ("zero3", "zero3,wire=int8"):
        model = net()
        optimizer = adamw(list(model.parameters()))
        before = here().comm.traffic["gather"].bytes_sent  # dt.distribute begins the first gather
        dt.distribute(model, optimizer, plan=plan, batches="own")
        train(model, optimizer)
        here().comm.barrier()
        sent[plan] = here().comm.traffic["gather"].bytes_sent - before
        release()
    large, small = 8 * (2400 + 2000), 8 * (50 + 40 + 123)
    stated = (large * (1 + 4 / 256) / 8 + small) / (large + small)
    assert sent["zero3,wire=int8"] <= 1.1 * stated * sent["zero3"], sent


# Twins that the checks must catch.


def owners_compute_with_what_they_keep(self: Encoded, flat: Tensor) -> None:
    LANDED(self, flat)
    flat[self.range] = self.own


def owners_keep_what_was_sent(self: Encoded) -> None:
    UPDATED(self)
    if self.own.numel():
        self.own.copy_(self._decoded(self.code, self.own.numel()))


def an_edit_rounds_its_neighbours(self: Encoded, *edited: Any, **options: Any) -> None:
    now = self.arrive()[self.range].clone()
    WRITTEN(self, *edited, **options)
    self.own = now


def only_what_looks_different_was_written(self: Encoded, now: Tensor, edited: set[int], *, filled: bool) -> Tensor:
    return now != (self._decoded(self.code, now.numel()) if self.shown is None else self.shown)


def what_was_seen_is_forgotten(self: Encoded, now: Tensor, edited: set[int], *, filled: bool) -> Tensor:
    self.shown = None
    return CHANGED(self, now, edited, filled=filled)


def rounding_is_at_random(self: Encoded) -> Tensor:
    return self.form.encode(self.own, 0, torch.Generator().manual_seed(1)) if self.own.numel() else ENCODED(self)


LANDED, UPDATED, WRITTEN, ENCODED = Encoded._land, Encoded.updated, Encoded.written, Encoded._encoded
CHANGED = Encoded._changed


def wrong_codes_are_seen() -> None:
    for name, twin, check, said in (
        ("_land", owners_compute_with_what_they_keep, lambda: as_written_out("bf16"), "the algorithm written out"),
        ("updated", owners_keep_what_was_sent, lambda: as_written_out("bf16"), "the algorithm written out"),
        ("_encoded", rounding_is_at_random, lambda: as_written_out("int8"), "the algorithm written out"),
        ("written", an_edit_rounds_its_neighbours, edited, "what nobody wrote was rounded"),
        ("_changed", only_what_looks_different_was_written, zeroed, "what was set to zero is not"),
        ("_changed", what_was_seen_is_forgotten, zeroed, "a second edit rounds what nobody wrote"),
    ):
        right = getattr(Encoded, name)
        setattr(Encoded, name, twin)
        with pytest.raises(AssertionError, match=said):
            check()
        setattr(Encoded, name, right)


def main(folder: Path) -> None:
    for wire in WIRES:
        as_written_out(wire)
    as_written_out("int8", whole)
    edited()
    zeroed()
    saved(folder)
    if dt.world() == 2:
        wrong_codes_are_seen()
    if dt.world() == 3:
        filled()
        frozen_and_whole_numbers()
        recomputed()
        fewer_bytes()
        changes_on_one_rank_are_named()  # after it the ranks are not in step
    dt.print("encoded as written out")


if __name__ == "__main__":
    os.environ["DISTRIBUTEDTORCH_BUCKET_BYTES"] = "8192"
    dt.barrier()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    main(Path(sys.argv[1]))
