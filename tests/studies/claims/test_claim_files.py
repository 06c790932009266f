"""Every claim's file can be read and run, and what a claim must not say is refused in one sentence."""

from __future__ import annotations

import itertools

import pytest

from fedspan.cli.checks import known_checks
from fedspan.errors import ConfigError
from fedspan.studies.claims import Claim, catalogue, find_claim, parse_claim
from fedspan.studies.claims.claim_file import papers
from fedspan.studies.claims.claim_runs import check_all, reported_jobs
from fedspan.studies.claims.fair_play import COMMON, GROUPED, all_rows, config_of, usual_fields

pytestmark = pytest.mark.slow  # seconds together: make test has them

CLAIMS = catalogue()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.name)
def test_a_claim_names_rows_methods_and_options_that_exist(claim: Claim) -> None:
    assert claim.sentence.endswith(".") and claim.place and (claim.minutes > 0 or claim.not_testable)
    if claim.not_testable:
        return
    if claim.trains:
        rows = all_rows(claim)
        check_all(claim, rows)
        names = {row.name for row in rows}
        columns = {row.name for row in rows if row.published is not None}
        assert all(t.row in columns for t in claim.tests if t.column == "published")
    else:
        assert claim.check is not None and claim.check.name in known_checks()
        names = set(claim.check.figures)
        assert all(t.measure == "value" for t in claim.tests)
    assert {t.row for t in claim.tests} | {t.minus for t in claim.tests if isinstance(t.minus, str)} <= names


def test_there_are_claims_of_every_paper_and_names_are_unambiguous() -> None:
    assert {c.paper for c in CLAIMS} == set(papers())
    assert len({c.stem for c in CLAIMS}) == len(CLAIMS)
    assert find_claim(CLAIMS[0].stem) is find_claim(CLAIMS[0].name)
    with pytest.raises(ConfigError, match="theorem-1"):
        find_claim("theorem-one")


MADE = """
sentence = "a beats b."
place = "Table 1"
[experiment]
rounds = 20
[experiment.partition]
kind = "permuted-groups"
groups = 3
clients = 6
[experiment.train]
epochs = 4
[[rows]]
name = "a"
method = "fedrep"
[[tests]]
row = "a"
minus = "local"
above = 0.0
"""


def made(*changes: tuple[str, str]) -> Claim:
    """A claim of one row, with changes to its text."""
    text = MADE
    for old, new in changes:
        text = text.replace(old, new)
    return parse_claim(text.encode(), "paper", "made-up")


def test_controls_stand_in_every_table() -> None:
    rows = {row.name: row for row in all_rows(made())}
    assert set(rows) == {"a", *COMMON, *GROUPED} and rows["ifca"].fields == {"clusters": 3}
    alone = made(('kind = "permuted-groups"\ngroups = 3', 'kind = "iid"'))
    assert {row.name for row in all_rows(alone)} == {"a", *COMMON}
    common = made(('kind = "permuted-groups"\ngroups = 3', 'kind = "iid"\nsplit = "common"\ntest = 0.2'))
    assert {row.name for row in all_rows(common)} == {"a", "fedavg", "local"}


