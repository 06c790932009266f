"""Ratings of many users: a file of them, a keyed split, and the predictors everybody compares with (Example 3)."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedspan.errors import DataError
from fedspan.randomness import generator

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]

FILE = "movielens_100k.npz"


@dataclass(frozen=True)
class Ratings:
    """Triples (user, item, rating), users and items numbered from 0 without gaps."""

    user: Ints
    item: Ints
    rating: Reals
    users: int
    items: int

    def rows(self, chosen: Ints) -> Ratings:
        """Some of the triples, of the same users and items."""
        return Ratings(self.user[chosen], self.item[chosen], self.rating[chosen], self.users, self.items)

    def by_user(self) -> list[Ints]:
        """Row numbers of each user: what one client holds."""
        order = np.argsort(self.user, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.user, minlength=self.users))[:-1])

    def rmse(self, predicted: Reals) -> float:
        """Root of the mean squared error over all triples."""
        return float(np.sqrt(np.mean((predicted - self.rating) ** 2)))


def load(root: str | None) -> Ratings:
    """The ratings file under `root`, or under $FEDSPAN_DATA.

    Raises:
        DataError: if there is no folder or file, or the file does not hold usable triples.
    """
    base = root or os.environ.get("FEDSPAN_DATA")
    if not base:
        raise DataError(f"movielens: a folder with {FILE} is needed. Set $FEDSPAN_DATA or give --root.")
    path = Path(base).expanduser() / FILE
    if not path.is_file():
        raise DataError(
            f"movielens: {FILE} must lie in the data folder {base}. Got no such file; it is an npz with the arrays"
            " user, item and rating of MovieLens-100k."
        )
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [k for k in ("user", "item", "rating") if k not in archive.files]
            if missing:
                raise DataError(f"{FILE}: the arrays user, item and rating are needed. Got no {', '.join(missing)}.")
            user, item, rating = (archive[k] for k in ("user", "item", "rating"))
    except DataError:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
        raise DataError(f"{FILE}: must be an npz file as numpy.savez writes it. Got: {error}.") from None
    if not (user.ndim == 1 and user.shape == item.shape == rating.shape and len(user) > 1):
        raise DataError(
            f"{FILE}: user, item and rating must be rows of one length. Got {user.shape}, {item.shape}, {rating.shape}."
        )
    if user.dtype.kind not in "iu" or item.dtype.kind not in "iu" or rating.dtype.kind not in "iuf":
        raise DataError(
            f"{FILE}: user and item must be integers, ratings numbers. Got {user.dtype}, {item.dtype}, {rating.dtype}."
        )
    if not np.isfinite(rating).all():
        raise DataError(f"{FILE}: ratings must be finite. Got NaN or infinity.")
    users, u = np.unique(user, return_inverse=True)
    items, i = np.unique(item, return_inverse=True)
    return Ratings(u.astype(np.int64), i.astype(np.int64), rating.astype(np.float64), len(users), len(items))


def split(ratings: Ratings, fraction: float, *parts: int | str) -> tuple[Ratings, Ratings]:
    """Training and held-out triples by a shuffle keyed by the parts; users and items may lack training triples."""
    order = generator(*parts).permutation(len(ratings.rating))
    n = round(fraction * len(order))
    return ratings.rows(np.sort(order[n:])), ratings.rows(np.sort(order[:n]))


@dataclass(frozen=True)
class Bias:
    """μ + b_u + b_i."""

    mu: float
    user: Reals
    item: Reals

    def predict(self, r: Ratings) -> Reals:
        """The prediction for each triple."""
        return self.mu + self.user[r.user] + self.item[r.item]


def mean_only(train: Ratings) -> Bias:
    """The mean of all training ratings, for everybody and everything."""
    return Bias(float(train.rating.mean()), np.zeros(train.users), np.zeros(train.items))


def bias_model(train: Ratings, user_ridge: float = 5.0, item_ridge: float = 3.0, sweeps: int = 15) -> Bias:
    """Regularised least squares for μ + b_u + b_i by alternation.

    It is itself pFL-MF of rank 2, with U = [b, 1] and v_u = (1, b_u): b_u is solved by the user, and b needs only the
    sums over users of their residuals and of ones.
    """
    start = mean_only(train)
    b_u, b_i = start.user, start.item
    n_u, n_i = np.bincount(train.user, minlength=train.users), np.bincount(train.item, minlength=train.items)
    for _ in range(sweeps):
        left = train.rating - start.mu - b_i[train.item]
        b_u = np.bincount(train.user, left, train.users) / (n_u + user_ridge)  # on the client
        left = train.rating - start.mu - b_u[train.user]
        b_i = np.bincount(train.item, left, train.items) / (n_i + item_ridge)  # from sums over users
    return Bias(start.mu, b_u, b_i)


def truncated_svd(train: Ratings, base: Bias, ranks: list[int]) -> dict[int, Reals]:
    """For each rank the best approximation [items, users] of the residual matrix with zeros where nothing is known.

    Not federated: the server would have to see all ratings.
    """
    R = np.zeros((train.items, train.users))
    R[train.item, train.user] = train.rating - base.predict(train)
    left, s, right = np.linalg.svd(R, full_matrices=False)
    return {k: (left[:, :k] * s[:k]) @ right[:k] for k in ranks}
