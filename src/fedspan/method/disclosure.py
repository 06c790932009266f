"""What a method discloses to a curious server: a value next to each method, held to what attacks find.

What is sent is not written down here: it is found by running a round. This is what can be computed from it, with
default fields, by whoever sees uploads one by one, as the server does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Discloses:
    """What a server can compute from a client's upload, with default fields."""

    labels: Literal["set", "hints", "nothing"]
    """The classes a client holds: at least five of six read rightly, better than by chance, or no better."""
    model: Literal["whole", "part", "likeness", "nothing"]
    """The client's own model: all of it, some of its tensors exactly, a model that resembles it, or nothing."""
    private: tuple[str, ...] = ()
    """Parts of the state a client keeps that can be read from what it sends, such as v; of a vector the direction."""
    examples: bool
    """Whether the upload says how many examples the client trained on."""
    class_means: bool = False
    """Whether the upload holds the means of the client's features by class (of one example: its features)."""
    resembles: bool
    """Whether uploads show which clients hold the same classes."""

    @property
    def sentences(self) -> list[str]:
        """What the server can tell of a client, in plain words."""
        said = {
            {"set": "which classes it holds", "hints": "which classes it probably holds"}.get(self.labels, ""): True,
            _MODEL[self.model]: True,
            f"of what it keeps: {', '.join(self.private)}": bool(self.private),
            "how many examples it trained on": self.examples,
            "the mean of its features for each class": self.class_means,
            "which clients resemble it": self.resembles,
        }
        return [words for words, holds in said.items() if words and holds]

    @property
    def keywords(self) -> list[str]:
        """The same for a narrow column."""
        said = {
            {"set": "classes", "hints": "classes (hints)"}.get(self.labels, ""): True,
            {"whole": "model", "part": "model (part)", "likeness": "model (alike)"}.get(self.model, ""): True,
            ", ".join(self.private): True,
            "examples": self.examples,
            "class means": self.class_means,
            "likeness": self.resembles,
        }
        return [word for word, holds in said.items() if word and holds]


_MODEL = {
    "whole": "its own model",
    "part": "parts of its own model",
    "likeness": "a model that resembles its own",
    "nothing": "",
}
