"""Flower's ClientApp: hands a message to the node's work and its answer back. Needs no torch itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedspan.deploy.envelope import Facts, seal, unseal

NodeHandler: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any], Facts, bytes], tuple[Facts, bytes]]
"""(run configuration, node configuration, facts, payload) → (facts, payload)."""


def make_client_app(handle: NodeHandler) -> ClientApp:
    """A ClientApp whose work is done by `handle`."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        facts, payload = handle(context.run_config, context.node_config, *unseal(message.content))
        return Message(seal(facts, payload), reply_to=message)

    app.query()(answer)
    app.train()(answer)
    app.evaluate()(answer)
    return app
