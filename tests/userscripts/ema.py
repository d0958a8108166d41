import argparse
import copy

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="small CNN + EMA of weights")
parser.add_argument("--out", default="ema.pt")
parser.add_argument("--double", action="store_true")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--bs", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--ema-decay", type=float, default=0.95)
parser.add_argument("--seed", type=int, default=0)


def conv_bn(cin, cout, stride=1):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
    )


class SmallCNN(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(conv_bn(3, 16), conv_bn(16, 32, stride=2), conv_bn(32, 32, stride=2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(32, num_classes)

    def forward(self, x):
        return self.head(self.pool(self.features(x)).flatten(1))


def make_data(n, protos):
    """Noisy, randomly brightened copies of one prototype picture per class."""
    y = torch.randint(0, len(protos), (n,))
    gain = 0.5 + torch.rand(n, 1, 1, 1)
    x = gain * protos[y] + 0.8 * torch.randn(n, 3, 16, 16)
    return TensorDataset(x, y)


@torch.no_grad()
def update_ema(ema, model, decay):
    for pe, pm in zip(ema.parameters(), model.parameters()):
        pe.lerp_(pm, 1.0 - decay)
    for be, bm in zip(ema.buffers(), model.buffers()):
        be.copy_(bm)


@torch.no_grad()
def evaluate(net, loader, device):
    net.eval()
    correct = total = 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        correct += (net(x).argmax(1) == y).sum().item()
        total += y.numel()
    return 100.0 * correct / total


def train_one_epoch(model, ema, loader, opt, criterion, decay, device):
    model.train()
    running, seen = 0.0, 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        opt.zero_grad(set_to_none=True)
        loss = criterion(model(x), y)
        loss.backward()
        opt.step()
        update_ema(ema, model, decay)
        running += loss.item() * x.size(0)
        seen += x.size(0)
    return running / seen


def main(args):
    torch.manual_seed(args.seed)
    if args.double:
        torch.set_default_dtype(torch.float64)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    protos = torch.randn(10, 3, 16, 16)
    train_set = make_data(1000, protos)
    test_set = make_data(330, protos)
    train_loader = DataLoader(train_set, batch_size=args.bs, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=128, shuffle=False)

    model = SmallCNN().to(device)
    ema = copy.deepcopy(model)
    for p in ema.parameters():
        p.requires_grad_(False)

    opt = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    sched = optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(1, args.epochs + 1):
        loss = train_one_epoch(model, ema, train_loader, opt, criterion, args.ema_decay, device)
        lr = sched.get_last_lr()[0]
        sched.step()
        ema.eval()
        acc, ema_acc = evaluate(model, test_loader, device), evaluate(ema, test_loader, device)
        print(f"epoch {epoch}: lr={lr:.4f} train_loss={loss:.4f} test_acc={acc:.2f}% ema_acc={ema_acc:.2f}%")

    torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, args.out)
    print("wrote", args.out)


if __name__ == "__main__":
    main(parser.parse_args())
