"""What people write in loops beside the plain one: habits of other libraries, tutorials and notebooks."""

from __future__ import annotations

from tests.mistakes.table import Script

SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
NET = "model = nn.Sequential({}, nn.Tanh(), nn.Linear(8, 3))\n"
CALL = "model, optimizer, loader = dt.distribute(model, optimizer, loader)\n"
LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def right(name: str, body: str, before: str = "right", **rest: object) -> Script:
    """A script that gives the result of one process."""
    return Script(name=name, body=body, before=before, **rest)  # type: ignore[arg-type]


def refused(name: str, body: str, *says: str, before: str = "refused", **rest: object) -> Script:
    """A script that is refused in words."""
    return Script(name=name, body=body, before=before, says=says, **rest)  # type: ignore[arg-type]


SCRIPTS = [
    right(
        "the loss divided by the window, and a last window that is shorter",
        CALL
        + """
for i, (x, y) in enumerate(loader):
    (F.cross_entropy(model(x), y) / 3).backward()
    if (i + 1) % 3 == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    right("gradients are never set to zero", CALL + LOOP.replace("optimizer.zero_grad()", "pass")),
    right(
        "gradients are zeros, not None",
        CALL + LOOP.replace("zero_grad()", "zero_grad(set_to_none=False)"),
    ),
    right(
        "gradients are set to None by hand",
        CALL + LOOP.replace("optimizer.zero_grad()", "for p in model.parameters(): p.grad = None"),
    ),
    right(
        "the scheduler steps before the optimizer",
        """
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
model, optimizer, loader, scheduler = dt.distribute(model, optimizer, loader, scheduler)
for epoch in range(2):
    scheduler.step()
"""
        + LOOP.replace("\n", "\n    "),
    ),
    right(
        "the learning rate is set by hand",
        CALL + LOOP + "    for group in optimizer.param_groups:\n        group['lr'] *= 0.5\n",
    ),
    right(
        "clipping before there are gradients",
        CALL + "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n" + LOOP,
    ),
    right(
        "the loop leaves every epoch early",
        CALL + "for epoch in range(3):" + LOOP.replace("\n", "\n    ") + "    break\n",
    ),
    right("train() is never called after eval()", CALL + "model.eval()\n" + LOOP),
    right("forward is called by its name", CALL + LOOP.replace("model(x)", "model.forward(x)")),
    right("layers are called one by one", CALL + LOOP.replace("model(x)", "model[2](model[1](model[0](x)))")),
    right(
        "inputs that need a gradient, as for adversarial rows",
        CALL
        + """
for x, y in loader:
    x = x.clone().requires_grad_()
    F.cross_entropy(model(x), y).backward()
    near = (x + 0.1 * x.grad.sign()).detach()
    optimizer.zero_grad()
    F.cross_entropy(model(near), y).backward()
    optimizer.step()
""",
    ),
    right(
        "adversarial rows by autograd.grad",
        CALL
        + """
for x, y in loader:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    optimizer.zero_grad()
    F.cross_entropy(model((x + 0.1 * slope.sign()).detach()), y).backward()
    optimizer.step()
""",
    ),
    right(
        "a backward of each of two losses of a batch",
        CALL
        + LOOP.replace(
            "F.cross_entropy(model(x), y).backward()",
            "out = model(x)\n    F.cross_entropy(out, y).backward(retain_graph=True)\n"
            "    out.square().mean().backward()",
        ),
    ),
    right(
        "gradients by torch.func, put in place by hand",
        CALL
        + """
for x, y in loader:
    params = {name: p.detach() for name, p in model.named_parameters()}
    def loss_of(params):
        return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
    for (name, p), g in zip(model.named_parameters(), torch.func.grad(loss_of)(params).values()):
        p.grad = g
    optimizer.step()
""",
        plans=("ddp", "zero2"),
    ),
    right(
        "gradients by autograd.grad, put in place by hand",
        CALL
        + """
for x, y in loader:
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    for p, g in zip(model.parameters(), grads):
        p.grad = g
    optimizer.step()
""",
    ),
    right(
        "the best state is kept and put back",
        CALL
        + "import copy\nbest = copy.deepcopy(model.state_dict())\n"
        + LOOP
        + "model.load_state_dict(best)\n"
        + LOOP,
    ),
    right(
        "an average of weights by hand",
        CALL
        + "import copy\ntarget = copy.deepcopy(model)\n"
        + LOOP
        + """
    with torch.no_grad():
        for q, p in zip(target.parameters(), model.parameters()):
            q.mul_(0.9).add_(p, alpha=0.1)
model = target
""",
    ),
    right(
        "weights averaged by swa_utils",
        "averaged = torch.optim.swa_utils.AveragedModel(model)\n"
        + CALL
        + LOOP
        + "    averaged.update_parameters(model)\nmodel = averaged.module\n",
    ),
    right(
        "one batch is looked at before the loop",
        CALL + "x, y = next(iter(loader))\nresult = {'rows': 5}\n" + LOOP,
    ),
    right(
        "two loaders side by side",
        """
other = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=5)
model, optimizer, loader, other = dt.distribute(model, optimizer, loader, other)
for (x, y), (z,) in zip(loader, other):
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) + model(z).square().mean()).backward()
    optimizer.step()
