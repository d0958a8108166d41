"""Train a ResNet-18 with DistributedPyTorch: first every rank holds everything, then the same objects are divided."""

import argparse
from pathlib import Path

import torch
from distributedtorch import DistributedPyTorch, accuracy, is_main
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from resnet import ResNet18, images

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=2, help="of each of the two parts")
parser.add_argument("--workers", type=int, help="processes to start")
parser.add_argument("--data", type=Path, help="folder of CIFAR-10, binary version; without it a set is generated")
parser.add_argument("--samples", type=int, default=2048, help="images to train on")
parser.add_argument("--test-samples", type=int, default=512, help="images to test on")
parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
parser.add_argument("--weights", type=Path, help="file to save the trained weights to")
parser.add_argument("--as-printed", action="store_true", help="leave out loss and backward in the second part")
arguments = parser.parse_args()
num_epochs = arguments.epochs
criterion = nn.CrossEntropyLoss()


def ddp_train(model, optimizer, device, train_loader):
    dist = DistributedPyTorch(workers=arguments.workers)
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
        print(f"ddp epoch {epoch + 1} done", flush=True)
    dist.join()


def zero_train(model, optimizer, device, train_loader):
    dist = DistributedPyTorch(strategy="zero", workers=arguments.workers)
    dist.setup(model, optimizer, device)
    for epoch in range(num_epochs):
        dist.launch()
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            outputs = model(inputs)
            if not arguments.as_printed:
                loss = criterion(outputs, labels)
                loss.backward()
            optimizer.step()
        dist.barrier()
        print(f"zero epoch {epoch + 1} done", flush=True)
    dist.join()


torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train_loader = DataLoader(images("train", arguments.samples, arguments.data), batch_size=32, shuffle=True)
test_loader = DataLoader(images("test", arguments.test_samples, arguments.data), batch_size=32)
model = ResNet18(arguments.width).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

ddp_train(model, optimizer, device, train_loader)
zero_train(model, optimizer, device, train_loader)
print(f"Test Accuracy: {100 * accuracy(model, test_loader):.2f}%")
if arguments.weights is not None and is_main():
    save_file({name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}, arguments.weights)
