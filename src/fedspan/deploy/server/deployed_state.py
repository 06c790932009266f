"""What a deployment's server knows of its nodes, as a checkpoint holds it; parsed like an answer when it is read."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from annotated_types import Ge, Le, MaxLen
from pydantic import Field, ValidationError

from fedspan.deploy.server.answers import MOST, CheckedFacts, Count, describe_fault
from fedspan.errors import CheckpointError

MOST_NORMS = 200
"""Norms of accepted uploads that are remembered."""

NOTHING = -1
"""Announcements heard by a node of which that is not known: it is sent the whole state."""


class KnownNode(CheckedFacts):
    """One node: what it registered and how it has behaved."""

    heard: Annotated[int, Ge(NOTHING), Le(MOST)] = 0
    answered: Count = 0
    refused: Count = 0
    examples: Annotated[int, Ge(1), Le(MOST)] | None = None
    held_out: Count | None = None


class DeployedState(CheckedFacts):
    """The section `deployed` of a checkpoint."""

    lineage: Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]
    told: Count = 0
    norms: Annotated[list[Annotated[float, Ge(0)]], MaxLen(MOST_NORMS)] = []
    nodes: dict[str, KnownNode]


def begin_or_parse(deployed: dict[str, Any], clients: int) -> tuple[dict[str, Any], list[str]]:
    """The section as it is kept, new or read back, and what a person should be told.

    A number of announcements that nobody can have heard is forgotten: its node is sent the whole state.

    Raises:
        CheckpointError: if the section is not one that a server of so many clients wrote.
    """
    if not deployed:
        nodes = {str(i): KnownNode() for i in range(clients)}
        return DeployedState(lineage=uuid.uuid4().hex, nodes=nodes).model_dump(exclude_none=True), []
    healed, notes = _without_impossible(deployed)
    try:
        state = DeployedState.model_validate(healed)
    except ValidationError as e:
        fault = describe_fault(e)
        raise CheckpointError(
            f"Checkpoint: what it holds of the nodes is damaged: {fault} Start afresh with --fresh."
        ) from None
    if state.nodes.keys() != {str(i) for i in range(clients)}:
        raise CheckpointError(
            f"Checkpoint: it must hold {clients} nodes, 0..{clients - 1}. Got {len(state.nodes)}. Use --fresh."
        )
    return state.model_dump(exclude_none=True), notes


def _without_impossible(deployed: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    nodes, told, notes = deployed.get("nodes"), deployed.get("told"), []
    if not isinstance(nodes, dict) or not isinstance(told, int):
        return deployed, []
    kept = dict(nodes)
    for i, node in nodes.items():
        heard = node.get("heard") if isinstance(node, dict) else None
        if isinstance(heard, int) and not NOTHING <= heard <= told:
            kept[i] = {**node, "heard": NOTHING}
            notes.append(f"Client {i!s:.20} cannot have heard {heard!s:.20} announcements of {told}; it is sent all.")
    return {**deployed, "nodes": kept}, notes
