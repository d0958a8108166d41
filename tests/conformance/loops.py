"""What users do in their loops: each runs untouched in one process and distributed, and must end with equal weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt

Distribute = Callable[..., Any]
DEVICE = os.environ.get("CONFORMANCE_DEVICE", "cpu")
LOOPS: dict[str, Callable[[Distribute], Any]] = {}


def loop(function: Callable[[Distribute], Any]) -> Callable[[Distribute], Any]:
    LOOPS[function.__name__] = function
    return function


def net(width: int = 20) -> nn.Sequential:
    layers = nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    return nn.Sequential(*layers).to(DEVICE)


def rows(n: int = 23, batch: int = 5, **kwargs: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 8, generator=generator).to(DEVICE)
    return DataLoader(TensorDataset(x, x[:, :3].sin()), batch, shuffle=True, **kwargs)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def simple(distribute: Distribute, edit: Callable[[nn.Module], Any], optimizer: Any = adam) -> nn.Module:
    """A loop with something between backward and step."""
    model = net()
    opt = optimizer(model)
    model, opt, data = distribute(model, opt, rows())
    for _ in range(3):
        for x, y in data:
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            edit(model)
            opt.step()
    return model


@loop
def clip_by_value(distribute: Distribute) -> Any:
    return simple(distribute, lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.02))


@loop
def clip_by_other_norms(distribute: Distribute) -> Any:
    def edit(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=float("inf"))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.9, norm_type=1.0, foreach=False)
        torch.nn.utils.clip_grad_norm_([next(model.parameters())], 0.1)

    return simple(distribute, edit)


@loop
def clip_by_hand(distribute: Distribute) -> Any:
    def edit(model: nn.Module) -> None:
        total = sum(float(p.grad.norm()) ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
        for p in model.parameters():
            p.grad.mul_(min(1.0, 0.3 / (total + 1e-6)))  # type: ignore[union-attr]

    return simple(distribute, edit)


@loop
def edit_in_place(distribute: Distribute) -> Any:
    def edit(model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data.add_(p.detach(), alpha=0.1)
            p.grad.clamp_(-0.2, 0.2)
            p.grad /= 1.5
            p.grad[0] = 0.01

    return simple(distribute, edit)


@loop
def assign_new_gradient(distribute: Distribute) -> Any:
    def edit(model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad * 0.5 + p.grad.abs().mean()

    return simple(distribute, edit)


@loop
def drop_some_gradients(distribute: Distribute) -> Any:
    def edit(model: nn.Module) -> None:
        model[0].bias.grad = None  # type: ignore[index]

    return simple(distribute, edit)


@loop
def noise_scale_from_gradients(distribute: Distribute) -> Any:
    def edit(model: nn.Module) -> None:
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
        for p in model.parameters():
            p.grad.mul_(1.0 / (1.0 + flat.var()))  # type: ignore[union-attr]

    return simple(distribute, edit)


@loop
def clamp_weights_after_step(distribute: Distribute) -> Any:
    model = net()
    opt = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    model, opt, data = distribute(model, opt, rows())
    for x, y in list(data):
        opt.zero_grad(set_to_none=False)
        F.mse_loss(model(x), y).backward()
        opt.step()
        for p in model.parameters():
            p.data.clamp_(-0.25, 0.25)
    return model


@loop
def never_zero_gradients(distribute: Distribute) -> Any:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, opt, data = distribute(model, opt, rows())
    for _ in range(2):
        for x, y in data:
            F.mse_loss(model(x), y).backward()
            opt.step()
    return model


@loop
def irregular_windows(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows(80, 4))
    batches = iter(list(data) * 4)
    for window in (3, 3, 3, 3, 3, 2, 1, 3, 3, 3, 4, 4, 4, 4, 4, 4, 2, 4):
        for _ in range(window):
            x, y = next(batches)
            (F.mse_loss(model(x), y) / window).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        opt.step()
        opt.zero_grad()
    return model


@loop
def windows_with_reads_inside(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows(80, 4))
    total = torch.zeros((), device=DEVICE)
    batches = iter(list(data) * 2)
    for number in range(12):
        for _ in range(3):
            x, y = next(batches)
            (F.mse_loss(model(x), y) / 3).backward()
            if number > 7:
                total = total + model[2].weight.grad.norm()
        opt.step()
        opt.zero_grad(set_to_none=number % 2 == 0)
    return {**model.state_dict(), "total": total}


@loop
def ema_by_deepcopy(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    ema = copy.deepcopy(model).eval()
    for _ in range(2):
        for x, y in data:
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.1)
            model.eval()
            with torch.no_grad():
                ema(x)
            model.train()
    return {**model.state_dict(), **{f"ema.{k}": v for k, v in ema.state_dict().items()}}


@loop
def gan(distribute: Distribute) -> Any:
    generator, critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(DEVICE), net()
    opt_g, opt_c = torch.optim.Adam(generator.parameters(), lr=3e-3), torch.optim.Adam(critic.parameters(), lr=3e-3)
    generator, critic, opt_g, opt_c, data = distribute(generator, critic, opt_g, opt_c, rows())
    for _ in range(3):
        for x, _y in data:
            fake = generator(x)
            opt_c.zero_grad()
            (F.softplus(-critic(x)).mean() + F.softplus(critic(fake.detach())).mean()).backward()
            opt_c.step()
            opt_g.zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            opt_g.step()
    return {**generator.state_dict(), **{f"c.{k}": v for k, v in critic.state_dict().items()}}


@loop
def gradient_penalty(distribute: Distribute) -> Any:
    critic = net()
    opt = torch.optim.Adam(critic.parameters(), lr=3e-3)
    critic, opt, data = distribute(critic, opt, rows())
    for _ in range(2):
        for x, _y in data:
            x = x.requires_grad_()
            (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            loss = critic(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    return critic


@loop
def l2_in_the_loss(distribute: Distribute) -> Any:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        opt.zero_grad()
        (F.mse_loss(model(x), y) + 0.05 * sum(p.square().sum() for p in model.parameters())).backward()
        opt.step()
    return model


@loop
def gradients_by_autograd_grad(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        grads = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g
        opt.step()
    return model


@loop
def two_forwards_two_backwards(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows(24, 4))
    for x, y in data:
        one, two = F.mse_loss(model(x), y), F.l1_loss(model(x * 2), y)
        opt.zero_grad()
        one.backward()
        two.backward()
        opt.step()
    return model


@loop
def submodules_called_directly(distribute: Distribute) -> Any:
    model = nn.ModuleDict({"a": nn.Linear(8, 12), "b": nn.Linear(12, 3), "rarely": nn.Linear(12, 3)}).to(DEVICE)
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    for number, (x, y) in enumerate(data):
        hidden = model["a"](x).tanh()
        opt.zero_grad()
        F.mse_loss(model["rarely" if number == 2 else "b"](hidden), y).backward()
        opt.step()
    return model


class Checked(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 12), nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.last, self.reentrant = nn.Linear(12, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in [*self.blocks, self.blocks[0]]:
            x = checkpoint(lambda z, b=block: b(z).tanh(), x, use_reentrant=self.reentrant)
        return self.last(x)


def checked(distribute: Distribute, reentrant: bool) -> Any:
    model = Checked(reentrant).to(DEVICE)
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
    return model


@loop
def checkpointing(distribute: Distribute) -> Any:
    return checked(distribute, reentrant=False)


@loop
def checkpointing_reentrant_shared_block(distribute: Distribute) -> Any:
    return checked(distribute, reentrant=True)


@loop
def closures(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        assert float(opt.step(closure).detach()) > 0
    return model


@loop
def trunk_and_head_optimizers(distribute: Distribute) -> Any:
    model = net()
    trunk = torch.optim.SGD(model[:2].parameters(), lr=1e-2, momentum=0.9)
    head = torch.optim.Adam(model[2:].parameters(), lr=1e-2)
    model, trunk, head, data = distribute(model, trunk, head, rows())
    for number, (x, y) in enumerate(list(data) * 2):
        F.mse_loss(model(x), y).backward()
        head.step()
        head.zero_grad()
        if number % 2:
            trunk.step()
            trunk.zero_grad()
    return model


@loop
def frozen_layers(distribute: Distribute) -> Any:
    model = net()
    for p in model[0].parameters():
        p.requires_grad_(False)
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
        model[2].weight.requires_grad_(False)
    return model


@loop
def state_loaded_before_and_after(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    x = torch.linspace(-1, 1, 32, device=DEVICE).view(4, 8)
    F.mse_loss(model(x), x[:, :3]).backward()
    opt.step()
    opt.zero_grad()
    model, opt, data = distribute(model, opt, rows())
    kept = None
    for number, (x, y) in enumerate(data):
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
        if number == 1:
            kept = copy.deepcopy((model.state_dict(), opt.state_dict()))
    assert kept is not None
    model.load_state_dict(kept[0])
    opt.load_state_dict(kept[1])
    for x, y in data:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
    state = opt.state_dict()["state"]
    return {**model.state_dict(), **{f"{i}.{k}": v for i, s in state.items() for k, v in s.items()}}


@loop
def grad_scaler(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=3)
    model, opt, data = distribute(model, opt, rows(22, 11))
    for number, (x, y) in enumerate(list(data) * 4):
        loss = F.mse_loss(model(x), y)
        if number == 3:
            loss = loss + model(x)[-1].sum() * float("inf")
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
    return {**model.state_dict(), "scale": torch.tensor(scaler.get_scale())}


@loop
def schedulers_and_groups(distribute: Distribute) -> Any:
    model = net()
    opt = torch.optim.Adagrad(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2:].parameters()}], lr=0.05
    )
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[0.1, 0.05], total_steps=15, cycle_momentum=False)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    model, opt, data, sched, plateau = distribute(model, opt, rows(), sched, plateau)
    for _ in range(3):
        for x, y in data:
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
            sched.step()
    plateau.step(1.0)
    return {**model.state_dict(), "lr": torch.tensor([g["lr"] for g in opt.param_groups])}


@loop
def mixed_types_and_layouts(distribute: Distribute) -> Any:
    model = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 6, 2), nn.Flatten(), nn.Linear(6, 3)).to(DEVICE)
    model[1].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model[3].weight.data = model[3].weight.data.t().contiguous().t()
    model.register_parameter("gain", nn.Parameter(torch.ones(3, dtype=torch.float32, device=DEVICE)))
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        opt.zero_grad()
        F.mse_loss(model(x) * model.gain, y).backward()
        opt.step()
    return model


@loop
def two_backwards_before_two_steps(distribute: Distribute) -> Any:
    one, two = net(), net(12)
    opt_one, opt_two = adam(one), adam(two)
    one, two, opt_one, opt_two, data = distribute(one, two, opt_one, opt_two, rows())
    for x, y in data:
        opt_one.zero_grad()
        opt_two.zero_grad()
        F.mse_loss(one(x), y).backward()
        F.mse_loss(two(x), y).backward()
        opt_one.step()
        opt_two.step()
    return {**one.state_dict(), **{f"two.{k}": v for k, v in two.state_dict().items()}}


@loop
def irregular_windows_without_reads(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows(80, 4))
    batches = iter(list(data) * 3)
    for number, window in enumerate((3, 3, 3, 3, 3, 3, 2, 3, 3, 1, 3, 3, 3, 3)):
        for _ in range(window):
            x, y = next(batches)
            (F.mse_loss(model(x), y) / window).backward()
        if number == 12:
            opt.zero_grad()
        opt.step()
        opt.zero_grad()
    return model


@loop
def a_second_phase(distribute: Distribute) -> Any:
    model, head = net(), nn.Linear(3, 3).to(DEVICE)
    opt, opt_head = adam(model), adam(head)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
    head, opt_head = distribute(head, opt_head)
    for x, y in data:
        opt_head.zero_grad()
        F.mse_loss(head(model(x).detach()), y).backward()
        opt_head.step()
    return {**model.state_dict(), **{f"head.{k}": v for k, v in head.state_dict().items()}}


@loop
def gradients_kept_over_two_losses(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        F.mse_loss(model(x), y).backward()
        first = [p.grad for p in model.parameters()]
        opt.zero_grad()
        F.l1_loss(model(x), y).backward()
        for p, g in zip(model.parameters(), first, strict=True):
            p.grad = p.grad + 0.3 * g  # type: ignore[operator]
        opt.step()
        opt.zero_grad()
    return model


@loop
def clip_over_more_than_the_optimizer_has(distribute: Distribute) -> Any:
    model = net()
    opt = torch.optim.Adam(model[2:].parameters(), lr=1e-2)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
    return model


@loop
def evaluation_between_a_batch_and_its_backward(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data, held_out = distribute(model, opt, rows(), rows(8, 4))
    for x, y in data:
        opt.zero_grad()
        with torch.no_grad():
            for value, _ in held_out:
                model(value)
        F.mse_loss(model(x), y).backward()
        opt.step()
    return model


@loop
def batches_taken_without_gradients(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    batches = iter(data)
    for _ in range(len(data)):
        with torch.no_grad():
            x, y = next(batches)
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
    return model


@loop
def weights_changed_by_hand(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
        for p in model.parameters():
            p.data.mul_(0.99)
        with torch.no_grad():
            model[0].weight.add_(0.01)
            model[2].bias[1:] = 0.25
            nn.init.constant_(model[2].bias[:1], 0.5)
    return model


@loop
def read_by_one_rank(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        opt.zero_grad()
        if dt.is_main():
            f"{model[0].weight.norm():.3f} {model[2].weight[0, 0]} {model}"
        loss = F.mse_loss(model(x), y)
        if dt.is_main():
            with torch.no_grad():
                model(x)
            copy.deepcopy(model.state_dict())
        loss.backward()
        if dt.is_main():
            model[0].weight.detach().cpu().numpy().sum()
            [p.tolist() for p in model.parameters()]
        opt.step()
    return model


@loop
def views_kept_over_steps(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    views = [p.detach() for p in model.parameters()]
    for x, y in data:
        opt.zero_grad()
        weight = sum(float(v.square().sum()) for v in views)
        (F.mse_loss(model(x), y) * weight).backward()
        opt.step()
    return {str(k): v for k, v in enumerate(views)}


@loop
def experts_that_not_every_rank_uses(distribute: Distribute) -> Any:
    model = nn.ModuleList(net(6 + k) for k in range(4))
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows(40, 5))
    for x, y in data:
        opt.zero_grad()
        where = (x[:, 0] * 7).long().abs() % 4
        parts = [((model[k](x[where == k]) - y[where == k]) ** 2).sum() for k in range(4) if (where == k).any()]
        (sum(parts) / len(x)).backward()
        opt.step()
    return model


@loop
def a_teacher_that_follows(distribute: Distribute) -> Any:
    model = net()
    teacher = copy.deepcopy(model).requires_grad_(False)
    opt = adam(model)
    model, teacher, opt, data = distribute(model, teacher, opt, rows())
    for x, y in data:
        opt.zero_grad()
        (F.mse_loss(model(x), y) + F.mse_loss(model(x), teacher(x))).backward()
        opt.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
    return {**model.state_dict(), **{f"teacher.{k}": v for k, v in teacher.state_dict().items()}}


def penalised(distribute: Distribute, penalty: Callable[[nn.Module], Any]) -> nn.Module:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        opt.zero_grad()
        (F.mse_loss(model(x), y) + penalty(model)).backward()
        opt.step()
    return model


@loop
def l1_in_the_loss(distribute: Distribute) -> Any:
    return penalised(distribute, lambda model: 0.01 * sum(p.abs().sum() for p in model.parameters()))


@loop
def elastic_net_in_the_loss(distribute: Distribute) -> Any:
    def penalty(model: nn.Module) -> Any:
        weights = torch.cat([p.flatten() for name, p in model.named_parameters() if name.endswith("weight")])
        return 0.02 * (0.5 * weights.norm(1) + 0.5 * weights.square().sum())

    return penalised(distribute, penalty)


@loop
def weight_decay_by_groups(distribute: Distribute) -> Any:
    def decayed(model: nn.Module) -> torch.optim.Optimizer:
        matrices, biases = [[p for p in model.parameters() if (p.dim() > 1) is many] for many in (True, False)]
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.Adam(groups, lr=1e-2)

    return simple(distribute, lambda model: None, decayed)


# Batches of 12 rows are divided equally over 2, 3 and 4 ranks: the mean of the ranks' losses is the global loss.


@loop
def plateau_on_local_losses(distribute: Distribute) -> Any:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.7, patience=0)
    model, opt, data, plateau = distribute(model, opt, rows(24, 12), plateau)
    rates = []
    for x, y in list(data) * 6:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        plateau.step(loss.detach())
        rates.append(opt.param_groups[0]["lr"])
    return {**model.state_dict(), "lr": torch.tensor(rates)}


@loop
def early_stop_on_local_losses(distribute: Distribute) -> Any:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.4)
    model, opt, data = distribute(model, opt, rows(48, 12))
    stop, taken = dt.EarlyStop(patience=3), 0
    for x, y in list(data) * 6:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        taken += 1
        if stop(loss):
            break
    return {**model.state_dict(), "taken": torch.tensor(float(taken))}


@loop
def decisions_on_global_losses(distribute: Distribute) -> Any:
    model = net()
    opt = torch.optim.Adam(model.parameters(), lr=5e-2)
    plateau = dt.schedule(opt, "plateau", warmup=3, patience=1, factor=0.5)
    model, opt, data, plateau = distribute(model, opt, rows(), plateau)
    stop, flags = dt.EarlyStop(patience=4), []
    for x, y in list(data) * 4:
        opt.zero_grad()
        errors = (model(x) - y).square()
        errors.mean().backward()
        opt.step()
        plateau.step()
        value = dt.mean(errors.mean())
        plateau.step(value)
        flags.append([dt.any(errors.max() > 0.5), dt.all(errors.max() < 0.3)])
        if stop(value.item()):
            break
    return {**model.state_dict(), "flags": torch.tensor(flags).double(), "lr": torch.tensor(plateau.get_last_lr())}


@loop
def momentum_that_cycles(distribute: Distribute) -> Any:
    model = net()
    trunk = torch.optim.SGD(model[:2].parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    head = torch.optim.AdamW(model[2:].parameters(), lr=1e-2)
    cyclic = torch.optim.lr_scheduler.CyclicLR(trunk, 1e-3, 1e-1, step_size_up=3, mode="triangular2")
    one = torch.optim.lr_scheduler.OneCycleLR(head, max_lr=2e-2, total_steps=11)
    model, trunk, head, data, cyclic, one = distribute(model, trunk, head, rows(), cyclic, one)
    for x, y in list(data) * 2:
        trunk.zero_grad()
        head.zero_grad()
        F.mse_loss(model(x), y).backward()
        for thing in (trunk, head, cyclic, one):
            thing.step()
    return {**model.state_dict(), "momentum": torch.tensor([trunk.param_groups[0]["momentum"]])}


@loop
def warm_up_then_decay(distribute: Distribute) -> Any:
    model = net()
    trunk, head = torch.optim.RMSprop(model[:2].parameters(), lr=1e-2), adam(model[2:])
    rise = torch.optim.lr_scheduler.LinearLR(trunk, 0.1, total_iters=3)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(trunk, 7)
    sched = torch.optim.lr_scheduler.SequentialLR(trunk, [rise, fall], [3])
    model, trunk, head, data, sched = distribute(model, trunk, head, rows(), sched)
    cosine = dt.schedule(head, "cosine", steps=10, warmup=3, batch=5, base_batch=10, scale="sqrt", floor=0.1)
    for x, y in list(data) * 2:
        trunk.zero_grad()
        head.zero_grad()
        F.mse_loss(model(x), y).backward()
        for thing in (trunk, head, sched, cosine):
            thing.step()
    return {**model.state_dict(), "lr": torch.tensor([sched.get_last_lr(), cosine.get_last_lr()])}


@loop
def the_first_weight_changed_through_data(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        model[0].weight.data.mul_(0.9)
        F.mse_loss(model(x.requires_grad_()), y).backward()  # so that the first layer's weight is saved
        opt.step()
        opt.zero_grad()
    return model


@loop
def tokens_weighted_with_ranks_without_rows(distribute: Distribute) -> Any:
    model = net()
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows(n=21, batch=4))
    plain = "step" not in vars(opt)
    for _ in range(2):
        for x, y in data:
            counted = (x[:, 0] > 0).double() + 1
            loss = (F.mse_loss(model(x), y, reduction="none").mean(1) * counted).sum() / counted.sum()
            (loss if plain else dt.weight(loss, counted.sum())).backward()
            opt.step()
            opt.zero_grad()
    return model


class Rounded(nn.Linear):
    """A layer that computes with a copy of its weight that it changes."""

    def forward(self, x: Tensor) -> Tensor:
        other = self.weight.to(x.dtype, copy=True)
        with torch.no_grad():
            other.copy_((other * 8).round() / 8)
        return F.linear(x, other, self.bias)


@loop
def copies_of_weights_that_are_changed(distribute: Distribute) -> Any:
    model = nn.Sequential(Rounded(8, 8), nn.Tanh(), Rounded(8, 8), nn.Tanh(), Rounded(8, 3)).to(DEVICE)
    opt = adam(model)
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        F.mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def seeds_set_again_for_every_run(distribute: Distribute) -> Any:
    """As in cross-validation: the order of the second run's data is that of its own seed."""
    kept = {}
    for number, seed in enumerate((7, 8, 8)):
        torch.manual_seed(seed)
        model = net()
        opt = adam(model)
        model, opt, data = distribute(model, opt, rows(batch=3 + number))
        for x, y in data:
            F.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        kept |= {f"{number}.{name}": value.clone() for name, value in model.state_dict().items()}
    return kept


