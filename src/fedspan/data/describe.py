"""Look at a split before training: a table of clients, a picture for the terminal, a figure for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedspan.data.federated import FederatedData, Index
from fedspan.errors import ConfigError, DataError

_SHADES = " ░▒▓█"
_BAR = "▏▎▍▌▋▊▉█"
_MOST_GROUPS = 20


def label_counts(data: FederatedData, part: str = "train") -> Index:
    """How often each client has each label, as the client itself names them. [clients, classes]"""
    if data.classes is None:
        raise DataError("Data: label counts need class labels. Got real-valued targets.")
    if data.y.ndim > 1:
        raise DataError("Data: label counts need one label per example. Got rows of tokens.")
    rows = [torch.bincount(data.labels(i, part).flatten(), minlength=data.classes) for i in range(data.clients)]
    return torch.stack(rows).numpy()


def describe(data: FederatedData) -> list[dict[str, Any]]:
    """One row per client: name, group, n_train, n_val, n_test, classes (held in training), entropy (bits).

    `group`, `classes` and `entropy` are None where they do not apply.
    """
    counts = None if data.classes is None else label_counts(data)
    rows: list[dict[str, Any]] = []
    for i in range(data.clients):
        held = entropy = None
        if counts is not None:
            share = counts[i][counts[i] > 0] / counts[i].sum()
            held, entropy = len(share), float(max(0.0, -(share * np.log2(share)).sum()))
        rows.append(
            {
                "name": data.names[i],
                "group": None if data.groups is None else int(data.groups[i]),
                "n_train": len(data.train[i]),
                "n_val": len(data.validation[i]),
                "n_test": len(data.test[i]),
                "classes": held,
                "entropy": entropy,
            }
        )
    return rows


def heterogeneity(data: FederatedData) -> float:
    """Mean total-variation distance of the clients' label distributions to the overall one; 0 = all alike."""
    counts = label_counts(data)
    share = counts / counts.sum(1, keepdims=True)
    overall = counts.sum(0) / counts.sum()
    return float(np.abs(share - overall).sum(1).mean() / 2)


def _summary(data: FederatedData) -> list[str]:
    n = data.sizes
    tests = [len(t) for t in data.test]
    lines = [
        f"{data.source}: {data.clients} client(s); training examples each: {n.min()} min, {np.median(n):g} median,"
        f" {n.max()} max; test {min(tests)} to {max(tests)}"
    ]
    if data.classes is not None:
        held = (label_counts(data) > 0).sum(1)
        lines.append(
            f"{data.classes} classes; held by a client: {held.min()} min, {np.median(held):g} median, {held.max()} max;"
            f" heterogeneity {heterogeneity(data):.2f} (mean total variation, 0 = all alike)"
        )
    if data.relabel is not None:
        lines.append(f"classes are named in {len(torch.unique(data.relabel, dim=0))} different ways")
    if data.groups is not None:
        sizes = torch.bincount(data.groups)
        sizes = sizes[sizes > 0]
        each = f" ({':'.join(map(str, sizes.tolist()))})" if len(sizes) <= _MOST_GROUPS else ""
        lines.append(f"{len(sizes)} {'true' if data.membership is None else 'main'} groups of clients{each}")
    if data.membership is not None:
        main = data.membership.max(1).values
        lines.append(
            f"clients mix {data.membership.shape[1]} groups; share of the main one: {float(main.mean()):.2f} mean"
        )
    if data.group_names and len(data.group_names) <= _MOST_GROUPS:
        lines.append(f"groups see their examples: {', '.join(data.group_names)}")
    lines.append(f"tested on: {judged_by(data)}")
    return lines


def judged_by(data: FederatedData) -> str:
    """Which examples the clients are judged by, in words."""
    shared = {rows.tobytes() for rows in data.test}
    labels = ", in each client's own labels (global_test_local_labels)" if data.relabel is not None else ""
    if data.clients > 1 and len(shared) == 1:
        return f"one test set for all{labels}"
    if data.groups is not None and len(shared) == len(torch.unique(data.groups)) < data.clients:
        return f"one test set for each group{labels}"
    return "each client's own held-out examples"


