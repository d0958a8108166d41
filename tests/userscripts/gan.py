# toy GAN: learn a ring of 8 gaussians
import sys
import math
import torch
import torch.nn as nn
from torch.utils.data import TensorDataset, DataLoader

torch.manual_seed(1234)

out_path = 'gan.pt'
if '--out' in sys.argv:
    out_path = sys.argv[sys.argv.index('--out') + 1]
if '--double' in sys.argv:
    torch.set_default_dtype(torch.float64)

device = 'cuda' if torch.cuda.is_available() else 'cpu'

# hyperparams
dim = 16
hidden = 64
batch_size = 64
n_epochs = 20
lr = 1e-3

# ---- data ----
N = 1000
mode = torch.randint(0, 8, (N,))
angle = mode * (2 * math.pi / 8)
centers = torch.stack([angle.cos(), angle.sin()], dim=1).to(torch.get_default_dtype())
samples = 2.0 * centers + 0.05 * torch.randn(N, 2)
loader = DataLoader(TensorDataset(samples), batch_size=batch_size, shuffle=True)


# ---- models ----
class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 2),
        )

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, hidden), nn.LeakyReLU(0.2),
            nn.Linear(hidden, hidden), nn.LeakyReLU(0.2),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(1)


netG = Generator().to(device)
netD = Discriminator().to(device)
optG = torch.optim.Adam(netG.parameters(), lr=lr, betas=(0.5, 0.999))
optD = torch.optim.Adam(netD.parameters(), lr=lr, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()

g = torch.Generator().manual_seed(99)   # noise has its own generator

# ---- train ----
it = 0
for epoch in range(n_epochs):
    for (real,) in loader:
        real = real.to(device)
        ones = torch.ones(real.size(0), device=device)
        zeros = torch.zeros(real.size(0), device=device)

        # (1) update D: maximize log D(x) + log(1 - D(G(z)))
        netD.zero_grad()
        z = torch.randn(real.size(0), dim, generator=g).to(device)
        fake = netG(z)
        errD_real = criterion(netD(real), ones)
        errD_fake = criterion(netD(fake.detach()), zeros)
        errD = errD_real + errD_fake
        errD.backward()
        optD.step()

        # (2) update G: maximize log D(G(z))
        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optG.step()

        if it % 40 == 0:
            print('[%2d/%d][%4d] Loss_D: %.4f Loss_G: %.4f' % (epoch, n_epochs, it, errD.item(), errG.item()))
        it += 1

with torch.no_grad():
    z = torch.randn(512, dim, generator=g).to(device)
    r = netG(z).norm(dim=1)
print('generated radius: mean %.3f std %.3f (target 2.0)' % (r.mean().item(), r.std().item()))

torch.save({'netG': netG.state_dict(), 'netD': netD.state_dict()}, out_path)
print('saved', out_path)