@loop
def batches_of_lists(distribute: Distribute) -> Any:
    """Fields that are lists, made into tensors in the loop."""
    model = net()
    opt = adam(model)
    x = torch.randn(11, 8, generator=torch.Generator().manual_seed(4))
    whole = [(part.tolist(), part[:, :3].tolist()) for part in x.split(4)]
    model, opt, data = distribute(model, opt, whole)
    for a, b in data:
        F.mse_loss(model(torch.tensor(a).to(DEVICE)), torch.tensor(b).to(DEVICE)).backward()
        opt.step()
        opt.zero_grad()
    return model


class ByIdentity(torch.optim.Optimizer):
    """An optimizer that looks at the parameter objects: state of its own by identity, attributes, requires_grad."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.moved: dict[Tensor, Tensor] = {}
        for number, param in enumerate(model.parameters()):
            param.pace = 0.5 + 0.1 * number  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None and param.requires_grad:
                moved = self.moved.setdefault(param, torch.zeros_like(param)).mul_(0.9).add_(param.grad)
                param.add_(moved, alpha=-0.1 * param.pace)


@loop
def an_optimizer_that_knows_its_parameters(distribute: Distribute) -> Any:
    return simple(distribute, lambda model: None, ByIdentity)


@loop
def hooks_on_the_step(distribute: Distribute) -> Any:
    """A hook before the step clips by the norm of all gradients, one after it averages and bounds the weights."""
    model = net()
    opt = adam(model)
    shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def before(opt: torch.optim.Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_([p for group in opt.param_groups for p in group["params"]], 0.05)

    def after(*_: Any) -> None:
        with torch.no_grad():
            for name, param in model.named_parameters():
                shadow[name].lerp_(param, 0.5)
                param.clamp_(-0.3, 0.3)

    opt.register_step_pre_hook(before)
    model, opt, data = distribute(model, opt, rows())
    opt.register_step_post_hook(after)
    for x, y in data:
        F.mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return {**model.state_dict(), **{f"shadow {name}": value for name, value in shadow.items()}}


@loop
def a_step_replaced_on_the_object(distribute: Distribute) -> Any:
    """Somebody has put a function of his own in the place of `step`; a hook still runs once for each."""
    model = net()
    opt = adam(model)
    own, times = opt.step, torch.zeros(1)
    opt.step = partial(own)  # type: ignore[method-assign]
    opt.register_step_post_hook(lambda *_: times.add_(1))
    model, opt, data = distribute(model, opt, rows())
    for x, y in data:
        F.mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return {**model.state_dict(), "times": times}
