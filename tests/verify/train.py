"""A plain training script: BatchNorm, clipping, a scheduler, a last batch of one row. Words change a detail of it."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt

words = set(sys.argv[1:])
torch.manual_seed(0)
if "double" in words:
    torch.set_default_dtype(torch.float64)


class Net(nn.Module):
    """Two convolutions; the bias of the first has no effect behind BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5 if "dropout" in words else 0.0)
        self.conv2, self.head = nn.Conv2d(4, 6, 3), nn.Linear(6 * 4 * 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.relu(self.norm(self.conv1(x))))
        return self.head(torch.tanh(self.conv2(hidden)).flatten(1))


inputs, targets = torch.randn(22, 1, 8, 8), torch.randint(3, (22,))
model = Net()
adam = "adam" in words
optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if adam else torch.optim.SGD(model.parameters(), 0.1, 0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
if "unseeded" in words:
    torch.seed()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=7, shuffle=True)
criterion = nn.CrossEntropyLoss()

model, optimizer, loader, scheduler = dt.distribute(model, optimizer, loader, scheduler)

for _epoch in range(1 if "short" in words else 100):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        if "raise" in words:
            raise ValueError("no more disk quota")
