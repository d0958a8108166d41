"""Batches: results not assigned, loaders not given, batches drawn by hand, streams and evaluations divided or not."""

from __future__ import annotations

from tests.mistakes.table import Script

GIVEN = "model, optimizer, loader = dt.distribute(model, optimizer, loader)\n"
STEP = """
def step(x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
EPOCHS = """
for epoch in range(2):
    for x, y in loader:
        step(x, y)
"""
UNEVEN = "loader = DataLoader(data, batch_size=6, shuffle=True)\n"  # the last batch has 2 rows
DRAWN = ("every rank has another one", "def batches(): while True: yield get_batch()", "batches='own'")
TWICE = "would divide them twice"


def drawn(name: str, head: str, get_batch: str, before: str) -> Script:
    """A loop over batches that it draws by itself."""
    body = f"{head}\ndt.distribute(model, optimizer){STEP}\nfor number in range(6):\n    {get_batch}\n    step(x, y)\n"
    return Script(name=name, body=body, before=before, says=DRAWN)


SCRIPTS = [
    # What dt.distribute returns is not used, or the loader was not given.
    Script(
        name="the result of distribute is not assigned",
        body="dt.distribute(model, optimizer, loader)" + STEP + EPOCHS,
        before="right, every rank trained on all rows",
    ),
    Script(
        name="the loader is not given",
        body="dt.distribute(model, optimizer)" + STEP + EPOCHS,
        before="right, every rank trained on all rows",
    ),
    Script(
        name="the loader is not given, short last batch",
        body=UNEVEN + "dt.distribute(model, optimizer)" + STEP + EPOCHS,
        before="right, every rank trained on all rows",
    ),
    Script(
        name="the loader is not given, windows by hand",
        body="dt.distribute(model, optimizer)"
        + """
for epoch in range(3):
    for number, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
""",
        before="right, every rank trained on all rows",
    ),
    Script(
        name="the loader is not given, BatchNorm",
        body="""
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dt.distribute(model, optimizer)"""
        + STEP
        + EPOCHS,
        before="exit 0, running_var differs by 0.04",
    ),
    Script(
        name="statistics of a loader that is not given",
        body="dt.distribute(model, optimizer)\n"
        + "result = {'mean': torch.cat([x for x, _ in loader]).mean(0)}"
        + STEP
        + EPOCHS,
        before="right, every rank trained on all rows",
    ),
    Script(
        name="an evaluation in training mode, its loader not given",
        body="""
test = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = dt.distribute(model, optimizer, loader)
right = 0
"""
        + STEP
        + """
for x, y in loader:
    step(x, y)
    for u, v in test:
        right += int((model(u).argmax(1) == v).sum())
result = {"right": right}
""",
        before="right",
    ),
    Script(
        name="an evaluation in training mode, both not given",
        body="""
test = DataLoader(data, batch_size=4, shuffle=True)
dt.distribute(model, optimizer)
right = 0
"""
        + STEP
        + """
for epoch in range(2):
    for x, y in loader:
        step(x, y)
        u, v = next(iter(test))
        right += int((model(u).argmax(1) == v).sum())
    for u, v in test:
        right += int((model(u).argmax(1) == v).sum())
result = {"right": right}
""",
        before="right, every rank trained on all rows",
    ),
    Script(
        name="a loader made anew in every epoch",
        body=GIVEN
        + STEP
        + """
for epoch in range(3):
    loader = DataLoader(data, batch_size=5, shuffle=True)
    for x, y in loader:
        step(x, y)
""",
        before="right, every rank trained on all rows",
    ),
    Script(
        name="the first batch of a loader that is not given, each time",
        body="dt.distribute(model, optimizer)"
        + STEP
        + """
for _ in range(6):
    step(*next(iter(loader)))
""",
        before="right, every rank trained on all rows",
    ),
    Script(
        name="two loaders, zipped, not given",
        body="""
other = DataLoader(data, batch_size=4, shuffle=True)
dt.distribute(model, optimizer)
for (x, y), (u, v) in zip(loader, other):
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) + F.cross_entropy(model(u), v)).backward()
    optimizer.step()
""",
        before="right, every rank trained on all rows",
    ),
    Script(
        name="a loader that is not given, pulled ahead",
        body=UNEVEN
        + "dt.distribute(model, optimizer)"
        + STEP
        + """
def ahead(batches):
    last = None
    for batch in batches:
        if last is not None:
            yield last
        last = batch
    yield last
for epoch in range(2):
    for x, y in ahead(loader):
        step(x * 1.0, y)
for x, y in list(loader):
    step(x, y)
""",
        before="right, every rank trained on all rows",
    ),
    Script(
        name="a DistributedSampler, its loader not given",
        body="""
