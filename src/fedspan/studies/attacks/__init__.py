"""Attacks on a federation by some of its own clients, in simulation: what they reach, with a defence and without."""

from fedspan.studies.attacks.attack_table import Bar, bars, from_csv, to_csv, to_markdown
from fedspan.studies.attacks.attacked_run import AttackJob, AttackOutcome, attack_jobs, carry_out
from fedspan.studies.attacks.catalogue import ATTACKS, Attack, find_attack

__all__ = ["ATTACKS", "Attack", "AttackJob", "AttackOutcome", "Bar", "attack_jobs", "bars", "carry_out"]
__all__ += ["find_attack", "from_csv", "to_csv", "to_markdown"]
