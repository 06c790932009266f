"""Clients as people hold them: whatever it is, the same numbers; whatever it is not, one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedspan
from fedspan.data.tables.table_federation import table_data
from fedspan.data.tables.table_layout import TableLayout
from fedspan.errors import ConfigError, DataError

NAMES = ["x0", "x1", "x2", "x10"]


def arrays() -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    made = []
    for n in (16, 24):
        x = (rng.integers(-200, 200, (n, 4)) / 64).astype(np.float32)
        made.append((x, (x[:, 0] > x[:, 1]).astype(np.int64)))
    return made


class Pairs(Dataset[Any]):
    """A data set of somebody's own."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, k: int) -> Any:
        return self.x[k], self.y[k]


def columns(x: Any, y: Any) -> dict[str, Any]:
    return {**{n: x[:, k] for k, n in enumerate(NAMES)}, "label": y}


def of_arrays(_: Path) -> fedspan.FederatedData:
    return fedspan.federate(arrays())


def of_torch(_: Path) -> fedspan.FederatedData:
    return fedspan.federate([Pairs(x, y) for x, y in arrays()])


def of_tensors(_: Path) -> fedspan.FederatedData:
    return fedspan.federate([TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in arrays()])


def of_hub(_: Path) -> fedspan.FederatedData:
    datasets = pytest.importorskip("datasets", reason="pip install 'fedspan[data]'")
    clients = [datasets.Dataset.from_dict(columns(x, y)) for x, y in arrays()]
    return fedspan.federate(clients, target="label", standardise="none")


def of_pandas(_: Path) -> fedspan.FederatedData:
    pandas = pytest.importorskip("pandas", reason="pip install 'fedspan[data]'")
    clients = [pandas.DataFrame(columns(x, y)) for x, y in arrays()]
    return fedspan.federate(clients, target="label", standardise="none")


def of_polars(_: Path) -> fedspan.FederatedData:
    polars = pytest.importorskip("polars", reason="pip install 'fedspan[data]'")
    frames = [polars.DataFrame({**columns(x, y), "who": [k] * len(y)}) for k, (x, y) in enumerate(arrays())]
    whole = polars.concat(frames).select("label", "who", *reversed(NAMES))
    return fedspan.federate(whole, client="who", target="label", standardise="none")


def _arrow() -> Any:
    pa = pytest.importorskip("pyarrow", reason="pip install 'fedspan[data]'")
    return pa.concat_tables([pa.table({**columns(x, y), "who": [k] * len(y)}) for k, (x, y) in enumerate(arrays())])


def of_csv(folder: Path) -> fedspan.FederatedData:
    table = _arrow()
    from pyarrow import csv

    csv.write_csv(table, folder / "t.csv")
    return table_data(str(folder / "t.csv"), TableLayout(client="who", target="label", standardise="none"))


def of_parquet(folder: Path) -> fedspan.FederatedData:
    table = _arrow()
    from pyarrow import parquet

    parquet.write_table(table, folder / "t.parquet")
    return table_data(str(folder / "t.parquet"), TableLayout(client="who", target="label", standardise="none"))


KINDS = (of_torch, of_tensors, of_hub, of_pandas, of_polars, of_csv, of_parquet)


def trained(data: fedspan.FederatedData) -> str:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape) / (k + 1))
    return fedspan.simulate(fedspan.make("fedavg", lr=0.1), model, data, rounds=3, batch_size=4).digest


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_model_whatever_the_data_are_held_in(tmp_path: Path, kind: Any) -> None:
    assert trained(kind(tmp_path)) == trained(of_arrays(tmp_path))


def test_names_tests_and_groups() -> None:
    (a, ya), (b, yb) = arrays()
    data = fedspan.federate({"oslo": (a, ya), "rome": (b, yb)}, test=[(b, yb), (a, ya)], groups=[0, 1])
    assert data.names == ["oslo", "rome"] and [len(t) for t in data.test] == [24, 16] and data.groups is not None
    pandas = pytest.importorskip("pandas")
    frames = {n: pandas.DataFrame(columns(*pair)) for n, pair in zip(("oslo", "rome"), arrays())}
    tested = fedspan.federate(frames, test=[*frames.values()][::-1], target="label", standardise="none")
    assert [len(t) for t in tested.test] == [24, 16] and tested.names == ["oslo", "rome"]
    assert torch.equal(tested.x[torch.from_numpy(tested.test[0])], torch.from_numpy(b))


