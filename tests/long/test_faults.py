"""Faults at their full size: killed processes, hostile uploads, real federations on the loopback address.

The same programs can be run by hand with other numbers: see tests/tools/.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tools.fuzz_server import ROUNDS, fuzz_server
from tools.fuzz_uploads import fuzz

TOOLS = Path(__file__).parents[1] / "tools"
pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


def play(tool: str, *arguments: str) -> None:
    """Run a tool to its end; it exits with 0 only if all it looks at held."""
    done = subprocess.run([sys.executable, str(TOOLS / f"{tool}.py"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_ten_thousand_hostile_uploads() -> None:
    found = fuzz(10_000)
    assert found.tried == 10_000 and found.refused + found.valid == 10_000
    assert found.crashed == 0 and found.wrongly_admitted == 0 and found.same_result


def test_ten_thousand_hostile_conversations() -> None:
    fuzz_server(200, seed=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    heard = fuzz_server(10_000)
    assert heard.fine, heard
    assert heard.conversations >= 10_000 and heard.resumed == ROUNDS * heard.runs
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # kilobytes


def test_killed_runs_end_with_the_same_bits() -> None:
    play("kill_trials", "--trials", "20", "--kills", "3")


@pytest.mark.parametrize("fault", ["same", "node", "serverapp", "superlink", "replay", "flood", "join"])
def test_a_real_federation(fault: str) -> None:
    play("deploy_faults", fault)
