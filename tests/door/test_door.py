"""The way in for others: public names, a registry that is open, code that runs only if it was allowed."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_method import FedDyn
from runs import outcome, rounds_done

import fedspan
from conftest import call, failing, make_data, make_task
from fedspan import ConfigError, Method, Training, allow_code, make, register, simulate
from fedspan.config import from_dict, load_config
from fedspan.data import load
from fedspan.deploy.experiment import Experiment
from fedspan.deploy.local_grid import deploy_here
from fedspan.deploy.node.service import Service
from fedspan.method import named_code
from fedspan.method.named_code import only_allowing
from fedspan.method.registry import METHODS, Registry
from fedspan.methods import BUILT_IN, name_of
from fedspan.models import build
from fedspan.simulation.settings import Settings

HERE = Path(__file__).resolve().parent
SRC = HERE.parents[1] / "src"
SPEC = "own_method:FedDyn"
EXPERIMENT = """
rounds = {rounds}
[data]
source = "digits"
limit = 300
[partition]
clients = 4
[model]
kind = "{model}"
[method]
name = "{method}"
[train]
batch_size = 16
evaluate_every = 4
checkpoint_seconds = 0.0
"""


def written(folder: Path, method: str = SPEC, rounds: int = 2, model: str = "logistic") -> str:
    """An experiment file that names code."""
    path = folder / "exp.toml"
    path.write_text(EXPERIMENT.format(method=method, rounds=rounds, model=model))
    return str(path)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module on the path that leaves a file when it is imported, and holds things that are no methods."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    mark = tmp_path / "imported"
    (folder / "door_trap.py").write_text(
        f"from pathlib import Path\nPath({str(mark)!r}).touch()\nimport torch\n"
        "from fedspan.methods.fedavg import FedAvg\n"
        "class Mine(FedAvg):\n    pass\nclass Net(torch.nn.Linear):\n"
        "    def __init__(self, input_shape, classes):\n        super().__init__(64, classes)\n"
        "    def forward(self, x):\n        return super().forward(x.flatten(1))\n"
        "class Other:\n    pass\ndef function(config):\n    return None\nvalue = 3\n"
    )
    monkeypatch.syspath_prepend(folder)
    yield mark
    sys.modules.pop("door_trap", None)


# ------------------------------------------------------------------------------------------------ public names


def generated(found: Any) -> bool:
    """Whether a docstring is only the signature that `dataclass` or `NamedTuple` write."""
    return bool(re.match(rf"{getattr(found, '__name__', '')}\(", found.__doc__ or "("))


@pytest.mark.parametrize("name", sorted(set(fedspan.__all__) - {"__version__"}))
def test_every_public_name_is_documented(name: str) -> None:
    found = getattr(fedspan, name)
    assert found.__doc__ and not generated(found)
    if inspect.isclass(found):
        for member, value in vars(found).items():
            if inspect.isfunction(value) and not member.startswith("_"):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_unknown_public_names_are_said() -> None:
    assert set(fedspan.__all__) <= set(dir(fedspan))
    with pytest.raises(AttributeError, match="module 'fedspan' has no attribute 'Metod'"):
        _ = fedspan.Metod


@pytest.mark.parametrize(
    "code", ["import fedspan", "from fedspan.cli.app import app", "from fedspan import FedspanError"]
)
def test_torch_is_not_loaded_before_it_is_needed(code: str) -> None:
    check = f"import sys; {code}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, env=os.environ | {"PYTHONPATH": str(SRC)})


def test_only_the_module_that_is_asked_for_is_imported() -> None:
    check = (
        "import sys; from fedspan.methods import METHODS; assert 'fedavg' in METHODS and len(METHODS) > 50;"
        "METHODS['fedavg']; print([m for m in sys.modules if m.startswith('fedspan.methods.')])"
    )
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    found = subprocess.run([sys.executable, "-c", check], check=True, env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == "['fedspan.methods.fedavg']"


# ------------------------------------------------------------------------------------------------ the registry


def test_the_table_names_classes_that_exist() -> None:
    assert list(METHODS)[: len(BUILT_IN)] == list(BUILT_IN)
    assert all(issubclass(METHODS[name], Method) for name in BUILT_IN)
    assert all(name_of(METHODS[name]()) == name for name in ("fedavg", "pfl-mf", "ditto"))
    with pytest.raises(KeyError):
        METHODS["fedavgg"]


def test_register_adds_a_name_and_keeps_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_classes", dict(METHODS._classes))
    assert register("door-dyn")(FedDyn) is FedDyn
    assert register("door-dyn")(FedDyn) is FedDyn  # a module that is loaded twice
    assert make("door-dyn", alpha=0.3) == FedDyn(alpha=0.3)
    assert name_of(FedDyn()) == "door-dyn" and "door-dyn" in list(METHODS)
    config = from_dict({"method": {"name": "door-dyn", "alpha": 0.3}, "partition": {"clients": 3}})
    assert config.only("door-dyn") == FedDyn(alpha=0.3)
    with pytest.raises(
        ConfigError, match=r"register 'door-dyn': the name must be free. It stands for own_method:FedDyn"
    ):
        register("door-dyn")(Training)
    with pytest.raises(ConfigError, match=r"the name must be free. It stands for fedspan\.methods\.fedavg:FedAvg"):
        register("fedavg")(FedDyn)
    with pytest.raises(ConfigError, match="the name must be 1 to 100 letters"):
        register("a/b")(FedDyn)
    with pytest.raises(ConfigError, match=r"must be a subclass of fedspan\.Method. Got the class builtins\.int"):
        register("door-int")(int)  # type: ignore[type-var]


# ------------------------------------------------------------------------------------------------ installed packages


def install(folder: Path, package: str, entries: str, module: str = "") -> None:
    """A package as an installer leaves it: its module, and the entry points it declares."""
    (folder / f"{package}.py").write_text(module)
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entries)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for packages; what is installed is looked at anew, before and after."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(METHODS, "_classes", dict(METHODS._classes))
    named_code.forget_installed()
    yield tmp_path
    named_code.forget_installed()
    for name in ("door_good", "door_bad", "door_twin"):
        sys.modules.pop(name, None)


GOOD = """
import numpy as np
from torch import nn
from fedspan.methods.fedavg import FedAvg
class Mine(FedAvg):
    pass
