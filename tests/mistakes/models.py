"""Models: pickled and copied whole, with gaps and empty parts, seen by other tools."""

from __future__ import annotations

from tests.mistakes.table import Script

TWO_LINES = "model, optimizer, loader = dt.distribute(model, optimizer, loader)"
LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
PICKLED = """
import io, pickle
def pickled(thing):
    data = pickle.dumps(thing)
    assert b"distributedtorch" not in data
    return pickle.loads(data)
def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    assert b"distributedtorch" not in file.getvalue()
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)
def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert list(one) == list(other)
    assert all(torch.equal(one[k], other[k]) for k in one)
"""

SCRIPTS = [
    Script(
        name="the whole model is pickled before and after steps",
        body=PICKLED
        + TWO_LINES
        + """
same(pickled(model), model)
"""
        + LOOP
        + """
twin = saved(model)
same(twin, model)
assert type(next(twin.parameters())) is nn.Parameter
assert not vars(twin).keys() - vars(nn.Sequential()).keys(), vars(twin).keys()
result = {"out": twin(xs)}
""",
        before="zero3: cannot pickle weakref",
    ),
    Script(
        name="the whole model is pickled after an evaluation",
        body=PICKLED
        + """
held = DataLoader(data, batch_size=4)
model, optimizer, loader, held = dt.distribute(model, optimizer, loader, held)
for epoch in range(2):"""
        + LOOP.replace("\n", "\n    ")
        + """
    with torch.no_grad():
        for x, y in held:
            model(x)
            twin = saved(model)
    same(twin, model)
result = {"out": saved(model)(xs)}
""",
        before="every plan: cannot pickle a local function",
    ),
    Script(
        name="the whole model is pickled on rank 0 only",
        body=PICKLED
        + TWO_LINES
        + LOOP
        + """
if dt.is_main():
    same(saved(model), model)
    same(pickled(model[0]), model[0])
"""
        + LOOP,
        before="zero3: cannot pickle weakref",
    ),
    Script(
        name="copies of the model, deep and shallow",
        body="import copy\n"
        + PICKLED
        + TWO_LINES
        + LOOP
        + """
deep, shallow, layer = copy.deepcopy(model), copy.copy(model), copy.deepcopy(model[2])
same(deep, model)
same(shallow, model)
same(layer, model[2])
with torch.no_grad():
    result = {"deep": deep(xs), "shallow": shallow(xs), "layer": layer(torch.ones(8))}
same(pickled(deep), model)
same(pickled(shallow), model)
"""
        + LOOP,
        before="right",
    ),
    Script(
        name="the optimizer is pickled whole",
        body=PICKLED
        + TWO_LINES
        + LOOP
        + """
model2, optimizer2 = pickled((model, optimizer))
same(model2, model)
state = optimizer2.state_dict()["state"]
result = {str(k): v["momentum_buffer"] for k, v in state.items()}
for _ in range(3):
    optimizer2.zero_grad()
    F.cross_entropy(model2(xs), ys).backward()
    optimizer2.step()
result |= {"went on": model2(xs)}
""",
        before="zero: pieces of the state",
    ),
    Script(
        name="a deep copy computes with parameters of its own",
        body="import copy\n"
        + PICKLED
        + """
model, optimizer, loader = dt.distribute(model.float(), optimizer, loader, plan="bf16,recompute")
teacher, many = copy.deepcopy(model), torch.randn(4, 4, dtype=torch.float32)
before = teacher(many).detach().clone()
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x.float()), y).backward()
    optimizer.step()
assert torch.equal(teacher(many), before)
assert not torch.equal(saved(model)(many), before)
same(saved(model), model)
model = None
""",
        before="silent: the copy computed with the parameters of the model",
    ),
    Script(
        name="a copy that trains on batch statistics of its own",
        body="import copy\n"
        + PICKLED
        + """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
        + TWO_LINES
        + """
teacher = copy.deepcopy(model)
for x, y in loader:
    with torch.no_grad():
        target = copy.deepcopy(teacher)(x)
    optimizer.zero_grad()
    out = model(x)
    (F.cross_entropy(out, y) + F.mse_loss(out, target)).backward()
    optimizer.step()
    with torch.no_grad():
        for old, new in zip(teacher.parameters(), model.parameters()):
            old.lerp_(new, 0.5)
twin = saved(teacher)
same(twin, teacher)
assert "forward" not in vars(twin[1])
result = {"twin": twin.eval()(xs)}
""",
        before="right",
    ),
    Script(
        name="modules that say themselves how they are copied and pickled",
        body="import copy, torch.fx\nfrom torch.nn.utils.parametrizations import weight_norm\n"
        + PICKLED
        + """
class Picky(nn.Linear):
    def __getstate__(self):
        return {**self.__dict__, "said": 1}
    def __deepcopy__(self, memo):
        twin = Picky(self.in_features, self.out_features)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(dict(self.__dict__), memo))
        return twin
import __main__
__main__.Picky, Picky.__module__, Picky.__qualname__ = Picky, "__main__", "Picky"
model = nn.Sequential(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.Tanh())), Picky(8, 8), nn.Linear(8, 3))
normed = weight_norm(nn.Linear(4, 4))
optimizer = torch.optim.SGD([*model.parameters(), *normed.parameters()], lr=0.1, momentum=0.9)
held = DataLoader(data, batch_size=4)
model, normed, optimizer, loader, held = dt.distribute(model, normed, optimizer, loader, held)
for x, y in loader:
    with torch.no_grad():
        [model(normed(x)) for x, _ in held]
    optimizer.zero_grad()
    F.cross_entropy(model(normed(x)), y).backward()
    optimizer.step()