from torch.utils.data.distributed import DistributedSampler
loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data, dt.world(), dt.rank()))
dt.distribute(model, optimizer)"""
        + STEP
        + EPOCHS,
        before="exit 0, weights differ by 0.74",
        says=("every rank has another one",),
    ),
    # Batches drawn by hand.
    drawn(
        "torch.randint draws the batch",
        "",
        "at = torch.randint(0, 20, (5,)); x, y = xs[at], ys[at]",
        "exit 0, weights differ by 0.32",
    ),
    drawn(
        "numpy draws the batch",
        "import numpy; numpy.random.seed(0)",
        "at = numpy.random.randint(0, 20, 5); x, y = xs[at], ys[at]",
        "exit 0, weights differ by 0.98",
    ),
    drawn(
        "random draws the batch",
        "import random; random.seed(0)",
        "at = random.sample(range(20), 5); x, y = xs[at], ys[at]",
        "exit 0, weights differ by 1.0",
    ),
    Script(
        name="slices of tensors by hand",
        body="dt.distribute(model, optimizer)"
        + STEP
        + """
for epoch in range(2):
    for x, y in zip(xs.split(5), ys.split(5)):
        step(x, y)
""",
        before="right, every rank trained on all rows",
    ),
    Script(
        name="slices by hand, after a forward of noise",
        body="dt.distribute(model, optimizer)"
        + STEP
        + """
for x, y in zip(xs.split(5), ys.split(5)):
    if not optimizer.state:
        model(torch.randn(2, 4)), model(x)
    step(x, y)
""",
        before="right, every rank trained on all rows",
    ),
    Script(
        name="a drawn batch for a part of the model at a time",
        body="""
dt.distribute(model, optimizer)
for number in range(6):
    at = torch.randint(0, 20, (5,))
    optimizer.zero_grad()
    F.cross_entropy(model[2](model[1](model[0](xs[at]))), ys[at]).backward()
    optimizer.step()
""",
        before="exit 0, weights differ by 0.32",
        says=DRAWN,
    ),
    Script(
        name="a generator of drawn batches as the loader",
        body="""
def batches():
    while True:
        at = torch.randint(0, 20, (5,))
        yield xs[at], ys[at]
model, optimizer, loader = dt.distribute(model, optimizer, batches())
"""
        + STEP
        + """
for number, (x, y) in enumerate(loader):
    step(x, y)
    if number == 5:
        break
""",
        before="right",
    ),
    Script(
        name="a list of batches as the loader",
        body="loader = [*zip(xs.split(6), ys.split(6))]\n" + GIVEN + STEP + EPOCHS,
        before="right",
    ),
    Script(
        name="each rank draws its own",
        body="""
dt.distribute(model, optimizer, batches="own")
"""
        + STEP
        + """
for number in range(6):
    at = torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(number))
    at = at.chunk(dt.world())[dt.rank()]
    step(xs[at], ys[at])
""",
        before="a TypeError",
    ),
    Script(
        name="each rank draws its own, of other sizes",
        body="""
dt.distribute(model, optimizer, batches="own")
"""
        + STEP
        + """
for number in range(6):
    at = torch.randint(0, 20, (7,), generator=torch.Generator().manual_seed(number))
    at = at.tensor_split(dt.world())[dt.rank()]
    step(xs[at], ys[at])
""",
        before="a TypeError",
        says=("have drawn", "draw batches of one size"),
    ),
    Script(
        name="each rank draws its own, of other sizes, weighted",
        body="""
dt.distribute(model, optimizer, batches="own")
for number in range(6):
    at = torch.randint(0, 20, (7,), generator=torch.Generator().manual_seed(number))
    at = at.tensor_split(dt.world())[dt.rank()]
    optimizer.zero_grad()
    dt.weight(F.cross_entropy(model(xs[at]), ys[at]), len(at)).backward()
    optimizer.step()
""",
        before="a TypeError",
    ),
    Script(
        name="each rank draws its own, and a loader is given",
        body="dt.distribute(model, optimizer, loader, batches='own')",
        before="a TypeError",
        says=("one of the two",),
    ),
    # How a loader is walked.
    Script(
        name="itertools.cycle",
        body="import itertools\n"
        + UNEVEN
        + GIVEN
        + STEP
        + "for x, y in itertools.islice(itertools.cycle(loader), 10):\n    step(x, y)",
        before="right with 2 ranks; with 3 exit 0, weights differ by 0.33",
    ),
    Script(
        name="itertools.cycle, batches moved",
        body="import itertools\n"
        + UNEVEN
        + GIVEN
        + STEP
        + "for x, y in itertools.islice(itertools.cycle(loader), 10):\n    step(x * 1.0, y)",
        before="exit 0, weights differ by 0.33",
        says=("are used again",),
        worlds=(3,),
    ),
    Script(
        name="islice, next of iter and zip over given loaders",
        body="""
