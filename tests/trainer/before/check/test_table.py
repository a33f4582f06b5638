"""What a dry run says of the table's applications: the verdict, all their roles, and the findings that matter."""

from __future__ import annotations

import os

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", CREWAI_TESTING="true")
os.environ.setdefault("CREWAI_STORAGE_DIR", "cotune-tests")

import pytest

from cotune.trainer.before.check.dry_run import check
from cotune.trainer.config.load import convert
from tests.trainer.before.check.apps import crews, graphs, plain, teams

ROWS = {**graphs.ROWS, **plain.ROWS, **teams.ROWS, **crews.ROWS}


@pytest.mark.parametrize("name", ROWS)
def test_the_verdict_the_roles_and_the_findings_are_true(name: str, provider: object) -> None:
    row = ROWS[name]
    report = check(row.make(), [{"id": "t", "question": "why"}], convert({"model": "none"}), **row.options)
    found = [(f.level, f"{f.about}: {f.text} {f.remedy}") for f in report.findings]
    assert (report.verdict, {role.role for role in report.roles}) == (row.verdict, row.roles), found
    assert row.unlisted in (None, report.unlisted)
    for level, text in row.says:
        assert any(level == one and text in told for one, told in found), (level, text, found)
    for text in row.never:
        assert not any(text in told for _, told in found), (text, found)
