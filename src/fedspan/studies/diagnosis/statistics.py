"""How clients differ in labels and features, as shares of variance that do not grow with the number of examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedspan.data.federated import FederatedData
from fedspan.randomness import generator

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CLIENTS = 200  # looked at; of more, an even choice stands for all
EXAMPLES = 200  # of a client
_POOL = 4000  # examples the principal components are taken from
_COMPONENTS = 20
_DRAWS = 30
_PART, _LEFT = 0.06, 0.2  # of what divides clients: what one more group explains, and what groups may leave


@dataclass(frozen=True)
class Sample:
    """Training examples of some clients: principal components of the inputs, labels, and whose they are."""

    z: Floats  # [n, components], whitened
    y: Ints | None  # as the client names them; None for real-valued targets
    client: Ints  # 0..clients−1
    clients: int
    ids: list[int]  # which clients of the federation
    target: Floats | None = None  # where it is one real number


@dataclass(frozen=True)
class Statistics:
    """What the samples show. Shares of variance are between clients, 0 where all are alike."""

    labels: float | None  # total-variation distance of label distributions to the common one, above chance
    labels_by_chance: float | None
    classes_held: float | None  # mean number of classes of a client
    inputs: float  # share of variance of the inputs
    meaning: float | None  # the same among examples of one label
    groups: Ints | None  # clients in groups within which the meaning agrees, if there are such
    within: float | None  # what is left of `meaning` inside the groups


def sample(data: FederatedData) -> Sample:
    """Look at the training parts; keyed by nothing but the federation itself, so that it is the same every time."""
    ids = np.unique(np.linspace(0, data.clients - 1, min(CLIENTS, data.clients)).round().astype(int)).tolist()
    rng = generator(0, "diagnose")
    rows, client, labels = [], [], []
    for k, i in enumerate(ids):
        held = data.train[i]
        own = held if len(held) <= EXAMPLES else np.sort(rng.choice(held, EXAMPLES, replace=False))
        y = data.y[torch.from_numpy(own)]
        labels.append(y if data.relabel is None else data.relabel[i][y])
        rows.append(own)
        client.append(np.full(len(own), k, np.int64))
    at = np.concatenate(rows)
    x = data.x[torch.from_numpy(at)].reshape(len(at), -1).double().numpy()
    said = torch.cat(labels).reshape(len(at), -1)
    named: Ints | None = None if data.classes is None else said[:, 0].numpy()
    real = said[:, 0].double().numpy() if data.classes is None and said.shape[1] == 1 else None
    return Sample(_components(x, rng), named, np.concatenate(client), len(ids), ids, real)


def _components(x: Floats, rng: np.random.Generator) -> Floats:
    """Whitened principal components of the pooled inputs."""
    x = x - x.mean(0)
    some = x if len(x) <= _POOL else x[rng.choice(len(x), _POOL, replace=False)]
    _, s, axes = np.linalg.svd(some, full_matrices=False)
    kept = int(min(_COMPONENTS, (s > 1e-6 * max(float(s[0]), 1e-30)).sum()))
    z = x @ axes[:kept].T if kept else np.zeros((len(x), 1))
    spread = z.std(0)
    out: Floats = z / np.where(spread > 0, spread, 1.0)
    return out


def between(z: Floats, cell: Ints, client: Ints) -> float:
    """The share of variance between clients among examples of one cell, by analysis of variance over all cells.

    What remains by chance is taken off, so it is about 0 (or slightly below) where clients do not differ.
    """
    if not len(z):
        return 0.0
    # Every (cell, client) that occurs is a class of the analysis; cells with one client tell nothing.
    pair = cell * (int(client.max()) + 1) + client
    _, at, count = np.unique(pair, return_inverse=True, return_counts=True)
    first = np.unique(at, return_index=True)[1]
    sums = np.stack([np.bincount(at, z[:, k]) for k in range(z.shape[1])], 1)
    means = sums / count[:, None]
    inside = float(((z - means[at]) ** 2).sum())
    of = cell[first]
    names, of = np.unique(of, return_inverse=True)
    total = np.bincount(of, count)
    centre = np.stack([np.bincount(of, sums[:, k]) for k in range(z.shape[1])], 1) / total[:, None]
    across = float((count[:, None] * (means - centre[of]) ** 2).sum())
    free_across, free_inside = len(count) - len(names), len(z) - len(count)
    if free_across <= 0 or free_inside <= 0:
        return 0.0
    usual = float((total - np.bincount(of, count**2) / total).sum()) / free_across  # n₀ of unbalanced designs
    noise = inside / free_inside
    signal = (across / free_across - noise) / max(usual, 1e-9)
    return signal / max(signal + noise, 1e-12)


def label_distance(y: Ints, client: Ints, clients: int, classes: int) -> tuple[float, float]:
    """Mean total-variation distance of the clients' label distributions to the common one, and what chance gives."""
    counts = np.zeros((clients, classes))
    np.add.at(counts, (client, y), 1.0)
    common = counts.sum(0) / counts.sum()
    sizes = counts.sum(1).astype(int)
    rng = generator(0, "diagnose", "labels")
    drawn = [np.stack([rng.multinomial(n, common) for n in sizes]).astype(np.float64) for _ in range(_DRAWS)]

    def distance(of: Floats) -> float:
        share = of / np.maximum(of.sum(1, keepdims=True), 1)
        return float(np.abs(share - common).sum(1).mean() / 2)

    return distance(counts), float(np.mean([distance(d) for d in drawn]))


