"""What a curious server can compute from what clients send: attacks, and what they find of each method."""

from fedspan.studies.disclosure.measure import Found, measure

__all__ = ["Found", "measure"]
