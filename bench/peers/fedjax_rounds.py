"""FedJAX: its federated averaging with models written in haiku, compiled for the CPU. https://fedjax.readthedocs.io"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from bench.measurement import Measurement, Rounds, main
from bench.workloads import CLASSES, LR, Workload


def forward(w: Workload) -> Any:
    """The model of a workload as a haiku function of a batch."""
    if w.model == "mlp":
        return lambda batch: hk.nets.MLP([200, 200, CLASSES])(batch["x"])
    return {"cnn": _cnn, "resnet9": _resnet9}[w.model]


def _cnn(batch: Any) -> Any:
    x = batch["x"]
    for channels in (32, 64):
        x = hk.max_pool(jax.nn.relu(hk.Conv2D(channels, 5, padding="VALID")(x)), (2, 2, 1), (2, 2, 1), "VALID")
    x = jax.nn.relu(hk.Linear(512)(hk.Flatten()(x)))
    return hk.Linear(CLASSES)(x)


def _unit(x: Any, channels: int, kernel: int = 3, stride: int = 1, padding: str = "SAME") -> Any:
    x = hk.Conv2D(channels, kernel, stride, padding=padding, with_bias=False)(x)
    return jax.nn.relu(hk.GroupNorm(min(32, channels // 4))(x))


def _resnet9(batch: Any) -> Any:
    x = _unit(_unit(batch["x"], 64), 128, 5, 2)
    x = x + _unit(_unit(x, 128), 128)
    x = hk.max_pool(_unit(x, 256), (2, 2, 1), (2, 2, 1), "VALID")
    x = x + _unit(_unit(x, 256), 256)
    return hk.Linear(CLASSES)(_unit(x, 256, padding="VALID").max((1, 2)))


def measure(w: Workload) -> Measurement:
    """Rounds without evaluation; those that compile something new are not counted."""
    data = w.data()
    # Channels come last, as XLA's convolutions like them; a perceptron takes flat rows.
    x = np.ascontiguousarray(data.x.transpose(0, 2, 3, 1)) if w.convolutional else data.x.reshape(len(data.x), -1)
    clients = [fedjax.ClientDataset({"x": x[rows], "y": data.y[rows].astype(np.int32)}) for rows in data.train]
    model = hk.transform(forward(w))

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        logits = model.apply(params, rng, batch)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1).mean()

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(LR),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=w.batch, num_epochs=1, drop_remainder=False),
    )
    state = algorithm.init(model.init(jax.random.PRNGKey(0), {"x": x[:1]}))
    order, rounds = w.sampled(), Rounds()
    for t in range(w.rounds + 1):
        ids = next(order)
        keys = jax.random.split(jax.random.PRNGKey(t), len(ids))
        state, _ = algorithm.apply(state, [(str(i).encode(), clients[i], k) for i, k in zip(ids, keys)])
        jax.block_until_ready(state.params)
        rounds.add(sum(len(data.train[i]) for i in ids))
        rounds.end()
    return {**rounds.measurement(), "version": f"fedjax {version('fedjax')}, jax {version('jax')}"}


if __name__ == "__main__":
    main(measure)
