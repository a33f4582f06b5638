"""The examples of how-to/roles.md and frameworks/openai-agents.md in docs, as they stand there, on real frameworks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agents.tracing import set_tracing_disabled

from cotune.episodes.workflows import workflow_of
from cotune.recording.recorder import LiveCall
from tests.integrations.recorded import Recorded, asks, tool_call
from tests.test_docs import ROOT, blocks

TASK = {"question": "What is 2 + 2?", "answer": "4"}


def example(page: str, framework: str) -> Any:
    """The workflow of the page's example that imports the framework."""
    (code,) = (text for text in blocks(ROOT / "docs" / page, "python") if f"from {framework} import" in text)
    found: dict[str, Any] = {"__name__": framework}
    exec(compile(code, str(Path(page).resolve()), "exec"), found)
    return workflow_of(found["solve"]).fn, found["solve"].cotune.roles


def final(text: str) -> Any:
    return asks(tool_call("final_answer", {"answer": text}))


def of_smolagents(call: LiveCall) -> Any:
    if (call.role, call.turn) == ("manager", 0):
        return asks(tool_call("searcher", {"task": "add"}))
    return final("4")


@pytest.mark.parametrize(
    ("page", "framework", "reply", "roles"),
    [
        ("how-to/roles.md", "pydantic_ai", lambda call: "4", ["plan", "write"]),
        ("how-to/roles.md", "smolagents", of_smolagents, ["manager", "searcher", "manager"]),
        (
            "frameworks/openai-agents.md",
            "agents",
            lambda call: asks(tool_call("transfer_to_writer", {})) if call.role == "triage" else "4",
            ["triage", "writer"],
        ),
    ],
)
def test_an_example_has_the_roles_it_says(nowhere, record: Recorded, page, framework, reply, roles) -> None:
    import cotune

    set_tracing_disabled(True)
    fn, names = example(page, framework)
    outcome = record(cotune.workflow(lambda task: fn(TASK), roles=names), reply)
    assert (record.roles, outcome.rewards, outcome.live.warnings) == (roles, {"team": 1.0}, {})
    assert {call.status for call in record.calls} == {"ok"}, json.dumps([call.error for call in record.calls])
