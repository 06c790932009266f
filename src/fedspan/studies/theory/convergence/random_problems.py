"""Many random problems at once: Algorithm 1 on quadratics of drawn sizes, against Theorem 1 printed and corrected.

Problems of all sizes run side by side, filled up with clients that have no loss and dimensions that stay zero. On
quadratics the constant L of Assumption 1 can be bounded on every step that a run takes, so nothing is estimated but the
expectation over who takes part, and one round's expectation is exact: `one_round` follows all 2ⁿ sets of clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedspan.randomness import generator
from fedspan.studies.theory.convergence.bounds import Participation, as_printed, sharpened
from fedspan.studies.theory.problem import drawn_quadratic

MOST = {"n": 8, "d": 6, "r": 3, "K": 3}
"""The largest number of clients, dimensions, ranks and local steps that are drawn; the least is 1."""
CHECKPOINTS = (10, 30, 100, 300, 1000)
"""T at which bounds are looked at."""


@dataclass(frozen=True)
class Quadratics:
    """B problems f_i(θ) = ½ (θ − a_i)ᵀ H_i (θ − a_i), filled up to one size, with a start (U⁰, V⁰) each."""

    H: Tensor  # [B, n, d, d], zero for clients that are not there
    a: Tensor  # [B, n, d]
    U: Tensor  # [B, d, r]
    V: Tensor  # [B, n, r]
    n: Tensor  # [B]
    p: Tensor  # [B]
    K: Tensor  # [B]
    size: tuple[tuple[int, int, int], ...]  # the n, d and r of each

    def only(self, chosen: Tensor) -> Quadratics:
        """Some of the problems."""
        size = tuple(s for s, keep in zip(self.size, chosen.tolist()) if keep)
        fields = (self.H, self.a, self.U, self.V, self.n, self.p, self.K)
        H, a, U, V, n, p, K = (x[chosen] for x in fields)
        return Quadratics(H, a, U, V, n, p, K, size)

    @property
    def present(self) -> Tensor:
        """Which clients are there [B, n]."""
        return torch.arange(self.a.shape[1]) < self.n[:, None]

    def left(self, U: Tensor, V: Tensor) -> Tensor:
        """θ_i − a_i of every client [B, M, n, d] at U [B, M, d, r] and V [B, M, n, r]."""
        return V @ U.transpose(-1, -2) - self.a[:, None]

    def slopes(self, left: Tensor) -> Tensor:
        """∇f_i(θ_i) [B, M, n, d]."""
        return (self.H[:, None] @ left[..., None]).squeeze(-1)

    def psi(self, left: Tensor) -> Tensor:
        """ψ of eq. (6) [B, M]."""
        return (left * self.slopes(left)).sum((-1, -2)) / (2 * self.n[:, None])


def drawn(count: int, first: int = 200) -> Quadratics:
    """Problems with seeds first, first + 1, …: sizes, p, K and scales of the start are drawn."""
    H, a = (
        torch.zeros(count, MOST["n"], MOST["d"], MOST["d"]).double(),
        torch.zeros(count, MOST["n"], MOST["d"]).double(),
    )
    U, V = torch.zeros(count, MOST["d"], MOST["r"]).double(), torch.zeros(count, MOST["n"], MOST["r"]).double()
    n, K, p, size = [], [], [], []
    for b in range(count):
        rng = generator(first + b, "theorem-1", "problem")
        clients, d, r, k = (int(rng.integers(1, MOST[x] + 1)) for x in ("n", "d", "r", "K"))
        made, minimisers = drawn_quadratic(d, clients, min(r, d), rng)
        H[b, :clients, :d, :d], a[b, :clients, :d] = made, minimisers.T
        scale = 10.0 ** rng.uniform(-1, 0, size=2)
        U[b, :d, :r] = torch.from_numpy(scale[0] * rng.normal(size=(d, r)))
        V[b, :clients, :r] = torch.from_numpy(scale[1] * rng.normal(size=(clients, r)))
        n.append(clients)
        K.append(k)
        p.append(float(rng.choice([0.1, 0.2, 0.3, 0.5, 0.7, 1.0])))
        size.append((clients, d, r))
    return Quadratics(H, a, U, V, torch.tensor(n), torch.tensor(p, dtype=torch.float64), torch.tensor(K), tuple(size))


@dataclass(frozen=True)
class RoundOfAll:
    """One round of B problems on M paths: the new state, and what the theorem speaks of at the old one [B, M]."""

    U: Tensor
    V: Tensor
    psi: Tensor
    grad_U: Tensor  # ‖∇_U ψ‖²
    grad_V: Tensor  # (1/K) Σ_k ‖∇_V ψ(U, V_k)‖², every client at the V_k it would have if it took part
    grad_V_printed: Tensor  # the same at the V_k of the round, where only those who take part move
    scatter: Tensor  # (1/n) Σ ‖G_i − mean G‖²
    smooth: Tensor  # L that satisfies Assumption 1 on all segments of this round


def step(problems: Quadratics, U: Tensor, V: Tensor, took: Tensor, eta: Tensor) -> RoundOfAll:
    """Algorithm 1 with K steps on v, η_v = p η/K: eqs. (8) and (9), for clients `took` [B, M, n]."""
    n = problems.n[:, None].double()
    present, D = problems.present[:, None], took[..., None].double()
    left = problems.left(U, V)
    g = problems.slopes(left)  # ∇f_i(U v_i)
    mean_G = g.transpose(-1, -2) @ V / n[..., None, None]
    # ‖G_i − mean‖² = ‖g_i‖²‖v_i‖² − 2 ⟨G_i, mean⟩ + ‖mean‖², summed over the clients that are there.
    square = ((g.square().sum(-1) * V.square().sum(-1)).sum(-1) / n - mean_G.square().sum((-1, -2))).clamp_min(0)
    count = took.sum(-1)
    G = g.mul(D).transpose(-1, -2) @ V / count.clamp_min(1)[..., None, None]
    new_U = U - eta[:, None, None, None] * G  # eq. (9): the mean over those who take part
    eta_v = (problems.p * eta / problems.K)[:, None, None, None]
    trained, grad_V, printed = V, torch.zeros_like(n + U[..., 0, 0]), torch.zeros_like(n + U[..., 0, 0])
    widest = {"v": V.norm(dim=-1), "left": torch.maximum(left.norm(dim=-1), problems.left(new_U, V).norm(dim=-1))}
    first = None
    for k in range(MOST["K"]):
        live = (k < problems.K)[:, None].double()
        g_V = g @ U / n[..., None, None]  # ∇_V ψ(U, V_k)
        each = g_V.square().sum(-1)
        first = each if first is None else first
        grad_V = grad_V + live * each.sum(-1) / problems.K[:, None]
        printed = printed + live * torch.where(took, each, first).sum(-1) / problems.K[:, None]
        trained = trained - live[..., None, None] * eta_v * g_V  # eq. (8)
        left_k = problems.left(U, trained)
        g = problems.slopes(left_k)
        corners = torch.maximum(left_k.norm(dim=-1), problems.left(new_U, trained).norm(dim=-1))
        widest = {"v": widest["v"].maximum(trained.norm(dim=-1)), "left": widest["left"].maximum(corners)}
    new_V = torch.where(took[..., None], trained, V)
    smooth = _smoothness(problems, torch.maximum(U.norm(dim=(-1, -2)), new_U.norm(dim=(-1, -2))), present, **widest)
    return RoundOfAll(new_U, new_V, problems.psi(left), mean_G.square().sum((-1, -2)), grad_V, printed, square, smooth)


def _smoothness(problems: Quadratics, U: Tensor, present: Tensor, *, v: Tensor, left: Tensor) -> Tensor:
    """L [B, M] from the largest ‖U‖ [B, M], ‖v_i‖ and ‖θ_i − a_i‖ [B, M, n] of a round.

    With h_i = ‖H_i‖₂ the blocks of the Hessian of ψ have ‖UU‖ <= (1/n) Σ h_i ‖v_i‖², ‖VV‖ <= (1/n) max h_i ‖U‖² and
    ‖UV‖ <= (1/n) (Σ (h_i ‖U‖ ‖v_i‖ + h_i ‖θ_i − a_i‖)²)^½; the largest of them is an L. θ_i − a_i is affine in U and
    in v_i, so that its norm on a segment in one of them is largest at an end: the corners of a round are enough.
    """
    h = (torch.linalg.matrix_norm(problems.H, 2)[:, None]) * present
    n = problems.n[:, None]
    UU = (h * v.square()).sum(-1) / n
    VV = h.amax(-1) * U.square() / n
    UV = (h * (U[..., None] * v + left)).square().sum(-1).sqrt() / n
    return torch.maximum(torch.maximum(UU, VV), UV)


@dataclass(frozen=True)
class Runs:
    """B problems against the bounds at `T`: means over the paths, and the standard error of the printed average."""

    problems: Quadratics
    L: Tensor  # [B]
    T: tuple[int, ...]
    printed: Tensor  # [B, T] bound / average
    printed_error: Tensor  # [B, T] relative standard error of the average
    without_weight: Tensor  # [B, T] the printed one with the variance of sampling in σ²
    without_variance: Tensor  # [B, T] the printed one with q and p² on the left, sampling taken for exact
    corrected: Tensor  # [B, T] with both
    sharpened: Tensor  # [B, T] and with the smaller constants
    covered: Tensor  # [B] whether L covers every step of every path


def run_all(problems: Quadratics, rounds: int = 1000, paths: int = 8, first: int = 200) -> Runs:
    """Run every problem on several paths with η = 1/(4L), L raised until it covers every step taken."""
    B, n_most = problems.a.shape[:2]
    took = torch.zeros(rounds, B, paths, n_most, dtype=torch.bool)
    for b in range(B):
        rng, n = generator(first + b, "theorem-1", "took"), int(problems.n[b])
        took[:, b, :, :n] = torch.from_numpy(rng.random((rounds, paths, n)) < float(problems.p[b]))
    start = step(problems, *_spread(problems, 1), took[0, :, :1], torch.zeros(B, dtype=torch.float64))
    L = 1.5 * start.smooth[:, 0]
    kept: dict[str, Tensor] = {}
    todo = torch.ones(B, dtype=torch.bool)
    for _ in range(8):
        found = _follow(problems.only(todo), took[:, todo], 1 / (4 * L[todo]))
        if not kept:
            kept = {k: torch.zeros(*v.shape[:-2], B, *v.shape[-1:], dtype=v.dtype) for k, v in found.items()}
        for k, v in found.items():
            kept[k][..., todo, :] = v
        seen = kept["smooth"].amax((0, 2))
        todo = seen > L
        if not todo.any():
            break
        L = torch.where(todo, 1.2 * seen, L)
    return _against(problems, L, kept, ~todo)


def _spread(problems: Quadratics, paths: int) -> tuple[Tensor, Tensor]:
    """The starts, the same on every path."""
    return problems.U[:, None].expand(-1, paths, -1, -1), problems.V[:, None].expand(-1, paths, -1, -1)


def _follow(problems: Quadratics, took: Tensor, eta: Tensor) -> dict[str, Tensor]:
    """All rounds: the fields of `RoundOfAll` that are numbers, each [T, B, M], and ψ at the end."""
    U, V = _spread(problems, took.shape[2])
    names = ("psi", "grad_U", "grad_V", "grad_V_printed", "scatter", "smooth")
    seen: dict[str, list[Tensor]] = {k: [] for k in names}
    for t in range(len(took)):
        found = step(problems, U, V, took[t], eta)
        for k in names:
            seen[k].append(getattr(found, k))
        U, V = found.U, found.V
    made = {k: torch.stack(v) for k, v in seen.items()}
    return made | {"last": problems.psi(problems.left(U, V))[None]}


def _against(problems: Quadratics, L: Tensor, seen: dict[str, Tensor], covered: Tensor) -> Runs:
    eta = 1 / (4 * L)
    who = [Participation(n, float(p)) for (n, _, _), p in zip(problems.size, problems.p)]
    q = torch.tensor([w.anybody for w in who], dtype=torch.float64)
    variance = torch.tensor([w.anybody * w.spread for w in who], dtype=torch.float64)
    rounds = len(seen["psi"])
    Ts = tuple(T for T in CHECKPOINTS if rounds >= T) or (rounds,)
    # The lowest loss of all paths stands for F*, which makes the bounds smaller than the theorem's.
    gap = seen["psi"][0, :, 0] - torch.minimum(seen["psi"].amin((0, 2)), seen["last"].amin((0, 2)))
    at = torch.tensor(Ts) - 1

    def average(x: Tensor) -> Tensor:
        return x.cumsum(0)[at] / torch.tensor(Ts)[:, None, None]  # [T, B, M]

    printed = average(seen["grad_U"] + seen["grad_V_printed"])
    corrected = average(q[:, None] * seen["grad_U"] + problems.p[:, None] ** 2 * seen["grad_V"]).mean(2)
    sampling = variance * average(seen["scatter"]).mean(2)

    def ratio(bound: Callable[..., Tensor], over: Tensor, sigma2: Tensor) -> Tensor:
        made = [bound(gap, eta, L, T, s) / a for T, a, s in zip(Ts, over, sigma2)]
        return torch.stack(made, 1)

    none = torch.zeros_like(sampling)
    paths = printed.shape[2]
    error = printed.std(2) / paths**0.5 if paths > 1 else torch.zeros_like(printed[..., 0])
    return Runs(
        problems, L, Ts, ratio(as_printed, printed.mean(2), none), (error / printed.mean(2)).T,
        ratio(as_printed, printed.mean(2), sampling), ratio(as_printed, corrected, none),
        ratio(as_printed, corrected, sampling), ratio(sharpened, corrected, sampling), covered,
    )  # fmt: skip


def one_round(problems: Quadratics, L: Tensor) -> Tensor:
    """What the proof's inequality of one round has to spare at the start, in parts of ψ [B]: exact, over all 2ⁿ sets.

    ψ − E ψ⁺ − η (1 − ηL)(q ‖∇_U‖² + p² ‖∇_V‖²) + η² L q · variance of sampling, which must not be negative.
    """
    n_most = problems.a.shape[1]
    sets = torch.from_numpy((np.arange(2**n_most)[:, None] >> np.arange(n_most)) & 1).bool()
    # Clients that are not there double the number of equal sets: count those sets only that leave them out.
    took = sets[None] & problems.present[:, None]
    chance = torch.where(sets[None], problems.p[:, None, None], 1 - problems.p[:, None, None])
    chance = torch.where(problems.present[:, None], chance, torch.where(sets[None], 0.0, 1.0)).prod(-1)
    eta = 1 / (4 * L)
    found = step(problems, *_spread(problems, len(sets)), took, eta)
    after = (chance * problems.psi(problems.left(found.U, found.V))).sum(1)
    who = [Participation(n, float(p)) for (n, _, _), p in zip(problems.size, problems.p)]
    q, c = (torch.tensor([getattr(w, k) for w in who], dtype=torch.float64) for k in ("anybody", "spread"))
    psi, grad_U, grad_V, scatter = (getattr(found, k)[:, 0] for k in ("psi", "grad_U", "grad_V", "scatter"))
    fall = eta * (1 - eta * L) * (q * grad_U + problems.p**2 * grad_V)
    spare: Tensor = (psi - after - fall + eta**2 * L * q * c * scatter) / psi
    return spare


def trimmed(problems: Quadratics, b: int) -> Quadratics:
    """One of the problems without what fills it up."""
    n, d, r = problems.size[b]
    one = problems.only(torch.arange(len(problems.n)) == b)
    return replace(one, H=one.H[:, :n, :d, :d], a=one.a[:, :n, :d], U=one.U[:, :d, :r], V=one.V[:, :n, :r])