class Net(nn.Module):
    def __init__(self, input_shape, classes, wide=3):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(wide), nn.Linear(wide, classes))
        self.layers[1] = nn.Linear(input_shape[0], wide)
    def forward(self, x):
        return self.layers(x)
def points(root):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(40, 4)).astype("float32"), "y": np.arange(40) % 2}
def wrong(root):
    return {"x": np.zeros((3, 2)), "z": np.zeros(3)}
def broken(root):
    raise OSError("no disk")
"""
ENTRIES = """
[fedspan.methods]
door-mine = door_good:Mine
door-net = door_good:Net
fedavg = door_good:Mine
[fedspan.models]
door-net = door_good:Net
[fedspan.data]
door-points = door_good:points
door-wrong = door_good:wrong
door-broken = door_good:broken
door-class = door_good:Net
"""


def test_an_installed_package_counts_as_registered(plugins: Path) -> None:
    install(plugins, "door_good", ENTRIES, GOOD)
    assert "door-mine" in METHODS and "door_good" not in sys.modules
    assert type(make("door-mine", lr=0.5)).__name__ == "Mine" and name_of(make("door-mine")) == "door-mine"
    assert type(make("fedavg")).__module__ == "fedspan.methods.fedavg"  # a built-in name stays what it is
    assert build("door-net", (4,), 2, wide=5).layers[1].out_features == 5
    assert load("door-points").x.shape == (40, 4)
    text = {"data": {"source": "door-points"}, "model": {"kind": "door-net", "wide": 2}}
    config = from_dict(text | {"method": {"name": "door-mine"}, "partition": {"clients": 2}, "rounds": 1})
    assert config.model.options == {"wide": 2}
    with pytest.raises(
        ConfigError, match=r"Method door-net: must be a subclass of fedspan\.Method. Got the class door_"
    ):
        make("door-net")
    with pytest.raises(ConfigError, match=r"Data door-class: its entry point must be a function. Got the class"):
        load("door-class")
    with pytest.raises(ValueError, match="Data door-wrong: unknown array 'z'"):
        load("door-wrong")
    with pytest.raises(ValueError, match=r"Data door-broken: its package could not load it \(OSError: no disk\)"):
        load("door-broken")


def test_a_broken_package_is_named_with_its_entry_point(plugins: Path) -> None:
    install(
        plugins, "door_bad", "[fedspan.methods]\ndoor-bad = door_bad:Gone\n[fedspan.models]\nnet = door_bad:N\n", "1/0"
    )
    with pytest.raises(ConfigError) as e:
        make("door-bad")
    assert "entry point 'door-bad = door_bad:Gone' (fedspan.methods) of package 'door_bad' cannot be loaded" in str(
        e.value
    )
    assert "ZeroDivisionError" in str(e.value) and "\n" not in str(e.value)
    with pytest.raises(ConfigError, match="entry point 'net = door_bad:N'"):
        build("net", (4,), 2)
    assert make("fedavg")  # others are not disturbed


def test_two_packages_with_one_name_are_refused(plugins: Path) -> None:
    install(plugins, "door_good", "[fedspan.methods]\ndoor-mine = door_good:Mine\n", GOOD)
    install(plugins, "door_twin", "[fedspan.methods]\ndoor-mine = door_twin:Mine\n", GOOD)
    with pytest.raises(ConfigError, match=r"one installed package must offer it\. Got door_good and door_twin"):
        make("door-mine")


def test_an_empty_registry_looks_nowhere() -> None:
    assert list(Registry()) == [] and "fedavg" not in Registry()


# ------------------------------------------------------------------------------------------------ code that is named


@pytest.mark.parametrize("command", ["run", "compare", "sweep", "bytes", "capacity", "partition", "diagnose"])
def test_code_is_not_imported_unless_it_is_allowed(
    command: str, trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = {"compare": ["--methods", "door_trap:Mine"], "sweep": ["seed=0,1"]}.get(command, [])
    for method, model in (("door_trap:Mine", "logistic"), ("fedavg", "door_trap:Net")):
        exp = written(tmp_path, method, model=model)
        said = failing(command, exp, *more)
        assert "code of package 'door_trap' must be allowed before it runs" in said
        assert "allow it with --allow-code door_trap" in said
        failing(command, exp, *more, "--allow-code", "door", "--allow-code", "own_method")  # others do not help
    assert not trap.exists()
    call(command, written(tmp_path, "door_trap:Mine", model="door_trap:Net"), *more, "--allow-code", "door_trap")
    assert trap.exists()


def test_overrides_and_python_are_asked_alike(trap: Path, tmp_path: Path) -> None:
    exp = written(tmp_path, "fedavg")
    assert "must be allowed" in failing("run", exp, "method.name=door_trap:Mine")
    assert "must be allowed" in failing("run", exp, 'model.kind="os:system"', 'model.command="true"')
    with pytest.raises(ConfigError, match="must be allowed"):
        make("door_trap:Mine")
    with pytest.raises(ConfigError, match="must be allowed"):
        load_config(exp, ["method.name=door_trap:Mine"])
    assert not trap.exists()
    assert type(make("door_trap:Mine", allow_code=["door_trap"], lr=0.3)).__name__ == "Mine"
    with pytest.raises(ConfigError, match="must be allowed"):  # only that once
        make("door_trap:Mine")


def test_allow_code_goes_for_the_process(trap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_code, "_OWN", set())
    allow_code("door_trap")
    assert make("door_trap:Mine")
    with only_allowing([], "ask {package}"), pytest.raises(ConfigError, match="ask door_trap"):
        make("door_trap:Mine")
    with pytest.raises(ConfigError, match=r"must be given by its top-level name. Got 'a\.b'; use 'a'"):
        allow_code("a.b")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("door_trap:Other", "must be a subclass of fedspan.Method. Got the class door_trap.Other"),
        ("door_trap:function", "must be a subclass of fedspan.Method. Got the function function"),
        ("door_trap:value", "must be a subclass of fedspan.Method. Got a value of type int"),
        ("door_trap:Mien", "door_trap has no class 'Mien' ("),
        ("door_trap.inner:Mine", "door_trap.inner cannot be imported (ModuleNotFoundError: No module named"),
        (
            "door_none:Mine",
            "door_none cannot be imported (ModuleNotFoundError: No module named 'door_none'); looked in ",
        ),
        ("door_trap:Mine.x", "code must be given as 'package.module:Class'. Got 'door_trap:Mine.x'"),
        ("door_trap:", "code must be given as 'package.module:Class'. Got 'door_trap:'"),
        ("os:system", "must be a subclass of fedspan.Method. Got the function system"),
    ],
)
@pytest.mark.usefixtures("trap")
def test_what_cannot_be_used_is_said_in_one_sentence(spec: str, words: str) -> None:
    with only_allowing(["door_trap", "door_none", "os"], "x"), pytest.raises(ConfigError) as e:
        make(spec)
    assert words in str(e.value) and "\n" not in str(e.value)


def test_the_nearest_class_is_a_method(trap: Path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'Mine'\?"):
        make("door_trap:Mien", allow_code=["door_trap"])


def test_a_received_run_directory_names_no_code(trap: Path, tmp_path: Path) -> None:
    exp, out = written(tmp_path, "door_trap:Mine"), str(tmp_path / "run")
    call("run", exp, "--out", out, "--allow-code", "door_trap")
    npz = tmp_path / "new.npz"
    np.savez(npz, x=np.zeros((8, 1, 8, 8), np.float32), y=np.arange(8))
    trap.unlink()
    del sys.modules["door_trap"]
    model = str(tmp_path / "m.safetensors")
    for command in (["export", out, model, "--client", "0"], ["onboard", out, "--data", str(npz)]):
        assert "code of package 'door_trap' must be allowed" in failing(*command)
        assert not trap.exists()
        call(*command, "--allow-code", "door_trap")
        trap.unlink(missing_ok=True)
        sys.modules.pop("door_trap", None)
    assert "door_trap" in failing("run", exp, "--out", out)


def test_nothing_is_looked_up_beside_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])
    (tmp_path / "door_beside.py").write_text("from fedspan.methods.fedavg import FedAvg\nclass Mine(FedAvg): pass\n")
    said = failing("run", written(tmp_path, "door_beside:Mine"), "--allow-code", "door_beside")
    assert "door_beside cannot be imported (ModuleNotFoundError" in said and "put its folder on PYTHONPATH" in said


# ------------------------------------------------------------------------------------------------ nodes


def node_of(folder: Path, **settings: Any) -> Service:
    folder.mkdir(exist_ok=True)
    (folder / "node.json").write_text(json.dumps(settings))
    return Service(folder)


def test_a_node_runs_only_code_that_its_owner_allowed(trap: Path, tmp_path: Path) -> None:
    texts = [
        EXPERIMENT.format(method=m, model=k, rounds=1)
        for m, k in (("door_trap:Mine", "mlp"), ("fedavg", "door_trap:Net"))
    ]
    for text in (f'name = "x"\n{t}' for t in texts):
        with (
            only_allowing(["door_trap"], "x"),
            pytest.raises(ConfigError, match="its owner can allow it with deploy node"),
        ):
            node_of(tmp_path / "node", partition=0).node(text)  # what the process allows is not the owner's word
        assert not trap.exists()
        made = node_of(tmp_path / "node", partition=0, allow_code=["door_trap"]).node(text)
        assert made.handle({"do": "hello", "round": 0}, b"")[0]["examples"] > 0
        trap.unlink()
        del sys.modules["door_trap"]
    with pytest.raises(ConfigError, match=r"allow_code of node\.json must be a list of packages"):
        node_of(tmp_path / "node", partition=0, allow_code="door_trap").node(texts[0])


def test_a_nodes_loader_is_asked_for_too(trap: Path, tmp_path: Path) -> None:
    text = EXPERIMENT.format(method="fedavg", model="mlp", rounds=1)
    with pytest.raises(ConfigError, match="Node: loader: code of package 'door_trap' must be allowed"):
        node_of(tmp_path / "node", loader="door_trap:function").node(text)
    assert not trap.exists()
    with pytest.raises(ConfigError, match=r"Node: loader: must be a function. Got the class door_trap\.Net"):
        node_of(tmp_path / "node", loader="door_trap:Net", allow_code=["door_trap"]).node(text)
    said = failing("deploy", "node", str(tmp_path), "--server", "localhost:1", "--loader", "door_trap.x:function")
    assert "deploy node: --loader: code of package 'door_trap' must be allowed before it runs" in said


# ------------------------------------------------------------------------------------------------ a method outside


def test_own_method_is_short_and_outside() -> None:
    assert len((HERE / "own_method.py").read_text().splitlines()) <= 40
    assert not list(SRC.rglob("own_method.py"))


def test_own_method_runs_from_the_command_line_and_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exp = written(tmp_path)
    result = call("run", exp, "--allow-code", "own_method", "method.alpha=0.2", "--out", "one")
    assert "FedDyn, 2 rounds" in result.stdout
    assert json.loads((tmp_path / "one" / "result.json").read_text())["config"]["method"]["alpha"] == 0.2
    again = call("run", exp, "--allow-code", "own_method", "method.alpha=0.2", "--out", "one")
    assert "finished already" in again.stderr
    assert "unknown key 'alhpa'" in failing("run", exp, "--allow-code", "own_method", "method.alhpa=0.2")
    assert "alpha must be a finite number > 0" in failing("run", exp, "--allow-code", "own_method", "method.alpha=0")
    call("compare", exp, "--methods", f"fedavg,{SPEC}", "--allow-code", "own_method", "--out", "both")
    assert {p.name for p in (tmp_path / "both").iterdir() if p.is_dir()} == {"fedavg-0", "FedDyn-0"}


@pytest.mark.long
def test_own_method_goes_on_after_kill_9(tmp_path: Path) -> None:
    exp = written(tmp_path, rounds=40)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SRC), str(HERE)]), "OMP_NUM_THREADS": "1"}
    place = [
        sys.executable,
        "-P",
        "-m",
        "fedspan.cli.app",
        "run",
        exp,
        "--allow-code",
        "own_method",
        "--quiet",
        "--out",
    ]

    def command(out: str) -> list[str]:
        return [*place, str(tmp_path / out)]

    child = subprocess.Popen(command("killed"), env=environment, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 90
    while rounds_done(tmp_path / "killed") < 3 and child.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    assert child.poll() is None, "it ended before it could be killed"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert 3 <= rounds_done(tmp_path / "killed") < 40
    for out in ("killed", "whole"):
        subprocess.run(command(out), env=environment, check=True, stdout=subprocess.DEVNULL)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


def test_own_method_deploys_on_the_grid_of_this_process(tmp_path: Path) -> None:
    method, data = FedDyn(alpha=0.3), make_data(clients=3)
    settings = Settings(batch_size=8, epochs=1, precision="float64", evaluate_every=100)
    experiment = Experiment(method, make_task(), 5, settings, 3, "own", {"method": {"name": name_of(method)}})
    server, _ = deploy_here(experiment, data, tmp_path)
    found = server.run()
    expected = simulate(
        method, make_task(), data, rounds=3, seed=5, batch_size=8, epochs=1, precision="float64", evaluate_every=100,
        mapping="loop", workers=1,
    )  # fmt: skip
    assert found.per_client["loss"] == pytest.approx(expected.per_client["loss"], abs=1e-12)
    assert not server.transport.refusals
