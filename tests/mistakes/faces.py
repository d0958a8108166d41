"""Strategies and DistributedPyTorch: the documents' listings in their printed order, and what people make of them."""

from __future__ import annotations

from tests.mistakes.table import Script

ALONE = """
from contextlib import nullcontext
from types import SimpleNamespace

class Alone:
    def __init__(self, *_, **__): self.iterator = SimpleNamespace(as_default=nullcontext)
    def scope(self): return nullcontext()
    def run(self, step, args=()): return step(*args).detach()
    def sync(self): pass
    setup = launch = barrier = join = lambda self, *_, **__: None

PLAIN = type(dt).__name__ == "Plain"
Strategy, DistributedPyTorch = (Alone, Alone) if PLAIN else (dt.Strategy, dt.DistributedPyTorch)

def step_of(model, optimizer, loss_fn=F.cross_entropy):
    def train_step(x, y):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss
    return train_step
"""
"""What the faces mean in one process, and a step."""

MODEL = """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
"""
MADE = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()
train_step = step_of(model, optimizer, loss_fn)
losses = []
"""
LOOP = """
for epoch in range(3):
    for x_batch, y_batch in dataset:
        with strategy.iterator.as_default():
            loss = strategy.run(train_step, args=(x_batch, y_batch))
    losses += [float(loss), float(loss.numpy()), loss.item()]
"""
END = """
strategy.sync()
result = dict(enumerate(losses))
"""


def inside(text: str) -> str:
    """Inside the scope."""
    return "with strategy.scope():" + text.replace("\n", "\n    ")


def under(variable: str, text: str, plan: str = "zero") -> str:
    """With a plan in a variable of the environment."""
    body = text.replace("\n", "\n    ")
    return (
        f"import os\nos.environ[{variable!r}] = {plan!r}\ntry:\n    {body}\nfinally:\n    del os.environ[{variable!r}]"
    )


def program(kind: str, *, model_inside: bool, loop_inside: bool) -> str:
    """A listing, as it is printed or in another order."""
    before = "" if model_inside else MODEL
    made = inside((MODEL if model_inside else "") + MADE + (LOOP if loop_inside else ""))
    data = "torch.manual_seed(1)\ndataset = DataLoader(data, batch_size=9, shuffle=True)"
    parts = [ALONE, data, before, f"strategy = Strategy({kind!r}, workers=4)", made, "" if loop_inside else LOOP, END]
    return "\n".join(parts)


PROGRAMS = [
    Script(
        name=f"{kind}, model {'inside' if model else 'before'}, loop {'inside' if loop else 'after'}",
        body=program(kind, model_inside=model, loop_inside=loop),
        before="refused; all made inside, the loop after: losses of this rank; server: weights differ by 1.4",
        plans=("ddp",),
    )
    for kind in ("mirrored", "server", "topk")
    for model in (False, True)
    for loop in (True, False)
]


def around(setting: str, body: str = LOOP, kind: str = "mirrored") -> str:
    """A listing in its printed order, with something else in it."""
    data = "dataset = DataLoader(data, batch_size=9, shuffle=True)"
    return "\n".join([ALONE, data, MODEL, setting, f"strategy = Strategy({kind!r})", inside(MADE + body), END])


SHARED = """
class Trainer:
    def __init__(self, model, optimizer): self.parts = {"run": step_of(model, optimizer)}
    def step(self, *args): return self.parts["run"](*args)
class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x): return self.model(x)
"""
HIDDEN = LOOP.replace("run(train_step", "run(Trainer(model, optimizer).step")


OTHERS = [
    Script(
        name="the mirrored listing under zero3",
        body=under("DISTRIBUTEDTORCH_PLAN", program("mirrored", model_inside=False, loop_inside=True)),
        before="refused: run() before scope()",
        plans=("ddp",),
    ),
    Script(
        name="no seed: the order of data is rank 0's",
        body=around("torch.manual_seed(dt.rank())" + MODEL),
        before="refused: run() before scope(); with the loop after it exit 0, weights differ by 0.47",
        plans=("ddp",),
    ),
    Script(
        name="no seed, model made in the scope, loop after it",
        body="\n".join(
            [
                ALONE,
                "torch.manual_seed(dt.rank())\ndataset = DataLoader(data, batch_size=9, shuffle=True)",
                "strategy = Strategy('mirrored')",
                inside(MODEL + MADE),
                LOOP,
                END,
            ]
        ),
        before="exit 0, losses differ by 0.08: each rank took rows of batches of its own",
        plans=("ddp",),
    ),
    Script(
        name="BatchNorm in a step",
        body=around("model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))")
        .replace("batch_size=9", "batch_size=6")
        .replace("range(3)", "range(2)"),
        before="refused: run() before scope()",
        plans=("ddp",),
    ),
    Script(
        name="batches drawn by hand",
        body=around(
            """
