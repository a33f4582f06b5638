"""The calls of a judge count: against the limits, and in the cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import cotune
from cotune.records.structs import JUDGING
from cotune.storage.open_store import open_store
from cotune.terminal import terminal
from cotune.trainer.blame.report import render
from tests.integrations.provider import serving
from tests.trainer.blame.office import Office, application, tasks

PRICES = {"small": (1.0, 1.0), "judge": (100.0, 100.0)}
"""A call has 10 tokens, so one of the judge costs a thousandth."""


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "blame")


@pytest.fixture
def provider_url() -> Iterator[str]:
    """A provider whose model repeats the word that it gets."""
    with serving() as provider:
        provider.reply = Office({}).reply
        yield provider.url


def question(episode: Any) -> list[Any]:
    said = episode.calls[-1].answer.text
    return [{"role": "system", "content": "You are the judge."}, {"role": "user", "content": said}]


def judged(url: str, made: list[str], *, sync: bool = False) -> Any:
    """An application of one role, whose judge asks a model once for each episode. `made` gets the judge's answers."""
    plain = application(("writer",)).cotune.fn

    @cotune.workflow
    async def solve(task: Any) -> None:
        await plain(task)

    if sync:

        @solve.judge
        def ask(episodes: Any, task: Any) -> list[float]:
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
            reply = client.chat.completions.create(model="judge", messages=question(episodes[0]))
            made.append(reply.choices[0].message.content or "")
            return [float(made[-1] == task["word"])]
    else:

        @solve.judge
        async def ask_async(episodes: Any, task: Any) -> list[float]:
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                reply = await client.chat.completions.create(model="judge", messages=question(episodes[0]))
            made.append(reply.choices[0].message.content or "")
            return [float(made[-1] == task["word"])]

    return solve


@pytest.mark.parametrize("sync", [False, True])
def test_the_calls_of_a_judge_count(out: str, provider_url: str, sync: bool) -> None:
    made, answers = Office({"writer": 0.3}), list[str]()
    app = judged(provider_url, answers, sync=sync)
    found = cotune.blame(app, tasks(6), out=out, responder=made, runs=3, prices=PRICES)
    # One call for each run, and one for each task when its first run was scored again.
    assert found.scoring is not None and found.scoring.runs == 6
    assert len(answers) == found.runs + 6
    assert found.calls == made.asked.total() + len(answers)
    assert found.cost == pytest.approx(1e-5 * made.asked.total() + 1e-3 * len(answers))
    assert f"The judge made {len(answers)} of the {found.calls} calls." in found.notes
    assert found.all_roles == ["writer"]

    # The same command asks nobody again, and counts the same.
    again = cotune.blame(app, tasks(6), out=out, responder=made, runs=3, prices=PRICES)
    assert (again.calls, again.cost) == (found.calls, pytest.approx(found.cost))
    assert again.scoring == found.scoring


def test_forks_are_judged_within_the_count(out: str, provider_url: str) -> None:
    made, answers = Office({"writer": 0.5}, seed=1), list[str]()
    app = judged(provider_url, answers)
    found = cotune.blame(app, tasks(4), episodes="failed", out=out, responder=made, runs=10)
    assert found.episodes and sum(one.forks for one in found.episodes) > 10
    assert found.calls == made.asked.total() + len(answers)


def test_a_judge_does_not_pass_the_limit(out: str, provider_url: str) -> None:
    made, answers = Office({}), list[str]()
    app = judged(provider_url, answers)
    # Six runs take twelve calls. Three are left to score runs again.
    found = cotune.blame(app, tasks(6), out=out, responder=made, runs=1, max_calls=15)
    assert found.tasks == 6 and found.scoring is not None and found.scoring.runs == 3
    assert found.calls == made.asked.total() + len(answers) == 15

    few = cotune.blame(app, tasks(6), out=f"{out}-few", responder=made, runs=1, max_calls=12)
    assert few.tasks == 6 and few.calls == 12 and few.scoring is None
    more = cotune.blame(app, tasks(6), out=f"{out}-few", responder=made, runs=1, max_calls=100)
    assert more.calls == 18 and more.scoring is not None and more.scoring.runs == 6


def test_a_run_whose_judge_was_refused_is_continued(out: str, provider_url: str) -> None:
    made, answers = Office({}), list[str]()
    app = judged(provider_url, answers)
    # The call of the first run is the only one that is allowed.
    with pytest.raises(cotune.CotuneError, match="max_calls = 1"):
        cotune.blame(app, tasks(1), out=out, responder=made, runs=1, max_calls=1)
    assert (made.asked.total(), len(answers)) == (1, 0)
    # The run is judged now, and not made again. Then it is scored a second time.
    found = cotune.blame(app, tasks(1), out=out, responder=made, runs=1, max_calls=100)
    assert found.tasks == 1 and found.left_out == {}
    assert (made.asked.total(), len(answers), found.calls) == (1, 2, 3)


