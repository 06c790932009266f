"""The papers' models by name: `build("mlp", (1, 28, 28), 10)`. In every one the last `nn.Linear` is the head."""

from __future__ import annotations

from fedspan.models.build import MODELS, Entry, build

__all__ = ["MODELS", "Entry", "build"]
