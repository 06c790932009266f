"""What the papers claim, one file each: what is run, the test that decides, and outcomes from which verdicts follow."""

from fedspan.studies.claims.claim_file import Claim, ClaimRow, DecidingTest, catalogue, find_claim, parse_claim
from fedspan.studies.claims.outcome_file import ClaimOutcome, read_outcome, sound_outcomes, stored_outcomes
from fedspan.studies.claims.verdict import Decision, TestResult, decide

__all__ = [
    "Claim",
    "ClaimOutcome",
    "ClaimRow",
    "DecidingTest",
    "Decision",
    "TestResult",
    "catalogue",
    "decide",
    "find_claim",
    "parse_claim",
    "read_outcome",
    "sound_outcomes",
    "stored_outcomes",
]
