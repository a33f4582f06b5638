"""An unchanged LangGraph application whose calls are answered in process by an export's policies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

import cotune
from cotune.adapters.deployed import Deployment
from cotune.adapters.open_policies import LocalPolicies, ServedModel
from cotune.adapters.serving import serving_local
from cotune.errors import AdapterError, ConfigError, CotuneError
from cotune.recording.context import current_episode
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams
from cotune.storage.open_store import open_store

pytestmark = pytest.mark.slow


class Fixed:
    """A sampler and chat format that always say the same; keeps what was asked."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[SamplingParams] = []
        self.closed = False

    async def sample(
        self, prompt_token_ids: Any, n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        self.asked.append(params)
        return [Completion((1,), (-0.1,), "stop")]

    def images(self, messages: Any) -> tuple[bytes, ...]:
        return ()

    def render(self, messages: Any, tools: Any, **earlier: Any) -> list[int]:
        return [1]

    def parse(self, token_ids: Any, stop: Any = (), **_: Any) -> tuple[str, dict[str, Any], str]:
        return self.text, {"role": "assistant", "content": self.text}, "stop"

    async def info(self) -> SamplerInfo:
        return SamplerInfo(name=self.text, max_model_len=64)

    async def aclose(self) -> None:
        self.closed = True


class App:
    """A graph of three roles, of which `judge` is in no export, on one provider."""

    def __init__(self, url: str) -> None:
        model = ChatOpenAI(base_url=url, api_key="unused", model="gpt-x", temperature=0, max_tokens=6)

        def planner(state: MessagesState) -> dict[str, Any]:
            return {"messages": [model.invoke(state["messages"])]}

        async def writer(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke(state["messages"])]}

        def judge(state: MessagesState) -> dict[str, Any]:
            return {"messages": [model.invoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("planner", planner)
        graph.add_node("writer", writer)
        graph.add_node("judge", judge)
        for source, target in ((START, "planner"), ("planner", "writer"), ("writer", "judge"), ("judge", END)):
            graph.add_edge(source, target)
        self.graph = graph.compile()

    async def run(self) -> list[str]:
        state = await self.graph.ainvoke({"messages": [HumanMessage("hello")]})
        return [m.content for m in state["messages"] if isinstance(m, AIMessage)]


@pytest.fixture(scope="module")
def provider() -> Fixed:
    """What the application uses today."""
    return Fixed("provider")


@pytest.fixture(scope="module")
def app(provider: Fixed) -> Iterator[App]:
    async def opened() -> LocalPolicies:
        served = {"gpt-x": ServedModel("gpt-x", PolicyRef("gpt", 0), "frozen", "gpt", "0", "0")}
        return LocalPolicies(provider, provider, served, [], 64)

    with serving_local(opened) as endpoint:
        yield App(endpoint.url)


@pytest.fixture(scope="module")
def deployment(in_thread: None, export: Path) -> Iterator[Deployment]:
    with _elsewhere(cotune.deployed(export)) as opened:
        yield opened


@contextlib.contextmanager
def _elsewhere(made: Deployment) -> Iterator[Deployment]:
    """Open a deployment without covering the test itself."""
    with made:
        token = current_episode.set(None)
        try:
            yield made
        finally:
            current_episode.reset(token)


def threads() -> int:
    """Those of cotune that end with a deployment; what calls are answered on stays for the next ones, and traces of
    earlier tests keep their stores open for a moment."""
    lasting = {"cotune-answers", "cotune-store", "cotune-unused-stores"}
    return sum(thread.name.startswith("cotune") and thread.name not in lasting for thread in threading.enumerate())


def test_roles_of_the_export_are_answered_and_others_pass_through(
    app: App, deployment: Deployment, provider: Fixed, caplog: pytest.LogCaptureFixture
) -> None:
    outside = asyncio.run(app.run())
    assert outside == ["provider"] * 3
    asked = len(provider.asked)
    with caplog.at_level(logging.WARNING, "cotune"), deployment.here():
        first, second = asyncio.run(app.run()), asyncio.run(app.run())
    assert len(provider.asked) == asked + 2
    assert first == second
    assert (first[0] != "provider", first[1] != "provider", first[2]) == (True, True, "provider")
    assert deployment.passed_through == {"judge": 2}
    assert deployment.calls[("planner", "ok")] == 2
    assert [r.getMessage() for r in caplog.records if "No policy" in r.getMessage()] == [
        "No policy here is named 'judge' (there are: planner, writer): the application's own provider answers."
    ]
    assert asyncio.run(app.run()) == outside


def test_sync_invocations_threads_and_many_at_once(app: App, deployment: Deployment) -> None:
    before = deployment.calls[("writer", "ok")]

    def request(_: int) -> list[str]:
        with deployment.here():
            return asyncio.run(app.run())

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(request, range(8)))
    assert all(answer == answers[0] for answer in answers)
    assert deployment.calls[("writer", "ok")] == before + 8


def test_nothing_is_kept_of_earlier_calls(app: App, deployment: Deployment) -> None:
    from cotune.recording.recorder import LiveCall, LiveEpisode

    def kept() -> int:
        gc.collect()
        return sum(type(thing) in (LiveCall, LiveEpisode) for thing in gc.get_objects())

    with deployment.here():
        asyncio.run(app.run())
        before = kept()
        for _ in range(5):
            asyncio.run(app.run())
        assert kept() <= before


def test_an_async_deployment_ends_with_its_block(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Fixed("trained")

    async def opened(source: Any, **options: Any) -> LocalPolicies:
        assert options == {"base": "moved"}
        served = {"planner": ServedModel("planner", PolicyRef("planner", 1), "lora", "tiny", "0", "1")}
        return LocalPolicies(trained, trained, served, [], 64)

    monkeypatch.setattr("cotune.adapters.deployed.open_local", opened)
    before = threads()
    made = cotune.deployed("adapters/", base="moved", temperature=0.5, max_tokens=3)

    async def run() -> tuple[list[str], list[str]]:
        async with made:
            inside = await app.run()
        return inside, await app.run()

    assert asyncio.run(run()) == (["trained", "provider", "provider"], ["provider"] * 3)
    assert made.passed_through == {"writer": 1, "judge": 1}
    assert (trained.asked[0].temperature, trained.asked[0].max_tokens) == (0.5, 3)
    assert trained.closed
    assert threads() == before


def test_a_deployment_may_end_in_another_context_than_it_began_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a test framework runs the two halves of an asynchronous fixture in tasks of their own."""
    trained = Fixed("trained")

    async def opened(source: Any, *, base: Any = None) -> LocalPolicies:
        return LocalPolicies(trained, trained, {}, (), 64)

    monkeypatch.setattr("cotune.adapters.deployed.open_local", opened)

    async def main() -> None:
        deployment = cotune.deployed("anywhere")
        await asyncio.create_task(deployment.__aenter__())
        await asyncio.create_task(deployment.__aexit__(None, None, None))

    asyncio.run(main())
    assert trained.closed


def test_misuse_is_said(export: Path, deployment: Deployment) -> None:
    with pytest.raises(CotuneError, match="not open"), cotune.deployed(export).here():
        pass
    with pytest.raises(CotuneError, match="already deployed"), deployment:
        pass


def test_a_broken_export_is_refused_and_leaves_no_thread(tmp_path: Path) -> None:
    before = threads()
    (tmp_path / "roles.json").write_text("{")
    with pytest.raises(AdapterError, match="broken"), cotune.deployed(tmp_path):
        pass
    assert threads() == before
    assert current_episode.get() is None


def test_calls_are_recorded_with_policy_version_and_tokens(app: App, export: Path, tmp_path: Path) -> None:
    records = tmp_path / "records.db"
    with pytest.raises(ConfigError, match="key = 'night' has no effect without records"):
        cotune.deployed(export, key="night")
    with cotune.deployed(export, records=records, key="night", redactor=lambda message: message) as opened:
        asyncio.run(app.run())
        with opened.here(task={"id": "order-7"}, key="order-7") as trace:
            asyncio.run(app.run())
            trace.reward(0.5)
    with open_store(records, read_only=True) as store:
        outer, inner = store.episodes()
        assert (outer.workflow, inner.task.id, inner.id) == ("deployed", "order-7", trace.id)
        assert (outer.key, inner.key) == ("night", "order-7")
        assert store.rewards([inner.id]) == {inner.id: {"team": 0.5}}
        for episode in (outer, inner):
            planner, writer, judge = store.calls(episode.id)
            assert [call.role for call in (planner, writer, judge)] == ["planner", "writer", "judge"]
            assert planner.policy == opened.served["planner"].policy
            assert all(len(c.token_ids) == len(c.logprobs) > 0 for c in planner.candidates)
            assert store.token_ids(planner.prompt)
