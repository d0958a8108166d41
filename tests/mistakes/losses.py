"""Losses: sums, means over uneven units, roots of means, weights said by hand; batches whose rows are not first."""

from __future__ import annotations

from tests.mistakes.table import Script

GIVEN = "model, optimizer, loader = dt.distribute(model, optimizer, DataLoader(data, batch_size={}, shuffle=True))\n"
NORM = """
first, last = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh()], [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)]
model = nn.Sequential(*first, *last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
WAVES = """
first = [nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2, bias=False), nn.BatchNorm1d(3)]
model = nn.Sequential(*first, nn.Tanh(), nn.Flatten(), nn.Linear(9, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
CAPTIONS = """
model, optimizer, loader = dt.distribute(model, optimizer, DataLoader(data, {batch}))
for _ in range(2):
    for x, y in loader:
        out, tokens = model(x), (x[:, 0] > 0).double() * 3 + {least}
        loss = (F.cross_entropy(out, y, reduction="none") * tokens).sum() / tokens.sum()
        dt.weight(loss, tokens.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def loop(batch: int, loss: str, before: str = "") -> str:
    """A script that trains on a loss, written with `x`, `y` and `out`."""
    lines = [*before.splitlines(), f"loss = {loss}", "loss.backward()", "optimizer.step()", "optimizer.zero_grad()"]
    head = GIVEN.format(batch) + "for x, y in loader:\n    out = model(x)\n"
    return head + "".join(f"    {line}\n" for line in lines)


HOT = "hot = F.one_hot(y, 3).double()"
EACH = "each = F.cross_entropy(out, y, reduction='none')"
DICE = HOT + "\np = out.softmax(1)"
RIGHT = {
    "a negated mean": ("-out[range(len(y)), y].mean()", ""),
    "half a mean": ("0.5 * F.mse_loss(out, hot)", HOT),
    "a mean over a number": ("F.cross_entropy(out, y) / 4", ""),
    "a mean over classes of means over rows": ("(out - hot).square().mean(dim=0).sum()", HOT),
    "a mean over rows of sums over classes": ("(out - hot).square().sum(dim=1).mean()", HOT),
    "a mean over rows of norms": ("torch.linalg.norm(out - hot, dim=1).mean()", HOT),
    "a mean over rows of roots": ("((out - hot).square().sum(1) + 1e-3).sqrt().mean()", HOT),
    "a sum divided by its rows": ("((out - hot) ** 2).sum() / len(x)", HOT),
    "a sum divided by twice its rows": ("((out - hot) ** 2).sum() / (2 * len(x))", HOT),
    "a sum times one over its rows": ("((out - hot) ** 2).sum() * (1 / len(x))", HOT),
    "a sum times one over its numbers": ("0.5 * ((out - hot) ** 2).sum() * (1 / out.numel())", HOT),
    "a dot product with weights that sum to one": ("torch.dot(each, torch.ones(len(y)) / len(y))", EACH),
    "two sums divided together": ("(each.sum() + 0.1 * out.square().sum()) / len(x)", EACH),
    "two heads stacked": ("torch.stack([F.cross_entropy(out, y), F.mse_loss(out, hot)]).sum()", HOT),
    "a mean whose sum is taken again": ("F.cross_entropy(out, y).sum()", ""),
    "rows taken one by one": ("sum(F.mse_loss(o, h) for o, h in zip(out, hot)) / len(x)", HOT),
    "rows stacked one by one": ("torch.stack([F.mse_loss(o, h) for o, h in zip(out, hot)]).mean()", HOT),
    "exits stacked as many as rows": (
        "sum(F.cross_entropy(o, y) for o in torch.stack([out, 2 * out, 3 * out]))  # 3 rows on 2 ranks",
        "",
    ),
    "smoothed labels": ("F.cross_entropy(out, y, label_smoothing=0.1)", ""),
    "probabilities as targets": ("F.cross_entropy(out, hot * 0.8 + 0.1)", HOT),
    "divergence by batchmean": (
        "F.kl_div(F.log_softmax(out, 1), hot, reduction='batchmean')",
        HOT + "\nhot = (hot + 0.1) / 1.3",
    ),
    "focal by hand": ("((1 - torch.exp(-each)) ** 2 * each).mean()", EACH),
    "a policy's loss": ("-(F.log_softmax(out, 1)[range(len(y)), y] * (x[:, 0] - 0.2)).mean()", ""),
    "an autoencoder's loss": (
        "(out - hot).square().sum() / len(x) + 0.1 * kl / len(x)",
        HOT + "\nkl = out.exp().sum()",
    ),
    "reduced over all dimensions by name": ("(out - hot).square().mean(dim=(0, 1))", HOT),
    "huber": ("F.huber_loss(out, hot) + F.smooth_l1_loss(out, hot) + F.l1_loss(out, hot)", HOT),
    "logits with weights of classes": (
        "F.binary_cross_entropy_with_logits(out, hot, pos_weight=torch.tensor([2.0, 1, 3]))",
        HOT,
    ),
    "triplets and cosines": (
        "F.triplet_margin_loss(out, hot, hot + 1) + F.cosine_embedding_loss(out, hot, torch.ones(len(x)))",
        HOT,
    ),
    "dice of each row": (
        "(1 - (2 * (p * hot).sum(1) + 1) / ((p + hot).sum(1) + 1)).mean()",
        DICE,
    ),
    "L1 and L2": (
        "F.cross_entropy(out, y) + 1e-2 * sum(p.abs().sum() for p in model.parameters())"
        " + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())",
        "",
    ),
    "norms of parameters": (
        "F.cross_entropy(out, y) + 1e-2 * sum(p.norm() for p in model.parameters())"
        " + 1e-2 * torch.stack([p.norm() for p in model.parameters()]).norm()"
        " + 1e-2 * torch.cat([p.flatten() for p in model.parameters()]).square().sum().sqrt()",
        "",
    ),
    "orthogonal weights": (
        "F.cross_entropy(out, y) + 0.1 * torch.norm(model[2].weight @ model[2].weight.T - torch.eye(3))",
        "",
    ),
    "pulled to where it began": (
        "F.cross_entropy(out, y) + sum((p - torch.zeros_like(p)).square().sum() for p in model.parameters())"
        " + F.mse_loss(model[0].weight, torch.ones(8, 4), reduction='sum')",
        "",
    ),
    "a gradient penalty": (
        "F.cross_entropy(model(z), y) + slope.square().sum(1).mean()",
        "z = x.clone().requires_grad_()\nslope = torch.autograd.grad(model(z).sum(), z, create_graph=True)[0]",
    ),
    "a mean over chosen columns": ("out[:, :2].square().mean() + out[:, torch.tensor([True, False, True])].mean()", ""),
    "a flooded loss": ("(F.cross_entropy(out, y) - 0.01).abs() + 0.01", ""),
    "masked evenly": (
        "(each * m).sum() / m.sum() + (out * hot)[hot > 0].mean()",
        EACH + "\n" + HOT + "\nm = y * 0 + 2",
    ),
}
REFUSED = (
    "a mean over classes of means over rows",
    "two heads stacked",
    "a mean whose sum is taken again",
    "pulled to where it began",
)
SUM, MEAN, BENT = ("sum over rows",), ("unevenly many",), ("not a mean over rows",)
WRONG = {
    "a negated sum": ("-torch.sum(each)", EACH, "weights differ by 1e-1", SUM),
    "half a sum": ("0.5 * each.sum()", EACH, "weights differ by 1e-1", SUM),
    "a scaled sum": ("each.sum() * torch.tensor(1024.0)", EACH, "weights differ", SUM),
    "two sums": ("each.sum() + out.square().sum()", EACH, "weights differ by 1e-1", SUM),
    "two sums stacked": ("torch.stack([each.sum(), out.square().sum()]).mean()", EACH, "weights differ by 1e-1", SUM),
    "a sum and L2": (
        "each.sum() + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())",
        EACH,
        "weights differ by 1e-1",
        SUM,
    ),
    "a sum over dimensions by name": ("(out - hot).square().sum(dim=(0, 1)) * 0.1", HOT, "weights differ", SUM),
    "a sum over rows, a mean over classes": ("(out - hot).square().sum(dim=0).mean()", HOT, "weights differ", SUM),
    "einsum to a number": ("torch.einsum('bc,bc->', out, out)", "", "weights differ by 1e-1", SUM),
    "einsum with targets": ("-torch.einsum('bc,bc->', out.log_softmax(1), hot)", HOT, "weights differ by 1e-1", SUM),
    "a dot product": ("torch.dot(each, each)", EACH, "weights differ by 1e-1", SUM),
    "a loop over rows": ("sum(F.mse_loss(o, h) for o, h in zip(out, hot))", HOT, "weights differ by 1e-1", SUM),
    "a loop over numbers of rows": (
        "sum(F.cross_entropy(out[i : i + 1], y[i : i + 1]) for i in range(len(x)))",
        "",
        "weights differ by 1e-1",
        SUM,
    ),
    "a mean and a sum": ("F.cross_entropy(out, y) + 0.1 * out.square().sum()", "", "weights differ by 1e-2", SUM),
    "a mean, and a sum by reduction": (
        "F.cross_entropy(out, y) - 0.1 * F.mse_loss(out, hot, reduction='sum')",
        HOT,
        "refused",
        SUM,
    ),
    "a norm over everything": ("torch.norm(out - hot)", HOT, "weights differ by 1e-2", BENT),
    "the root of a mean": ("torch.sqrt(F.mse_loss(out, hot))", HOT, "weights differ by 1e-3", BENT),
    "the log of a mean": ("F.mse_loss(out, hot).log()", HOT, "weights differ by 1e-2", BENT),
    "the square of a mean": ("(out.mean() - 0.3) ** 2 + F.cross_entropy(out, y)", "", "weights differ by 1e-4", BENT),
    "focal of a mean": ("(1 - torch.exp(-F.cross_entropy(out, y))) ** 2 * each.mean()", EACH, "weights differ", BENT),
    "a product of means": ("F.cross_entropy(out, y) * F.mse_loss(out, hot)", HOT, "weights differ by 1e-3", BENT),
    "dice of the batch": (
        "1 - (2 * (p * hot).sum() + 1) / (p.sum() + hot.sum() + 1)",
        DICE,
        "weights differ by 1e-3",
        BENT,
    ),
    "the spread of the batch": ("F.cross_entropy(out, y) - 0.1 * out.std()", "", "weights differ by 1e-3", BENT),
    "a masked mean": (
        "(each * m).sum() / m.sum()",
        EACH + "\nm = (x[:, 0] > 0) * 2 + 1",
        "weights differ by 1e-2",
        MEAN,
    ),
    "a masked mean of flat numbers": (
        "(f * m).sum() / m.sum().clamp(min=1)",
        "f, m = (out - 1).square().flatten(), (x[:, :3] > 0).flatten()",
        "weights differ by 1e-2",
        MEAN,
    ),
    "a mean over chosen rows": (
        "F.mse_loss(out[m], out[m] * 0 + 1)",
        "m = x[:, 0] > -0.5",
        "weights differ by 1e-2",
        MEAN,
    ),
    "a mean over chosen numbers": ("(out - 1).square()[m].mean()", "m = x[:, :3] > 0", "weights differ by 1e-2", MEAN),
    "weights of samples": ("F.mse_loss(out, hot, weight=x.abs()[:, :3])", HOT, "weights differ by 1e-2", MEAN),
}
WEIGHTED = """
loader = DataLoader(data, batch_size={batch}, shuffle=True)
model, optimizer, loader = dt.distribute(model, optimizer, loader, plan="{plan}")
done = 0
for _ in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y, reduction="sum")
        dt.weight(0.1 * loss, len(x), sum=True).backward()
        done += 1
        if {acts}:
            optimizer.step()
            optimizer.zero_grad()
"""
MIXED = """
model, optimizer, loader = dt.distribute(model, optimizer, loader, plan="accumulate=2")
for number, (x, y) in enumerate(loader):
    each = F.cross_entropy(model(x), y, reduction="none")
    (dt.weight(each.sum(), len(x), sum=True) if number % 2 else each.mean()).backward()
    optimizer.step()
"""
ODD = "dt.world() > 1 or done % 3 in (0, 2)"  # 8, 8 and 4 rows: the window ends with the epoch
TIME = """
batches = [(torch.randn(9, n, 4), torch.randn(9, n, 3)) for n in (5, 7, 2, 6)]
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = {body}, nn.Linear(4, 3)
    def forward(self, x, *more):
        out = self.body(x, *more)
        return self.head(out[0] if isinstance(out, tuple) else out)
model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
STEP = "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
LSTM, GRU, LAYER = "nn.LSTM(4, 4, 2)", "nn.GRU(4, 4)", "nn.TransformerEncoderLayer(4, 2, 8, 0.0)"
TAKEN = "model, optimizer, loader = dt.distribute(model, optimizer, {}{})\n"
WALK = "for x, y in loader:\n    loss = F.mse_loss(model(x), y)\n" + STEP


def timed(body: str, given: str, said: str, walk: str = WALK) -> str:
    """A script over finished batches of sequences."""
    return TIME.format(body=body) + TAKEN.format(given, said) + walk


FIELDS = "[{'x': x, 'n': torch.full((x.shape[1],), 9.0), 'y': [y, 'text']} for x, y in batches]"
FIELDS_WALK = "for b in loader:\n    loss = ((model(b['x']) - b['y'][0]).square().sum((0, 2)) / b['n']).mean()\n" + STEP
STATES = "[(x.transpose(0, 1), torch.randn(1, x.shape[1], 4), y.transpose(0, 1).numpy()) for x, y in batches]"
STATES_WALK = "for x, h, y in loader:\n    loss = F.mse_loss(model(x, h), torch.from_numpy(y))\n" + STEP
TURNED = "[(x.transpose(0, 1), y.transpose(0, 1)) for x, y in batches]"
TURNED_WALK = "for x, y in loader:\n    loss = F.mse_loss(model(x.transpose(0, 1)), y.transpose(0, 1))\n" + STEP
PADDED = """DataLoader(
    [(torch.randn(3 + k % 5, 4), k / 20.0) for k in range(20)], 6,
    collate_fn=lambda rows: (nn.utils.rnn.pad_sequence([r[0] for r in rows]), torch.tensor([r[1] for r in rows])))"""
PADDED_WALK = "for x, y in loader:\n    loss = F.mse_loss(model(x)[0].sum(-1), y)\n" + STEP
PACKED_WALK = (
    """for x, y in loader:
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((x.shape[1],), len(x)))
    loss = F.mse_loss(model.head(model.body(packed)[1][0][-1]), y[-1])
"""
    + STEP
)
DIM = ", batch_dim={}"
TIMES = [
    ("time first, said", timed(LSTM, "batches", DIM.format(1)), "another computation", ()),
    ("time first, said, in a transformer", timed(LAYER, "batches", DIM.format(1)), "another computation", ()),
    ("time first, said, fields of one dimension", timed(LSTM, FIELDS, DIM.format(1), FIELDS_WALK), "refused", ()),
    (
        "rows in another dimension of each tensor",
        timed("nn.GRU(4, 4, batch_first=True)", STATES, DIM.format((0, 1, 0)), STATES_WALK),
        "refused",
        (),
    ),
    ("time first, not said", timed(LSTM, "batches", ""), "weights differ by 1e-2", ("batch_dim=1",)),
    ("time first, not said, in a transformer", timed(LAYER, "batches", ""), "weights differ", ("batch_dim=1",)),
    ("time first, not said, packed", timed(LSTM, "batches", "", PACKED_WALK), "weights differ", ("batch_dim=1",)),
    ("rows first, turned in the loop", timed(GRU, TURNED, "", TURNED_WALK), "right", ()),
    ("rows first, turned in the loop, said", timed(GRU, TURNED, DIM.format(0), TURNED_WALK), "right", ()),
    ("sequences padded by the DataLoader, time first", timed(GRU, PADDED, "", PADDED_WALK), "right", ()),
    ("sequences padded by the DataLoader, said", timed(GRU, PADDED, DIM.format(1), PADDED_WALK), "right", ()),
    ("a dimension for too few tensors", timed(LSTM, "batches", DIM.format((1,))), "no such argument", ("2 tensors",)),
    ("a dimension that is none", timed(LSTM, "batches", ", batch_dim=-1"), "no such argument", ("batch_dim=-1",)),
]
ALL = ("ddp", "zero2", "zero3")
UNLIKE = ((6, 1, "weights differ by 6e-2 at 3 ranks"), (10, 1, "right"), (5, 0, "not a number"))

SCRIPTS = [
    *(
        Script(
            name=name,
            body=loop(6, *given),
            before="refused" if name in REFUSED else "right",
            plans=ALL if "model" in given[0] else ("ddp",),
        )
        for name, given in RIGHT.items()
    ),
    *(
        Script(name=name, body=loop(12, loss, lines), before=before, says=says, plans=("ddp",))
        for name, (loss, lines, before, says) in WRONG.items()
    ),
    *(
        Script(
            name=f"captions of unlike lengths over BatchNorm, {batch} rows, at least {least} tokens",
            body=NORM + CAPTIONS.format(batch=batch, least=least),
            before=before,
        )
        for batch, least, before in UNLIKE
    ),
    Script(
        name="captions over BatchNorm, a rank without rows",
        body=WAVES + CAPTIONS.format(batch=19, least=1),
        before="weights differ by 1e-3",
    ),
    *(
        Script(name=name, body=WEIGHTED.format(batch=batch, plan=plan, acts=acts), before="no such argument")
        for name, batch, plan, acts in (
            ("a sum that is said", 5, "", "True"),
            ("a sum that is said, on ranks without rows", 2, "", "True"),
            ("a sum that is said, in windows", 2, "accumulate=2", "dt.world() > 1 or done % 2 == 0"),
            ("a sum that is said, in windows that end with the epoch", 8, "accumulate=2", ODD),
        )
    ),
    Script(
        name="a sum that is said, over BatchNorm, on ranks without rows",
        body=NORM + WEIGHTED.format(batch=6, plan="", acts="True"),
        before="no such argument",
    ),
    *(
        Script(name=name, body=loop(12, f"dt.weight({said})", EACH), before=before, says=says, plans=("ddp",))
        for name, said, before, says in (
            (
                "a sum that is said to be a mean",
                "each.sum(), len(x)",
                "weights differ by 1e-1",
                ("dt.weight(loss, n) of",),
            ),
            ("a mean that is said to be a sum", "each.mean(), len(x), sum=True", "no such argument", ("sum=True) of",)),
        )
    ),
    Script(
        name="a window of a sum and a mean",
        body=MIXED,
        before="no such argument",
        says=("one window of `accumulate`",),
        plans=("ddp",),
    ),
    *(
        Script(name=name, body=body, before=before, says=says, plans=("ddp",) if says else ALL)
        for name, body, before, says in TIMES
    ),
]
