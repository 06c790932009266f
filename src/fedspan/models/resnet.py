"""Residual networks for small images: 3x3 stems with stride 1 and no max-pool, GroupNorm unless asked otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.models import checks

NORMS = ("group", "batch", "none")


def groups(channels: int) -> int:
    """Groups of a GroupNorm: the largest divisor of `channels` that is at most min(32, channels // 4), at least 1.

    Four or more channels per group keep the variance meaningful even where an image has shrunk to one pixel.
    """
    most = max(1, min(32, channels // 4))
    return next(g for g in range(most, 0, -1) if channels % g == 0)


def normalise(channels: int, norm: str) -> nn.Module:
    """The normalisation layer called `norm`: "group", "batch" or "none" (identity)."""
    if norm == "group":
        return nn.GroupNorm(groups(channels), channels)
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.Identity()


def _conv(inputs: int, outputs: int, kernel: int, norm: str, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    # A bias before a norm layer is cancelled or repeated by it; without one the convolution needs its own.
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=norm == "none")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, projected by a 1x1 convolution where the shape changes.

    He et al., CVPR 2016, figure 2 and option B.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, norm, stride, 1)
        self.norm1 = normalise(outputs, norm)
        self.conv2 = _conv(outputs, outputs, 3, norm, 1, 1)
        self.norm2 = normalise(outputs, norm)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_conv(inputs, outputs, 1, norm, stride), normalise(outputs, norm))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H / stride, W / stride]."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, stages `layer1`, `layer2`, ... of basic blocks, mean over pixels, head. He et al., CVPR 2016.

    Args:
        blocks: basic blocks per stage; (1, 1, 1) is ResNet-8, (1,) * 4 ResNet-10, (2,) * 4 ResNet-18.
        width: channels of the first stage; each further stage doubles them and halves the image.
        norm: "group" (see `groups`), "batch", or "none", where the convolutions have biases instead.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        *,
        blocks: Sequence[int] = (2, 2, 2, 2),
        width: int = 64,
        norm: str = "group",
    ) -> None:
        super().__init__()
        blocks = checks.integers("resnet", "blocks", blocks)
        who = f"resnet{2 * sum(blocks) + 2}"
        checks.integer(who, "width", width)
        checks.choice(who, "norm", norm, NORMS)
        channels, _, _ = checks.image(who, input_shape)
        self.conv1 = _conv(channels, width, 3, norm, 1, 1)
        self.norm1 = normalise(width, norm)
        self.stages = [f"layer{i + 1}" for i in range(len(blocks))]
        inputs = width
        for i, (name, count) in enumerate(zip(self.stages, blocks)):
            outputs = width * 2**i
            stage = [BasicBlock(inputs, outputs, 1 if i == 0 else 2, norm)]
            stage += [BasicBlock(outputs, outputs, 1, norm) for _ in range(count - 1)]
            # One attribute per stage, because the FedLoRU specification names its layers layer1 to layer4.
            self.add_module(name, nn.Sequential(*stage))
            inputs = outputs
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, height, width] -> [B, classes]."""
        x = F.relu(self.norm1(self.conv1(x)))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        y: Tensor = self.head(x.mean((-2, -1)))
        return y


class ConvNorm(nn.Module):
    """Convolution, norm, ReLU: the unit of Factorized-FL's ResNet-9."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, padding: int, norm: str) -> None:
        super().__init__()
        self.conv = _conv(inputs, outputs, kernel, norm, stride, padding)
        self.norm = normalise(outputs, norm)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H', W']."""
        return F.relu(self.norm(self.conv(x)))


class ResNet9(nn.Module):
    """ResNet-9 of Factorized-FL (Jeong and Hwang, NeurIPS 2022) as in its public code.

    With norm="batch", 10 classes and colour images its state has 2,574,290 scalars, BatchNorm buffers included.

    Args:
        width: channels of the first convolution; the later ones have twice and four times as many.
        norm: "group" (see `groups`), "batch", or "none", where the convolutions have biases instead.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, width: int = 64, norm: str = "group") -> None:
        super().__init__()
        w = checks.integer("resnet9", "width", width)
        checks.choice("resnet9", "norm", norm, NORMS)
        remedy = "use larger images, or model 'resnet8' or 'resnet10', which take any size"
        channels, _, _ = checks.image("resnet9", input_shape, 11, remedy)
        self.conv1 = ConvNorm(channels, w, 3, 1, 1, norm)
        self.conv2 = ConvNorm(w, 2 * w, 5, 2, 2, norm)
        self.res1 = nn.Sequential(*(ConvNorm(2 * w, 2 * w, 3, 1, 1, norm) for _ in range(2)))
        self.conv3 = ConvNorm(2 * w, 4 * w, 3, 1, 1, norm)
        self.res2 = nn.Sequential(*(ConvNorm(4 * w, 4 * w, 3, 1, 1, norm) for _ in range(2)))
        self.conv4 = ConvNorm(4 * w, 4 * w, 3, 1, 0, norm)
        self.head = nn.Linear(4 * w, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, height, width] -> [B, classes]."""
        x = self.conv2(self.conv1(x))
        x = x + self.res1(x)
        x = F.max_pool2d(self.conv3(x), 2)
        x = x + self.res2(x)
        # Adaptive max-pooling to 1x1, written as a maximum over pixels, which vmap maps without a slow path.
        y: Tensor = self.head(self.conv4(x).flatten(2).max(-1).values)
        return y
