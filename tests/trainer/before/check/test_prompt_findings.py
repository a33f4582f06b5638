"""What a dry run tells of prompts."""

from pathlib import Path

from cotune.prompts.edits import Prompts
from cotune.trainer.before.check.prompts import prompt_findings, use_findings
from tests.core.prompts.written import Asked, store_of
from tests.integrations.edits import part, prompts

SYSTEM = "You are a careful assistant of a small shop. Answer in one sentence."


def test_parts_are_counted_and_a_role_without_any_is_named(tmp_path: Path) -> None:
    calls = lambda q: [Asked("writer", [("system", SYSTEM), q]), Asked("reader", [q])]  # noqa: E731
    tasks = [{"q": "Where is the parcel?"}, {"q": "Who pays for the broken lamp?"}]
    with store_of(tmp_path / "two.db", [(task, calls(task["q"])) for task in tasks], phase="check") as store:
        bare, parts = prompt_findings(store)
    assert (bare.level, parts.level) == ("warns", "note")
    assert bare.text.startswith("reader sends nothing but its input")
    assert parts.text == "writer: 1 system message."
    assert parts.remedy == "They are shown by: cotune prompts show."
    with store_of(tmp_path / "one.db", [(tasks[0], calls(tasks[0]["q"]))], phase="check") as store:
        assert "--limit 2" in list(prompt_findings(store))[-1].remedy


def test_parts_of_a_file_are_compared_with_the_calls_of_the_dry_run(tmp_path: Path) -> None:
    calls = [Asked("writer", [("system", SYSTEM), "hello"]), Asked("writer", [("system", "Another one."), "hello"])]
    given = prompts(
        part(SYSTEM, "Be short.", role="writer"),
        part("You are a careful clerk.", "Be kind.", role="writer"),
        part("Nobody asks this.", "At all.", role="ghost"),
    )
    with store_of(tmp_path / "one.db", [({"q": "hello"}, calls)], phase="check") as store:
        seen = [call for episode in store.episodes() for call in store.calls(episode.id)]
        found = list(use_findings(store, seen, given))
        assert [one.text for one in use_findings(store, seen, Prompts(parts=()))] == [
            "the file of prompts has no edited part."
        ]
    names = [one.name for one in given.parts]
    assert [(one.level, one.text) for one in found] == [
        (
            "blocks",
            f"{names[1]} is unmatched: none of 2 calls of writer has it; "
            "the nearest text differs from character 19 on.",
        ),
        ("warns", f"{names[2]}: its role made no call in the dry run, so nothing is known of it."),
        ("warns", "1 call of writer would be sent unedited (prompt_unmatched)."),
        ("ok", f"edited parts that match: {names[0]} in 1 of 2 calls."),
    ]
