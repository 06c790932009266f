"""What only some methods have: small classes that a method adds to its bases, found once by `Abilities`.

A capability has no fields and no `__post_init__`, so that the order of bases decides nothing. Whether it is used may
depend on a method's fields: then it returns what a method without it would.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from fedspan import tree
from fedspan.learn.batches import Amount
from fedspan.learn.task import Task
from fedspan.method.promises import check_down
from fedspan.method.protocol import Capacity, Down, Federation, Method, Sent, Visit, Weight
from fedspan.tree import Inputs, Tree
from fedspan.wire import Codec

if TYPE_CHECKING:
    from typing import Self

    from fedspan.method.panels import Panel


class Announces:
    """State that every client holds without being sent it each round: a frozen base model, a change of gauge."""

    def common(self, task: Task, federation: Federation) -> Tree:
        """What every client holds identically from the start."""
        return {}

    def announce(self, server: Tree, round: int) -> Tree | None:
        """News for all clients after a round, sampled or not."""
        return None

    def hear(self, common: Tree, news: Tree) -> Tree:
        """The common state after the news."""
        return common

    def silent(self) -> bool:
        """Whether there will never be news with the fields as they are: the common state stays as it was."""
        return False


class Converts:
    """The model is trained in another form than the plain one: its layers become structured ones."""

    def model(self, task: Task, capacity: Capacity) -> Task:
        """The task as this method trains it on clients of one capacity."""
        return task


class Lifts:
    """Uploads are brought to one form on the server before they are averaged."""

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        """Applied to each decoded upload; `shared` is the download that clients of this capacity received in common."""
        return mean


class Ranked(Converts, Lifts):
    """Clients train at the rank they can afford; those of one capacity share all shapes."""

    def capacity_of(self, client: int) -> Capacity:
        """What a client can afford; None where all are alike."""
        return None

    def levels(self, client: int) -> Sequence[Capacity]:
        """What a client may train with in some round: what it can afford, then less.

        Shapes of its private state must be the same at all of them.
        """
        return (self.capacity_of(client),)

    def level(self, server: Tree, client: int) -> int:
        """Which of its levels a client has now."""
        return 0

    def with_ratios(self, ratios: tuple[float, ...]) -> Self | None:
        """The same method with these rank ratios for its clients, in turn; None where clients have no ranks."""
        return None


class Judged:
    """Uploads are compared with something else than the parts of the download that have their names."""

    def unchanged(self, sent: Sent, down: Tree) -> Tree:
        """What the upload of a client would be that changes nothing, by the upload's names.

        A defence judges the difference. What is missing here, or of another shape, is judged as it is: gradients, sums.
        """
        return down


class Estimates:
    """Parts of the upload are found by the client for itself, not trained from the download's parts of their names."""

    def estimates(self) -> Collection[str]:
        """Names of parts of `mean`: statistics of its examples, a model that it keeps.

        A late upload's parts are otherwise changes to what was downloaded; these are averaged as they came.
        """
        return ()


class Coded:
    """Parts of the payload are written on the wire in another form."""

    def codecs(self, round: int) -> Mapping[str, Codec]:
        """How named parts are written, both ways; what is not named travels as it is."""
        return {}


