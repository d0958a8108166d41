"""Optimizers and schedulers: made late, forgotten, replaced, grouped in other orders on other ranks."""

from __future__ import annotations

from tests.mistakes.table import Script

LONG = (3,)
"""Only among the long tests, and by name."""
LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
TWO_LINES = "model, optimizer, loader = dt.distribute(model, optimizer, loader)\n"
GROUPS = """
named = dict(model.named_parameters())
names = sorted(named)
if dt.rank() % 2:
    names.reverse()  # a set of names: its order differs between processes
decay, rest = [n for n in names if "weight" in n], [n for n in names if "bias" in n]
groups = [{"params": [named[n] for n in decay], "weight_decay": 0.1}, {"params": [named[n] for n in rest], "lr": 0.02}]
"""
STATE = """
numbers = [named[n] for n in decay + rest]  # as optimizer.state_dict() counts: by position in the groups
state = optimizer.state_dict()["state"]
result = {f"{n} {k}": v for i, n in enumerate(decay + rest) for k, v in state[i].items()}
"""
REVERSED = """
params = list(model.parameters())
optimizer = torch.optim.{kind}(params[::-1] if dt.rank() == 1 else params, lr=0.05)
"""

LATE = "model, loader = dt.distribute(model, loader)\n"
ADAM = "optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)\n"
"""Made after the call: AdamW, whose steps tell a late start from a right one."""
TWO = """
other = nn.Linear(4, 3)
model, other, loader = dt.distribute(model, other, loader)
one, two = torch.optim.AdamW(model.parameters(), lr=0.05), torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
for epoch in range(2):
    for x, y in loader:
        one.zero_grad()
        two.zero_grad()
        F.cross_entropy(model(x) + other(x), y).backward()
        one.step()
        two.step()
result = dict(other.named_parameters())
"""

ORDERS = [
    Script(
        name="groups of parameters in another order on every second rank",
        body=GROUPS + "optimizer = torch.optim.AdamW(groups, lr=0.01)\n" + TWO_LINES + LOOP + STATE,
        before="exit 0, weights differ",
    ),
    Script(
        name="parameters reversed on one rank",
        body=REVERSED.format(kind="SGD") + TWO_LINES + LOOP,
        before="exit 0, weights differ",
        worlds=LONG,
    ),
    Script(
        name="named parameters reversed on one rank, state loaded and clipped",
        body="""
named, params = list(model.named_parameters()), list(model.parameters())
optimizer = torch.optim.AdamW(named[::-1] if dt.rank() == 1 else named, lr=0.05)
F.cross_entropy(model(xs), ys).backward()
optimizer.step()
optimizer.zero_grad()
"""
        + TWO_LINES
        + LOOP.replace(
            "    optimizer.step", "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n    optimizer.step"
        ),
        before="exit 0, weights differ",
        worlds=LONG,
    ),
    Script(
        name="a frozen and a sparse parameter, reversed on one rank",
        body="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4, sparse=True)
        self.kept, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)
    def forward(self, x):
        x = x.mul(3).long().clamp(0, 8)
        return self.head(self.kept(self.first(x).sum(1) + self.second(x).mean(1)))
model = Net()
"""
        + REVERSED.format(kind="SGD")
        + TWO_LINES
        + LOOP,
        before="exit 0, weights differ",
        worlds=LONG,
    ),
    Script(
        name="parameters of two models in one optimizer, from a set",
        body="""
other = nn.Linear(4, 3)
mine = {p for m in (other, model) for p in m.parameters()}
optimizer = torch.optim.SGD(sorted(mine, key=id, reverse=dt.rank() == 1), lr=0.1, momentum=0.9)
model, other, optimizer, loader = dt.distribute(model, other, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x) + other(x), y).backward()
    optimizer.step()
result = dict(other.named_parameters())
""",
        before="exit 0, weights differ",
        worlds=LONG,
    ),
    Script(
        name="a parameter is in another group on one rank",
        body="""
