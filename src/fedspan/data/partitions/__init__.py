"""How examples are divided among clients."""
