"""Small federations that every test can afford; one thread, float64, warnings are errors."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any, TypeVar

# Before torch starts: more threads than cores would make tests ten times slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["FEDSPAN_SETTINGS"] = ""  # whatever the user who runs the tests has settled
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background; commands under test inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from fedspan import tree
from fedspan.cli.app import app
from fedspan.data.federated import FederatedData
from fedspan.layers import plain_weights
from fedspan.learn.task import Task
from fedspan.method import Method
from fedspan.method.fields import build
from fedspan.methods import METHODS
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.tree import Params, Tree

torch.set_num_threads(1)

M = TypeVar("M", bound=Method)
TOLERANCE = 1e-12
"""Two ways of computing the same thing in float64: |difference| <= TOLERANCE * max(1, largest entry)."""


def method_of(cls: type[M], **keys: Any) -> M:
    """A method of this class with these keys, as an experiment file writes them (`momentum`, `server_lr`, `cycle`)."""
    return build(cls, keys, cls.__name__)


def register_while(patch: pytest.MonkeyPatch, name: str, cls: type[Method]) -> None:
    """Register a method of one's own as long as a patch lasts."""
    patch.setitem(getattr(METHODS, "_classes", METHODS), name, cls)


def call(*arguments: str, code: int = 0) -> Any:
    """`fedspan` with these arguments: its result, if it ends with this code."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def failing(*arguments: str) -> str:
    """The one sentence with which `fedspan` refuses these arguments."""
    result = call(*arguments, code=2)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("Error: "), result.stderr
    assert "Traceback" not in result.output
    return str(lines[0])


def assert_close(a: object, b: object, tolerance: float = TOLERANCE) -> None:
    """Equal trees up to rounding."""
    x, y = dict(tree.items(a)), dict(tree.items(b))
    assert x.keys() == y.keys()
    for path in x:
        p, q = x[path].detach(), y[path].detach()
        assert p.shape == q.shape, path
        if p.dtype == torch.bool:
            assert torch.equal(p, q), path
            continue
        scale = max(1.0, float(p.abs().max()) if p.numel() else 1.0)
        gap = float((p - q).abs().max()) if p.numel() else 0.0
        assert gap <= tolerance * scale, f"{path}: {gap:.3e}"


def assert_same(a: object, b: object) -> None:
    """Equal trees bit for bit."""
    assert tree.digest(a) == tree.digest(b)


class SmallCnn(nn.Module):
    """A convolution, a norm, a hidden layer and a head on 1x6x6 images."""

    def __init__(self, norm: str = "group") -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4) if norm == "group" else nn.BatchNorm2d(4)
        self.hidden = nn.Linear(36, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        return self.head(self.hidden(x.flatten(1)).relu())


def make_model(kind: str) -> nn.Module:
    """mlp, dropout, cnn or batchnorm."""
    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))
    if kind == "dropout":
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Dropout(0.3), nn.Linear(7, 3))
    return SmallCnn("batch" if kind == "batchnorm" else "group")


def make_task(kind: str = "mlp") -> Task:
    """A task in float64."""
    return Task(make_model(kind), dtype=torch.float64)


def make_data(
    kind: str = "mlp", clients: int = 7, seed: int = 0, equal: bool = False, opposed: bool = True
) -> FederatedData:
    """Clients of very different sizes in two groups, easy to learn; with `opposed` one renames the classes."""
    rng = np.random.default_rng(seed)
    shape = (5,) if kind in ("mlp", "dropout") else (1, 6, 6)
    centres = rng.normal(size=(3, *shape)) * 2
    pairs = []
    for i in range(clients):
        n = 16 if equal else int(rng.integers(6, 30))
        y = rng.integers(0, 3, n)
        x = centres[y] + rng.normal(size=(n, *shape))
        pairs.append((torch.tensor(x), torch.tensor((y + 1) % 3 if opposed and i % 2 else y)))
    data = FederatedData.from_arrays(pairs, groups=[i % 2 for i in range(clients)], seed=seed)
    return data.to(torch.float64)


@pytest.fixture
def task() -> Task:
    """The small MLP."""
    return make_task()


@pytest.fixture
def data() -> FederatedData:
    """Seven ragged clients for the small MLP."""
    return make_data()


def finished(
    method: Method,
    kind: str = "mlp",
    rounds: int = 3,
    task: Task | None = None,
    data: FederatedData | None = None,
    **settings: Any,
) -> Simulation:
    """A finished run on seven ragged clients, four of them in each round."""
    chosen = {"participation": 0.6, "batch_size": 8, "epochs": 2, "workers": 1, "precision": "float64"} | settings
    settled = Settings(evaluate_every=100, **chosen)
    sim = Simulation(method, task or make_task(kind), data or make_data(kind), rounds=rounds, seed=5, settings=settled)
    sim.result = sim.run()  # type: ignore[attr-defined]
    return sim


def plain_model(sim: Simulation, client: int = 0) -> Params:
    """A client's model as that of the plain network."""
    task, weights = sim.personal(client)
    return plain_weights(task.module, weights)


def plain_models(sim: Simulation) -> Tree:
    """Every client's model as that of the plain network."""
    return {str(i): plain_model(sim, i) for i in range(sim.data.clients)}


SLOW = {"test_all_methods", "test_bad_input", "test_browser", "test_checkpoint", "test_cli", "test_divergence"}
SLOW |= {"test_door", "test_factor_figures", "test_flower", "test_generated_pages", "test_kinds", "test_new"}
SLOW |= {"test_onboard", "test_pages", "test_panels", "test_reproduce", "test_resume", "test_theory", "test_workers"}
SLOW |= {"test_baselines", "test_client_store", "test_factorized_files", "test_factorized_fl", "test_fedara_files"}
SLOW |= {"test_fedloru", "test_fedloru_files", "test_hessian", "test_matching_report", "test_server_optimizer"}
SLOW |= {"test_subspace_report", "test_portability", "test_faulty_disk", "test_damaged_files", "test_processes"}
SLOW |= {"test_boundary", "test_quota", "test_owner_policy", "test_os_system", "test_promises", "test_live_roster"}
SLOW |= {"test_audit_log", "test_conformance", "test_membership", "test_accelerator"}
SLOW |= {"test_adaptive_rank", "test_blocks", "test_clusters", "test_devices", "test_fedara", "test_feature_methods"}
SLOW |= {
    "test_tasks",
    "test_fedhm",
    "test_fedpara",
    "test_language",
    "test_posteriors",
    "test_reference",
    "test_resume_environment",
}
SLOW |= {"test_measures", "test_protocols", "test_attacks", "test_disclosure", "test_tables_deployed", "test_tasks"}
SLOW |= {
    "test_client_objects",
    "test_transforms",
    "test_defence",
    "test_tuning",
    "test_deployed_warnings",
    "test_folded",
    "test_asynchronous",
    "test_pfl_mf_adaptive",
    "test_out_of_memory",
    "test_after",
    "test_equivalences",
    "test_ray_workers",
}
"""Files that start processes or train for seconds: `make quick` leaves them out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow files."""
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Keep modules and tests, thousands of them, out of every later search for garbage."""
    gc.collect()
    gc.freeze()
