"""Published tables run again: experiment files that carry the paper's figures, their grids, and the comparison."""

from fedspan.studies.papers.experiment_file import PaperExperiment, PaperRow, available, load_experiment
from fedspan.studies.papers.paper_tables import cells, describe, right, titles, to_csv, to_json, to_markdown
from fedspan.studies.papers.step_sizes import (
    PaperJob,
    Result,
    RowOutcome,
    candidates,
    config_of,
    finals,
    reproduce_row,
    trials,
)

__all__ = [
    "PaperExperiment",
    "PaperJob",
    "PaperRow",
    "Result",
    "RowOutcome",
    "available",
    "candidates",
    "cells",
    "config_of",
    "describe",
    "finals",
    "load_experiment",
    "reproduce_row",
    "right",
    "titles",
    "to_csv",
    "to_json",
    "to_markdown",
    "trials",
]
