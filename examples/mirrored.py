"""Train with a mirrored strategy: every rank has the model, and its rows of every batch."""

import distributedtorch as dt
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
points = torch.randn(1024, 20)
dataset = DataLoader(TensorDataset(points, points[:, :5].argmax(1)), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

strategy = dt.Strategy("mirrored", workers=2)

with strategy.scope():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    def train_step(x, y):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for epoch in range(3):
        for x_batch, y_batch in dataset:
            with strategy.iterator.as_default():
                loss = strategy.run(train_step, args=(x_batch, y_batch))
        print(f"epoch {epoch + 1}: loss {loss.numpy():.3f}", flush=True)

strategy.sync()
