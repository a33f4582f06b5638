from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.config.rollouts import SamplingConfig
from cotune.prompts.edits import PromptPart
from cotune.prompts.templates import Template
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.trainer.prompts.credit import Turns
from cotune.trainer.prompts.improve import improve
from cotune.trainer.prompts.options import ImproveOptions
from tests.integrations.tiny_models import build_bytes
from tests.trainer.prompts import travel

PARTS = [
    PromptPart(name=f"{role}.system", roles=(role,), kind="system", old=Template((f"You are the {role}.",)))
    for role in ("planner", "writer")
]


def turns(number: int, **options: Any) -> list[list[str]]:
    made = Turns(PARTS, **options)
    return [made.next() for _ in range(number)]


def test_roles_are_changed_in_turn() -> None:
    assert turns(4, scored=True) == [["planner.system"], ["writer.system"]] * 2


def test_without_scorers_every_second_proposal_changes_all_roles() -> None:
    both = ["planner.system", "writer.system"]
    assert turns(4, scored=False) == [both, ["planner.system"], both, ["writer.system"]]


class Moody(travel.Office):
    """The writer repeats the planner's answer only every second time; the planner always says the same."""

    async def respond(self, call: LiveCall) -> Answer:
        await super().respond(call)
        if call.role == "planner":
            return travel.answer(f"a journey to {call.messages[1]['content'].split()[3].strip(',')}")
        return travel.answer(call.messages[1]["content"] if len(self.asked) % 2 else "Of course.")


def test_forks_give_contrasts_and_do_not_claim_to_know_whose_calls_decide(tmp_path: Path) -> None:
    office, reflector = Moody(), travel.Reflector()
    options = ImproveOptions(rounds=3, max_calls=400, concurrency=1)
    report = improve(
        travel.application(), travel.tasks(24), options, out=tmp_path / "p", responder=office, reflector=reflector
    )
    assert report.credit == "not known yet: forks on 6 tasks are too few to tell; roles are changed in turn"
    changed = {name.partition(".")[0]: count for name, count in report.taken.items()}
    assert abs(changed["planner"] - changed["writer"]) <= 1
    assert any("Other answers to this very request" in request for request in reflector.requests)


@pytest.mark.parametrize("diverges", [False, True])
def test_calls_before_the_changed_role_come_from_the_record(tmp_path: Path, diverges: bool) -> None:
    asked = 0

    @cotune.workflow
    async def solve(task: Any) -> float:
        nonlocal asked
        asked += 1
        said = f"{task['days']} days in {task['city']}, please." + (f" ({asked})" if diverges else "")
        plan = await travel.ask("planner", travel.PLANNER + " " + travel.NAME_CITY, said)
        return float(task["city"] in await travel.ask("writer", travel.WRITER, plan))

    office = travel.Office()
    report = improve(
        solve,
        travel.tasks(24),
        ImproveOptions(rounds=6, max_calls=400, credit=0, roles=("writer",)),
        out=tmp_path / "p",
        responder=office,
        reflector=travel.Reflector(rules=(travel.REPEAT,)),
    )
    assert report.verdict == "better"
    planner, writer = report.spending["planner"]["calls"], report.spending["writer"]["calls"]
    if diverges:
        assert report.counts["diverged"] > 0 and "repeated" not in report.counts and planner == writer
    else:
        assert "diverged" not in report.counts and planner == writer - report.counts["repeated"]


@pytest.mark.slow
def test_policies_answer_edited_prompts_and_repeat_what_came_before(tmp_path: Path) -> None:
    build_bytes(tmp_path / "model")
    options = ImproveOptions(
        rounds=3,
        max_calls=120,
        credit=0,
        minibatch=2,
        sampling=SamplingConfig(max_tokens=4),
        model=str(tmp_path / "model"),
        roles=("writer",),
    )

    @cotune.workflow
    async def solve(task: Any) -> float:
        plan = await travel.ask("planner", travel.PLANNER, f"{task['days']} days in {task['city']}, please.")
        return float(len(await travel.ask("writer", travel.WRITER, plan)) % 2)

    reflector = travel.Reflector()
    report = improve(solve, travel.tasks(12), options, out=tmp_path / "p", reflector=reflector)
    assert reflector.requests and report.counts["repeated"] > 0
    assert not {"diverged", "retried"} & report.counts.keys() and not report.counts["unmatched"]
