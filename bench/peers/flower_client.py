"""Flower's client app for the workloads, in a module that Ray's actors can import."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from bench.models import build
from bench.workloads import LR, WORKLOADS


@functools.cache
def _held(name: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Data of a workload, made once in every actor."""
    data = WORKLOADS[name].data()
    return torch.from_numpy(data.x), torch.from_numpy(data.y), [torch.from_numpy(r) for r in data.train]


def client_app(name: str) -> ClientApp:
    """An app that trains one local epoch on its node's partition."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        w = WORKLOADS[name]
        x, y, rows = _held(name)
        torch.set_num_threads(1)
        module = build(w)
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        own = rows[int(context.node_config["partition-id"])]
        optimizer = torch.optim.SGD(module.parameters(), LR)
        for at in own[torch.randperm(len(own))].split(w.batch):
            optimizer.zero_grad()
            F.cross_entropy(module(x.index_select(0, at)), y.index_select(0, at)).backward()
            optimizer.step()
        found = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": len(own)})}
        return Message(content=RecordDict(found), reply_to=message)

    return app