def text_picture(data: FederatedData, width: int = 80, height: int = 40) -> str:
    """Clients × labels as block shades (darker = a larger share of that client's examples), and a summary below.

    Where sizes differ much a bar shows them; where groups are known a second field shows who belongs to which. Of more
    than `height` clients an even sample is shown; neighbouring labels share a column where `width` is short.
    """
    if width < 30 or height < 1:
        raise ConfigError(f"Picture: width must be >= 30 and height >= 1. Got {width} and {height}.")
    if data.classes is None:
        return "\n".join(_summary(data))
    shown = np.unique(np.linspace(0, data.clients - 1, min(height, data.clients)).round().astype(np.int64))
    name_width = min(16, max(6, *(len(data.names[i]) for i in shown)))
    n_width = max(5, len(str(data.sizes.max())))
    bars = _bars(data.sizes) if width >= 60 and data.sizes.max() > 2 * data.sizes.min() else None
    belongs = _membership(data) if width >= 60 else None
    aside = (0 if bars is None else len(bars[0]) + 1) + (0 if belongs is None else belongs.shape[1] + 1)
    room = width - name_width - n_width - 4 - aside
    columns = min(data.classes, room)
    cell = max(1, min(3, room // columns))
    edges = np.linspace(0, data.classes, columns + 1).round().astype(np.int64)
    counts = label_counts(data)[shown]
    share = np.add.reduceat(counts, edges[:-1], axis=1) / counts.sum(1, keepdims=True)
    # Square root: small shares stay visible beside a client that has one class only.
    level = np.ceil(np.sqrt(share / share.max()) * (len(_SHADES) - 1)).astype(np.int64)
    head = f"labels 0..{data.classes - 1}"
    if belongs is not None:
        head = f"{head:<{columns * cell}} {'group' if belongs.shape[1] < 6 else 'groups'}"
    gap = "" if bars is None else " " * (len(bars[0]) + 1)
    lines = [f"{'client':<{name_width}} {'n':>{n_width}} {gap} {head}"]
    for k, i in enumerate(shown):
        bar = "".join(_SHADES[v] * cell for v in level[k])
        size = "" if bars is None else bars[i] + " "
        group = "" if belongs is None else "".join(_SHADES[v] for v in belongs[i]) + "│"
        lines.append(f"{data.names[i][:name_width]:<{name_width}} {data.sizes[i]:>{n_width}} {size}│{bar}│{group}")
    if len(shown) < data.clients:
        lines.append(f"({len(shown)} of {data.clients} clients shown)")
    return "\n".join([*lines, *_summary(data)])


def _bars(sizes: Index, width: int = 8) -> list[str]:
    """Sizes as bars of equal width; the largest one fills it."""
    eighths = np.maximum(1, np.rint(8 * width * sizes / sizes.max()).astype(np.int64))
    return [("█" * (e // 8) + (_BAR[e % 8 - 1] if e % 8 else "")).ljust(width) for e in eighths.tolist()]


def _membership(data: FederatedData) -> Index | None:
    """Clients × groups as levels of shade; None without groups, or with too many of them."""
    if data.groups is None or int(data.groups.max()) >= _MOST_GROUPS:
        return None
    share = torch.nn.functional.one_hot(data.groups).double() if data.membership is None else data.membership
    return np.asarray(np.ceil(np.sqrt(share.numpy()) * (len(_SHADES) - 1) - 0.5), np.int64)


def figure(data: FederatedData, path: str | Path) -> Path:
    """Draw label shares per client (heat map) beside training sizes; the file's ending says the format (.png, .pdf).

    Raises:
        DataError: without matplotlib, or for data without class labels.
        ConfigError: for an ending matplotlib cannot write.
    """
    counts = label_counts(data)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DataError("Figure: this needs matplotlib. Install it with: pip install 'fedspan[report]'") from None
    path = Path(path)
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"Figure: the file must end in .png, .pdf or .svg. Got {path.name!r}.")
    order = np.arange(data.clients) if data.groups is None else np.argsort(data.groups.numpy(), kind="stable")
    share: NDArray[np.float64] = (counts / counts.sum(1, keepdims=True))[order]
    tall = min(9.0, max(2.8, 0.16 * data.clients + 1.2))
    drawing = Figure(figsize=(8, tall), layout="constrained")
    left, right = drawing.subplots(1, 2, sharey=True, width_ratios=[4, 1])
    image = left.imshow(share, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    left.set(xlabel="label", ylabel="client" if data.groups is None else "client, ordered by group")
    if data.clients <= 40:
        left.set_yticks(range(data.clients), [data.names[i][:16] for i in order], fontsize=7)
    if len(data.class_names) == data.classes and 0 < len(data.class_names) <= 20:
        long = max(map(len, data.class_names)) > 2
        left.set_xticks(
            range(len(data.class_names)), data.class_names, rotation=45 if long else 0, ha="right" if long else "center"
        )
    drawing.colorbar(image, ax=left, label="share of the client's examples", pad=0.01, fraction=0.05, aspect=40)
    many = data.clients > 60  # gaps between many bars would only be a moiré pattern
    right.barh(
        range(data.clients), data.sizes[order], color="#4878a8", height=1.0 if many else 0.9, antialiased=not many
    )
    right.set(xlabel="training examples")
    for side in ("top", "right"):
        right.spines[side].set_visible(False)
    drawing.suptitle(f"{data.source}: {data.clients} clients, heterogeneity {heterogeneity(data):.2f}", fontsize=11)
    drawing.savefig(path, dpi=150)
    return path