class Drawn:
    def __iter__(self):
        for rows in torch.randperm(len(xs)).split(7):
            yield xs[rows], ys[rows]
dataset = Drawn()
"""
        ),
        before="exit 0, weights differ by 0.78",
        plans=("ddp",),
    ),
    Script(
        name="batches drawn by hand beside layers that draw",
        body=around(
            """
class Drawn:
    def __iter__(self):
        for rows in torch.randperm(len(xs)).split(7):
            yield xs[rows], ys[rows]
dataset, net = Drawn(), nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
model = net
"""
        )
        + "\nmodel, result = None, {}",
        before="exit 0, each rank took rows of batches of its own",
        plans=("ddp",),
    ),
    Script(
        name="made-up data that is another on every rank",
        body=around("data = TensorDataset(xs + dt.rank(), ys)\ndataset = DataLoader(data, batch_size=9)"),
        before="exit 0, weights differ by 0.24",
        says=("different batches",),
        plans=("ddp",),
    ),
    Script(
        name="run() of batches that a DistributedSampler divided",
        body=around(
            """
if not PLAIN:
    sampler = torch.utils.data.DistributedSampler(data, dt.world(), dt.rank())
    dataset = DataLoader(data, batch_size=9, sampler=sampler)
"""
        ),
        before="exit 0, weights differ by 2.4",
        says=("different batches", "no DistributedSampler"),
        plans=("ddp",),
    ),
    *(
        Script(
            name=f"validation between training under {kind}, of tensors made on the way",
            body=around(
                "",
                """
def validate(x, y):
    return loss_fn(model(x * 1), y)
def train_step(x, y):
    optimizer.zero_grad()
    loss = loss_fn(model(x * 1), y)
    loss.backward()
    optimizer.step()
    return loss
for epoch in range(3):
    for x_batch, y_batch in dataset:
        loss = strategy.run(train_step, args=(x_batch, y_batch))
        losses += [float(strategy.run(validate, (xs[:7], ys[:7]))), float(strategy.run(validate, (xs[7:], ys[7:])))]
""",
                kind,
            ),
            before="refused: batches were taken ahead of their use",
            plans=("ddp",),
        )
        for kind in ("mirrored", "server")
    ),
    Script(
        name="a loss over tokens, weighted",
        body=around(
            "ys = ys.where(torch.arange(20) % 3 > 0, -100)\ndataset = DataLoader(TensorDataset(xs, ys), batch_size=9)",
            """
def train_step(x, y):
    x.mul_(1.0)
    optimizer.zero_grad()
    loss = dt.weight(F.cross_entropy(model(x), y, ignore_index=-100), int((y >= 0).sum()))
    loss.backward()
    optimizer.step()
    return loss
"""
            + LOOP,
        ),
        before="right weights, this rank's losses",
        plans=("ddp",),
    ),
    Script(
        name="a step that returns several numbers",
        body=around(
            "",
            """
def several(x, y):
    loss = train_step(x, y)
    hits = (model(x).argmax(1) == y).double()
    return {"loss": loss, "hits": (hits.mean(), hits.mean().item(), None, "text", True)}
Alone.run = lambda self, step, args=(): step(*args)
for x_batch, y_batch in dataset:
    found = strategy.run(several, args=(x_batch, y_batch))
    assert found["hits"][2:] == (None, "text", True) and type(found["hits"][1]) is float
    losses += [found["loss"].item(), *found["hits"][:2]]
""",
        ),
        before="exit 0, this rank's numbers",
        plans=("ddp",),
    ),
    Script(
        name="a step that returns a count",
        body=around(
            "",
            LOOP.replace("run(train_step", "run(lambda x, y: (train_step(x, y), len(x))[0]")
            + """
def hits(x, y):
    return (model(x).argmax(1) == y).sum()
