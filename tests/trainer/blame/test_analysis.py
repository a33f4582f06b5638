"""`cotune.blame` on an application whose faulty role is known, with models that err as the test says."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

import cotune
from cotune.errors import ConfigError, RunError, WorkflowError
from cotune.integrations.apps.openai.other_model import OtherModel
from cotune.prompts.edits import PromptPart, Prompts
from cotune.prompts.file import write_prompts
from cotune.prompts.templates import Template
from cotune.reading.blame import Blame
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.policies import UNTRAINED
from cotune.records.structs import PolicyRef
from cotune.records.tasks import as_tasks
from cotune.sampling.responder import PolicyResponder
from cotune.storage.open_store import open_store
from cotune.trainer.blame.analysis import planned
from cotune.trainer.blame.options import BlameOptions
from cotune.trainer.blame.references import Answering, OpenReferences
from cotune.trainer.blame.tasks import draw_tasks
from tests.integrations.provider import serving
from tests.trainer.blame.office import Office, application, ask, tasks

Makes = Callable[[Mapping[str, float]], Office]


@pytest.fixture
def office(monkeypatch: pytest.MonkeyPatch) -> Makes:
    """Makes an office with these error rates by role, which answers for references, too."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    def make(rates: Mapping[str, float]) -> Office:
        made = Office(rates)

        async def respond(self: OtherModel, call: LiveCall) -> Answer:
            return made.answer(self.model, call)

        monkeypatch.setattr(OtherModel, "respond", respond)
        return made

    return make


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "blame")


GOOD = ("openai:good",)


def test_the_faulty_role_is_named(office: Makes, out: str) -> None:
    made = office({"writer": 0.8})
    found = cotune.blame(application(), tasks(6), references=GOOD, out=out, responder=made, runs=8)
    assert (found.verdict, found.at_fault) == ("named", ("writer",))
    assert found.sentence.startswith("writer is at fault: it costs ")
    assert "points; the next one, " in found.sentence
    assert "Answering writer with good alone wins " in found.sentence
    assert (found.tasks, found.runs, found.calls) == (6, 48, 144)
    assert found.swapped is not None and found.swapped.mean == 1
    # Of the 8 arms, 4 swap each role.
    assert made.asked == {(model, role): 24 for model in ("small", "good") for role in ("planner", "writer", "checker")}


def test_two_certain_faults_are_both_found(office: Makes, out: str) -> None:
    made = office({"writer": 1.0, "checker": 1.0})
    found = cotune.blame(application(), tasks(6), references=GOOD, out=out, responder=made, runs=8)
    assert (found.verdict, set(found.at_fault)) == ("named", {"writer", "checker"})


def test_a_reference_with_the_same_fault_does_not_help(office: Makes, out: str) -> None:
    made = office({"writer": 1.0})
    found = cotune.blame(application(), tasks(6), references=("openai:same",), out=out, responder=made, runs=8)
    assert found.verdict == "reference"
    assert "Look at the prompts, the tasks or the scorer." in found.sentence


def test_an_application_of_one_role_has_two_arms(office: Makes, out: str) -> None:
    made = office({"solver": 0.9})
    found = cotune.blame(application(("solver",)), tasks(6), references=GOOD, out=out, responder=made, runs=4)
    assert (found.verdict, found.at_fault, found.runs) == ("named", ("solver",), 24)


def test_answers_that_repeat_end_the_rounds(office: Makes, out: str) -> None:
    made = office({"writer": 1.0})
    found = cotune.blame(application(("writer",)), tasks(20), references=GOOD, out=out, responder=made, runs=30)
    assert found.runs == 20 * 2 * 2
    assert any("repeats the same answers" in note and "--temperature 1" in note for note in found.notes)


def test_a_reference_of_one_role_swaps_only_that_one(office: Makes, out: str) -> None:
    made = office({"writer": 0.8, "checker": 0.8})
    found = cotune.blame(application(), tasks(5), references=("writer=openai:good",), out=out, responder=made, runs=4)
    assert [one.role for one in found.roles] == ["writer"]
    assert {role for model, role in made.asked if model == "good"} == {"writer"}


