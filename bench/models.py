"""The models of the workloads in plain torch: what the plain loop and the peers train."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bench.workloads import CLASSES, Workload


def build(w: Workload) -> nn.Module:
    """The model of a workload, with as many parameters as fedspan's of that name."""
    if w.model == "mlp":
        return nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, CLASSES)),
        )
    if w.model == "cnn":
        return nn.Sequential(
            *(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, CLASSES)),
        )
    return ResNet9()


def _unit(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, padding: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(min(32, outputs // 4), outputs), nn.ReLU())


class ResNet9(nn.Module):
    """Convolutions of 64, 128 and 256 channels with group normalisation and two residual pairs, maximum over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Sequential(_unit(3, 64), _unit(64, 128, 5, 2, 2))
        self.pair1 = nn.Sequential(_unit(128, 128), _unit(128, 128))
        self.middle = nn.Sequential(_unit(128, 256), nn.MaxPool2d(2))
        self.pair2 = nn.Sequential(_unit(256, 256), _unit(256, 256))
        self.last = _unit(256, 256, padding=0)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 32, 32] -> [B, 10]."""
        x = self.start(x)
        x = self.middle(x + self.pair1(x))
        x = self.last(x + self.pair2(x))
        y: Tensor = self.head(F.adaptive_max_pool2d(x, 1).flatten(1))
        return y
