"""The dry run: what it says of applications that are trainable, and of those that are not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import cotune
from cotune.cli.main import main
from cotune.errors import ConfigError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.trainer.before.check.dry_run import check
from cotune.trainer.before.check.report import CheckLimits, CheckReport, render
from cotune.trainer.config.load import convert
from tests.integrations.models.folder.tiny_gguf import write_gguf
from tests.integrations.provider import Provider
from tests.trainer.tiny_app import TASKS, application, ask, client, converse, letters

GRAPH = """
import cotune
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph

model = ChatOpenAI(model="m", api_key="none", temperature=0.2)

async def writer(state: dict) -> dict:
    return {"text": (await model.ainvoke(state["question"])).text}

async def critic(state: dict) -> dict:
    reply = await model.ainvoke([("user", state["question"]), ("assistant", state["text"]), ("user", "Good?")])
    return {"verdict": reply.text}

from typing import TypedDict
class State(TypedDict, total=False):
    question: str
    text: str
    verdict: str

builder = StateGraph(State)
builder.add_node("writer", writer)
builder.add_node("critic", critic)
builder.add_edge(START, "writer")
builder.add_edge("writer", "critic")
graph = builder.compile()

@cotune.workflow
async def solve(task):
    state = await graph.ainvoke({"question": task["question"]})
    return {"team": float("1" in state["verdict"])}

@solve.scorer("writer")
def short(candidate, call, task):
    return -len(candidate.text)
