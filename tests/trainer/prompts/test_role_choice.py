from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import cotune
from cotune.config.rollouts import SamplingConfig
from cotune.errors import ConfigError, CotuneError
from cotune.integrations.apps.openai.other_model import OtherModel
from cotune.prompts.edits import PromptPart
from cotune.prompts.templates import Template
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.trainer.prompts.improve import improve
from cotune.trainer.prompts.options import ImproveOptions
from cotune.trainer.prompts.role_choice import Turns
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
    """The planner names the city. The writer leaves it out every second time, whatever its prompt says."""

    async def respond(self, call: LiveCall) -> Answer:
        self.asked.append((call.role, call.messages[0]["content"]))
        said = call.messages[1]["content"]
        if call.role == "planner":
            return travel.answer(f"a journey to {said.split()[3].strip(',')}")
        return travel.answer(said if len(self.asked) % 3 else "Of course.")


MOODY = ImproveOptions(rounds=3, max_calls=1000, concurrency=1)


def test_without_a_reference_decisive_calls_are_shown_and_roles_take_turns(tmp_path: Path) -> None:
    office, reflector = Moody(), travel.Reflector()
    given: dict[str, Any] = {"responder": office, "reflector": reflector}
    report = improve(travel.application(), travel.tasks(24), MOODY, out=tmp_path / "p", **given)
    assert report.blame.startswith("not known without a reference (--set blame=openai:NAME)")
    assert "of the failures succeed at another try. One call decided " in report.blame
    changed = {name.partition(".")[0]: count for name, count in report.taken.items()}
    assert abs(changed["planner"] - changed["writer"]) <= 1
    # The analysis is a part of the budget, and at most a quarter of it.
    assert 0 < report.spending["blame"]["calls"] <= 250 and report.spending["blame"]["prompt_tokens"]
    assert sum(spent["calls"] for spent in report.spending.values()) == len(office.asked) + len(reflector.requests)

    shown = [text for text in reflector.requests if "This answer decided it: " in text]
    assert shown and all("of the role writer" in text for text in shown)
    assert "Another answer to this very request, in the best of the repeated runs:" in shown[0]
    assert "in this order: planner, writer. Requests of writer hold answers of planner. No other role" in shown[0]
    planner = next(text for text in reflector.requests if "of the role planner" in text)
    assert "Requests of planner hold answers of no other role. Answers of planner are read by writer." in planner

    # A search that continues asks nothing again.
    asked = len(office.asked)
    again = improve(travel.application(), travel.tasks(24), MOODY, out=tmp_path / "p", resume=True, **given)
    assert (again.blame, again.spending, len(office.asked)) == (report.blame, report.spending, asked)


@pytest.fixture
def good_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider's model that repeats what it is told, and names the city."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    async def respond(self: OtherModel, call: LiveCall) -> Answer:
        return travel.answer(call.messages[1]["content"])

    monkeypatch.setattr(OtherModel, "respond", respond)


def test_with_a_reference_only_the_role_at_fault_is_changed(tmp_path: Path, good_model: None) -> None:
    options = msgspec.structs.replace(MOODY, blame="openai:good")
    report = improve(
        travel.application(),
        travel.tasks(24),
        options,
        out=tmp_path / "p",
        responder=Moody(),
        reflector=travel.Reflector(),
    )
    assert report.blame.startswith("writer is at fault: it costs ")
    assert "Changed: only writer.system." in report.blame and set(report.taken) == {"writer.system"}
    assert 0 < report.spending["blame"]["calls"] <= 250


@pytest.mark.parametrize(
    ("max_calls", "note"),
    [(48, "not known, as the limits leave no run of the analysis with an outcome"), (56, "not known without")],
)
def test_limits_end_the_analysis(tmp_path: Path, max_calls: int, note: str) -> None:
    options = ImproveOptions(rounds=1, max_calls=max_calls, concurrency=1)
    report = improve(
        travel.application(),
        travel.tasks(24),
        options,
        out=tmp_path / "p",
        responder=Moody(),
        reflector=travel.Reflector(),
    )
    assert report.blame.startswith(note) and "roles are changed in turn" in report.blame
    # 16 runs to choose by, and as many in reserve for the held-out tasks, have 48 calls.
    assert report.spending.get("blame", {"calls": 0})["calls"] <= max_calls - 48
    assert ("The analysis stopped at its share of the limits, after " in report.blame) == (max_calls == 56)
    assert sum(spent["calls"] for spent in report.spending.values()) <= max_calls


@pytest.mark.parametrize("prices", [{"office": (1.0, 1.0)}, {"office": (1.0, 1.0), "unused": (0.0, 0.0)}])
def test_the_analysis_spends_its_share_of_the_money(tmp_path: Path, prices: dict[str, tuple[float, float]]) -> None:
    # A call of 25 tokens costs 25 millionths.
    options = ImproveOptions(rounds=1, max_calls=10_000, max_cost=0.006, prices=prices, concurrency=1)
    report = improve(
        travel.application(),
        travel.tasks(24),
        options,
        out=tmp_path / "p",
        responder=Moody(),
        reflector=travel.Reflector(),
    )
    assert 0 < report.spending["blame"]["cost"] <= 0.25 * options.max_cost
    assert "The analysis stopped at its share of the limits, after " in report.blame
    assert report.blame.endswith(" of money.")


def test_a_reference_on_this_machine_has_no_price_of_a_provider() -> None:
    assert ImproveOptions(blame="runs/openai:old", max_cost=5, prices={"office": (1.0, 1.0)}).max_cost == 5
    with pytest.raises(ConfigError, match="needs a price of the reference gpt-5"):
        ImproveOptions(blame="openai:gpt-5", max_cost=5, prices={"office": (1.0, 1.0)})


def test_a_limit_of_money_needs_the_price_of_the_reference() -> None:
    with pytest.raises(ConfigError, match=r"needs a price of the reference gpt-5.*--price gpt-5="):
        ImproveOptions(blame="writer=openai:gpt-5", max_cost=5, prices={"office": (1.0, 1.0)})


def test_an_unknown_reference_is_refused_before_anything_runs(tmp_path: Path) -> None:
    office = travel.Office()
    options = ImproveOptions(blame=str(tmp_path / "nothing"))
    with pytest.raises(CotuneError):
        improve(
            travel.application(),
            travel.tasks(24),
            options,
            out=tmp_path / "p",
            responder=office,
            reflector=travel.Reflector(),
        )
    assert not office.asked


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
        ImproveOptions(rounds=6, max_calls=400, blame="off", roles=("writer",)),
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
        blame="off",
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