strategy.run(hits, (xs, ys))
""",
        ),
        before="exit 0, this rank's count",
        says=("the step returned a whole number", "return a mean"),
        plans=("ddp",),
    ),
    Script(
        name="a step that returns a bool about its own rows",
        body=around(
            "Alone.run = lambda self, step, args=(): step(*args)",
            "strategy.run(train_step, (xs, ys))\nstrategy.run(lambda x: bool(x.sum() > xs.sum()), (xs,))",
        ),
        before="exit 0, this rank's answer",
        says=("another bool on each rank", "dt.any(flag)"),
        plans=("ddp",),
    ),
    Script(
        name="run() with a tensor for its arguments",
        body=around("", "if not PLAIN: strategy.run(train_step, args=(xs))\n"),
        before="failed: the step got each row as an argument",
        says=("a Tensor as args",),
        plans=("ddp",),
    ),
    Script(
        name="run() of a step without an optimizer",
        body=ALONE + "strategy = Strategy('mirrored')\nwith strategy.scope():\n    strategy.run(lambda x: x, (xs,))",
        before="refused: run() before scope()",
        says=("for which no optimizer is known",),
        plans=("ddp",),
    ),
    Script(
        name="an optimizer made before the scope",
        body=ALONE
        + """
dataset, loss_fn, losses, train_step = loader, F.cross_entropy, [], step_of(model, optimizer)
strategy = Strategy("mirrored")
"""
        + inside(LOOP)
        + END,
        before="refused: scope() made no optimizer",
        plans=("ddp",),
    ),
    Script(
        name="two models and two optimizers",
        body=around(
            """
first, second = nn.Linear(4, 5), nn.Linear(5, 3)
model = nn.ModuleList([first, second])
""",
            """
optimizer = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
other = torch.optim.Adam(first.parameters(), lr=0.01)
def train_step(x, y):
    loss = F.cross_entropy(second(first(x)), y)
    loss.backward()
    for one in (other, optimizer):
        one.step()
        one.zero_grad()
    return loss
"""
            + LOOP,
        ),
        before="refused: run() before scope()",
        plans=("ddp",),
    ),
    Script(
        name="a second model and optimizer, made after the first run",
        body=around(
            "",
            LOOP
            + """
torch.manual_seed(5)
second = nn.Linear(3, 3)
after = torch.optim.SGD(second.parameters(), lr=0.1)
dataset = DataLoader(data, batch_size=9)
both = nn.ModuleList([model, second])
def train_step(x, y):
    after.zero_grad()
    loss = loss_fn(second(model(x).detach()), y)
    loss.backward()
    after.step()
    return loss
"""
            + LOOP,
        )
        + "\nmodel = both",
        before="refused: run() before scope()",
        plans=("ddp",),
    ),
    *(
        Script(
            name=f"a wrapper that the step does not use, under {kind}",
            body=around(SHARED + "unused = Wrapper(model)", kind=kind),
            before="refused: run() before scope()",
            plans=("ddp",),
        )
        for kind in ("mirrored", "server")
    ),
    Script(
        name="a wrapper, and a step that names nothing",
        body=around(SHARED + "inner = model\nmodel = Wrapper(inner)", HIDDEN, "server"),
        before="refused: run() before scope()",
        plans=("ddp",),
        worlds=(3,),
    ),
    Script(
        name="layers of the model in another one, and a step that names nothing",
        body=around(SHARED + "features = nn.Sequential(*list(model.children())[:-1])", HIDDEN),
        before="refused: run() before scope()",
        plans=("ddp",),
        worlds=(3,),
    ),
    Script(
        name="two wrappers, and a step that names nothing",
        body=around(SHARED + "one, two = Wrapper(model), Wrapper(model)", HIDDEN),
        before="refused: run() before scope()",
        says=("two models have the optimizer's parameter", "by its own name in the step"),
        plans=("ddp",),
        worlds=(3,),
    ),
    Script(
        name="two wrappers, and a step that names one, in a loop after the scope",
        body=ALONE
        + MODEL
        + SHARED
        + "dataset, one, two = loader, Wrapper(model), Wrapper(model)\nstrategy = Strategy('mirrored')\n"
        + inside(MADE)
        + "\ntrain_step = step_of(two, optimizer)"
        + LOOP
        + END,
        before="refused: scope() made no model",
        plans=("ddp",),
    ),
    Script(
        name="a scheduler in the scope",
        body=around(
            "",
            "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)"
            + LOOP.replace("    losses +=", "    scheduler.step()\n    losses +="),
        ),
        before="refused: run() before scope()",
        plans=("ddp",),
    ),
    Script(
        name="a step that takes its batches itself",
        body=around(
            "",
            """