def test_edited_prompts_are_a_reference(office: Makes, out: str, tmp_path: Path) -> None:
    parts = tuple(
        PromptPart(
            name=f"{role}.system",
            roles=(role,),
            kind="system",
            old=Template((f"You are the {role}.",)),
            new=Template((f"You are the new {role}.",)),
        )
        for role in ("planner", "writer", "checker")
    )
    write_prompts(tmp_path / "prompts", Prompts(parts=parts))
    # The provider knows the roles by their prompts: a new writer has no error rate.
    made = office({"writer": 0.9})
    found = cotune.blame(
        application(), tasks(6), references=(f"prompts:{tmp_path / 'prompts'}",), out=out, responder=made, runs=8
    )
    assert (found.verdict, found.at_fault) == ("named", ("writer",))
    assert made.asked["small", "new writer"] == made.asked["small", "writer"] == 24


def failed_first(out: str) -> list[str]:
    """Ids of the tasks whose first run as it is failed."""
    with open_store(out, read_only=True) as store:
        first = [episode for episode in store.episodes() if episode.rollout == 0 and episode.phase == "blame own"]
        return [one.task.id for one in first if store.rewards([one.id])[one.id]["team"] == 0]


def test_a_model_on_this_machine_is_a_reference(office: Makes, out: str, tiny_base: Path, in_thread: None) -> None:
    made = office({"writer": 1.0})
    reference = (f"writer={tiny_base}",)
    found = cotune.blame(application(), tasks(2), references=reference, out=out, responder=made, runs=4, max_tokens=3)
    assert (found.tasks, found.left_out, [one.role for one in found.roles]) == (2, {}, ["writer"])
    with open_store(out, read_only=True) as store:
        answered = {
            (episode.phase, call.role, call.policy is not None)
            for episode in store.episodes()
            for call in store.calls(episode.id)
            if episode.phase != "blame-rescored"
        }
    roles = ("planner", "writer", "checker")
    assert answered == {("blame own", role, False) for role in roles} | {
        ("blame all", role, role == "writer") for role in roles
    }


def test_a_model_on_this_machine_answers_for_the_application(
    office: Makes, out: str, tiny_base: Path, in_thread: None
) -> None:
    office({})
    word = {"id": "t", "word": "never said"}
    model = {"model": str(tiny_base), "temperature": 0.0, "max_tokens": 3}
    found = cotune.blame(
        application(("writer",)), [word, {**word, "id": "u"}], references=GOOD, out=out, runs=4, **model
    )
    assert found.outcome is not None and found.outcome.mean == 0
    assert found.swapped is not None and found.swapped.mean == 1


def test_without_a_reference_failed_tasks_are_run_again(office: Makes, out: str) -> None:
    made = office({"writer": 0.5})
    found = cotune.blame(application(), tasks(8), out=out, responder=made)
    assert found.failures > 0
    assert (found.verdict, found.all_roles) == ("untested", ["planner", "writer", "checker"])
    assert found.luck is not None and found.luck.n == len(failed_first(out)) > 0
    assert found.runs == 8 + 5 * found.luck.n


def test_a_role_that_earns_its_place(office: Makes, out: str) -> None:
    made = office({})
    found = cotune.blame(application(), tasks(5), without=("writer",), out=out, responder=made)
    assert found.sentence.startswith("Without writer the outcome loses 100 (")
    assert found.sentence.endswith(" points: it earns its place.")
    assert [one.reference for one in found.roles] == ["an empty answer"]


def test_a_limit_takes_fewer_tasks_and_a_larger_one_continues(office: Makes, out: str) -> None:
    made = office({"writer": 0.8})
    first = cotune.blame(application(), tasks(10), references=GOOD, out=out, responder=made, runs=8, max_calls=80)
    assert first.tasks == 3 and first.calls <= 80
    assert any("The limits allow one round on 3 of 10 tasks" in note for note in first.notes)
    assert first.verdict == "undecided" and first.more_tasks == 2
    second = cotune.blame(application(), tasks(10), references=GOOD, out=out, responder=made, runs=8, max_calls=300)
    assert second.tasks == 10 and second.verdict == "named"
    # No run is made twice.
    assert made.asked.total() == second.calls == 10 * 8 * 3