twin = saved(model)
same(twin, model)
assert twin[1].said == 1
deep, deep_normed = copy.deepcopy((model, normed))
same(deep, model)
same(deep_normed, normed)
for one in [*deep.modules(), *deep_normed.modules(), *twin.modules()]:
    assert not any(hooks for name, hooks in vars(one).items() if "_forward" in name), vars(one)
    assert not {"__getstate__", "__reduce_ex__", "__deepcopy__", "forward"} & vars(one).keys(), vars(one).keys()
result = {"deep": deep(deep_normed(xs)), "twin": twin(xs)}
""",
        before="not pickled: a local function",
    ),
    Script(
        name="what else holds a model is pickled",
        body="import functools\n"
        + PICKLED
        + """
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
model, optimizer, loader, scheduler, plateau = dt.distribute(model, optimizer, loader, scheduler, plateau)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    scheduler.step()
plateau.step(1.0)
twin, again, later, rates, call = saved((model, optimizer, scheduler, plateau, functools.partial(model.forward)))
same(twin, model)
assert call.func.__self__ is twin and later.optimizer is again and again.param_groups[0]["params"][0] is twin[0].weight
assert later.state_dict().keys() == scheduler.state_dict().keys() and "__getstate__" not in scheduler.state_dict()
later.step()
rates.step(2.0)
result = {"call": call(xs), "lr": later.get_last_lr()[0]}
""",
        before="zero: pieces of the optimizer's state; after accumulation: not pickled",
    ),
    Script(
        name="part of a model is pickled",
        body=PICKLED
        + TWO_LINES
        + LOOP
        + """
weight, bias, layer = saved((model[2].weight, model[2].bias, model[2]))
assert type(weight) is nn.Parameter and weight is layer.weight and weight.requires_grad
result = {"weight": weight, "bias": bias, "layer": layer(torch.ones(8))}
""",
        before="zero3: not pickled",
    ),
    Script(
        name="the model's memory is shared with other processes",
        body=TWO_LINES
        + LOOP
        + """
model.share_memory()
"""
        + LOOP,
        before="zero: killed by SIGSEGV",
    ),
    Script(
        name="the model's memory is shared with other processes where ranks share it",
        body="""
model, optimizer, loader = dt.distribute(model, optimizer, loader, plan="share")
"""
        + LOOP
        + """
model.share_memory()
with torch.no_grad():
    model[2].bias.add_(1)
"""
        + LOOP,
        before="killed by SIGSEGV; through a queue: exit 0, weights differ by 0.15",
        plans=("zero2",),
    ),
    Script(
        name="the model is handed to a process that is being started",
        body=TWO_LINES
        + LOOP
        + """
import multiprocessing.context as context, os, torch.multiprocessing
from multiprocessing.reduction import ForkingPickler
class Started:
    def __init__(self):
        self.files = []
    def duplicate_for_child(self, file):
        self.files.append((file, os.fstat(file).st_ino))
        return file
    @staticmethod
    def DupFd(file):
        return file
started = Started()
context.set_spawning_popen(started)
try:
    ForkingPickler.dumps(model)
finally:
    context.set_spawning_popen(None)
assert all(os.fstat(file).st_ino == number for file, number in started.files)
""",
        before="zero3: ValueError: bad value(s) in fds_to_keep",
    ),
    Script(
        name="the model is pickled in a thread",
        body=PICKLED
        + TWO_LINES
        + LOOP
        + """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as beside:
    beside.submit(pickled, model).result()
""",
        before="not pickled",
        says=("parameter '", "a thread beside training"),
        plans=("zero3",),
    ),
    Script(
        name="a forked process runs the model",
        body=TWO_LINES
        + LOOP
        + """
import os
ear, mouth = os.pipe()
child = os.fork()
if not child:
    try:
        model(xs)
    except dt.UsageError as error:
        os.write(mouth, str(error).encode())
    os._exit(0)
os.close(mouth)
os.waitpid(child, 0)
with open(ear) as file:
    said = file.read()
if said:
    raise dt.UsageError(said)
""",
        before="zero3: values of several steps, or a wait for ever",
        says=("a process forked from a rank", "copy.deepcopy(model)"),
        plans=("zero3",),
    ),
    Script(
        name="lists of modules with gaps",
        body="""
class Gaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), None, None, nn.Linear(8, 8), nn.ModuleList(), nn.Linear(8, 8)])
        self.named = nn.ModuleDict({"head": nn.Linear(8, 3), "aux": None, "none": nn.Sequential()})
        self.chain = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.chain.register_module("gap", None)
        self.again = self.layers[3]
        self.register_parameter("scale", None)
        self.register_buffer("shift", None)
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.free = nn.ParameterList([nn.Parameter(torch.ones(8)), None, nn.Parameter(torch.zeros(8)), 2.0])
        self.words = nn.ParameterDict({"a": nn.Parameter(torch.ones(8)), "b": None})
        self.empty = nn.Parameter(torch.zeros(0))
    def forward(self, x):
        for layer in self.layers:
            x = x if layer is None or not isinstance(layer, nn.Linear) else layer(x).tanh()
        x = self.norm(self.again(x) * self.free[0] + self.free[2] * self.free[3] + self.words["a"])
        for part in self.chain.children():
            x = part(x)
        return self.named["head"](x)
model = Gaps()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""
        + TWO_LINES
        + LOOP,
        before="zero3 and recompute: AttributeError in the library",
    ),
]
