"""What is found of the prompts of real applications stands in their source, and edits a task that was not seen."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cotune
from cotune.cli.main import main
from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.episodes.workflows import workflow_of
from cotune.prompts.edits import Prompts, rewrite_chat
from cotune.prompts.file import read_prompts
from cotune.prompts.parts import FoundParts, find_parts
from cotune.prompts.templates import Template
from cotune.records.structs import CallRecord
from cotune.records.tasks import as_tasks
from cotune.storage.open_store import open_store
from tests.integrations import prompt_apps as apps
from tests.integrations.provider import Provider, completion, json_reply

QUESTIONS = [
    "My parcel of last week has still not arrived.",
    "Why does the bill show two lamps, when I ordered one?",
    "Do you sell green paint for wood?",
    "The chair broke on its first day!",
]
ANSWERS = [
    "It is on its way.",
    "We look into it\nand write again.",
    "orders",
    "Yes: two kinds.",
    "correct, as far as I see",
]

HUMAN = apps.REPLY.replace("{{", "{").replace("}}", "}")
FOUND = {
    "langgraph": {
        "triage.system": tuple(apps.TRIAGE.replace("{today}", "|").split("|")),
        "reply.user": tuple(HUMAN.replace("{mail}", "|").replace("{desk}", "|").split("|")),
    },
    "autogen": {"primary.system": (apps.PRIMARY,), "critic.system": (apps.CRITIC,)},
    "sdk": {
        "solver.system": (apps.SOLVER,),
        "solver.tool.calculate": (apps.TOOL,),
        "solver.tool.calculate/expression": ("The expression, such as (3 + 4) * 2.",),
        "checker.user": tuple(apps.CHECKER.replace("{problem}", "|").replace("{solution}", "|").split("|")),
    },
}


def found_in(app: str, provider: Provider, folder: Path) -> tuple[FoundParts, list[tuple[CallRecord, Any]]]:
    """The parts that all tasks but the last show, and the calls of the last with their messages."""
    said = lambda number: {"role": "assistant", "content": f"{ANSWERS[number % len(ANSWERS)]} {number}"}  # noqa: E731
    provider.reply = lambda body, number: json_reply(completion(said(number)))
    flow = workflow_of(cotune.workflow(apps.APPLICATIONS[app]))
    tasks = as_tasks([{"id": str(n), "q": q} for n, q in enumerate(QUESTIONS)])
    with open_store(folder / "records.db") as store:
        batch = EpisodeBatch(tasks=tasks, sink=store, phase="trace", concurrency=1)
        *seen, last = asyncio.run(rollout(flow, batch))
        assert {episode.status for episode in (*seen, last)} == {"ok"}
        store.flush()
        calls = [(call, [store.message(id) for id in call.messages]) for call in store.calls(last.id)]
        return find_parts(store, seen), calls


def edited(found: FoundParts, calls: list[tuple[CallRecord, Any]]) -> Counter[tuple[str, str]]:
    """What becomes of calls when all parts say a little more."""
    more = [
        msgspec.structs.replace(one.part, new=Template.of([*one.part.old.pieces, " Be exact."]))
        for one in found.editable
        if one.part.kind in ("system", "user")
    ]
    outcomes: Counter[tuple[str, str]] = Counter()
    for call, messages in calls:
        edits = Prompts(parts=tuple(more)).edits(call.role)
        if edits is not None:
            begun = edits.begin()
            sent = rewrite_chat(begun, {"messages": messages})["messages"]
            longer = sum(len(str(new)) - len(str(old)) for new, old in zip(sent, messages, strict=True))
            assert longer == begun.edited * len(" Be exact.")
            outcomes[call.role, begun.outcome] += 1
    return outcomes


@pytest.mark.parametrize(
    ("app", "outcomes"),
    [
        ("langgraph", {("triage", "edited"): 1, ("reply", "edited"): 1}),
        ("autogen", {("primary", "edited"): 2, ("critic", "edited"): 2}),
        ("sdk", {("solver", "edited"): 1, ("checker", "edited"): 1}),
    ],
)
def test_parts_are_those_of_the_source(app: str, outcomes: dict, provider: Provider, tmp_path: Path) -> None:
    found, calls = found_in(app, provider, tmp_path)
    assert {one.part.name: one.part.old.texts for one in found.editable} == FOUND[app]
    assert edited(found, calls) == outcomes
    assert [role.name for role in found.roles if role.bare] == (["reader"] if app == "sdk" else [])


def test_a_crew(provider: Provider, tmp_path: Path) -> None:
    found, calls = found_in("crewai", provider, tmp_path)
    texts = {one.part.name: one.part.old.texts for one in found.editable}
    assert apps.BACKSTORY in texts["Travel Guide.system"][0] and apps.GOAL in texts["Travel Guide.system"][0]
    before, after = texts["Travel Guide.user"]
    assert before.endswith("Plan a day trip: ") and "A plan with times." in after
    assert edited(found, calls) == {("Travel Guide", "edited"): 1}


def test_an_application_is_recorded_to_show_its_prompts(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"id": q[:2], "q": q}) + "\n" for q in QUESTIONS))
    app = f"{Path(apps.__file__)}:plain"
    assert main(["prompts", "show", app, "--tasks", "tasks.jsonl", "--limit", "2"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("sdk · 6 calls · 3 roles · m\n") and "2 episodes, 6 calls" in err
    assert main(["prompts", "show", app, "--tasks", "tasks.jsonl", "--limit", "1", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) and "runs/prompts has earlier records, which count too" in err
    assert main(["prompts", "show", "runs/prompts", "--json"]) == 0
    assert [part["name"] for part in json.loads(capfd.readouterr().out)["parts"]] == list(FOUND["sdk"])


def test_an_edit_by_hand_is_compared_on_the_same_tasks(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The provider says that a solution is correct where the new text asks for it."""
    provider.reply = lambda body, number: json_reply(
        completion({"role": "assistant", "content": "correct" if "Be honest." in str(body["messages"]) else "wrong"})
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"q": f"{q} {n}"}) + "\n" for q in QUESTIONS for n in range(3))
    )
    app = ["--tasks", "tasks.jsonl"]
    assert main(["prompts", "show", f"{Path(apps.__file__)}:plain", *app, "--out", "p.json"]) == 0
    (tmp_path / "new.txt").write_text("Be honest. Problem: ⟦1⟧. Solution: ⟦2⟧.")
    edit = ["prompts", "edit", "p.json", "--part", "checker.user", "--text", "new.txt"]
    assert main([*edit, "--app", f"{Path(apps.__file__)}:plain"]) == 1
    assert main([*edit, "--app", f"{Path(apps.__file__)}:plain", *app]) == 0
    assert "\nbetter: 0.000 before, 1.000 after, difference +1.000" in capfd.readouterr().out
    evaluation = read_prompts("p.json").evaluation
    assert evaluation["verdict"] == "better" and evaluation["held_out"]["unmatched"] == 0
