"""Low-rank algebra: factors, subspaces, similarity."""
