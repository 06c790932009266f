"""Small convolutional networks of the papers. The flattened size follows from the input shape.

Where a paper writes ReLU and then pooling, pooling comes first: the same numbers, as ReLU is monotone, for less work.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.models import checks
from fedspan.models.resnet import NORMS, normalise

# fc1's width per level; level 2 also keeps 16 channels in its second convolution.
_LEVELS = {1: (32, 2000), 2: (16, 2000), 3: (32, 1000), 4: (32, 800), 5: (32, 500)}


def _after_pools(side: int, padding: int) -> int:
    """The side left after two rounds of a 5x5 convolution and 2x2 pooling; below 1 if the image is too small."""
    for _ in range(2):
        side = (side + 2 * padding - 4) // 2
    return side


def _two_pools(who: str, shape: tuple[int, ...], padding: int) -> tuple[int, int]:
    """(channels, pixels left after both pools); raises ConfigError if an image is too small."""
    checks.integer(who, "padding", padding, 0, 2)
    smallest = next(side for side in range(1, 99) if _after_pools(side, padding) >= 1)
    remedy = "" if padding == 2 else "set padding = 2 (then 4x4 is enough), or use model 'mlp'"
    channels, height, width = checks.image(who, shape, smallest, remedy)
    return channels, _after_pools(height, padding) * _after_pools(width, padding)


class CNN(nn.Module):
    """The usual benchmark CNN: conv 5x5 to 32, pool, conv 5x5 to 64, pool, fc 512, fc classes.

    McMahan et al., AISTATS 2017, section 3 (there with padding); unpadded, as in PFLlib, it is the "4-layer CNN" of
    FedARA and the "two conv + two linear" of the pFL-MF paper: 1600 features after the pools for 3x32x32.

    Args:
        norm: "none", or "group" or "batch" after each convolution, which then has no bias. Models whose weights are
            products of two vectors hardly start to train without one.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, padding: int = 0, norm: str = "none") -> None:
        super().__init__()
        channels, pixels = _two_pools("cnn", input_shape, padding)
        checks.choice("cnn", "norm", norm, NORMS)
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=padding, bias=norm == "none")
        self.norm1 = normalise(32, norm)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=padding, bias=norm == "none")
        self.norm2 = normalise(64, norm)
        self.fc1 = nn.Linear(64 * pixels, 512)
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, height, width] -> [B, classes]."""
        x = F.relu(F.max_pool2d(self.norm1(self.conv1(x)), 2))
        x = F.relu(F.max_pool2d(self.norm2(self.conv2(x)), 2))
        y: Tensor = self.head(F.relu(self.fc1(x.flatten(1))))
        return y


class CNN3x3(nn.Module):
    """The CIFAR model of the public pFL-MF code: two padded 3x3 convolutions, no pooling, one linear layer.

    Its weights (without biases) are the d = 674,656 for 10 and 6,572,896 for 100 classes at 3x32x32.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = checks.image("cnn3x3", input_shape)
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.head = nn.Linear(64 * height * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, height, width] -> [B, classes]."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        y: Tensor = self.head(x.flatten(1))
        return y


class LeNet5(nn.Module):
    """LeNet-5 (LeCun et al., Proceedings of the IEEE 1998) in today's form: ReLU, max pooling, full connections.

    Images below 32x32 are zero-padded to 32x32, as the paper does with the 28x28 digits: 61,706 parameters there.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = checks.image("lenet5", input_shape)
        rows, columns = max(0, 32 - height), max(0, 32 - width)
        self.pad = nn.ZeroPad2d((columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
        pixels = _after_pools(height + rows, 0) * _after_pools(width + columns, 0)
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * pixels, 120)
        self.fc2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, height, width] -> [B, classes]."""
        x = F.relu(F.max_pool2d(self.conv1(self.pad(x)), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        y: Tensor = self.head(x)
        return y


class CapacityCNN(nn.Module):
    """CNN1 to CNN5, FedARA's five capacity levels, in the form of the public pFedES/pFedAFM code.

    conv 5x5 to 16, pool, conv 5x5 to 32 (level 2: 16), pool, fc1 of 2000/2000/1000/800/500, fc2 of 500, fc classes.
    All levels have 500 features before the head, so that features and heads can be shared between levels.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, level: int = 1, padding: int = 0) -> None:
        super().__init__()
        checks.integer("cnn1 to cnn5", "level", level, 1, 5)
        channels, pixels = _two_pools(f"cnn{level}", input_shape, padding)
        second, wide = _LEVELS[level]
        self.conv1 = nn.Conv2d(channels, 16, 5, padding=padding)
        self.conv2 = nn.Conv2d(16, second, 5, padding=padding)
        self.fc1 = nn.Linear(second * pixels, wide)
        self.fc2 = nn.Linear(wide, 500)
        self.head = nn.Linear(500, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, height, width] -> [B, classes]."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        y: Tensor = self.head(x)
        return y
