# tiny char LM, gradient accumulation by hand
import argparse, copy
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader

ap = argparse.ArgumentParser()
ap.add_argument('--out', default='accumulate.pt')
ap.add_argument('--double', action='store_true')
cfg = ap.parse_args()

torch.manual_seed(3407)
if cfg.double: torch.set_default_dtype(torch.float64)
device = "cuda" if torch.cuda.is_available() else "cpu"

VOCAB, BLOCK, D, HEADS, LAYERS = 27, 24, 48, 4, 2
BATCH, ACCUM, EPOCHS = 16, 4, 4

# a long text sampled from a sparse random markov chain
trans = torch.randn(VOCAB, VOCAB).mul(3).softmax(-1)
text = [0]
for _ in range(20000):
    text.append(torch.multinomial(trans[text[-1]], 1).item())
text = torch.tensor(text)
split = int(0.9 * len(text))

class Blocks(Dataset):
    def __init__(self, ids, stride): self.ids, self.stride = ids, stride
    def __len__(self): return (len(self.ids) - BLOCK - 1) // self.stride
    def __getitem__(self, i):
        s = i * self.stride
        return self.ids[s:s + BLOCK], self.ids[s + 1:s + BLOCK + 1]

train_dl = DataLoader(Blocks(text[:split], 20), batch_size=BATCH, shuffle=True, drop_last=True)
val_dl = DataLoader(Blocks(text[split:], BLOCK), batch_size=BATCH)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.proj = nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, HEADS, C // HEADS).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(C, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))

class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, D)
        self.pos = nn.Embedding(BLOCK, D)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(D)
        self.head = nn.Linear(D, VOCAB, bias=False)
        nn.init.normal_(self.tok.weight, std=0.05)
        nn.init.normal_(self.pos.weight, std=0.05)
        self.head.weight = self.tok.weight  # tie

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        for b in self.blocks:
            x = b(x)
        return self.head(self.ln_f(x))

model = LM().to(device)
opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
sched = torch.optim.lr_scheduler.StepLR(opt, step_size=20, gamma=0.5)

def val_loss():
    model.eval()
    tot, n = 0., 0
    with torch.no_grad():
        for x, y in val_dl:
            x, y = x.to(device), y.to(device)
            tot += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction='sum').item()
            n += y.numel()
    model.train()
    return tot / n

best, best_loss = None, float('inf')
print('batches/epoch', len(train_dl), '| initial val', round(val_loss(), 4))
for epoch in range(EPOCHS):
    model.train()
    for i, (x, y) in enumerate(train_dl):
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(model(x).view(-1, VOCAB), y.view(-1))
        loss = loss / ACCUM
        loss.backward()
        if (i + 1) % ACCUM == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
        if (i + 1) % 16 == 0:
            print(f'  ep {epoch} it {i+1} loss {loss.item() * ACCUM:.4f} lr {opt.param_groups[0]["lr"]:.5f}')
    vl = val_loss()
    if vl < best_loss:
        best_loss, best = vl, copy.deepcopy(model.state_dict())
    print(f'epoch {epoch} val {vl:.4f} best {best_loss:.4f}')

torch.save({'model': model.state_dict(), 'best': best}, cfg.out)
