"""Hyper-parameters chosen by trials on validation parts of development seeds, with the same effort for every method."""

from fedspan.studies.tuning.effort import steps_of
from fedspan.studies.tuning.search import Trial, TrialJob, TuningOutcome, search
from fedspan.studies.tuning.seeds import (
    DEVELOPMENT,
    REPORTED,
    check_development,
    check_reported,
    development_seeds,
    reported_seeds,
)
from fedspan.studies.tuning.spaces import USUAL_SPACE, Space, split_spaces

__all__ = [
    "DEVELOPMENT",
    "REPORTED",
    "USUAL_SPACE",
    "Space",
    "Trial",
    "TrialJob",
    "TuningOutcome",
    "check_development",
    "check_reported",
    "development_seeds",
    "reported_seeds",
    "search",
    "split_spaces",
    "steps_of",
]
