"""A node owner's policy, `node.toml`: which runs this machine takes part in, checked before a run's text is used.

The server sends an experiment as text. What the text names (a method, a model, a source, code) is compared with the
policy as words, so that nothing is imported, built or loaded for a run that is not allowed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from fedspan.config.sections import DataConfig, ModelConfig
from fedspan.errors import Refused
from fedspan.method.fields import AtLeast1, Share, build, check
from fedspan.method.named_code import checked_packages
from fedspan.simulation.settings import Settings
from fedspan.storage.toml import parse_toml, read_small

POLICY = "node.toml"
WHO = f"Node: {POLICY}"
CODE_REMEDY = f"its owner can allow it with deploy node --allow-code {{package}}, or allow_code in {POLICY}"
MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class OwnerPolicy:
    """What the owner of a node lets a server ask of it; without a list everything that is installed is allowed."""

    methods: tuple[str, ...] | None = None
    """Methods a run may use."""
    models: tuple[str, ...] | None = None
    """Kinds of model a run may use."""
    sources: tuple[str, ...] | None = None
    """Sources that a run may have this node load, which it does only if it was started with `--partition`."""
    loaders: tuple[str, ...] | None = None
    """Functions that `--loader` may name."""
    allow_code: tuple[str, ...] = ()
    """Packages whose code a run, or `--loader`, may name."""
    largest_download_mb: Annotated[float, Gt(0), Le(100_000)] = 1000.0
    """The largest message that is worked on, in units of 10⁶ bytes."""
    least_cohort: AtLeast1 = 1
    """The least number of clients that a run must declare to ask in every round."""
    privacy_required: bool = False
    """Whether a run must declare differential privacy; as none can yet, true refuses every run."""

    def __post_init__(self) -> None:
        check(self, WHO)
        checked_packages(self.allow_code, f"{WHO}: allow_code")

    def check_size(self, size: int) -> None:
        """Refuse a message that is too large, by its bytes.

        Raises:
            Refused: naming the limit.
        """
        if size > self.largest_download_mb * MB:
            limit = f"{self.largest_download_mb:g} MB"
            raise Refused(f"{WHO}: a download must be at most {limit}. Got {size / MB:.3g} MB; ask the node's owner.")

    def check_run(self, run: NamedByRun) -> None:
        """Refuse a run that names or declares something else than is allowed.

        Raises:
            Refused: naming the first such thing.
        """
        for name in run.methods:
            _need("method", name, self.methods)
        for name in run.models:
            _need("model", name, self.models)
        if self.privacy_required:
            raise Refused(f"{WHO}: a run must declare differential privacy. Got none; fedspan cannot declare it yet.")
        if self.least_cohort > 1 and (run.cohort is None or run.cohort < self.least_cohort):
            got = "none" if run.cohort is None else str(run.cohort)
            raise Refused(
                f"{WHO}: a run must declare a cohort of at least {self.least_cohort} clients in every round"
                f" (partition.clients, train.participation, train.sampling 'fraction'). Got {got}."
            )

    def check_source(self, source: str) -> None:
        """Refuse a source that the node would have to load for a run."""
        _need("source", source, self.sources)

    def check_loader(self, loader: str) -> None:
        """Refuse a function that the node would have to load its examples with."""
        _need("loader", loader, self.loaders)


def _need(what: str, name: str, among: tuple[str, ...] | None) -> None:
    if among is not None and name not in among:
        shown = ", ".join(among)[:120] or "none"
        raise Refused(f"{WHO}: a {what} must be one of {shown}. Got {name[:60]!r}; ask the node's owner.")


@dataclass(frozen=True, kw_only=True)
class NamedByRun:
    """What an experiment's text names and declares, as words; nothing of it has been looked up."""

    methods: tuple[str, ...]
    models: tuple[str, ...]
    source: str
    clients: Annotated[int, Ge(2)] | None
    participation: Share
    sampling: str

    @property
    def cohort(self) -> int | None:
        """How many clients every round asks; None where no number is promised."""
        if self.clients is None or self.sampling != "fraction":
            return None
        return max(1, round(self.participation * self.clients))


def named_by(text: str) -> NamedByRun:
    """What the text of an experiment names; what it leaves out is as an experiment file has it.

    Raises:
        ConfigError: if it is no TOML, or holds something else at these keys.
    """
    values = parse_toml(text.encode(), "the experiment")
    data, part, model, method, train = (
        _section(values, name) for name in ("data", "partition", "model", "method", "train")
    )
    usual = Settings()
    kinds = model.get("kinds", [])
    kind = [model.get("kind", ModelConfig.kind)] if "kind" in model or not kinds else []
    named = {
        "methods": [*([method["name"]] if "name" in method else []), *_section(values, "methods")],
        "models": [*kind, *kinds] if isinstance(kinds, list) else kinds,
        "source": data.get("source", DataConfig.source),
        "clients": part.get("clients"),
        "participation": train.get("participation", usual.participation),
        "sampling": train.get("sampling", usual.sampling),
    }
    if not named["methods"]:
        raise Refused("Node: the run must name its method. Got none; write method.name.")
    return build(NamedByRun, named, "Node: the run")


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name, {})
    if not isinstance(found, Mapping):
        raise Refused(f"Node: {name} of the run must be a section. Got {str(found)[:60]!r}.")
    return found


def read_policy(folder: Path) -> OwnerPolicy:
    """The policy in a node's folder; one without `node.toml` has the policy of a fresh one.

    Raises:
        ConfigError: if it cannot be read, or something in it does not fit; then no run is served.
    """
    path = folder / POLICY
    if not path.exists():
        return OwnerPolicy()
    return build(OwnerPolicy, parse_toml(read_small(path, "Node"), POLICY), WHO)


def write_template(folder: Path) -> None:
    """Put a `node.toml` with comments into a node's folder, unless there is one: it is its owner's."""
    text = (Path(__file__).parent / POLICY).read_bytes()
    try:
        fd = os.open(folder / POLICY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(fd, "wb") as stream:
        stream.write(text)
