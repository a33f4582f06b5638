"""What a dry run tells of prompts."""

from pathlib import Path

from cotune.trainer.before.check.prompts import prompt_findings
from tests.core.prompts.written import Asked, store_of

SYSTEM = "You are a careful assistant of a small shop. Answer in one sentence."


def test_parts_are_counted_and_a_role_without_any_is_named(tmp_path: Path) -> None:
    calls = lambda q: [Asked("writer", [("system", SYSTEM), q]), Asked("reader", [q])]  # noqa: E731
    tasks = [{"q": "Where is the parcel?"}, {"q": "Who pays for the broken lamp?"}]
    with store_of(tmp_path / "two.db", [(task, calls(task["q"])) for task in tasks], phase="check") as store:
        bare, parts = prompt_findings(store, "app:solve", "t.jsonl")
    assert (bare.level, parts.level) == ("warns", "note")
    assert bare.text.startswith("reader sends nothing but its input")
    assert parts.text == "writer: 1 system message."
    assert parts.remedy == "They are shown by: cotune prompts show app:solve --tasks t.jsonl."
    with store_of(tmp_path / "one.db", [(tasks[0], calls(tasks[0]["q"]))], phase="check") as store:
        assert "--limit 2" in list(prompt_findings(store, "app:solve", "t.jsonl"))[-1].remedy