class Adapts:
    """A model is made ready when it is used: fitted, asked for in another form, or read in another way."""

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        """The streams `personal` wants when the model is used; none for methods that only read."""
        return {}

    def download_for_use(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down | None:
        """What clients receive to predict with; None: what they would train."""
        return None

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        """What `personal` uses in the place of the download right after local training, before the server answers.

        The download itself, where a client's model is in its own state; methods whose model is in part the download
        put what the client made of it there.
        """
        return down

    def personal_trained(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree | None:
        """The weights of a client right after local training, where `down` is what `trained` returned.

        None: what `personal` makes of it. For methods whose `personal` would change a model that is trained already.
        """
        return None

    def prediction_rule(self) -> str | None:
        """The rule by which it predicts, `head` or `prototype`; None for methods that have one only."""
        return None

    def predicting_by(self, rule: str) -> Self:
        """The same method predicting by another of its rules."""
        raise TypeError(f"{type(self).__name__}: predicting_by must be defined where there are several rules.")

    def predict(self, task: Task, personal: Tree, x: Tensor) -> Tensor:
        """Outputs for inputs `x` from what `personal` returned."""
        return task.predict(personal, x)


class Newcomer(NamedTuple):
    """A client that has just joined: the weights it predicts with, and the few numbers it solved for."""

    weights: Tree
    solved: Tensor


class Onboards:
    """A client that was never trained is fitted in the method's own way: from one download, without an upload.

    A method without it lets a newcomer train its private part by `client_update`, as often as a client of the run took
    part on average, and drops what it would send; one whose clients keep nothing gives it the shared model as it is.
    """

    def onboard_plan(self, task: Task) -> Mapping[str, Amount]:
        """The streams `onboard` wants."""
        return {}

    def onboard(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Newcomer:
        """Fit a client whose state is that of `init_client` to the final download."""
        raise TypeError(f"{type(self).__name__}: onboard must be defined.")


class Observed:
    """Numbers about a run that are worth a curve or a panel."""

    def size(self, server: Tree) -> float:
        """The norm of the server's state that the divergence monitor watches."""
        return norm_of_state(server)

    def monitor(self, server: Tree) -> dict[str, float]:
        """Numbers about the server's state; asked for whenever the run is evaluated."""
        return {}

    def observe(self, client: Tree) -> Mapping[str, Tensor]:
        """Numbers about one client's own state. They are not sent: only a simulation can show them."""
        return {}

    def matrices(self, server: Tree) -> dict[str, Tensor]:
        """Matrices over the clients (similarity), kept at every evaluation of runs with up to 100 clients."""
        return {}

    def panels(self) -> Sequence[Panel]:
        """Sections that reports have on runs of this method, and subjects of `fedspan analyse`."""
        return ()


class Begins(NamedTuple):
    """From which round a method does what it is chosen for."""

    round: int
    key: str
    """The field that decides it."""
    value: float
    until: str
    """What it does before then, as the start of a sentence: `it is FedAvg`."""


OVERSHOOT = 2.0
"""Learning rate times curvature from which every step of a quadratic term lands farther from its minimum."""


class MeasuredStep(NamedTuple):
    """How large steps of a method's own term are on a client's examples."""

    name: str
    """What was multiplied, as the start of a sentence: `lr·lam·curvature`."""
    value: float
    """Beyond 2, steps of that term grow."""
    remedy: str
    """What helps, as the end of a sentence."""


class Cautions:
    """What a method knows of its own limits, so that a run can warn."""

    def begins(self) -> Begins | None:
        """When it begins to differ from a simpler method; None: in the first round."""
        return None

    def proximal_steps(self) -> Mapping[str, float]:
        """Learning rate times proximal weight by their names; at 2 and beyond, steps of that term grow."""
        return {}

    def measured_pull(self, round: int) -> float:
        """Learning rate times weight, in a round, of a term whose curvature has to be measured; 0: there is none."""
        return 0.0

    def measured_step(self, task: Task, weights: Tree, x: Inputs, pull: float) -> MeasuredStep | None:
        """`pull` times the curvature of that term for a client's model and some of its examples; None: not known.

        Asked of few clients when a run is evaluated, until it has warned.
        """
        raise TypeError(f"{type(self).__name__}: measured_step must be defined where measured_pull is not 0.")

    def directions(self) -> int | None:
        """Dimension of a subspace that the clients together have to span; None where there is none."""
        return None


def norm_of_state(server: Tree) -> float:
    """The norm of a server's state without that of its optimiser."""
    return math.sqrt(float(tree.squared_norm({k: part for k, part in server.items() if k != "optimizer"})))


class _Without(Announces, Ranked, Judged, Estimates, Coded, Adapts, Observed, Cautions):
    """What a method does that has none of them."""


_WITHOUT = _Without()


class Abilities:
    """A method's capabilities, found once: its own where it has them, and what a method without them does."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.announces: Announces = method if isinstance(method, Announces) else _WITHOUT
        self.converts: Converts = method if isinstance(method, Converts) else _WITHOUT
        self.ranked: Ranked = method if isinstance(method, Ranked) else _WITHOUT
        self.judged: Judged = method if isinstance(method, Judged) else _WITHOUT
        self.estimated: Estimates = method if isinstance(method, Estimates) else _WITHOUT
        self.coded: Coded = method if isinstance(method, Coded) else _WITHOUT
        self.adapts: Adapts = method if isinstance(method, Adapts) else _WITHOUT
        self.observed: Observed = method if isinstance(method, Observed) else _WITHOUT
        self.cautions: Cautions = method if isinstance(method, Cautions) else _WITHOUT
        self.lifts: Lifts | None = method if isinstance(method, Lifts) else None
        self.onboards: Onboards | None = method if isinstance(method, Onboards) else None

    @property
    def weight(self) -> Weight:
        """How uploads are weighted."""
        rule = self.method.about.weight
        found: Weight = rule(self.method) if callable(rule) else rule or "samples"
        return found

    @property
    def weight_bound(self) -> float:
        """The largest weight of the method's own that the server accepts."""
        return self.method.about.weight_bound or 1e12

    @property
    def secure_sum(self) -> str:
        """Whether what is sent as `mean` could be added up without being seen."""
        rule = self.method.about.secure_sum
        return rule(self.method) if callable(rule) else rule or "yes"

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int, use: bool = False) -> Down:
        """What clients receive to train, or (`use`) to predict with."""
        found = self.adapts.download_for_use(server, ids, capacity, round) if use else None
        down = self.method.download(server, ids, capacity, round) if found is None else found
        check_down(self.method, down, len(ids))
        return down

    def capacity(self, task: Task, client: int, level: int = 0) -> Capacity:
        """What tells a client's shapes from others': its kind of model, or what the method says it can afford.

        At a `level` beyond the first it makes do with less than that.
        """
        kind = task.kind_of(client)
        return self.ranked.levels(client)[level] if kind is None else kind

    def model(self, task: Task, capacity: Capacity) -> Task:
        """The task as the method trains it on clients of one capacity."""
        if task.kinds:
            return self.converts.model(task.kinds[str(capacity)], None)
        return self.converts.model(task, capacity)
