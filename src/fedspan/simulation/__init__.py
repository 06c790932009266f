"""Rounds: the driver, the engine, the simulator, and what a run gives back."""