named = dict(model.named_parameters())
other = "0.bias" if dt.rank() == 1 else "2.bias"
groups = [[p for n, p in named.items() if n != other], [named[other]]]
optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}])
"""
        + TWO_LINES
        + LOOP,
        before="exit 0, weights differ",
        says=("optimizer 0 model 0 0.bias: rank 0 group 0, rank 1 group 1",),
    ),
    Script(
        name="groups are in another order on one rank",
        body="""
named = dict(model.named_parameters())
groups = [{"params": [p for n, p in named.items() if kind in n]} for kind in ("weight", "bias")]
optimizer = torch.optim.AdamW(groups[::-1] if dt.rank() == 1 else groups)
"""
        + TWO_LINES
        + LOOP,
        before="exit 0, weights differ",
        says=("optimizer 0 model 0 0.bias: rank 0 group 1, rank 1 group 0",),
        worlds=LONG,
    ),
    Script(
        name="modules made from a set",
        body="""
names = ["a", "b"][:: -1 if dt.rank() == 1 else 1]
model = nn.ModuleDict({name: nn.Linear(4, 3) for name in names})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = dt.distribute(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model["a"](x) + model["b"](x).tanh(), y).backward()
    optimizer.step()
""",
        before="refused in words of the library's own",
        says=("registered in another order", "'model 0 a.weight' where rank 1 has 'model 0 b.weight'", "sorted("),
    ),
    Script(
        name="parameters reversed on one rank, for an optimizer that needs them whole",
        body=REVERSED.format(kind="Adafactor") + TWO_LINES + LOOP,
        before="exit 0, weights differ",
    ),
]

LATER = [
    Script(name="the optimizer is not given", body=LATE + LOOP, before="exit 0, weights differ"),
    Script(
        name="the optimizer is made later", body=LATE + ADAM + LOOP + LOOP, before="exit 0, weights differ", worlds=LONG
    ),
    Script(
        name="the optimizer is given in a second call",
        body=LATE + ADAM + "optimizer = dt.distribute(optimizer)" + LOOP,
        before="right",
    ),
    Script(
        name="the optimizer is given between a backward and its step",
        body=LATE
        + ADAM
        + """
for i, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if i == 0:
        optimizer = dt.distribute(optimizer)
    optimizer.step()
""",
        before="right",
        worlds=LONG,
    ),
    Script(
        name="the optimizer is made later, and gradients are zeroed in place or kept",
        body=LATE
        + "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)\n"
        + LOOP.replace("zero_grad()", "zero_grad(set_to_none=False)")
        + LOOP.replace("    optimizer.zero_grad()\n", ""),
        before="exit 0, weights differ",
        worlds=LONG,
    ),
    Script(
        name="the optimizer is made later, for an optimizer that needs parameters whole",
        body=LATE + "optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)\n" + LOOP,
        before="exit 0, weights differ",
        worlds=LONG,
    ),
    Script(
        name="the optimizer is made later, and its scheduler, with clipping, hooks and a closure",
        body=LATE
        + ADAM
        + """
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
seen = []
optimizer.register_step_pre_hook(lambda *_: seen.append(float(model[0].weight.sum())))
optimizer.register_step_post_hook(lambda *_: seen.append(float(model[0].weight.sum())))
for x, y in loader:
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss
    assert optimizer.step(closure).shape == ()
    scheduler.step()
result = {"seen": torch.tensor(seen), "lr": scheduler.get_last_lr()[0]}
""",
        before="exit 0, weights differ",
    ),
    Script(name="two optimizers are made later", body=TWO, before="exit 0, weights differ"),
    Script(
        name="one of two optimizers is made later",
        body=TWO.replace("for epoch", "one = dt.distribute(one)\nfor epoch", 1),
        before="right",
        worlds=LONG,
    ),
    Script(
        name="a new optimizer for a second phase",
        body=TWO_LINES + LOOP + ADAM + LOOP,
        before="right",
    ),
    Script(
        name="two optimizers over the same parameters take turns",
        body=LATE
        + ADAM
        + """
other = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
for i, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    (other if i % 2 else optimizer).step()
""",
        before="exit 0, weights differ",
        worlds=LONG,
    ),
    Script(
        name="an optimizer around the one that was given",
        body="""
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner, self.count = inner, 0
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(self.slow, (p for g in self.param_groups for p in g["params"])):
                with torch.no_grad():
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)
"""
        + TWO_LINES
        + "outer = Lookahead(optimizer)\n"
        + LOOP.replace("optimizer.step", "outer.step"),
        before="right",
        worlds=LONG,
    ),
    Script(
        name="the optimizer is made later, with a loss scale",
        body=LATE
        + ADAM
        + """
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
""",
        before="exit 0, weights differ",
        worlds=LONG,
    ),
    Script(
        name="a layer is frozen for a while",
        body=TWO_LINES + "model[0].requires_grad_(False)" + LOOP + "model[0].requires_grad_(True)" + LOOP,
        before="RuntimeError of torch where rows are uneven",
    ),
    Script(
        name="a separate model of each rank's own",
        body=TWO_LINES
        + """
own = nn.utils.skip_init(nn.Linear, 4, 1)
for p in own.parameters():
    nn.init.constant_(p, 0.3)
plain = torch.optim.SGD(own.parameters(), lr=0.1)
for x in xs.split(7):
    plain.zero_grad()
    own(x).square().mean().backward()
    plain.step()
result = dict(own.named_parameters())
"""
        + LOOP,
        before="right",
        worlds=LONG,
    ),
    Script(
        name="no optimizer, and the update by hand",
        body=LATE
        + """
for x, y in loader:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
""",
        before="exit 0, weights differ",
        worlds=LONG,
    ),
    Script(
        name="gradients put into p.grad for an optimizer made later",
        body=LATE
        + ADAM
        + """
for x, y in loader:
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    for p, grad in zip(model.parameters(), grads):
        p.grad = grad
    optimizer.step()
""",
        before="exit 0, weights differ",
        worlds=LONG,
    ),
    Script(
        name="tied and sparse parameters of an optimizer made later",
        body="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
    def forward(self, x):
        return self.last(self.first(x + self.table(x[:, 0].mul(3).long().clamp(0, 8))).tanh())
model = Net()
"""
        + LATE
        + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        + LOOP,
        before="exit 0, weights differ",
        worlds=LONG,
    ),
    Script(
        name="an optimizer made later trains a new layer",
        body=LATE + "model[2] = nn.Linear(8, 3)\n" + ADAM + LOOP,
        before="exit 0, weights differ",
        says=("trains '2.weight'", "frozen or not in the model"),
        worlds=LONG,
    ),
    Script(
        name="what was frozen is trained before the first backward",
        body="model[0].requires_grad_(False)\n" + LATE + "model.requires_grad_(True)\n" + ADAM + LOOP,
        before="exit 0, weights differ",
        plans=("ddp", "zero2"),
        worlds=LONG,
    ),
    Script(
        name="an optimizer for a second phase trains what was frozen",
        body="model[0].requires_grad_(False)\n"
        + LATE
        + "optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)"
        + LOOP
        + "model.requires_grad_(True)\n"
        + ADAM
        + LOOP,
        before="exit 0, weights differ",
        says=("trains '0.weight'", "freeze afterwards"),
        worlds=LONG,
    ),
    Script(
        name="an optimizer made later trains what was frozen",
        body="model[0].requires_grad_(False)\n" + LATE + ADAM + LOOP + "model.requires_grad_(True)" + LOOP,
        before="exit 0, weights differ",
        says=("was frozen when dt.distribute was called", "freeze afterwards"),
    ),
    Script(
        name="an optimizer made later has parameters of no model given",
        body=LATE
        + """
other = nn.Linear(4, 3)
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
for x, y in loader:
    F.cross_entropy(model(x) + other(x), y).backward()
    optimizer.step()
""",
        before="exit 0, weights differ",
        says=("in no model given",),
    ),
    Script(
        name="an optimizer steps inside the backward",
        body=LATE
        + """
each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
for p in model.parameters():
    p.register_post_accumulate_grad_hook(lambda p: each[p].step())
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
""",
        before="exit 0, weights differ",
        says=("inside a backward", "after loss.backward()"),
        worlds=LONG,
    ),
    Script(
        name="LBFGS made later",
        body=LATE
        + """
optimizer = torch.optim.LBFGS(model.parameters())
for x, y in loader:
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
""",
        before="exit 0, weights differ",
        says=("LBFGS",),
        worlds=LONG,
    ),
]