def test_runs_of_different_length_stay_within_the_limit(office: Makes, out: str) -> None:
    made = office({"writer": 0.5})
    short, long = application(("writer",)).cotune.fn, application(("writer",) * 9).cotune.fn

    @cotune.workflow
    async def varied(task: Any) -> float:
        outcome: float = await (short if task["id"] < "t05" else long)(task)
        return outcome

    found = cotune.blame(
        varied, tasks(10), references=GOOD, out=out, responder=made, runs=20, max_calls=150, concurrency=1
    )
    assert "max_calls = 150" in found.ended
    # The last run may be longer than the mean of those before it.
    assert found.calls == made.asked.total() <= 150 + 8


def test_a_limit_below_the_first_runs_says_so(office: Makes, out: str) -> None:
    made = office({})
    with pytest.raises(RunError, match="do not fit into max_calls = 3"):
        cotune.blame(application(), tasks(5), references=GOOD, out=out, responder=made, max_calls=3)


def test_an_interrupted_analysis_loses_no_run(office: Makes, out: str) -> None:
    made = office({"writer": 0.8})

    def interrupt_once() -> None:
        if made.asked.total() == 70:
            signal.raise_signal(signal.SIGINT)

    made.before = interrupt_once
    with pytest.raises(KeyboardInterrupt):
        cotune.blame(application(), tasks(6), references=GOOD, out=out, responder=made, runs=8, concurrency=1)
    with open_store(out, read_only=True) as store:
        ended = [episode for episode in store.episodes() if episode.status == "ok"]
    assert 15 <= len(ended) <= 24
    made.before = lambda: None
    found = cotune.blame(application(), tasks(6), references=GOOD, out=out, responder=made, runs=8)
    assert (found.verdict, found.at_fault, found.runs) == ("named", ("writer",), 48)
    assert found.left_out == {}


def test_another_reference_needs_another_folder(office: Makes, out: str) -> None:
    made = office({})
    cotune.blame(application(("solver",)), tasks(2), references=GOOD, out=out, responder=made, runs=2)
    with pytest.raises(ConfigError, match="holds an analysis with references"):
        cotune.blame(application(("solver",)), tasks(2), references=("openai:same",), out=out, responder=made, runs=2)
    with pytest.raises(ConfigError, match="other tasks"):
        cotune.blame(application(("solver",)), [{"id": "x", "word": "y"}], references=GOOD, out=out, responder=made)


def test_models_that_cannot_be_reached_end_the_analysis(office: Makes, out: str) -> None:
    made = office({"writer": 0.9})
    made.down = {"good"}
    with pytest.raises(RunError, match=r"All 2 runs with all roles swapped failed: .*good did not answer a call"):
        cotune.blame(application(), tasks(2), references=GOOD, out=out, responder=made, runs=8)
    # What has run counts, and what failed is run again.
    made.down = set()
    found = cotune.blame(application(), tasks(2), references=GOOD, out=out, responder=made, runs=8)
    assert (found.left_out, found.runs) == ({}, 16)


def test_a_task_that_always_fails_does_not_keep_an_analysis_from_going_on(office: Makes, out: str) -> None:
    made = office({"writer": 0.9})
    plain = application().cotune.fn

    @cotune.workflow
    async def solve(task: Any) -> Any:
        made.down = {"good"} if task["id"] == "t03" else set()
        return await plain(task)

    settings: dict[str, Any] = {"references": GOOD, "out": out, "responder": made, "concurrency": 1}
    first = cotune.blame(solve, tasks(6), runs=8, **settings)
    assert (first.verdict, first.left_out) == ("named", {"infrastructure": 7})
    second = cotune.blame(solve, tasks(6), runs=16, **settings)
    assert (second.verdict, second.at_fault) == ("named", ("writer",))
    assert second.roles[0].runs == 2