import itertools
other = DataLoader(data, batch_size=5, shuffle=True)
model, optimizer, loader, other = dt.distribute(model, optimizer, loader, other)
"""
        + STEP
        + """
for x, y in itertools.islice(loader, 3):
    step(x, y)
for _ in range(3):
    step(*next(iter(loader)))
for (x, y), (u, v) in zip(loader, other):
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) + F.cross_entropy(model(u), v)).backward()
    optimizer.step()
""",
        before="right",
    ),
    # Evaluations.
    Script(
        name="a test loader is given",
        body="""
test = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader, test = dt.distribute(model, optimizer, loader, test)
result = {"right": 0, "modes": 0}
"""
        + STEP
        + """
for epoch in range(2):
    for x, y in loader:
        step(x, y)
    with torch.no_grad():
        for x, y in test:
            result["right"] += int((model(x).argmax(1) == y).sum())
    model.eval()
    for x, y in test:
        result["modes"] += int((model(x).argmax(1) == y).sum())
    for x, y in test:  # the gradients of an attack
        F.cross_entropy(model(x), y).backward()
        result["modes"] += float(model[0].weight.grad.abs().sum())
        model.zero_grad()
    model.train()
""",
        before="exit 0, figures differ by 0.50",
    ),
    Script(
        name="the training loader is walked for an evaluation inside an epoch",
        body=GIVEN
        + STEP
        + """
result = {"loss": 0.0}
for epoch in range(2):
    for number, (x, y) in enumerate(loader):
        step(x, y)
        if number == 1:
            with torch.no_grad():
                result["loss"] += sum(float(F.cross_entropy(model(u), v)) for u, v in loader)
""",
        before="exit 0, the loss differs by 2e-4",
    ),
    Script(
        name="a frozen teacher in eval mode",
        body="""
teacher = nn.Linear(4, 3).requires_grad_(False).eval()
model, teacher, optimizer, loader = dt.distribute(model, teacher, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) + F.mse_loss(model(x), teacher(x))).backward()
    optimizer.step()
""",
        before="right",
    ),
    Script(
        name="training in eval mode",
        body="""
more = [*zip(xs.split(6), ys.split(6))]
model, optimizer, loader, more = dt.distribute(model, optimizer, loader, more)
model.eval()
"""
        + STEP
        + EPOCHS
        + """
for x, y in more:
    step(x, y)
""",
        before="right",
    ),
    Script(
        name="statistics of BatchNorm anew, over a given loader",
        body="""
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
        + GIVEN
        + STEP
        + EPOCHS
        + "torch.optim.swa_utils.update_bn(loader, model)\n",
        before="right",
    ),
    # Streams and datasets that divide themselves.
    Script(
        name="a stream that divides itself by rank",
        body="""
class Stream(IterableDataset):
    def __iter__(self):
        return iter([data[i] for i in range(dt.rank(), 20, dt.world())])
loader = DataLoader(Stream(), batch_size=5)
"""
        + GIVEN
        + STEP
        + EPOCHS,
        before="exit 0, weights differ by 1.2",
        says=(TWICE,),
    ),
    Script(
        name="a stream that divides itself by rank, not given",
        body="""
class Stream(IterableDataset):
    def __iter__(self):
        return iter([data[i] for i in range(dt.rank(), 20, dt.world())])
loader = DataLoader(Stream(), batch_size=5)
dt.distribute(model, optimizer)"""
        + STEP
        + EPOCHS,
        before="exit 0, weights differ by 1.1",
        says=(TWICE,),
    ),
    Script(
        name="a generator that divides itself by rank",
        body="""
def batches():
    for i in range(dt.rank(), 20, dt.world()):
        yield xs[i:i + 1].expand(4, 4), ys[i:i + 1].expand(4)
model, optimizer, loader = dt.distribute(model, optimizer, batches())
"""
        + STEP
        + "for x, y in loader:\n    step(x, y)",
        before="exit 0, weights differ by 1.3",
        says=(TWICE,),
    ),
    Script(
        name="a dataset that divides itself by rank",
        body="""
class Shard(Dataset):
    def __init__(self):
        self.x, self.y = xs[dt.rank()::dt.world()], ys[dt.rank()::dt.world()]
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.y[i]
loader = DataLoader(Shard(), batch_size=5)
"""
        + GIVEN
        + STEP
        + EPOCHS,
        before="exit 0, weights differ by 1.2",
        says=("leave rank and world size out of the dataset",),
        worlds=(2,),
    ),
]