def signatures(of: Sample) -> Floats:
    """What each client means by each label: the mean input of every label beside that of all clients."""
    assert of.y is not None
    labels = np.unique(of.y)
    out = np.zeros((of.clients, len(labels), of.z.shape[1]))
    for k, c in enumerate(labels):
        mine = of.y == c
        count = np.bincount(of.client[mine], minlength=of.clients)
        sums = np.stack([np.bincount(of.client[mine], of.z[mine, j], of.clients) for j in range(of.z.shape[1])], 1)
        centre = of.z[mine].mean(0)
        # Few examples say little: the mean is drawn towards that of all.
        out[:, k] = (sums - count[:, None] * centre) / (count[:, None] + 2.0)
    return out.reshape(of.clients, -1)


def find_groups(of: Sample, meaning: float, most: int = 20) -> tuple[Ints | None, float | None]:
    """Groups of clients that mean the same by their labels, as many as each explain a part of what divides all of them.

    Clients are merged by Ward's rule; the last cut that explains more than noise does (`_PART`) is taken if little is
    left (`_LEFT`). On digits a true group explained 0.08 or more of it, a cut through noise 0.04 or less.
    """
    from sklearn.cluster import AgglomerativeClustering

    assert of.y is not None
    s = signatures(of)
    found: tuple[Ints | None, float | None] = None, None
    before = meaning
    for k in range(2, min(most, of.clients // 2) + 1):
        groups = AgglomerativeClustering(k).fit_predict(s).astype(np.int64)
        left = between(of.z, of.y * k + groups[of.client], of.client)
        if before - left > _PART * meaning and left < _LEFT * meaning:
            found = groups, left
        before = left
    return found


def statistics(of: Sample, classes: int | None) -> Statistics:
    """Everything that needs no model."""
    one = np.zeros(len(of.z), np.int64)
    inputs = between(of.z, one, of.client)
    if of.y is None or classes is None:
        return Statistics(None, None, None, inputs, None, None, None)
    found, chance = label_distance(of.y, of.client, of.clients, classes)
    held = np.mean([len(np.unique(of.y[of.client == i])) for i in range(of.clients)])
    meaning = between(of.z, of.y, of.client)
    groups, left = find_groups(of, meaning) if meaning > 0.02 else (None, None)
    return Statistics(found - chance, chance, float(held), inputs, meaning, groups, left)