""",
    ),
    right(
        "cycle() around the loader",
        CALL
        + """
from itertools import cycle, islice
for x, y in islice(cycle(loader), 6):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    ),
    right(
        "iter() and next() by hand",
        CALL
        + """
batches = iter(loader)
for step in range(7):
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(loader)
        x, y = next(batches)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
del batches
""",
    ),
    right(
        "a sampler of the user's own that draws from random",
        """
import random
random.seed(3)
class Shuffled(torch.utils.data.Sampler):
    def __iter__(self):
        order = list(range(20))
        random.shuffle(order)
        return iter(order)
    def __len__(self):
        return 20
loader = DataLoader(data, batch_size=5, sampler=Shuffled())
"""
        + CALL
        + "for epoch in range(2):"
        + LOOP.replace("\n", "\n    "),
    ),
    right(
        "a sampler that draws from a generator of its own",
        """
class Shuffled(torch.utils.data.Sampler):
    generator = torch.Generator().manual_seed(5)
    def __iter__(self):
        return iter(torch.randperm(20, generator=self.generator).tolist())
    def __len__(self):
        return 20
loader = DataLoader(data, batch_size=5, sampler=Shuffled())
"""
        + CALL
        + "for epoch in range(2):"
        + LOOP.replace("\n", "\n    "),
    ),
    refused(
        "a sampler whose generator is seeded by the rank",
        """
class Shuffled(torch.utils.data.Sampler):
    generator = torch.Generator().manual_seed(5 + dt.rank())
    def __iter__(self):
        return iter(torch.randperm(20, generator=self.generator).tolist())
    def __len__(self):
        return 20
loader = DataLoader(data, batch_size=5, sampler=Shuffled())
"""
        + CALL
        + LOOP,
        "generators",
        before="exit 0, rows lost and repeated",
    ),
    refused(
        "a dataset that every rank cut for itself",
        """
data = torch.utils.data.Subset(data, range(dt.rank(), 20, max(dt.world(), 2))) if dt.world() > 1 else data
data.indices = list(data.indices)[:6] if dt.world() > 1 else []
loader = DataLoader(data, batch_size=3)
"""
        + CALL
        + LOOP,
        "different",
    ),
    refused(
        "a list of two loaders",
        "dt.distribute(model, optimizer, [loader, DataLoader(data, batch_size=5)])",
        "DataLoader",
        before="taken for a loader",
    ),
    refused("a list of two optimizers", "dt.distribute(model, [optimizer])", "SGD", before="taken for a loader"),
    refused(
        "the model's parameters in place of an optimizer",
        "dt.distribute(model, model.parameters(), loader)",
        "generator",
        before="taken for a loader",
    ),
    refused("a data set in place of a loader", "dt.distribute(model, optimizer, data)", "TensorDataset"),
    refused(
        "a loss function that is no module", "dt.distribute(model, optimizer, loader, F.cross_entropy)", "function"
    ),
    right(
        "a loss function that is a module",
        "loss_of = nn.CrossEntropyLoss()\n"
        "model, optimizer, loader, loss_of = dt.distribute(model, optimizer, loader, loss_of)"
        + LOOP.replace("F.cross_entropy", "loss_of"),
    ),
    right(
        "spectral norm",
        NET.format("torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8))") + SGD + CALL + LOOP,
    ),
    right(
        "weight norm",
        NET.format("torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))") + SGD + CALL + LOOP,
    ),
    right(
        "pruned weights",
        "from torch.nn.utils import prune\nprune.l1_unstructured(model[0], 'weight', 0.3)\n" + SGD + CALL + LOOP,
    ),
    right(
        "a scripted model",
        "model = torch.jit.script(model)\n" + SGD + CALL + LOOP,
        plans=("ddp", "zero2"),
    ),
    right(
        "a layer whose size comes from its first rows",
        "model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 3))\nmodel(xs[:2])\n" + SGD + CALL + LOOP,
    ),
    refused(
        "a layer whose size is not known yet",
        NET.format("nn.LazyLinear(8)") + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n" + CALL + LOOP,
        "LazyLinear",
        before="a traceback",
    ),
    right(
        "a backward under autocast",
        CALL
        + LOOP.replace(
            "F.cross_entropy(model(x), y).backward()",
            "with torch.autocast('cpu', enabled=False):\n        loss = F.cross_entropy(model(x), y)\n"
            "    loss.backward()",
        ),
    ),
    right(
        "checkpointed activations, the old way",
        "from torch.utils.checkpoint import checkpoint\n"
        + CALL
        + LOOP.replace("model(x)", "checkpoint(model, x.requires_grad_(), use_reentrant=True)"),
    ),
    right(
        "hooks on modules",
        CALL + "seen = []\nmodel[0].register_full_backward_hook(lambda *_: seen.append(1))\n"
        "model[0].register_forward_hook(lambda *_: None)\n" + LOOP,
    ),
    right(
        "a closure",
        CALL
        + """
for x, y in loader:
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    ),
    right(
        "the sum of losses of rows, divided by their number",
        CALL
        + LOOP.replace(
            "F.cross_entropy(model(x), y)", "(F.cross_entropy(model(x), y, reduction='none').sum() / len(x))"
        ),
    ),
    right(
        "a loss of the model's own, in its output",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
    def forward(self, x, y):
        out = self.inner(x)
        return {"loss": F.cross_entropy(out, y), "logits": out}
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
        + CALL
        + LOOP.replace("F.cross_entropy(model(x), y)", "model(x=x, y=y)['loss']"),
    ),
    right(
        "an evaluation in the middle of an epoch",
        CALL
        + LOOP
        + """
    model.eval()
    with torch.no_grad():
        held_out = F.cross_entropy(model(xs), ys).item()
    model.train()
result = {'held out': held_out}
""",
    ),
    right(
        "weights decayed by hand in the loss",
        CALL
        + LOOP.replace(
            "F.cross_entropy(model(x), y)",
            "(F.cross_entropy(model(x), y) + 0.01 * sum(p.abs().sum() for p in model.parameters()))",
        ),
    ),
    right(
        "the step is left out where the loss is high, by what all ranks think",
        CALL
        + """
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if dt.mean(loss.detach()) < 1.2:
        optimizer.step()
""",
    ),
    refused(
        "the step is left out where the loss is high, by each rank's own",
        CALL
        + """
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if not dt.rank():
            optimizer.step()
""",
        "same batch",
        alone=True,
    ),
    refused(
        "only the first rank goes backward",
        CALL
        + LOOP.replace("    F.cross", "    loss = F.cross").replace(
            ".backward()", "\n    if dt.is_main():\n        loss.backward()"
        ),
        "rank 1",
        alone=True,
    ),
    refused(
        "each rank has other random data",
        "torch.manual_seed(dt.rank())\ndata = TensorDataset(torch.randn(20, 4), ys)\n"
        "loader = DataLoader(data, batch_size=5)\n" + CALL + LOOP,
        "different",
    ),
    right(
        "each rank has made other weights",
        "torch.manual_seed(dt.rank())\nwith torch.no_grad():\n    model[0].weight.normal_()\ntorch.manual_seed(0)\n"
        + CALL
        + LOOP,
    ),
    right("batches of one row", "loader = DataLoader(data, batch_size=1)\n" + CALL + LOOP),
    right(
        "batches that do not divide, the last of one row", "loader = DataLoader(data, batch_size=19)\n" + CALL + LOOP
    ),
    right(
        "a data loader with workers",
        "loader = DataLoader(data, batch_size=5, num_workers=1)\n" + CALL + LOOP,
        plans=("ddp",),
    ),
    right("a list of batches", "loader = [(xs[i:i + 5], ys[i:i + 5]) for i in range(0, 20, 5)]\n" + CALL + LOOP),
    right(
        "a batch sampler of the user's own",
        """
class Pairs(torch.utils.data.Sampler):
    def __iter__(self):
        yield from ([0, 1, 2], [3, 4], [5, 6, 7, 8], [9])
    def __len__(self):
        return 4
loader = DataLoader(data, batch_sampler=Pairs())
"""
        + CALL
        + LOOP,
    ),
    right(
        "a parameter that some ranks' rows do not use",
        """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(4, 3), nn.Linear(4, 3)
    def forward(self, x):
        return self.low(x) if x.mean() < 0.1 else self.high(x) + 0 * self.low(x)
model = Gate()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(xs[:4], ys[:4])] * 3
"""
        + CALL
        + LOOP.replace("model(x)", "(model.high if float(xs.mean()) > 9 else model.low)(x)"),
    ),
    refused(
        "a layer is drawn anew between two epochs",
        CALL + LOOP + "\nnn.init.normal_(model[2].weight)\n" + LOOP,
        "'2.weight' differs between ranks after step 4",
        "nn.init",
        before="exit 0, replicas apart by the size of the layer",
        plans=("ddp", "zero2"),
    ),
    right(
        "noise is added to weights, from a seed",
        CALL
        + """