HALVES = """
k = 2 if hasattr(dt, "plan") else 1  # batches of half the size, two to a step: the steps of whole ones
loader = DataLoader(data, batch_size=8 // k, shuffle=True)
"""
WINDOWS = HALVES + "model, optimizer, loader = dt.distribute(model, optimizer, loader, plan='accumulate=2')\n"
SCHEDULED = """
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
result = {"lr": scheduler.get_last_lr()[0]}
"""

ACCUMULATED = [
    Script(
        name="a scheduler is not given, under accumulate",
        body="scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)\n" + WINDOWS + SCHEDULED,
        before="exit 0, decays twice as often",
    ),
    Script(
        name="schedulers of schedulers are made later, under accumulate",
        body=WINDOWS
        + """
of = torch.optim.lr_scheduler
parts = [of.LinearLR(optimizer, 0.5, total_iters=2), of.CosineAnnealingWarmRestarts(optimizer, 3)]
scheduler = of.SequentialLR(optimizer, parts, milestones=[2])
"""
        + SCHEDULED,
        before="exit 0, decays twice as often",
        worlds=LONG,
    ),
    Script(
        name="the optimizer and its scheduler are made later, under accumulate",
        body=HALVES
        + "model, loader = dt.distribute(model, loader, plan='accumulate=2,clip=0.1')\n"
        + ADAM
        + "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)\n"
        + SCHEDULED.replace(
            "        optimizer.step",
            "        if k == 1:\n            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n        optimizer.step",
        ),
        before="exit 0, weights differ",
    ),
    Script(
        name="a scheduler of another optimizer, under accumulate",
        body=WINDOWS
        + """
own = nn.utils.skip_init(nn.Linear, 4, 1)
plain = torch.optim.SGD(own.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    plain.step()
    scheduler.step()
result = {"lr": scheduler.get_last_lr()[0] * 2.0**scheduler.last_epoch}
""",
        before="right",
        worlds=LONG,
    ),
    Script(
        name="several losses of one batch, under accumulate",
        body=WINDOWS
        + """
for x, y in loader:
    optimizer.zero_grad()
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    out.square().mean().backward()
    F.cross_entropy(model(x * 2), y).backward()
    optimizer.step()
""",
        before="right",
    ),
    Script(
        name="batches of two loaders in one step, under accumulate",
        body=HALVES
        + """
second = DataLoader(data, batch_size=8 // k)
model, optimizer, loader, second = dt.distribute(model, optimizer, loader, second, plan='accumulate=2')
for (x, y), (u, v) in zip(loader, second):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    F.cross_entropy(model(u), v).backward()
    optimizer.step()
""",
        before="right",
        worlds=LONG,
    ),
    Script(
        name="a loop that accumulates by hand, under accumulate",
        body=WINDOWS
        + """
for i, (x, y) in enumerate(loader):
    F.cross_entropy(model(x), y).backward()
    if (i + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        before="exit 0, half of the steps",
        says=("accumulates by hand too", "optimizer.step() after every batch"),
    ),
    Script(
        name="two optimizers are made later, under accumulate",
        body=TWO.replace("loader)\none", "loader, plan='accumulate=2')\none"),
        before="exit 0, weights differ",
        says=("with some of the parameters", "accumulate=2"),
        worlds=LONG,
    ),
]

GROUP = """
import tempfile, torch.distributed as dist
if not dist.is_initialized():  # one process
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
CHANGED = [
    Script(
        name="DistributedDataParallel after the call",
        body=TWO_LINES
        + GROUP
        + """
model = nn.parallel.DistributedDataParallel(model)
assert isinstance(model.module, nn.Sequential)
"""
        + LOOP
        + LOOP.replace("model(x)", "model.module(x)")
        + "model = model.module\n",
        before="exit 0, weights differ",
    ),
    Script(
        name="DistributedDataParallel after the call, around a model of its own and a part",
        body=TWO_LINES
        + GROUP
        + """
own = nn.parallel.DistributedDataParallel(nn.utils.skip_init(nn.Linear, 4, 1))
assert type(own).forward is nn.parallel.DistributedDataParallel.forward and "forward" not in vars(own)
model[0] = nn.parallel.DistributedDataParallel(model[0])
"""
        + LOOP,
        before="exit 0, weights differ",
        worlds=LONG,
    ),
    Script(
        name="the loop goes on with the DistributedDataParallel that was given",
        body=GROUP
        + "wrapped = nn.parallel.DistributedDataParallel(model)\n"
        + "_, optimizer, loader = dt.distribute(wrapped, optimizer, loader)\n"
        + LOOP.replace("model(x)", "wrapped(x)"),
        before="right",
        worlds=LONG,
    ),
    Script(
        name="DataParallel after the call",
        body=TWO_LINES + "wrapped = nn.DataParallel(model)" + LOOP.replace("model(x)", "wrapped(x)"),
        before="right on CPU",
        says=("DataParallel around a model", "take DataParallel out"),
        worlds=LONG,
    ),
    Script(
        name="FullyShardedDataParallel after the call",
        body=TWO_LINES
        + GROUP
        + """
from torch.distributed.fsdp import FullyShardedDataParallel
if hasattr(dt, "plan"):
    FullyShardedDataParallel(model, device_id=torch.device("cpu"))
"""
        + LOOP,
        before="RuntimeError of torch",
        says=("FullyShardedDataParallel around a model", "take FullyShardedDataParallel out"),
        worlds=LONG,
    ),
    Script(
        name="fully_shard after the call",
        body=TWO_LINES
        + GROUP
        + """
from torch.distributed.fsdp import fully_shard
fully_shard(model)
"""
        + LOOP,
        before="exit 0, nothing is trained",
        says=("DTensor", "fully_shard"),
    ),
    Script(
        name="fully_shard after the call, and the optimizer after it",
        body=LATE
        + GROUP
        + """
from torch.distributed.fsdp import fully_shard
fully_shard(model)
"""
        + ADAM
        + LOOP,
        before="exit 0, weights differ",
        says=("fully_shard",),
        worlds=LONG,
    ),
    Script(
        name="torch.compile after the call",
        body=TWO_LINES + "compiled = torch.compile(model, backend='eager')" + LOOP.replace("model(x)", "compiled(x)"),
        before="right",
        worlds=LONG,
    ),
    Script(
        name="the model is made float after the call",
        body=TWO_LINES + "model.float()\n" + LOOP.replace("model(x)", "model(x.float())"),
        before="RuntimeError of torch",
        says=("float32", "before dt.distribute"),
    ),
    Script(
        name="the model is made float in the middle",
        body=TWO_LINES
        + LOOP
        + "model.float()\n"
        + LOOP.replace("model(x)", "model(x.float())").replace("zero_grad()", "zero_grad(set_to_none=False)"),
        before="exit 0, weights differ under ddp",
        says=("float32", "before dt.distribute"),
        worlds=LONG,
    ),
    Script(
        name="the model is put on the meta device after the call",
        body=TWO_LINES
        + LOOP
        + """
model.to("meta")
"""
        + LOOP.replace("model(x), y", 'model(x.to("meta")), y.to("meta")'),
        before="RuntimeError of torch",
        says=("on meta", "before dt.distribute"),
    ),
    Script(
        name="the model is converted there and back",
        body=TWO_LINES + LOOP + "model.to(torch.float64).to('cpu')\n" + LOOP,
        before="right",
        worlds=LONG,
    ),
]

SCRIPTS = [
    Script(
        name="the two lines",
        body=TWO_LINES + LOOP,
        before="right",
    ),
    Script(
        name="the optimizer is not over the model's parameters",
        body="model, optimizer = dt.distribute(nn.Linear(2, 2), optimizer)",
        before="refused",
        says=("in no model given",),
    ),
    *ORDERS,
    *LATER,
    *ACCUMULATED,
    *CHANGED,
]