"""


def dry(app: Any, tasks: Any = TASKS, *, config: dict[str, Any] | None = None, **options: Any) -> CheckReport:
    return check(app, tasks, convert({"model": "none", **(config or {})}), **options)


def said(report: CheckReport, level: str, about: str) -> list[str]:
    return [f"{f.text} {f.remedy}".strip() for f in report.findings if (f.level, f.about) == (level, about)]


def texts(report: CheckReport) -> str:
    return "\n".join(f"{f.level} {f.about}: {f.text} {f.remedy}" for f in report.findings)


@pytest.mark.slow
def test_a_graph_is_checked_in_seconds_without_loading_a_model_or_another_framework(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(GRAPH)
    (tmp_path / "tasks.jsonl").write_text('{"id": "q", "question": "why"}\n')
    code = (
        "import json, sys; from cotune.cli.main import main; "
        "status = main(['check', 'app:solve', '--tasks', 'tasks.jsonl', '--json']); "
        "print(json.dumps([status, sorted({m.split('.')[0] for m in sys.modules})]))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "LANGSMITH_TRACING": "false"},
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    report, (status, modules) = map(json.loads, done.stdout.splitlines())
    assert {"torch", "transformers", "crewai", "autogen_core"} & set(modules) == set()
    assert status == 0 and report["trainable"]
    assert seconds < 10
    writer, critic = report["calls"]
    assert [(c["role"], c["turn"], c["step"]) for c in (writer, critic)] == [("writer", 0, 0), ("critic", 0, 1)]
    assert (writer["parents"], critic["parents"]) == ([], [writer["id"]])
    assert [c["params"]["temperature"] for c in (writer, critic)] == [0.2, 0.2]
    assert report["groups"] == [{"task": "q", "roles": ["writer"], "size": 4}]
    assert [(r["role"], r["trained"], r["reason"]) for r in report["roles"]] == [
        ("writer", True, ""),
        ("critic", False, "no scorer"),
    ]
    assert (writer["integration"], writer["candidates"]) == ("langgraph", [])
    assert report["team"] == {"team": 1.0} and report["local"] == {"writer": {"local": [-14.0, -14.0]}}


def test_every_call_of_a_trained_role_is_a_group_of_k(provider: Provider) -> None:
    report = dry(application(first=letters, second=letters), config={"plan": {"k": 3}})
    assert report.trainable
    assert [(g.roles, g.size) for g in report.groups] == [(("first",), 3), (("second",), 3)]
    assert [(c.role, c.step, c.status, c.model) for c in report.calls] == [
        ("first", 0, "ok", "m"),
        ("second", 1, "ok", "m"),
    ]
    assert report.left_out == {}


def test_independent_rollouts_compare_the_episodes_of_a_task(provider: Provider) -> None:
    report = dry(application(), config={"plan": {"k": 5}})
    assert report.plan.startswith("plan independent (k=5), recipe dr_mas")
    assert [(g.roles, g.size) for g in report.groups] == [(("first",), 5), (("second",), 5)]
    assert report.trainable


def test_a_recipe_that_shares_prompts_finds_only_first_turns_alike(provider: Provider) -> None:
    async def talk(task: dict[str, str]) -> float:
        with cotune.role("talker"):
            history: list[Any] = [{"role": "user", "content": "go"}]
            for _ in range(2):
                chat = client(os.environ["OPENAI_BASE_URL"]).chat.completions
                reply = await chat.create(model="m", messages=history)
                history += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "on"}]
        return 1.0

    report = dry(application(talk), config={"recipe": "at_grpo", "plan": {"kind": "independent"}})
    assert [(g.roles, g.size) for g in report.groups] == [(("talker",), 4)]
    assert report.left_out == {"group_of_one": 4}


def test_it_works_where_a_loop_is_running(provider: Provider) -> None:
    async def notebook() -> CheckReport:
        return dry(application(first=letters))

    assert asyncio.run(notebook()).trainable


def test_only_the_first_tasks_are_run(provider: Provider) -> None:
    assert dry(application(first=letters), limits=CheckLimits(limit=2)).tasks == ("a", "b")


def test_a_role_without_scorer_is_not_trained_under_a_tree(provider: Provider) -> None:
    report = dry(application(first=letters))
    assert report.trainable
    assert said(report, "warns", "second") == [
        'not trained: no scorer Add @solve.scorer("second"), or use --plan independent.'
    ]


def test_a_scorer_of_a_role_that_never_calls_names_the_nearest(provider: Provider) -> None:
    report = dry(application(secnd=letters, first=letters))
    assert report.trainable
    assert any("Did you mean second?" in text for text in said(report, "warns", "secnd")), texts(report)
    report = dry(application(secnd=letters))
    assert not report.trainable
    assert "Did you mean second?" in said(report, "blocks", "")[0]


def test_a_rare_role_may_be_listed(provider: Provider) -> None:
    assert dry(application(first=letters, rare=letters), config={"roles": ["rare"]}).trainable


def test_a_scorer_that_fails_on_every_drawn_answer_is_undecided(provider: Provider) -> None:
    def broken(candidate: Any, call: Any, task: Any) -> float:
        return 1 / 0

    report = dry(application(first=broken))
    assert report.verdict == "undecided" and report.groups == ()
    assert "The scorer of role 'first' raised ZeroDivisionError" in texts(report)
    assert said(report, "warns", "first")[0].startswith("its scorer failed on 1 of 1 calls: ")
    assert report.left_out == {"scorer_failed": 4, "untrained_role": 1}


def test_an_error_that_quotes_whole_prompts_is_cut(provider: Provider) -> None:
    async def quotes(task: Any) -> float:
        await ask("first", "hello")
        raise ValueError("unreadable" + 40_000 * "x")

    [text] = said(dry(application(quotes)), "undecided", "runs")
    assert "raised ValueError: unreadablexxx" in text and "x ... (40,022 characters) (" in text and len(text) < 1500


def test_a_workflow_that_raises_after_an_answer_is_undecided(provider: Provider) -> None:
    async def broken(task: Any) -> float:
        return float(len(await ask("first", "how many?")) + task["weight"])

    report = dry(application(broken, first=letters))
    assert report.verdict == "undecided" and report.runs == 8
    (text,) = said(report, "undecided", "runs")
    assert "KeyError: 'weight'" in text and "first (turn 0)" in text and "All 8 runs failed." in text
    for way in ("--answers MODEL", "--answers provider", "--answers records:ADDRESS"):
        assert way in text
    assert [call.role for call in report.calls] == ["first"]


def test_an_answer_that_the_application_cannot_read_fails_one_run(provider: Provider) -> None:
    async def counts(task: Any) -> float:
        return float(len((await ask("first", "Is it good? Say 'fine' or 'poor'.")).split("fine")[1]) + 1)

    report = dry(application(counts))
    assert report.trainable and report.team == {"team": 1.0}
    (text,) = said(report, "warns", "runs")
    assert "IndexError" in text and "A model may answer like that too" in text and "drawn answer 1" in text


def test_roles_behind_an_error_are_not_called_unknown(provider: Provider) -> None:
    async def broken(task: Any) -> float:
        await ask("first", "how many?")
        raise KeyError("answer")

    (finding,) = [f for f in dry(application(broken, first=letters, second=letters)).findings if f.level == "undecided"]
    assert "KeyError: 'answer'" in finding.text


def test_a_scorer_that_never_ends_is_named_once(provider: Provider) -> None:
    def slow(candidate: Any, call: Any, task: Any) -> float:
        return float(time.sleep(5) is None)

    report = dry(application(first=slow), limits=CheckLimits(timeout=1.0))
    (text,) = said(report, "undecided", "runs")
    assert report.verdict == "undecided" and report.runs == 2
    assert "turn 0 of role 'first' was open (its scorer was running)" in text
    assert "CancelledError" not in text and "2 of them reached a limit of time or calls. Raise --timeout" in text


def test_a_run_that_fails_is_named_by_its_task(provider: Provider) -> None:
    async def forgetful(task: Any) -> float | None:
        await ask("first", "hello")
        return None if task["id"] == "b" else 1.0

    (text,) = said(dry(application(forgetful), limits=CheckLimits(limit=2)), "warns", "runs")
    assert "runs failed; the first, on task b: The workflow 'solve' returned None" in text
    assert 'return {"team": None}: then the episode is not trained on.' in text


def test_a_refusal_is_said_once(provider: Provider) -> None:
    async def searches(task: Any) -> float:
        with cotune.role("first"):
            chat = client(os.environ["OPENAI_BASE_URL"]).responses
            await chat.create(model="m", input="hello", tools=[{"type": "web_search"}])
        return 1.0

    (text,) = said(dry(application(searches)), "blocks", "")
    assert text.count("which no policy can answer") == 1
    line = searches.__code__.co_firstlineno + 3
    assert f"({__file__}:{line} in searches)" in text, "the application's line, not the library's"


IMAGE = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "https://example.org"}}]


@pytest.mark.parametrize(
    ("asked", "cause"),
    [
        ({"messages": [{"role": "user", "content": IMAGE}]}, "An image comes as 'https' and not with its bytes"),
        ({"extra_body": {"guided_choice": ["a", "b"]}}, "guided_choice is not supported."),
    ],
)
def test_what_no_policy_can_answer_blocks_but_for_a_provider(
    provider: Provider, asked: dict[str, Any], cause: str
) -> None:
    async def looks(task: Any) -> float:
        await ask("first", "hello")
        with cotune.role("second"):
            chat = client(os.environ["OPENAI_BASE_URL"]).chat.completions
            given: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, **asked}
            await chat.create(model="m", **given)
        return 1.0

    (text,) = said(dry(application(looks)), "blocks", "second")
    assert text.startswith(cause) and "a policy of kind provider" in text
    policy = [{"name": "p", "roles": ["first"]}, {"name": "today", "roles": ["second"], "kind": "provider"}]
    report = dry(application(looks), config={"policy": policy})
    assert report.trainable, texts(report)
    assert said(report, "note", "second") == ["not trained: left to the application's provider"]


def test_choices_of_a_role_that_is_not_trained_are_not_compared(provider: Provider) -> None:
    async def asks(task: Any) -> float:
        await ask("first", "hello", n=2)
        await ask("second", "hello", n=2)
        return 1.0

    report = dry(application(asks, first=letters))
    assert said(report, "warns", "first") == ["asks for n = 2 choices; 4 are drawn and compared."]
    assert not any("n = 2" in text for text in said(report, "warns", "second"))


def test_a_workflow_without_calls_blocks(provider: Provider) -> None:
    async def silent(task: Any) -> float:
        return 1.0

    [text] = said(dry(application(silent)), "blocks", "")
    assert "made no LLM call that cotune can see" in text and "httpx, the address of `with cotune.gateway()`" in text


def test_an_outage_that_the_application_reports_is_the_only_finding() -> None:
    async def closed(task):
        raise cotune.Outage("The search service is down.", "Start it.")

    assert texts(dry(application(closed, first=letters))) == "blocks : The search service is down. Start it."


def test_an_outage_after_an_answer_blocks_with_its_own_remedy(provider: Provider) -> None:
    async def closed(task: Any) -> float:
        await ask("first", "hello")
        raise cotune.Outage("The search service is down.", "Start it.")

    report = dry(application(closed))
    assert report.verdict == "not trainable"
    assert said(report, "blocks", "") == ["The search service is down. Start it."]
    assert not any(finding.level == "undecided" or "low reward" in finding.remedy for finding in report.findings)


def test_an_outage_in_some_runs_does_not_hide_another_error(provider: Provider) -> None:
    runs: list[int] = []

    async def broken(task: Any) -> float:
        runs.append(1)
        await ask("first", "hello")
        if len(runs) == 1:
            raise cotune.Outage("The search service is down.", "Start it.")
        raise ValueError("cannot read the answer")

    report = dry(application(broken))
    (text,) = said(report, "undecided", "runs")
    assert "ValueError: cannot read the answer" in text and "search service" not in texts(report)


def test_an_outage_in_some_runs_is_no_matter_of_rewards(provider: Provider) -> None:
    runs: list[int] = []

    async def sometimes(task: Any) -> float:
        runs.append(1)
        await ask("first", "hello")
        if len(runs) == 1:
            raise cotune.Outage("The search service is down.", "Start it.")
        return 1.0

    report = dry(application(sometimes))
    (text,) = said(report, "warns", "runs")
    assert text.startswith("1 of ") and "ended in an outage; the first, on task a: The search service is down." in text
    assert text.endswith("Start it.") and "low reward" not in text


def test_an_outage_names_the_call_that_failed(provider: Provider) -> None:
    async def catches(task: Any) -> float:
        try:
            with cotune.role("searcher"):
                await client(os.environ["OPENAI_BASE_URL"]).responses.create(
                    model="m", input="hello", tools=[{"type": "web_search"}]
                )
        except openai.OpenAIError as error:
            raise cotune.Outage("The model is down.", "Start it.") from error
        return 1.0

    (text,) = said(dry(application(catches)), "blocks", "")
    assert text.startswith("The model is down. The call of role 'searcher' failed: ") and text.endswith("Start it.")


def test_an_outage_for_want_of_a_recorded_answer_is_undecided(provider: Provider, tmp_path: Path) -> None:
    address = str(tmp_path / "records.db")
    with cotune.trace(address, task={"question": "how many?"}):
        asyncio.run(ask("first", "how many?"))
    provider.requests.clear()

    async def asks_more(task: Any) -> float:
        try:
            await ask("first", "how many?")
            await ask("first", "and now?")
        except Exception as error:
            raise cotune.Outage("The model is down.", "Start it.") from error
        return 1.0

    report = dry(application(asks_more), answers=f"records:{address}")
    (text,) = said(report, "undecided", "runs")
    assert text.startswith("The records have no answer for turn 1 of role 'first'.")


def test_recorded_answers_are_given_again(provider: Provider, tmp_path: Path) -> None:
    async def counts(task: Any) -> float:
        return float(len(await ask("first", "how many?")) + len(await ask("first", "and now?")))

    address = str(tmp_path / "records.db")
    with cotune.trace(address, task={"question": "how many?"}):
        asyncio.run(counts({}))
    asked = len(provider.requests)
    report = dry(application(counts), answers=f"records:{address}")
    assert report.trainable and report.answers == f"records:{address}"
    assert len(provider.requests) == asked
    provider.requests.clear()

    async def asks_more(task: Any) -> float:
        return sum([float(len(await ask("first", "how many?"))) for _ in range(3)])

    (text,) = said(dry(application(asks_more), answers=f"records:{address}"), "undecided", "runs")
    assert "The records have no answer for turn 2 of role 'first'" in text
    empty = str(tmp_path / "empty.db")
    with cotune.trace(empty):
        pass
    with pytest.raises(ConfigError, match="has no answered call"):
        dry(application(counts), answers=f"records:{empty}")


def test_the_provider_may_answer(provider: Provider) -> None:
    report = dry(application(), answers="provider")
    assert report.trainable and {role.role for role in report.roles} == {"first", "second"}
    assert len(provider.requests) == 2 * report.runs
    assert report.groups == ()
    provider.requests.clear()


@pytest.mark.slow
def test_a_small_model_may_answer(provider: Provider, tiny_base: Path, in_thread: None) -> None:
    report = dry(application(first=letters), answers=str(tiny_base), config={"sampling": {"max_tokens": 8}})
    assert report.trainable, texts(report)
    assert [(group.roles, group.size) for group in report.groups] == [(("first",), 4)]


def test_two_runs_at_once_that_fail_by_chance_leave_the_verdict_open(provider: Provider) -> None:
    runs = []

    async def fails_once(task: Any) -> float:
        runs.append(1)
        mine = len(runs)
        await ask("first", "hello")
        if mine == 4:
            raise RuntimeError("by chance")
        return 1.0

    report = dry(application(fails_once))
    assert report.verdict == "undecided" and len(runs) == 8  # the last one is of another task
    assert "(1 of 2 pairs)" in said(report, "undecided", "runs")[0]


def test_two_runs_at_once_that_both_reach_the_limit_do_not_block(provider: Provider) -> None:
    async def slow_together(task: Any) -> float:
        running.append(1)
        try:
            await ask("first", "hello")
            await asyncio.sleep(5 if len(running) > 1 else 0)
        finally:
            running.pop()
        return 1.0

    running: list[int] = []
    report = dry(application(slow_together), limits=CheckLimits(timeout=1.5))
    assert report.trainable
    assert any("reached a limit" in text for text in said(report, "warns", "runs"))


def test_a_loop_that_swallows_every_error_is_stopped_too(provider: Provider) -> None:
    async def stubborn(task: Any) -> float:
        while True:
            try:
                await ask("judge", "go on")
            except Exception:  # noqa: BLE001
                continue

    report = dry(application(stubborn), limits=CheckLimits(calls=3))
    assert not report.trainable and len(report.calls) == 3


def test_swallowed_failures_are_told(provider: Provider) -> None:
    async def careless(task: Any) -> float:
        await ask("first", "hello")
        try:
            with cotune.role("searcher"):
                await client(os.environ["OPENAI_BASE_URL"]).responses.create(
                    model="m", input="hello", tools=[{"type": "web_search"}]
                )
        except openai.OpenAIError:
            pass
        return 1.0

    report = dry(application(careless))
    assert any("1 of 1 calls are not trained on" in text for text in said(report, "warns", "searcher"))
    assert [(r.role, r.trained, r.reason) for r in report.roles] == [
        ("first", True, ""),
        ("searcher", False, "all its calls failed"),
    ]


def test_calls_outside_a_role_are_told(provider: Provider) -> None:
    async def bare(task: Any) -> float:
        messages: Any = [{"role": "user", "content": "hi"}]
        await client(os.environ["OPENAI_BASE_URL"]).chat.completions.create(model="m", messages=messages)
        return 1.0

    assert "made outside any agent or node share the role `app`: 1." in said(dry(application(bare)), "warns", "app")[0]


def test_what_calls_ask_for_is_told(provider: Provider) -> None:
    async def asks(task: Any) -> float:
        await ask("first", "hello", n=3, temperature=0.5)
        return 1.0

    report = dry(application(asks))
    assert said(report, "warns", "first") == ["asks for n = 3 choices; only the first is trained."]
    assert said(report, "note", "first") == ["asks for temperature 0.5; training samples at 1 (sampling.temperature)."]
    assert (report.calls[0].params["n"], report.calls[0].params["temperature"]) == (3, 0.5)


def test_a_stream_under_a_tree_is_told(provider: Provider) -> None:
    async def streams(task: Any) -> float:
        with cotune.role("first"):
            chat = client(os.environ["OPENAI_BASE_URL"]).chat.completions
            async for _ in await chat.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True):
                pass
        return 1.0

    report = dry(application(streams, first=letters))
    assert report.calls[0].streamed
    assert "with 4 candidates per call the answer comes at once" in said(report, "note", "first")[0]


def test_log_probabilities_are_drawn_too(provider: Provider) -> None:
    heard = []

    async def unsure(task: Any) -> float:
        with cotune.role("first"):
            chat = client(os.environ["OPENAI_BASE_URL"]).chat.completions
            messages = [{"role": "user", "content": "hello"}]
            (choice,) = (await chat.create(model="m", messages=messages, logprobs=True, top_logprobs=2)).choices
        heard.append(("".join(token.token for token in choice.logprobs.content), choice.message.content))
        return float(choice.logprobs.content[0].top_logprobs[0].logprob)

    assert not said(dry(application(unsure)), "blocks", "first")
    assert heard[0][0] == heard[0][1]


def test_a_blocked_loop_is_told(provider: Provider) -> None:
    async def blocking(task: Any) -> float:
        with cotune.role("first"):
            made = openai.OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
            made.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return 1.0

    assert "blocks its event loop" in said(dry(application(blocking)), "warns", "blocked_loop (1)")[0]


def test_connections_of_the_application_are_told(provider: Provider) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        async def fetches(task: Any) -> float:
            await ask("first", "hello")
            socket.create_connection(address).close()
            return 1.0

        report = dry(application(fetches))
    assert "connected there, 5 times in 5 runs" in said(report, "warns", f"127.0.0.1:{address[1]}")[0]


def test_connections_are_told_by_the_name_of_the_host(provider: Provider) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        async def fetches(task: Any) -> float:
            await ask("first", "hello")
            socket.create_connection(("localhost", port)).close()
            with contextlib.suppress(OSError):
                socket.create_connection(("models.invalid", "443"))
            return 1.0

        report = dry(application(fetches))
    told = {finding.about: finding for finding in report.findings if "connected there" in finding.text}
    assert list(told) == [f"localhost:{port}", "models.invalid:443"]
    assert "cotune.gateway()" in told["models.invalid:443"].remedy


def test_a_workflow_whose_only_client_is_not_seen_is_told_so(provider: Provider) -> None:
    async def fails(task: Any) -> float:
        raise OSError("no answer")

    [finding] = [finding for finding in dry(application(fails)).findings if finding.level == "blocks"]
    assert "no answer" in finding.text and "made no LLM call that cotune can see" in finding.text
    assert "cotune.gateway()" in finding.remedy


def test_the_gateway_is_no_connection_of_the_application(provider: Provider, capfd: pytest.CaptureFixture) -> None:
    async def fetches(task: Any) -> float:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        with cotune.gateway() as gate:
            async with httpx.AsyncClient() as http:
                return float((await http.post(f"{gate.role_url('first')}/chat/completions", json=body)).is_success)

    report = dry(application(fetches))
    assert [role.role for role in report.roles] == ["first"] and report.team == {"team": 1.0}
    assert "connected there" not in texts(report)
    assert "Started server process" not in capfd.readouterr().err


def test_policies_decide_what_is_trained(provider: Provider) -> None:
    policy = [{"name": "p", "roles": ["first"]}, {"name": "outside", "roles": ["second"], "kind": "provider"}]
    report = dry(application(), config={"policy": policy})
    assert [(r.role, r.policy, r.kind, r.reason) for r in report.roles] == [
        ("first", "p", "lora", ""),
        ("second", "outside", "provider", "left to the application's provider"),
    ]
    assert [(g.roles, g.size) for g in report.groups] == [(("first",), 4)]


def test_policies_that_do_not_fit_block(provider: Provider) -> None:
    report = dry(application(), config={"policy": [{"name": "p", "roles": ["first"]}]})
    assert "have no policy" in said(report, "blocks", "policies")[0]


def test_a_form_of_tool_calls_that_the_configuration_names_is_the_one_of_the_check(
    provider: Provider, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    load = ChatTemplate.load
    monkeypatch.setattr(ChatTemplate, "load", lambda model, tools: asked.append(tools) or load(model, tools))
    dry(application(), model=str(tiny_base), config={"tool_format": "hermes"})
    assert asked == ["hermes"]


def test_progress_names_what_runs(provider: Provider) -> None:
    heard: list[str] = []
    dry(application(), say=heard.append)
    assert heard[0] == "loading the application ..."
    assert heard[1:4] == ["running solve on task a ..."] * 3
    assert heard[4:6] == ["running solve on task a, twice at once ..."] * 2
    assert heard[6:] == ["running solve on task b, for the names of its roles ..."]


def test_tokens_are_counted_with_a_model(provider: Provider, tiny_base: Path) -> None:
    report = dry(application(), model=str(tiny_base))
    assert [report.tokens[call.id] for call in report.calls] == [len("say a") + 3, len("after drawn answer 1: a") + 3]


def test_a_model_is_named_as_in_training(provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that holds a GGUF file; and a run folder is told apart from it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    write_gguf(tmp_path / "model" / "tiny.gguf")
    report = dry(application(), model=str(tmp_path / "model"))
    assert all(report.tokens[call.id] for call in report.calls)
    assert not [*(tmp_path / "cache").rglob("*.safetensors")]
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="it is a run folder"):
        dry(application(), model=str(tmp_path))


def test_a_model_is_read_without_torch(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("import cotune\n\n@cotune.workflow\ndef solve(task):\n    return 1.0\n")
    code = """
