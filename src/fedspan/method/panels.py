"""What a method shows of a finished run: figures without a plotting library, a table, numbers and words.

A method lists its panels in `Observed.panels`. Reports and `fedspan analyse` let each look at what is left of a run,
and draw and write what it returns; they know no method by name.

>>> import numpy as np
>>> bars = BarChart(values=np.array([3.0, 1.0]), title="singular values", x="position")
>>> found = Findings(says="One direction does most.", drawings=(Drawing("spectrum", "Bars.", ((bars,),), (4.6, 2.9)),))
>>> Panel("spectrum", "The spectrum", "Of the server's matrix.", "spectrum", lambda seen: found).name
'spectrum'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedspan.errors import safe_name
from fedspan.learn.batches import Amount
from fedspan.learn.task import Task
from fedspan.method.protocol import Visit
from fedspan.tree import Tree

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

# ------------------------------------------------------------------------------------------------ what is looked at


class ClientRows(NamedTuple):
    """Private states of clients of one capacity, stacked in the order of `ids`."""

    ids: Tensor
    states: Tree


@dataclass(frozen=True)
class Models:
    """The models that all clients would use now, and the task they are weights of."""

    task: Task
    weights: Sequence[Tree]


class Refit(NamedTuple):
    """How clients fit their models anew before they are looked at; nothing is kept of it."""

    plan: Callable[[Task], Mapping[str, Amount]]
    """The minibatch streams it wants."""
    fit: Callable[[Task, Tree, Tree, Visit], Tree]
    """(task, a client's state, the download, the visit) → the weights it would predict with."""


@dataclass(frozen=True)
class Seen:
    """What is left of a run for its method to look at: the newest checkpoint and the recorded lines.

    Neither data nor model are needed, so that a run directory can be looked at anywhere.
    """

    label: str
    """What the report calls the run."""
    round: int
    """The round after which the states were saved."""
    seed: int
    names: tuple[str, ...]
    """The clients' names, in order."""
    groups: Labels | None
    """The clients' true groups, if the partition knows them."""
    lines: Sequence[Mapping[str, Any]]
    """The run's metrics, a line per round."""
    monitored: Mapping[str, Sequence[tuple[int, float]]]
    """(round, value) of every number that the method's monitor told, by its name."""
    server: Tree
    common: Tree
    rows: Callable[[], Sequence[ClientRows]]
    """The states of the clients that took part, by capacity; read when asked for."""
    models: Models | None = None
    """The models of all clients after `Panel.refit`, where someone asked for them."""
    clusters: int | None = None
    """How many clusters someone asked for."""


# ------------------------------------------------------------------------------------------------ what is drawn


@dataclass(frozen=True, kw_only=True)
class ScatterChart:
    """Points in a plane, of which distances mean something: one scale for both axes, a colour per label."""

    points: Floats  # [n, 2]
    labels: Labels
    x: str = ""
    y: str = ""
    legend: str = ""  # what colours and numbers stand for


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Values by position, beginning with 1."""

    values: Floats
    title: str = ""
    x: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """One number over the rounds."""

    points: Sequence[tuple[float, float]]
    title: str = ""
    x: str = "round"
    from_zero: bool = False
    logarithmic: bool = False
    colour: int = 0  # of the palette


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """A matrix over the clients, darker is more; NaN where nothing is known. The diagonal is left out.

    Clients of a group stand together. Maps of one row that are given `limits` share one scale of colours.
    """

    values: Floats  # [clients, clients]
    title: str = ""
    scale: str = ""
    x: str = ""
    y: str = ""
    names: Sequence[str] = ()
    groups: Labels | None = None
    limits: tuple[float, float] | None = None


Chart: TypeAlias = ScatterChart | BarChart | LineChart | HeatMap


@dataclass(frozen=True)
class Drawing:
    """One figure: charts in rows."""

    name: str
    """The file's name, without its ending."""
    label: str
    """What it shows, for those who cannot see it."""
    rows: Sequence[Sequence[Chart]]
    size: tuple[float, float]
    """Width and height in inches."""
    on_page: bool = True
    """Whether the report's page shows it; `fedspan analyse` writes all."""

    def __post_init__(self) -> None:
        safe_name(self.name, "A drawing's name")


# ------------------------------------------------------------------------------------------------ what is said


@dataclass(frozen=True)
class Findings:
    """What a panel found in a run."""

    says: str
    """What the figures show, in words: a sentence or two."""
    drawings: Sequence[Drawing] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Everything in plain values, as JSON holds it."""
    titles: Sequence[str] = ("", "")
    """Headings of the table."""
    table: Sequence[Sequence[str]] = ()
    numbers: Sequence[int] = ()
    """Columns of the table that hold numbers."""
    note: str = ""
    """What someone at the command line could do next."""


@dataclass(frozen=True)
class Panel:
    """A section of the report that a method brings, and one subject of `fedspan analyse`."""

    name: str
    """One word: the folder and the file that `fedspan analyse` writes."""
    title: str
    """The section's heading."""
    about: str
    """How to read the figures, in a sentence or two."""
    noun: str
    """What is missing where a run cannot be looked at: "No … of fedavg: why"."""
    look: Callable[[Seen], Findings]
    """What it finds in a run."""
    wide: bool = False
    """Whether its figures need the whole width of the page."""
    refit: Refit | None = None
    """How every client's model is fitted anew, for those who ask for it."""

    def __post_init__(self) -> None:
        safe_name(self.name, "A panel's name")