def test_the_cost_of_a_judge_ends_the_rescoring(out: str, provider_url: str) -> None:
    made, answers = Office({}), list[str]()
    app = judged(provider_url, answers)
    # Four runs cost 0.00404, and a further call of the judge 0.001.
    settings: dict[str, Any] = {"out": out, "responder": made, "runs": 1, "prices": PRICES}
    found = cotune.blame(app, tasks(4), max_cost=0.0045, **settings)
    assert found.tasks == 4 and len(answers) == 4 and found.scoring is None
    more = cotune.blame(app, tasks(4), max_cost=1.0, **settings)
    assert len(answers) == 8 and more.scoring is not None


def test_runs_that_are_scored_at_the_same_time_share_what_is_left(out: str, provider_url: str) -> None:
    made, answers = Office({}), list[str]()
    app = judged(provider_url, answers)
    # Four runs cost 0.00404. There is room for exactly one further call of the judge, although four wait for one.
    found = cotune.blame(app, tasks(4), max_cost=0.0055, out=out, responder=made, runs=1, prices=PRICES)
    assert found.tasks == 4 and len(answers) == 5
    assert found.scoring is not None and found.scoring.runs == 1
    assert found.cost == pytest.approx(0.00504)


def test_recorded_runs_are_not_judged_past_the_limit(out: str, provider_url: str) -> None:
    made, answers = Office({}), list[str]()
    broken = True
    plain = application(("writer",)).cotune.fn

    @cotune.workflow
    async def solve(task: Any) -> None:
        await plain(task)

    @solve.judge
    async def ask(episodes: Any, task: Any) -> list[float]:
        if broken:
            raise ValueError("no opinion")
        async with openai.AsyncOpenAI(base_url=provider_url, api_key="none", max_retries=0) as client:
            reply = await client.chat.completions.create(model="judge", messages=question(episodes[0]))
        answers.append(reply.choices[0].message.content or "")
        return [float(answers[-1] == task["word"])]

    settings: dict[str, Any] = {"out": out, "responder": made, "runs": 1, "prices": PRICES}
    with pytest.raises(cotune.CotuneError, match="no opinion"):
        cotune.blame(solve, tasks(3), max_cost=1.0, **settings)
    broken = False
    # The three runs cost 0.00003, and one call of the judge 0.001: what it costs is known after the first one.
    found = cotune.blame(solve, tasks(3), max_cost=0.0015, **settings)
    assert (made.asked.total(), len(answers)) == (3, 1)
    assert "max_cost = 0.0015" in found.ended
    # With room, the other two are judged, and no run is made again.
    more = cotune.blame(solve, tasks(3), max_cost=1.0, **settings)
    assert made.asked.total() == 3 and more.tasks == 3 and more.left_out == {}
    assert len(answers) == 3 + 3 and more.scoring is not None


def test_a_judge_that_asks_no_model_leaves_no_records(out: str) -> None:
    plain = application(("writer",)).cotune.fn

    @cotune.workflow
    async def solve(task: Any) -> None:
        await plain(task)

    @solve.judge
    def right(episodes: Any, task: Any) -> list[float]:
        return [float(one.calls[-1].answer.text == task["word"]) for one in episodes]

    found = cotune.blame(solve, tasks(3), out=out, responder=Office({}), runs=1)
    assert found.calls == 3 and not any("judge" in note for note in found.notes)
    with open_store(out, read_only=True) as store:
        assert not [episode for episode in store.episodes() if episode.phase == JUDGING]


def test_an_error_of_the_judge_is_told(out: str) -> None:
    plain = application(("writer",)).cotune.fn

    @cotune.workflow
    async def solve(task: Any) -> None:
        await plain(task)

    @solve.judge
    def fails(episodes: Any, task: Any) -> list[float]:
        raise ValueError("no opinion")

    with pytest.raises(cotune.CotuneError, match="no opinion"):
        cotune.blame(solve, tasks(3), out=out, responder=Office({}), runs=1)


def test_the_report_has_the_calls_of_the_judge(out: str, provider_url: str) -> None:
    found = cotune.blame(judged(provider_url, []), tasks(2), out=out, responder=Office({}), runs=1)
    console = terminal(width=80)
    with console.capture() as heard:
        console.print(render(found))
    assert "The judge made 4 of the 6 calls." in heard.get()
