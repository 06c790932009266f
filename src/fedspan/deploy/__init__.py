"""The same methods on a real Flower federation: a server that drives the grid itself, and nodes that keep their state.

Modules that run in Flower's own processes import torch only where they need it: Flower starts a process per message.
"""
