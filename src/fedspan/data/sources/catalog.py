"""Facts about the data sets fedspan knows by name: shapes, normalisation constants, class names, hub ids."""

from __future__ import annotations

import string
from dataclasses import dataclass

_FASHION = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
_CIFAR10 = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck"
_SUPERCLASSES = (
    "aquatic_mammals, fish, flowers, food_containers, fruit_and_vegetables, household_electrical_devices,"
    " household_furniture, insects, large_carnivores, large_man-made_outdoor_things, large_natural_outdoor_scenes,"
    " large_omnivores_and_herbivores, medium_mammals, non-insect_invertebrates, people, reptiles, small_mammals,"
    " trees, vehicles_1, vehicles_2"
)
# Factorized-FL's five domains of ten classes; the paper gives no class lists, these are the natural ones.
DOMAINS: dict[str, tuple[str, str]] = {
    "Household": ("household_electrical_devices", "household_furniture"),
    "Fruit&Food": ("fruit_and_vegetables", "food_containers"),
    "Tree&Flower": ("trees", "flowers"),
    "Transport": ("vehicles_1", "vehicles_2"),
    "Animal": ("large_carnivores", "large_omnivores_and_herbivores"),
}


@dataclass(frozen=True, kw_only=True)
class Known:
    """An image data set with a usual shape and usual normalisation constants (of pixels in 0..1)."""

    hub: str
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]
    coarse_names: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    hub_config: str | None = None
    leaf: bool = False  # may also come as LEAF's JSON files
    mat: bool = False  # may also come as MATLAB files of cropped digits
    tiny: bool = False  # may also come as Tiny-ImageNet's folders of pictures


KNOWN: dict[str, Known] = {
    "mnist": Known(
        hub="ylecun/mnist",
        shape=(1, 28, 28),
        mean=(0.1307,),
        std=(0.3081,),
        class_names=tuple("0123456789"),
    ),
    "fashion-mnist": Known(
        hub="zalando-datasets/fashion_mnist",
        shape=(1, 28, 28),
        mean=(0.2860,),
        std=(0.3530,),
        class_names=tuple(_FASHION.split(", ")),
        folders=("/usr/share/datasets/fashion-mnist",),  # where Debian's package dataset-fashion-mnist puts it
    ),
    "cifar10": Known(
        hub="uoft-cs/cifar10",
        shape=(3, 32, 32),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        class_names=tuple(_CIFAR10.split(", ")),
    ),
    "cifar100": Known(
        hub="uoft-cs/cifar100",
        shape=(3, 32, 32),
        mean=(0.5071, 0.4866, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        class_names=tuple(str(i) for i in range(100)),
        coarse_names=tuple(_SUPERCLASSES.split(", ")),
    ),
    "svhn": Known(
        hub="ufldl-stanford/svhn",
        hub_config="cropped_digits",
        shape=(3, 32, 32),
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        class_names=tuple("0123456789"),
        mat=True,
    ),
    "tiny-imagenet": Known(
        hub="zh-plus/tiny-imagenet",
        shape=(3, 64, 64),
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        class_names=tuple(str(i) for i in range(200)),
        tiny=True,
    ),
    "femnist": Known(
        hub="flwrlabs/femnist",
        shape=(1, 28, 28),
        mean=(0.9637,),  # black on white, unlike MNIST; the constants of FL-bench
        std=(0.155,),
        class_names=tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
        leaf=True,
    ),
}

SOURCES: dict[str, str] = {
    "digits": "1,797 handwritten digits of 8x8 pixels, bundled with scikit-learn; needs no download",
    "mnist": "70,000 handwritten digits of 28x28 pixels (parquet or IDX files)",
    "fashion-mnist": "70,000 pictures of clothes of 28x28 pixels (parquet or IDX files)",
    "cifar10": "colour pictures of 32x32 pixels, 10 classes (parquet)",
    "cifar100": "colour pictures of 32x32 pixels, 100 classes in 20 superclasses (parquet)",
    "svhn": "99,289 house numbers, colour pictures of 32x32 pixels, 10 digits (train_32x32.mat, .npz or parquet)",
    "tiny-imagenet": "110,000 colour pictures of 64x64 pixels, 200 classes (the published folders, or parquet)",
    "femnist": "814,000 handwritten characters of 28x28 pixels by 3,600 writers, 62 classes (parquet or LEAF's JSON)",
    "OWNER/NAME": "a data set of the Hugging Face hub, read through its `datasets` library",
    "PATH.csv": "a table (also .csv.gz, .tsv, .parquet) whose columns the keys client, target, split, ... name",
    "PATH.parquet": "a table with an image column, or with numeric columns, and a label column",
    "PATH.npz": "arrays x, y and optionally x_test, y_test, client, domain",
    "PATH.txt": "a play (also .txt.gz), whose roles predict their next character from 32; for model 'characters'",
    "PATH.json": "instruction records (instruction, input, output), also .jsonl; for model 'causal-lm'",
    "FOLDER": "one .npz, .csv or .parquet per client, or train/test parquet, IDX or LEAF's JSON files",
}