def test_local_work_is_equal_and_schedules_fit_the_rounds() -> None:
    rows = {row.name: row for row in all_rows(made())}
    assert config_of(made(), rows["a"], {}, 200).method["head_epochs"] == 4
    assert config_of(made(), rows["cfl"], {}, 200).method["start_round"] == 4  # 20 of 100
    assert usual_fields("fedara", 5) == {"warmup": "10%"}
    own = made(('method = "fedrep"', 'method = "fedrep"\nfields = { head_epochs = 10 }'))
    assert config_of(own, own.rows[0], {}, 200).method["head_epochs"] == 10


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ((("[[rows]]", "[tuning]\nseeds = [200]\n[[rows]]"),), "never on reported ones"),
        ((("[experiment]\n", "seeds = [0, 1]\n[experiment]\n"),), "on which nothing was chosen"),
        ((("above = 0.0", ""),), "one of above, below and within"),
        ((("above = 0.0", "above = 0.0\nbelow = 1.0"),), "one of above, below and within"),
        ((("above = 0.0", 'above = 0.0\nonly_if = "x"'),), "a test without only_if"),
        ((('method = "fedrep"', 'method = "fedrep"\nlr = [0.1]'),), "as many step sizes"),
        ((('place = "Table 1"', 'plaice = "Table 1"'),), "unknown key 'plaice'"),
        ((("[[rows]]", "[tuning]\ntrials = 1\n[[rows]]"),), "at least the grid's 4"),
        ((('method = "fedrep"', 'method = "fedrep"\nseeds = [200, 203]'),), "must be some of the claim's"),
        ((('method = "fedrep"', 'method = "fedrep"\nseeds = [200, 200]'),), "must be some of the claim's"),
        ((('method = "fedrep"', 'method = "fedrep"\nseeds = [200]'),), "as one decides nothing"),
        ((('place = "Table 1"', 'place = "Table 1"\nseeds = [200]'),), "as one decides nothing"),
    ],
)
def test_what_a_claim_must_not_say(changes: tuple[tuple[str, str], ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        made(*changes)


DEAR = """method = "fedrep"
[[rows]]
name = "dear"
method = "fedkd"
seeds = [201]"""


def test_a_row_that_is_too_dear_has_fewer_seeds() -> None:
    claim = made(('method = "fedrep"', DEAR))
    rows = {row.name: row for row in all_rows(claim)}
    assert claim.seeds_of(rows["dear"]) == (201,) and claim.seeds_of(rows["a"]) == claim.seeds == (200, 201, 202)
    jobs = {name: reported_jobs(claim, rows[name], 0.1)["tuned"] for name in ("a", "dear")}
    assert [job.config.seed for job in jobs["a"]] == [200, 201, 202]
    assert [job.config.seed for job in jobs["dear"]] == [201]


def test_fedaras_tables_share_their_runs() -> None:
    """What stands in both is run once: the same row under the same name, with the same trials."""
    table, others = find_claim("main-table"), find_claim("main-table-all")
    assert table.folder == others.folder and table.tuning == others.tuning and table.seeds == others.seeds
    first, second = (
        {r.name: config_of(c, r, {"lr": 0.1}, 200).identity() for r in all_rows(c)} for c in (table, others)
    )
    assert first.keys() & second.keys() == {"FedARA, λ = 10", *COMMON}
    assert all(first[name] == second[name] for name in first.keys() & second.keys())


def test_the_digest_is_of_what_decides() -> None:
    assert made(("[[tests]]", "# a comment\n[[tests]]")).digest == made().digest
    assert made(("[[tests]]", '[setting]\npaper = "words"\n[[tests]]')).digest == made().digest
    assert made(("above = 0.0", "above = 1.0")).digest != made().digest
    assert made(("a beats b", "a beats all")).digest != made().digest


def test_claims_of_one_table_share_their_runs() -> None:
    together = [c for c in CLAIMS if c.runs == "setup3"]
    assert len(together) >= 4 and {c.folder for c in together} == {"pfl-mf-setup3"}
    alone = made()
    shared = made(('place = "Table 1"', 'place = "Table 1"\nruns = "table"'))
    assert (alone.folder, shared.folder) == ("paper-made-up", "paper-table") and alone.digest == shared.digest
    with pytest.raises(ConfigError, match="runs"):
        made(('place = "Table 1"', 'place = "Table 1"\nruns = "../x"'))
    # What two of them have in common is one run: the same row with the same name and experiment.
    rows = [{r.name: (r, config_of(c, r, {"lr": 0.1}, 200)) for r in all_rows(c)} for c in together]
    for first, second in itertools.pairwise(rows):
        for name in first.keys() & second.keys():
            assert first[name][1].identity() == second[name][1].identity()


def test_setup_3_has_both_starts_and_both_readings_of_the_v_step_at_every_rank() -> None:
    found = {
        (r.fields["start"], r.fields["v_scale"], r.fields["rank"])
        for c in CLAIMS
        if c.runs == "setup3"
        for r in c.rows
        if r.method == "pfl-mf-paper" and r.published == {"lr": 0.1} and r.fields["u_update"] == "gradient"
    }
    assert found == set(itertools.product(("common", "random"), ("1", "1/n"), (1, 5, 10, 15)))


def test_a_control_is_left_out_only_with_a_reason() -> None:
    why = '[setting]\ndifferences = ["cfl is left out: it takes hours"]\n[experiment]\nrounds'
    told = made(('place = "Table 1"', 'place = "Table 1"\nleft_out = ["cfl"]'), ("[experiment]\nrounds", why))
    assert {row.name for row in all_rows(told)} == {"a", *COMMON, *GROUPED} - {"cfl"}
    with pytest.raises(ConfigError, match="why cfl is left out"):
        made(('place = "Table 1"', 'place = "Table 1"\nleft_out = ["cfl"]'))