def test_a_role_that_acts_late_leaves_the_analysis_of_the_others(office: Makes, out: str) -> None:
    made = office({"writer": 0.9})
    short, long = application(("writer",)).cotune.fn, application(("writer", "helper")).cotune.fn

    @cotune.workflow
    async def solve(task: Any) -> Any:
        return await (short if made.asked.total() < 24 else long)(task)

    settings: dict[str, Any] = {"references": GOOD, "out": out, "responder": made, "runs": 8, "concurrency": 1}
    found = cotune.blame(solve, tasks(6), **settings)
    assert (found.verdict, found.at_fault) == ("named", ("writer",))
    assert any("not analysed: helper" in note for note in found.notes)
    again = cotune.blame(solve, tasks(6), **settings)
    assert {one.role for one in again.roles} == {"writer", "helper"}


@pytest.mark.parametrize("option", ["references", "without"])
def test_a_named_role_may_act_on_few_tasks(office: Makes, out: str, option: str) -> None:
    made = office({})
    short, long = application(("writer",)).cotune.fn, application(("writer", "helper")).cotune.fn
    last = draw_tasks(as_tasks(tasks(6)), BlameOptions())[-1].id

    @cotune.workflow
    async def solve(task: Any) -> Any:
        return await (long if task["id"] == last else short)(task)

    value = "helper=openai:good" if option == "references" else "helper"
    found = cotune.blame(solve, tasks(6), out=out, responder=made, runs=4, **{option: (value,)})
    assert [one.role for one in found.roles] == ["helper"]


def test_a_limit_of_money_needs_the_price_of_every_model(office: Makes, out: str) -> None:
    made = office({})
    settings: dict[str, Any] = {"references": GOOD, "out": out, "responder": made, "runs": 4, "max_cost": 1.0}
    with pytest.raises(ConfigError, match=r"max_cost.*cannot be kept: small has no --price"):
        cotune.blame(application(), tasks(4), prices={"good": (1.0, 1.0)}, **settings)
    assert made.asked.total() == 3
    found = cotune.blame(application(), tasks(4), prices={"good": (1.0, 1.0), "small": (0.0, 0.0)}, **settings)
    assert found.cost is not None and found.cost > 0


def test_no_more_runs_than_were_agreed_to(office: Makes, out: str) -> None:
    made = office({"writer": 1.0})
    assert "up to 6 runs of the application on each: 30 runs" in planned(5, BlameOptions(without=("writer",)))
    removed = cotune.blame(application(), tasks(5), without=("writer",), out=out, responder=made)
    assert removed.runs == 5 * 6
    few = cotune.blame(application(), tasks(5), without=("writer",), out=f"{out}-few", responder=made, runs=2)
    assert few.runs == 5 * 2
    again = cotune.blame(application(), tasks(5), out=f"{out}-again", responder=made, runs=3)
    assert again.runs == 5 * 3
    assert "up to 3 runs" in planned(5, BlameOptions(runs=3))


def test_a_reference_without_a_policy_of_a_role_says_who_answers() -> None:
    class NoSampler:
        pass

    policies = {"planner": PolicyRef("planner", 1)}
    trained = PolicyResponder(NoSampler(), NoSampler(), policies, others=UNTRAINED)  # type: ignore[arg-type]
    opened = OpenReferences(Answering(), {"": Answering(trained)})
    assert opened.missing_policies(["planner", "writer"]) == [
        "The reference has no policy of writer: its untrained model answers in its place."
    ]


def test_outcomes_in_spite_of_failed_calls_are_told(out: str) -> None:
    @cotune.workflow
    async def forgiving(task: Any) -> float:
        async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as client:
            try:
                await client.chat.completions.create(model="small", messages=[{"role": "user", "content": "hello"}])
            except openai.OpenAIError:
                return 0.0
        return 1.0

    found = cotune.blame(forgiving, tasks(1), out=out, runs=1)
    assert any("calls failed and the application still returned an outcome" in note for note in found.notes)