batches = iter(dataset)
losses += [float(strategy.run(lambda: train_step(*next(batches)))) for _ in range(2)]
""",
        ),
        before="refused: run() before scope()",
        plans=("ddp",),
    ),
    Script(
        name="run() under a loader that dt.distribute has divided",
        body=around(
            "model, loader = dt.distribute(model, DataLoader(data, batch_size=6))",
            LOOP.replace("in dataset", "in loader"),
        ),
        before="refused: run() before scope()",
        says=("different batches", "no loader that dt.distribute returned"),
        plans=("ddp",),
    ),
    *(
        Script(
            name=f"sync() under {plan} makes replicas agree that did not",
            body=under(
                "DISTRIBUTEDTORCH_PLAN",
                around("", LOOP)
                + """
def agree():
    mine = torch.cat([p.detach().view(-1) for p in model.parameters()])
    return dt.all(bool((dt.total(mine) / dt.world() - mine).abs().max() < 1e-12))
strategy.run(train_step, (xs[:8], ys[:8]))
before = agree()
strategy.sync()
result, model = {"before": PLAIN or before, "after": agree()}, None
if not PLAIN: result["before"] = not before
""",
                plan,
            ),
            before="exit 0, sync() was a barrier: replicas differed",
            plans=("ddp",),
        )
        for plan in ("local(every=100)", "server(push=updates,every=100)", "server(staleness=4)")
    ),
    Script(
        name="sync() at every epoch under server",
        body=around("", LOOP + "    strategy.sync()\n", kind="server"),
        before="exit 0, weights differ by 1.4, and between ranks",
        plans=("ddp",),
    ),
]


EPOCHS = """
dist = DistributedPyTorch({call})
dist.setup(model, optimizer, device)
for epoch in range(num_epochs):
    dist.launch()
    for inputs, labels in train_loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
    dist.barrier()
{join}
"""
ENDS = {"after": "dist.join()", "inside": "    dist.join()"}
ACCURACY = """
if PLAIN:
    def accuracy(model, loader):
        with torch.no_grad():
            return sum(int((model(x).argmax(1) == y).sum()) for x, y in loader) / len(loader.dataset)
else:
    accuracy = dt.accuracy
result = {"accuracy": accuracy(model, test_loader), "again": accuracy(model, test_loader)}
"""
FORCE = """
if not PLAIN:
    from distributedtorch.run import RUN
    assert str(RUN.plan) == {plan!r}, RUN.plan
"""


def listing(*loops: str, ends: str = "after", plan: str = "zero3") -> str:
    """The documents' program: loops one after the other on the same objects, and then the test accuracy."""
    given = "device, criterion, num_epochs = torch.device('cpu'), nn.CrossEntropyLoss(), 2"
    loader = """
train_loader = DataLoader(data, batch_size=9, shuffle=True)
test_loader = DataLoader(TensorDataset(torch.randn(31, 4), torch.randint(0, 3, (31,))), batch_size=7)
"""
    program = [EPOCHS.format(call=call, join=ENDS[ends]) for call in loops]
    return "\n".join([ALONE, given, loader, *program, FORCE.format(plan=plan), ACCURACY])


LISTINGS = [
    *(
        Script(
            name=f"the listing under {' and then '.join(loops) or 'ddp'}, join() {ends} the loop",
            body=listing(*(f'"{word}"' if word else "" for word in loops), ends=ends, plan=plan),
            before="right",
            plans=("ddp",),
        )
        for loops, plan in ((("",), "ddp"), (("", "zero"), "zero3"))
        for ends in ("after", "inside")
    ),
    *(
        Script(
            name=f"the listing's strategy from {name}",
            body=under(name, listing("", ends="inside")),
            before="right",
            plans=("ddp",),
        )
        for name in ("DISTRIBUTEDTORCH_PLAN", "DISTRIBUTEDTORCH_RUN_PLAN")
    ),
    *(
        Script(
            name=f"the ZeRO listing as it is printed, without loss and backward, its strategy from {source}",
            body=body.replace("loss = criterion", "# ").replace("loss.backward()", ""),
            before="refused",
            says=("optimizer.step() with no gradient", "compute the loss and call loss.backward()"),
            plans=("ddp",),
        )
        for source, body in (
            ("the call", listing("'zero'")),
            ("the environment", under("DISTRIBUTEDTORCH_PLAN", listing(""))),
            ("the command line", under("DISTRIBUTEDTORCH_RUN_PLAN", listing("", ends="inside"))),
        )
    ),
]

SCRIPTS = [*PROGRAMS, *OTHERS, *LISTINGS]
