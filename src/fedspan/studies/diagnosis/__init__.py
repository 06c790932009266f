"""What kind of heterogeneity a federation has, seen before training, and what suits it."""

from fedspan.studies.diagnosis.advice import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
