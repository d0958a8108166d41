"""ResNet-18 for images of 32 x 32, and the images: CIFAR-10 from a folder, or a generated set of the same shape.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016; the first layer as for CIFAR: 3 x 3, no pooling.
"""

from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CLASSES = 10


class Block(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """Images (batch, 3, 32, 32) in, scores of the classes out. The published network has width 64."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Block(before, after, 1 if stage == 0 else 2), Block(after, after, 1))
                for stage, (before, after) in enumerate(pairwise(widths))
            )
        )
        self.out = nn.Linear(8 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(F.relu(self.norm(self.conv(x))))
        return self.out(x.mean(dim=(2, 3)))


def images(part: str, samples: int, folder: Path | None) -> TensorDataset:
    """`samples` images and labels for "train" or "test"."""
    return generated(part, samples) if folder is None else cifar10(part, samples, folder)


def cifar10(part: str, samples: int, folder: Path) -> TensorDataset:
    """CIFAR-10 in its binary version: 1 byte of label and 3 x 32 x 32 bytes of image, 10,000 times per file."""
    files = sorted(folder.glob("data_batch_*.bin" if part == "train" else "test_batch.bin"))
    if not files:
        raise SystemExit(f"no CIFAR-10 in {folder}: unpack cifar-10-binary.tar.gz there")
    rows = torch.cat([torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files])
    rows = rows.view(-1, 3073)[:samples]
    return TensorDataset((rows[:, 1:].view(-1, 3, 32, 32).float() / 255 - 0.5) * 4, rows[:, 0].long())


def generated(part: str, samples: int) -> TensorDataset:
    """A pattern for each class, with noise over it."""
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(1)).repeat_interleave(4, 2)
    draw = torch.Generator().manual_seed(2 if part == "train" else 3)
    labels = torch.randint(CLASSES, (samples,), generator=draw)
    noise = torch.randn(samples, 3, 32, 32, generator=draw)
    return TensorDataset(patterns.repeat_interleave(4, 3)[labels] + noise, labels)
