"""Published tables run again: experiment files that carry the paper's figures, their grids, and the comparison."""

from fedspan.reproductions.files import Experiment, Row, available, load_experiment
from fedspan.reproductions.grid import Job, Outcome, Result, candidates, finals, reproduce_row, trials
from fedspan.reproductions.tables import RIGHT, TITLES, cells, describe, to_csv, to_json, to_markdown

__all__ = [
    "RIGHT",
    "TITLES",
    "Experiment",
    "Job",
    "Outcome",
    "Result",
    "Row",
    "available",
    "candidates",
    "cells",
    "describe",
    "finals",
    "load_experiment",
    "reproduce_row",
    "to_csv",
    "to_json",
    "to_markdown",
    "trials",
]
