"""Asynchronous rounds on the simulated clock of devices: who trains when, what late uploads count, how it is replayed.

Nguyen et al., AISTATS 2022 (FedBuff), Algorithm 1: a number of clients train at any time, each from the state of the
server that it downloaded; whenever enough uploads have arrived the server takes a step with them, which is a round.
"""

from fedspan.simulation.asynchronous.timeline import Asynchronous

__all__ = ["Asynchronous"]
