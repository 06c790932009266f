"""One table of methods, and the promises of `fedspan.testing` that every one of them keeps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from conftest import make_data, make_task
from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.methods import METHODS, make
from fedspan.testing import PROMISES, Case, state_of

# One row per method and variant worth its own line: name, fields.
TABLE: list[tuple[str, dict[str, Any]]] = [
    ("local", {}),
    ("local", {"momentum": 0.9, "weight_decay": 0.01}),
    ("local", {"optimizer": "adamw", "lr": 0.01}),
    ("fedavg", {}),
    ("fedavg", {"private_head": True, "weighting": "uniform", "momentum": 0.5}),
    ("fedavg", {"server_optimizer": "yogi", "server_lr": 0.05}),
    ("fedprox", {"mu": 0.5, "weight_decay": 0.01}),
    ("fedavg-ft", {"finetune_epochs": 2, "momentum": 0.5}),
    ("fedavg-ft", {"lr_finetune": 0.05, "l2": 0.3, "private_head": True}),
    ("fedavg-head", {"finetune_epochs": 3, "lr_finetune": 0.2, "weight_decay": 0.01}),
    ("fedper", {}),
    ("fedrep", {"head_epochs": 2, "momentum": 0.9}),
    ("fedbabu", {"finetune_epochs": 2}),
    ("lg-fedavg", {}),
    ("ditto", {"lam": 0.3}),
    ("oracle", {}),
    ("cfl", {"start_round": 2, "eps_1": 10.0, "eps_2": 0.0}),
    ("cfl", {"weighting": "samples", "private_head": True, "linkage": "single", "gamma_max": 0.2, "start_round": 1}),
    ("ifca", {"clusters": 2}),
    ("ifca", {"clusters": 2, "averaging": "gradient", "clustered": "head", "private_head": False, "lr": 0.5}),
    ("fedcollab", {"distance_rounds": 2, "distance_hidden": 5, "momentum": 0.5}),
    ("per-fedavg", {}),
    ("per-fedavg", {"variant": "hessian-free", "lr_inner": 0.05, "momentum": 0.5, "adapt": 2}),
    ("per-fedavg", {"variant": "exact", "private_head": True, "adapt_unit": "epoch", "weight_decay": 0.01}),
    ("fedfomo", {}),
    ("apfl", {"momentum": 0.5}),
    ("fedalt", {"v_epochs": 2, "l2": 0.1, "server_momentum": 0.5, "server_lr": 0.9}),
    ("fedalt", {"stateful": False, "v_steps": 3, "server_optimizer": "adam", "server_lr": 0.05}),
    ("fedsim", {"momentum": 0.5}),
    ("pfedsim", {"warmup_rounds": 1}),
    ("pfedsim", {"warmup_rounds": 2, "private_head": True, "momentum": 0.5}),
    ("pfedsim", {"warmup_rounds": 0}),
    ("fedala", {"start_passes": 3}),
    ("fedala", {"top": 3, "private_head": True, "momentum": 0.5, "start_passes": 12, "threshold": 0.01}),
    ("pfedme", {}),
    ("pfedme", {"private_head": True, "beta": 0.7, "momentum": 0.5, "lr_inner": 0.02, "inner_steps": 2}),
    ("l2gd", {"p": 0.4, "private_head": True, "weight_decay": 0.01}),
    ("l2gd", {}),
    ("flute", {"head_epochs": 1}),
    ("flute", {"head_epochs": 1, "lr_server": 0.0, "momentum": 0.5, "rep_epochs": 2}),
    ("fedas", {}),
    ("fedas", {"align": "example", "align_epochs": 2, "private_head": False, "fisher": False, "momentum": 0.5}),
    ("pfedfda", {}),
    ("pfedfda", {"single_beta": True, "momentum": 0.5, "weight_decay": 0.01, "lr": 0.005}),
    ("fedkd", {}),
    ("fedkd", {"private_head": True, "momentum": 0.5, "clip": 0.5, "energy_start": 0.7, "energy_rounds": 2}),
    ("pfedes", {}),
    ("pfedafm", {"momentum": 0.5, "lr_common": 0.05}),
    ("fedproto", {}),
    ("fedproto", {"weighting": "uniform", "predict_by": "prototype", "momentum": 0.5, "lam": 3.0}),
    ("fedtgp", {"server_epochs": 2}),
    ("fedsim", {"l2": 0.1, "l2_towards": "start", "weighting": "uniform"}),
    ("apfl", {"mix": "logits", "alpha_every": "step", "alpha_decay": 0.02, "private_head": True}),
    ("fedavg", {"keep_momentum": True, "momentum": 0.5, "private_head": True}),
    ("local", {"keep_momentum": True, "momentum": 0.5, "weight_decay": 0.01}),
    ("fedfomo", {"models": 2, "private_head": True, "epsilon": 0.5, "momentum": 0.5}),
    ("pfl-mf", {"rank": 3}),
    ("pfl-mf", {"rank": 2, "factorise": "all", "v_steps": 3, "wire": "full", "server_step": "plain", "lr": 0.1}),
    (
        "pfl-mf",
        {"rank": "auto", "rank_start": 4, "rank_round": 1, "rank_gap": 1.001, "gauge_every": 2, "refresh": True},
    ),
    ("pfl-mf-adaptive", {"rank": 2, "score_every": 1, "lr": 0.3}),
    ("pfl-mf-adaptive", {"rank": 4, "wire": "full", "score_every": 1, "freeze": 1, "momentum": 0.5, "lr": 0.1}),
    ("pfl-mf-adaptive", {"kappa": (1.0,), "tau": (1.0,), "rank": 1, "cross_fit": 1.0, "weighting": "uniform"}),
    ("pfl-mf-paper", {"rank": 3, "v_scale": "1", "v_steps": 5}),
    ("pfl-mf-paper", {"rank": 2, "v_unit": "epoch", "g_at": "new", "wire": "full", "p": 0.5}),
    ("pfl-mf-paper", {"rank": 2, "u_update": "train", "u_steps": 2, "server_step": "literal", "lr_v": 0.3, "cycle": 3}),
    ("pfl-mf-paper", {"rank": 3, "start": "common", "v_scale": "1"}),
    ("pfl-mf-joint", {"rank": 2}),
    ("amht-lrs", {"rank": 2, "sparsity": 3}),
    ("amht-lrs", {"rank": 2, "sparsity": 3, "u_update": "gradient", "lr_u": 0.1, "momentum": 0.5}),
    ("lr-bpfl", {"rank": 2, "members": 1}),
    ("lr-bpfl", {"rank": 2, "members": 0, "joint": True, "adaptive_rank": True, "private_head": True}),
    ("waffle", {"temperature": 0.1}),
    ("factorized-fl-alpha", {"mu_start": "dense"}),
    ("factorized-fl-alpha", {"tau": 0.0, "gauge": True, "momentum": 0.5, "newcomer": "start", "mu_start": "dense"}),
    ("factorized-fl-alpha", {"matching": "random", "shared": "um", "private_head": False, "penalty": "subgradient"}),
    ("factorized-fl-beta", {"lam": 0.01, "eval_prune": True, "weight_decay": 0.001, "gamma": 2}),
    ("factorized-fl-beta", {"matching": "worst", "keep_momentum": True, "momentum": 0.5, "down_share": 0.5}),
    ("factorized-fedavg", {"layers": "body", "mu_start": "dense", "down_threshold": 0.001}),
    ("factorized-local", {"optimizer": "adamw", "lr": 0.01, "mu_start": "dense"}),
    ("fedpara", {"rank": 2, "tanh": True, "private_head": True, "momentum": 0.5}),
    ("pfedpara", {}),
    ("fedloru", {"rank": 2, "tau": 3, "momentum": 0.5}),
    (
        "fedloru",
        {"rank": 2, "tau": 3, "reinit": "momentum", "adapter": "lokr", "private_head": True, "cycle": 3}
        | {"alpha": 2.0, "alpha_over_r": True, "server_optimizer": "adam", "server_lr": 0.03},
    ),
    ("fedlora", {"rank": 2, "adapter": "loha", "server_optimizer": "adagrad", "server_lr": 0.2, "layers": "all"}),
    ("pfedloru", {"rank": 3, "tau": 3, "own_ranks": (1, 2), "ranks": (3, 1), "private_head": True, "momentum": 0.5}),
    ("mfedloru", {"rank": 3, "ranks": (3, 1), "tau": 3, "momentum": 0.5, "alpha_inner_by_rank": True}),
    ("pfedlora1", {"momentum": 0.5}),
    ("pfedlora2", {"rank": 1, "private_head": True, "cycle": 2}),
    ("fedhm", {"rho": (1.0, 3.0), "keep_full_rank_history": True, "weight_decay": 0.01, "momentum": 0.5}),
    ("fedlmt", {"rho": 3.0, "weight_decay": 0.01, "private_head": True}),
    ("feddlr", {"energy": 0.9}),
    ("prism", {"keep": (0.5, 0.8), "weight_decay": 0.01, "momentum": 0.5}),
    ("fedara", {"ratio": (1.0, 0.5), "lam": 1.0, "warmup": 1}),
    (
        "fedara",
        {"layers": "body", "ratio": 0.5, "aggregate": "changes", "lam": 0.1, "fac_reduction": "sum", "warmup": 2}
        | {"rho_rule": "whole", "weight_decay": 0.01, "momentum": 0.5, "watch": True},
    ),
    (
        "fedara",
        {"ratio": (1.0, 0.4), "layers": "body", "adapt_energy": 0.9, "adapt_ratios": (0.4, 0.2), "lam": 1.0}
        | {"warmup": 1, "momentum": 0.5},
    ),
    ("fedara", {"ratio": (1.0, 0.5), "lam": 0.2, "warmup": 1, "fac_reduction": "relative", "watch": True}),
    ("fedara-star", {"lam": 1.0}),
]
# Every row on the small MLP. Other models where a method has code of its own for them: convolutions where weights are
# composed, differentiated twice or read by channels, dropout where outputs, features or random numbers are asked for in
# another way than by `fit(task.loss, ...)`.
CONVOLUTIONS = {
    "fedavg",
    "per-fedavg",
    "apfl",
    "fedala",
    "pfedme",
    "fedas",
    "flute",
    "fedkd",
    "fedproto",
    "pfedfda",
    "ifca",
}
CONVOLUTIONS |= {"fedcollab", "pfl-mf", "pfl-mf-paper", "pfl-mf-joint", "amht-lrs", "lr-bpfl", "waffle", "prism"}
CONVOLUTIONS |= {"factorized-fl-alpha", "factorized-fl-beta", "fedpara", "pfedpara", "fedloru", "mfedloru", "pfedloru"}
CONVOLUTIONS |= {"pfl-mf-adaptive", "pfedlora1", "fedhm", "fedlmt", "feddlr"}
DROPOUT = {"local", "fedavg", "fedrep", "ditto", "per-fedavg", "fedfomo", "apfl", "l2gd", "flute", "fedkd", "fedproto"}
DROPOUT |= {
    "pfedfda",
    "ifca",
    "pfl-mf",
    "pfl-mf-paper",
    "amht-lrs",
    "lr-bpfl",
    "waffle",
    "factorized-fl-alpha",
    "fedpara",
}
DROPOUT |= {"pfl-mf-adaptive", "fedloru", "mfedloru", "pfedlora2", "fedhm", "prism"}
FIRST = [TABLE.index(next(row for row in TABLE if row[0] == name)) for name in dict(TABLE)]


def row_id(k: int) -> str:
    """A row by its method and fields: `fedavg-momentum=0.5`."""
    name, fields = TABLE[k]
    return f"{name}-{'-'.join(f'{key}={value}' for key, value in fields.items()) or 'default'}"


FIRST_ROWS = pytest.mark.parametrize(("name", "fields"), [TABLE[k] for k in FIRST], ids=[row_id(k) for k in FIRST])


# Methods whose server also holds what follows from the data alone, or loses on the wire what was never learnt.
SUMMARISING = {"pfedsim", "fedproto", "fedtgp", "pfedfda", "fedkd", "fedcollab"}


# Methods that do something else after a few rounds: split, part, settle, accumulate, cut the rank.
LATE = {
    "cfl",
    "pfedsim",
    "fedcollab",
    "fedloru",
    "fedlora",
    "pfedloru",
    "mfedloru",
    "pfl-mf",
    "fedkd",
    "l2gd",
    "fedala",
    "pfl-mf-adaptive",
}


# Methods that send an approximation of their model, so that it changes without any training.
TRUNCATING = {"fedhm", "feddlr", "fedara", "fedara-star"}
# Heads are fitted without a learning rate, so that their mean moves without any training.
TRUNCATING |= {"pfl-mf-adaptive"}


def test_every_registered_method_is_in_the_table() -> None:
    assert {n for n, _ in TABLE} == set(METHODS)


# Which rows a promise is checked on, where that is not the first row of every method.
EVERY_ROW = {"keys", "pure", "mappings", "bytes"}


def models_for(promise: str, k: int) -> list[str]:
    """The models on which a promise is checked for a row: one, except where methods have code for others."""
    name = TABLE[k][0]
    if k not in FIRST:
        return ["mlp"] if promise in EVERY_ROW else []
    if promise == "mappings":
        return ["mlp", *(["cnn"] if name in CONVOLUTIONS else []), *(["dropout"] if name in DROPOUT else [])]
    return ["mlp", "batchnorm"] if promise == "pure" else ["mlp"]


def case_of(promise: str, k: int, kind: str) -> Case:
    """A row of the table on the small federation of the tests."""
    name, fields = TABLE[k]
    method = make(name, **fields)
    late = promise in ("mappings", "workers", "resume") and name in LATE and kind == "mlp"
    summarising = getattr(method, "moves", False) or name in SUMMARISING
    return Case(
        method=method,
        task=partial(make_task, kind),
        data=make_data(kind, opposed=promise != "learns"),
        few=make_data(kind, clients=3),
        rounds=3 if late else 2,
        epochs=2 if promise in ("mappings", "workers") and kind == "mlp" and k in FIRST else 1,
        fixed="no" if name in TRUNCATING else "models" if summarising else "state",
        computed=("p", *(make_task(kind).head if name == "pfedfda" else [])),
        drop=("before", "after")[k % 2],
    )


@pytest.mark.parametrize(
    ("promise", "k", "kind"),
    [
        pytest.param(promise, k, kind, id=f"{promise}-{row_id(k)}-{kind}")
        for promise in PROMISES
        for k in range(len(TABLE))
        for kind in models_for(promise, k)
    ],
)
def test_every_method_keeps_its_promises(promise: str, k: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is compared here need not outlive a crash.
    monkeypatch.setattr("fedspan.storage.tree_file.os.fsync", lambda _: None)
    case = case_of(promise, k, kind)
    unchecked = PROMISES[promise].check(case)
    assert unchecked is None or (promise == "zero-step" and case.fixed == "no")


@FIRST_ROWS
def test_batch_normalisation_runs_by_the_loop_and_stays_finite(name: str, fields: dict[str, Any]) -> None:
    data = make_data("batchnorm")
    case = Case(method=make(name, **fields), task=partial(make_task, "batchnorm"), data=data, few=data)
    sim, _ = case.run("batch normalisation must run by the loop")
    assert sim.mapping == "loop"
    assert tree.all_finite(state_of(sim))
    with pytest.raises(ConfigError, match="BatchNorm2d at 'norm'"):
        case.begun(mapping="vmap")


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -0.1}, "lr must be a finite number >= 0. Got -0.1"),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"lr": float("inf")}, "lr must be a finite number"),
        ({"lr": "fast"}, "lr must be a number. Got 'fast'"),
        ({"lrr": 0.1}, "unknown key 'lrr'. Did you mean 'lr'?"),
        ({"momentum": 1.0}, "momentum must be a finite number >= 0 and < 1"),
        ({"optimizer": "adam"}, "optimizer must be one of 'sgd', 'adamw'"),
    ],
)
def test_bad_fields_are_refused_in_one_sentence(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        make(name, **fields)
    assert message in str(e.value)
    assert "\n" not in str(e.value)