import sys
from cotune.trainer.before.check.dry_run import check
check("app:solve", [{}], model=sys.argv[1])
assert "torch" not in sys.modules and "tokenizers" in sys.modules
"""
    command = [sys.executable, "-c", code, str(tiny_base)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("text", "level", "trainable"), [("a", "blocks", False), ("say look", "warns", True)])
def test_tools_that_the_model_is_not_told_of(
    provider: Provider, tiny_base: Path, text: str, level: str, trainable: bool
) -> None:
    """They block training unless the prompt describes them."""

    async def solve(task: Any) -> float:
        await ask("looker", text, tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}])
        return 1.0

    report = dry(cotune.workflow(solve), model=str(tiny_base))
    assert "chat template shows no tools" in said(report, level, "looker")[-1]
    (finding,) = [one for one in report.findings if one.level == level and "shows no tools" in one.text]
    assert 'kind = "provider"' in finding.remedy and report.trainable == trainable
    assert not [text for text in said(dry(cotune.workflow(solve)), level, "looker") if "template" in text]


def test_bad_input_is_refused_before_work(provider: Provider, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tasks = "):
        dry(application(), tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="limit = 0"):
        dry(application(), limits=CheckLimits(limit=0))
    with pytest.raises(ConfigError, match=r"plan\.kind = 'tree'"):
        dry(application(), config={"plan": {"kind": "tree"}})
    with pytest.raises(ConfigError, match="model = "):
        dry(application(), model=str(tmp_path))


def test_the_command_tells_by_its_status(
    provider: Provider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks.jsonl").write_text("1\n")
    (tmp_path / "checked.py").write_text(
        "import cotune\nfrom tests.trainer.tiny_app import ask\n"
        "@cotune.workflow\nasync def good(task): return len(await ask('first', 'hi'))\n"
        "@cotune.workflow\nasync def bad(task): return 1.0\n"
    )
    command = ["--tasks", str(tmp_path / "tasks.jsonl")]
    assert main(["check", f"{tmp_path}/checked.py:good", *command]) == 0
    assert "trainable" in capsys.readouterr().out
    assert main(["check", f"{tmp_path}/checked.py:bad", *command]) == 1
    assert "not trainable" in capsys.readouterr().out
    assert main(["check", f"{tmp_path}/checked.py:good", *command, "--plan", "tree"]) == 1
    assert "plan.kind = 'tree'" in capsys.readouterr().err


def test_tasks_are_read_before_the_application_changes_the_folder(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tasks.jsonl").write_text("1\n")
    (tmp_path / "moves_away.py").write_text(
        "import os, cotune\nos.chdir('elsewhere')\n@cotune.workflow\nasync def solve(task): return 1.0\n"
    )
    assert main(["check", "moves_away.py:solve", "--tasks", "tasks.jsonl"]) == 1
    assert "made no LLM call that cotune can see" in " ".join(capsys.readouterr().out.split())


def test_the_removed_flag_names_its_replacement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "app:solve", "--tasks", "tasks.jsonl", "--answer", "yes"])
    assert "--answers" in capsys.readouterr().err


def test_the_report_fits_a_terminal(provider: Provider) -> None:
    from rich.console import Console

    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(render(dry(application(converse, first=letters))))
    shown = console.export_text()
    assert "dry run of solve on 1 task (a)" in shown
    assert "no: no scorer" in shown
    assert "warns second: not trained: no scorer" in shown


def test_a_prompt_that_grew_is_shown_from_its_first_new_word(provider: Provider) -> None:
    notes: list[str] = []

    async def remembers(task: Any) -> float:
        notes.append(await ask("first", "\n".join(["your notes:", *notes])))
        return 1.0

    (text,) = said(dry(application(remembers)), "warns", "first")
    assert "grew in another run of the same task" in text
    assert "[(" not in text