noise = torch.Generator().manual_seed(3)
"""
        + LOOP
        + """
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=noise))
""",
    ),
    refused(
        "the learning rate follows each rank's own loss",
        CALL
        + """
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1 * loss.item()
""",
        "lr of group 0 of SGD differs between ranks",
        "dt.mean(loss)",
        before="exit 0, weights differ by 4e-3",
        plans=("ddp", "zero2"),
    ),
    refused(
        "a loss made of gradients, as in MAML",
        CALL
        + """
for x, y in loader:
    params = dict(model.named_parameters())
    inner = F.cross_entropy(model(x), y)
    grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads)}
    optimizer.zero_grad()
    F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y).backward()
    optimizer.step()
""",
        "torch.autograd.grad with create_graph=True",
        before="exit 0, weights differ by 0.05",
    ),
    right(
        "a product with the Hessian is looked at beside the loss",
        CALL
        + """
for x, y in loader:
    params = list(model.parameters())
    loss = F.cross_entropy(model(x), y)
    grads = torch.autograd.grad(loss, params, create_graph=True)
    torch.autograd.grad(sum(g.sum() for g in grads), params)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    ),
    right(
        "no optimizer at all: parameters are moved by hand",
        """
model, loader = dt.distribute(model, loader)
for x, y in loader:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
""",
    ),
    right(
        "a validation loss that is weighed, before a loss that is not",
        CALL
        + """
for x, y in loader:
    with torch.no_grad():
        dt.weight(F.cross_entropy(model(x[:1]), y[:1]), 1)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    ),
    refused(
        "one loss per row, and a gradient of ones",
        CALL + LOOP.replace(".backward()", ".backward(torch.ones(len(x)))").replace("y)", "y, reduction='none')"),
        "the loss is a sum over rows",
        before="exit 0, weights differ by 1.3",
        worlds=(2,),  # a rank with one row has nothing to refuse
    ),
    right(
        "one loss per row, and a gradient of shares",
        CALL
        + LOOP.replace(".backward()", ".backward(torch.full((len(x),), 1 / len(x)))").replace(
            "y)", "y, reduction='none')"
        ),
    ),
    refused(
        "the median of the rows' losses",
        CALL + LOOP.replace("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y, reduction='none').median()"),
        "median of all rows",
        before="exit 0, weights differ by 0.55",
        worlds=(2,),  # a rank with one row has nothing to refuse
    ),
    right(
        "an evaluation over a given loader between a batch and its backward, and a changed batch",
        CALL
        + """
held_out = dt.distribute(DataLoader(data, batch_size=3))
for x, y in loader:
    with torch.no_grad():
        list(held_out)
    optimizer.zero_grad()
    F.cross_entropy(model(x + 0), y).backward()
    optimizer.step()
""",
        before="refused",
    ),
]