def test_some_runs_that_cannot_be_reached_are_left_out(office: Makes, out: str) -> None:
    made = office({"writer": 0.9})

    def fails_at_times() -> None:
        made.down = {"good"} if made.asked.total() % 5 == 0 else set()

    made.before = fails_at_times
    found = cotune.blame(application(), tasks(4), references=GOOD, out=out, responder=made, runs=8, concurrency=1)
    assert set(found.left_out) == {"infrastructure"}
    assert found.failed == 0


def test_runs_that_raise_count_as_the_lowest_outcome(office: Makes, out: str) -> None:
    made = office({"writer": 0.9})
    plain = application().cotune.fn

    @cotune.workflow
    async def strict(task: Any) -> float:
        if not await plain(task):
            raise ValueError("the answer cannot be read")
        return 3.0

    found = cotune.blame(strict, tasks(6), references=GOOD, out=out, responder=made, runs=8)
    assert found.failed > 0 and found.left_out == {}
    assert (found.verdict, found.at_fault, found.span) == ("named", ("writer",), 3.0)


def test_episodes_without_an_outcome_are_left_out_and_counted(office: Makes, out: str) -> None:
    made = office({"writer": 0.9})
    plain = application().cotune.fn

    @cotune.workflow
    async def sometimes(task: Any) -> Mapping[str, float | None]:
        outcome = await plain(task)
        return {"team": None if task["word"] == "apple" else outcome}

    found = cotune.blame(sometimes, tasks(6), references=GOOD, out=out, responder=made, runs=8)
    assert found.left_out == {"no outcome": 8} and found.tasks == 5

    @cotune.workflow
    async def never(task: Any) -> Mapping[str, float | None]:
        await plain(task)
        return {"team": None}

    with pytest.raises(WorkflowError, match="No run of the application has a known outcome: 3 no outcome"):
        cotune.blame(never, tasks(3), out=f"{out}-2", responder=made)


def test_a_judge_gives_the_outcomes(office: Makes, out: str) -> None:
    made = office({"writer": 0.9})
    plain = application(("writer",)).cotune.fn

    @cotune.workflow
    async def judged(task: Any) -> None:
        await plain(task)

    @judged.judge
    def right(episodes: Any, task: Any) -> list[float]:
        return [float(one.calls[-1].answer.text == task["word"]) for one in episodes]

    found = cotune.blame(judged, tasks(6), references=GOOD, out=out, responder=made, runs=2)
    assert (found.verdict, found.at_fault) == ("named", ("writer",))


def test_an_application_without_calls_is_refused(office: Makes, out: str) -> None:
    made = office({})

    @cotune.workflow
    async def silent(task: Any) -> float:
        return 1.0

    with pytest.raises(WorkflowError, match="made no LLM call"):
        cotune.blame(silent, tasks(2), out=out, responder=made)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"references": ("openai:",)}, "names no model"),
        ({"references": ("openai:a", "openai:b")}, "is the second one of all roles"),
        ({"references": ("prompts:nowhere",)}, "nowhere"),
        ({"references": ("no/such/model",)}, "no/such/model"),
        ({"references": ("writer=nowhere#40",)}, "names a checkpoint, but nowhere is not a run"),
        ({"references": ("openai:a",), "without": ("writer",)}, "cannot be used with without"),
        ({"without": ("=text",)}, "names no role"),
        ({"runs": 0}, "above 0"),
        ({"max_cost": 1.0}, "needs prices"),
        ({"temperature": -1.0}, "must be a number of 0 or more"),
        ({"temperature": 1.0}, "cannot be used with a responder, which draws its answers itself"),
        ({"model": "nowhere#40"}, "names a checkpoint, but nowhere is not a run"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    office: Makes, out: str, settings: dict[str, Any], fault: str
) -> None:
    made = office({})
    with pytest.raises(ConfigError, match=fault):
        cotune.blame(application(), tasks(2), out=out, responder=made, **settings)
    assert not made.asked and not Path(out).exists()