def test_a_flower_federation() -> None:
    datasets = pytest.importorskip("datasets", reason="pip install 'fedspan[data]'")
    x, y = (np.concatenate(parts) for parts in zip(*arrays()))

    class Partitions:
        """What a FederatedDataset offers, without its download."""

        partitioners = {"train": type("P", (), {"num_partitions": 2})()}

        def load_partition(self, k: int) -> Any:
            part = slice(0, 16) if k == 0 else slice(16, None)
            return datasets.Dataset.from_dict(columns(x[part], y[part]))

    data = fedspan.federate(Partitions(), target="label", standardise="none")
    assert trained(data) == trained(of_arrays(Path()))


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "loader": (lambda: [DataLoader(Pairs(*arrays()[0]))], {}, "client 0 must be .* Got a DataLoader.*its .dataset"),
    "iterable": (lambda: [Stream()], {}, "client 0 must be a Dataset with a length"),
    "triple": (lambda: [(1, 2, 3)], {}, r"client 0 must be an \(x, y\) pair.* of length 3"),
    "array": (lambda: [np.zeros(3)], {}, "client 0 must be .* Got a value of type ndarray"),
    "path": (lambda: "heart.csv", {}, "clients must be a list or dict .* Got a value of type str"),
    "lone data set": (lambda: Pairs(*arrays()[0]), {}, "put it in a list"),
    "none": (list, {}, "at least one client"),
    "ragged": (lambda: [Pairs([torch.zeros(2), torch.zeros(3)], [0, 1])], {}, "of one shape .*pass collate"),
    "single": (lambda: [Pairs.__new__(Singles)], {}, r"an example must be a pair \(x, y\)"),
    "by name": (lambda: [Named()], {}, "examples by name need the name of the label, one of a, b"),
    "layout": (lambda: arrays(), {"missing": "mean"}, "missing is for frames"),
    "no target": (lambda: [_arrow()], {}, "pass target="),
    "both": (lambda: [_arrow(), arrays()[0]], {"target": "label"}, "must all be frames, or none"),
    "bad collate": (lambda: arrays(), {"collate": lambda s: s[0][0]}, r"collate must return \(x, y\)"),
    "short collate": (lambda: arrays(), {"collate": lambda s: (torch.zeros(1, 1), [0])}, "each of 40 examples"),
}  # fmt: skip


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Singles(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, k: int) -> Any:
        return torch.zeros(3)


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, k: int) -> Any:
        return {"a": torch.zeros(3), "b": 0}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_a_client_gets_one_sentence(case: str) -> None:
    make, keys, sentence = BAD[case]
    with pytest.raises((DataError, ConfigError), match=sentence):
        fedspan.federate(make(), **keys)


# ------------------------------------------------------------------------------------------------ trees and padding


class Two(nn.Module):
    """Takes a table and tokens with their mask, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 3), nn.Linear(5, 2)

    def forward(self, table: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        held = (self.tokens(tokens) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(torch.cat([table, held], 1))


def padded(samples: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Put examples of unequal lengths together."""
    rows = [x["tokens"] for x, _ in samples]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(tokens.shape[1])[None] < torch.tensor([len(r) for r in rows])[:, None]
    table = torch.stack([x["table"] for x, _ in samples])
    return {"table": table, "tokens": tokens, "mask": mask.to(table.dtype)}, torch.tensor([y for _, y in samples])


def ragged(n: int, seed: int) -> Pairs:
    rng = np.random.default_rng(seed)
    x = [
        {
            "table": torch.from_numpy(rng.normal(size=2).astype(np.float32)),
            "tokens": torch.from_numpy(rng.integers(1, 7, rng.integers(2, 9))),
        }
        for _ in range(n)
    ]
    return Pairs(x, [int(v["table"][0] > 0) for v in x])


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedrep"])
def test_trees_of_unequal_lengths_train_alike_mapped_and_in_a_loop(name: str) -> None:
    data = fedspan.federate([ragged(n, n) for n in (9, 14, 11)], collate=padded)
    assert isinstance(data.x, dict) and data.x["tokens"].shape == data.x["mask"].shape
    torch.manual_seed(0)
    model, found = Two().double(), {}
    for mapping in ("vmap", "loop"):
        found[mapping] = fedspan.simulate(
            fedspan.make(name, lr=0.2), model, data, rounds=3, batch_size=4, mapping=mapping, precision="float64"
        )
    one, other = (found[m].simulation for m in found)
    assert one is not None and other is not None
    for i in range(3):
        a, b = (s.personal(i)[1] for s in (one, other))
        assert all(torch.allclose(a[k], b[k], rtol=0, atol=1e-12) for k in a)
        assert not torch.equal(a["tokens.weight"], model.tokens.weight)


def test_a_tuple_is_given_by_place_and_changes_the_identity(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.head(a + 2 * b)  # type: ignore[no-any-return]

    x = [(torch.randn(12, 2), torch.randn(12, 2)) for _ in range(2)]
    clients = [(pair, (pair[0][:, 0] > 0).long()) for pair in x]
    run = {"rounds": 2, "out": tmp_path / "run"}
    fedspan.simulate(fedspan.make("fedavg", lr=0.1), Sum(), fedspan.federate(clients), **run)  # type: ignore[arg-type]
    swapped = [((pair[1], pair[0]), y) for pair, y in clients]
    with pytest.raises(fedspan.FedspanError, match=r"data\.examples"):
        fedspan.simulate(fedspan.make("fedavg", lr=0.1), Sum(), fedspan.federate(swapped), **run)  # type: ignore[arg-type]
    bad = [((pair[0], pair[1][:3]), y) for pair, y in clients]
    with pytest.raises(DataError, match=r"client 0 must have as many labels as examples\. Got 3 and 12 and 12"):
        fedspan.federate(bad)