def test_a_temperature_without_a_key_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="temperature = '1' needs OPENAI_API_KEY"):
        cotune.blame(application(), tasks(2), out=out, temperature=1.0)
    # So the same command without it is no other analysis in that folder.
    assert not Path(out).exists()


def test_a_role_that_does_not_exist_is_refused(office: Makes, out: str) -> None:
    made = office({})
    with pytest.raises(ConfigError, match="'editor' is not a role of the application"):
        cotune.blame(application(), tasks(2), references=("editor=openai:good",), out=out, responder=made)
    with pytest.raises(ConfigError, match="Roles: planner, writer, checker"):
        cotune.blame(application(), tasks(2), without=("editor",), out=f"{out}-2", responder=made)


def test_money_and_seconds_of_each_swap(office: Makes, out: str) -> None:
    made = office({"writer": 0.5})
    prices = {"small": (1.0, 1.0), "good": (11.0, 11.0)}
    found = cotune.blame(application(), tasks(2), references=GOOD, out=out, responder=made, runs=8, prices=prices)
    # 10 tokens of one call cost 10 money more for a million.
    assert all(one.cost == pytest.approx(100e-6) for one in found.roles)
    assert all(one.seconds is not None for one in found.roles)


@cotune.workflow
async def asking(task: Any) -> float:
    """One call with parameters of its own."""
    async with openai.AsyncOpenAI() as client:
        with cotune.role("writer"):
            messages: Any = [{"role": "system", "content": "You are the writer."}]
            messages.append({"role": "user", "content": task["word"]})
            reply = await client.chat.completions.create(
                model="small", messages=messages, temperature=0.0, seed=3, max_tokens=7, extra_body={"top_k": 3}
            )
    return float(reply.choices[0].message.content == task["word"])


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_a_provider_is_asked_as_the_application_asks_its_own(
    monkeypatch: pytest.MonkeyPatch, out: str, temperature: float | None
) -> None:
    made = Office({"writer": 1.0})
    with serving() as provider:
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        provider.reply = made.reply
        found = cotune.blame(asking, tasks(5), references=GOOD, out=out, runs=2, temperature=temperature)
    assert (found.verdict, found.at_fault) == ("named", ("writer",))
    own = next(r for r in provider.requests if r["model"] == "small")
    swapped = next(r for r in provider.requests if r["model"] == "good" and r["messages"] == own["messages"])
    assert own.pop("model") == "small" and swapped.pop("model") == "good"
    assert swapped.pop("stream") is False
    own.pop("stream", None)
    assert own == swapped and own["top_k"] == 3
    # A seed would give the same answer again at any temperature.
    assert (own["temperature"], own.get("seed")) == ((0.0, 3) if temperature is None else (0.7, None))


def test_the_result_is_json(office: Makes, out: str) -> None:
    made = office({"writer": 0.8})
    found: Blame = cotune.blame(application(), tasks(5), references=GOOD, out=out, responder=made, runs=8)
    values = json.loads(json.dumps(found.to_json()))
    assert values["at_fault"] == ["writer"] and values["sentence"] == found.sentence
    assert values["path"] == out


def test_runs_under_way_do_not_pass_the_limit(office: Makes, out: str) -> None:
    """The first run takes three calls, and all others ten: their number was not to be known."""
    made = office({"writer": 0.5})
    plain = application().cotune.fn

    @cotune.workflow
    async def growing(task: Any) -> float:
        outcome = float(await plain(task))
        for _ in range(7 if made.asked.total() > 3 else 0):
            # An application may go on without an answer. Its outcome says nothing then.
            try:
                await ask("writer", task["word"])
            except openai.APIError:
                break
        return outcome

    found = cotune.blame(growing, tasks(8), out=out, responder=made, max_calls=40)
    assert found.calls == made.asked.total() <= 40
    assert "max_calls = 40" in found.ended and found.left_out["limit"] > 0
    more = cotune.blame(growing, tasks(8), out=out, responder=made, max_calls=2_000)
    assert more.tasks == 8 and not more.ended and more.left_out == {}
    assert more.calls == made.asked.total()
