"""Ways in which recording and training an application's agents is known to go wrong, each as one test, end to end:
real frameworks, a real engine on a tiny model, and real training where weights matter."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

import cotune
from cotune.adapters.export import export_run, latest_policies
from cotune.adapters.manifest import Manifest
from cotune.adapters.serving import serving
from cotune.algorithms.catalogue import recipe
from cotune.algorithms.collect import collect
from cotune.algorithms.prepare import prepare
from cotune.episodes.episode import run_episode
from cotune.episodes.workflows import workflow_of
from cotune.errors import GroupError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.plans import Plan
from cotune.records.structs import CallRecord, PolicyRef, Record, RewardRecord, Segment, Task
from cotune.sampling.protocol import Completion, SamplingParams, fingerprint
from cotune.sampling.responder import PolicyResponder
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations import tiny_models
from tests.integrations.recorded import Recorded, answer
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, ask, build_base, converse, letters

NOWHERE = "http://127.0.0.1:9/v1"
BASE = PolicyRef("base", 0)
LENGTHS = {"short": 1, "long": 100}


@pytest.fixture(autouse=True)
def _no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", NOWHERE)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


class Engine:
    """The in-process sampler on a tiny model; remembers what it drew for which prompt."""

    def __init__(self, inner: TransformersSampler) -> None:
        self.inner = inner
        self.drawn: list[tuple[tuple[int, ...], list[Completion]]] = []

    async def sample(
        self, prompt: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        found = await self.inner.sample(prompt, n, params, policy)
        self.drawn.append((tuple(prompt), found))
        return found


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersSampler]:
    folder = tmp_path_factory.mktemp("engine")
    tiny_models.build("qwen3", folder)
    opened = asyncio.run(TransformersSampler.open(folder, host="thread", device="cpu"))
    yield opened
    asyncio.run(opened.aclose())


@pytest.fixture
def engine(sampler: TransformersSampler) -> Engine:
    return Engine(sampler)


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(tiny_models.tokenizer(), [2])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with SqliteStore.open(tmp_path / "records.db") as opened:
        yield opened


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def trainer(in_thread: None, base: Path, tmp_path: Path) -> Trainer:
    return Trainer(tmp_path, base)


def played(
    engine: Any, chat: ChatTemplate, app: Any, store: SqliteStore, *, k: int = 1, limit: int = 6
) -> list[CallRecord]:
    """Run an application once on the engine, every role on the base model; return its calls as stored."""
    flow = workflow_of(app)
    responder = PolicyResponder(
        engine,
        chat,
        dict.fromkeys(("left", "right", "asker", "planner", "coder", "agent", "app"), BASE),
        plan=Plan(kind="tree", k=k) if k > 1 else None,
        scorers=flow.scorers,
        defaults=SamplingParams(max_tokens=limit, temperature=1.0),
        seed=0,
    )
    outcome = asyncio.run(run_episode(flow, Task(id="t", input={}), sink=store, responder=responder))
    if outcome.error is not None:
        raise outcome.error
    store.flush()
    return store.calls(outcome.episode.id)


def graph_of(**nodes: Any) -> Any:
    """A LangGraph application in which all nodes run at once."""
    builder = StateGraph(MessagesState)
    for name, node in nodes.items():
        builder.add_node(name, node)
        builder.add_edge(START, name)
    return builder.compile()


# Two roles whose calls overlap in time


@pytest.mark.parametrize("way", ["asyncio tasks", "threads"])
def test_two_roles_whose_calls_overlap_in_time_by_tasks_and_by_threads(engine, chat, store, way):
    model = ChatOpenAI(model="m", max_retries=0)
    together = asyncio.Barrier(2) if way == "asyncio tasks" else threading.Barrier(2)

    def node(name: str) -> Any:
        asked = [{"role": "user", "content": f"I am {name}"}]

        async def in_task(state):
            await together.wait()
            return {"messages": [await model.ainvoke(asked) for _ in range(3)]}

        def in_thread(state):
            together.wait()
            return {"messages": [model.invoke(asked) for _ in range(3)]}

        return in_task if way == "asyncio tasks" else in_thread

    graph = graph_of(left=node("left"), right=node("right"))

    async def run(task):
        await graph.ainvoke({"messages": []})
        return 1.0

    calls = played(engine, chat, cotune.workflow(run), store, limit=12)
    assert sorted((c.role, c.turn) for c in calls) == [(name, i) for name in ("left", "right") for i in range(3)]
    for call in calls:
        assert store.message(call.messages[0])["content"] == f"I am {call.role}"
    left, right = ([c for c in calls if c.role == name] for name in ("left", "right"))
    assert left[0].started < right[0].started + right[0].latency
    assert right[0].started < left[0].started + left[0].latency


# The same role called twice at once, finishing out of order


def test_one_role_called_twice_at_once_that_finishes_out_of_order(engine, chat, store):
    seen: dict[str, str] = {}
    order: list[str] = []

    async def run(task):
        async with openai.AsyncOpenAI(max_retries=0) as client:

            async def one(kind: str) -> None:
                asked = [{"role": "user", "content": kind}]
                reply = await client.chat.completions.create(model="m", messages=asked, max_tokens=LENGTHS[kind])
                seen[kind] = reply.choices[0].message.content
                order.append(kind)

            with cotune.role("asker"):
                await asyncio.gather(one("long"), one("short"))
        return 1.0

    app = cotune.workflow(run)
    app.scorer("asker")(lambda candidate, call, task: len(candidate.token_ids) + candidate.index / 10)
    calls = played(engine, chat, app, store, k=2)
    assert order == ["short", "long"]
    drawn = {prompt: [c.token_ids for c in found] for prompt, found in engine.drawn}
    assert len(drawn) == 2
    for call in calls:
        kind = store.message(call.messages[0])["content"]
        assert call.turn == (0 if kind == "long" else 1)
        assert [c.token_ids for c in call.candidates] == drawn[store.token_ids(call.prompt)]
        assert max(len(c.token_ids) for c in call.candidates) <= LENGTHS[kind]
        assert call.candidates[call.chosen].text == seen[kind]
        rewards = store.rewards(f"{call.id}.{c.index}" for c in call.candidates)
        assert {name: found["local"] for name, found in rewards.items()} == {
            f"{call.id}.{c.index}": len(c.token_ids) + c.index / 10 for c in call.candidates
        }


# K samples of one prompt


def test_k_samples_of_one_prompt_are_k_candidates(engine, chat, store):
    def run(task):
        with openai.OpenAI(max_retries=0) as client, cotune.role("planner"):
            reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "plan"}])
        return len(reply.choices)

    app = cotune.workflow(run)
    app.scorer("planner")(lambda candidate, call, task: float(candidate.index == 3))
    (call,) = played(engine, chat, app, store, k=5)
    ((prompt, found),) = engine.drawn
    assert [c.token_ids for c in call.candidates] == [c.token_ids for c in found]
    assert len({c.token_ids for c in call.candidates}) > 1
    assert (len(call.candidates), call.chosen) == (5, 3)
    samples = collect(store, store.episodes()).samples
    (group,) = prepare(samples, recipe("at_grpo")).groups
    assert [s.id for s in group.samples] == [f"{call.id}.{i}" for i in range(5)]
    assert {s.prompt for s in group.samples} == {call.prompt}
    assert store.token_ids(call.prompt) == prompt


# Streaming with tool calls


class Calling(Engine):
    """The engine, whose first draw is a tool call: a tiny model says none by itself."""

    def __init__(self, inner: TransformersSampler, text: str) -> None:
        super().__init__(inner)
        self.ids = tuple(tiny_models.tokenizer().encode(text, add_special_tokens=False))

    async def sample(self, prompt, n, params, policy):
        if self.drawn:
            return await super().sample(prompt, n, params, policy)
        made = [Completion((*self.ids, 2), (-0.25,) * (len(self.ids) + 1), "stop") for _ in range(n)]
        self.drawn.append((tuple(prompt), made))
        return made


def test_streaming_with_tool_calls_keeps_the_engines_token_ids(sampler, chat, store):
    engine = Calling(sampler, 'Hm. <tool_call>{"name": "add",  "arguments": {"x": 1, "y": 2}}</tool_call>')
    used: list[int] = []

    def add(x: int, y: int) -> int:
        """Add two numbers."""
        used.append(x + y)
        return x + y

    agent = create_agent(ChatOpenAI(model="m", max_retries=0, streaming=True), tools=[add], name="agent")

    async def run(task):
        asked = {"messages": [{"role": "user", "content": "1 + 2?"}]}
        return float(len([part async for part in agent.astream(asked, stream_mode="messages")]) > 2)

    first, second = played(engine, chat, cotune.workflow(run), store)
    assert used == [3]
    assert first.streamed and second.streamed
    assert first.candidates[0].tool_calls[0]["function"]["name"] == "add"
    for call, (prompt, drawn) in zip((first, second), engine.drawn, strict=True):
        assert store.token_ids(call.prompt) == prompt
        assert [c.token_ids for c in call.candidates] == [c.token_ids for c in drawn]
        assert [c.logprobs for c in call.candidates] == [pytest.approx(c.logprobs) for c in drawn]
    kept = (*engine.drawn[0][0], *first.candidates[0].token_ids)
    assert store.token_ids(second.prompt)[: len(kept)] == kept


# Failures


def test_failed_and_timed_out_calls_and_failed_episodes_are_recorded_never_trained_on_and_counted(trainer, monkeypatch):
    """`b` fails after two good calls; every task has a call that is refused, and one that times out."""
    sample = TransformersSampler.sample

    async def slow(self, prompt, n, params, policy):
        late = msgspec.structs.replace(params, timeout=1e-9) if params.max_tokens == 3 else params
        return await sample(self, prompt, n, late, policy)

    monkeypatch.setattr(TransformersSampler, "sample", slow)

    async def run(task):
        said = await converse(task)
        with pytest.raises(openai.BadRequestError):
            await ask("second", "x" * 300)
        with pytest.raises(openai.InternalServerError):
            await ask("third", "too slow", max_tokens=3)
        if task["id"] == "b":
            raise RuntimeError("broken tool")
        return said

    app = application(run, first=letters, second=letters)
    summary = trainer(app, steps=1, plan={"k": 8}, on_failure="exclude")
    line = trainer.metrics()[0]
    assert (line["episodes"], line["failed"], line["calls"]) == (3, 1, 12)
    assert summary.left_out["failed_episode"] == 8 + 8 + 1 + 1
    assert summary.left_out["failed_call"] == 2
    assert summary.left_out["timed_out_call"] == 2
    assert line["rows"] <= 2 * 2 * 8
    with SqliteStore.open(trainer.folder / "run", read_only=True) as store:
        for episode in store.episodes(EpisodeFilters(phase="train")):
            assert [(c.role, c.status) for c in store.calls(episode.id)] == [
                ("first", "ok"), ("second", "ok"), ("second", "error"), ("third", "timeout"),
            ]  # fmt: skip
            assert episode.status == ("error" if episode.task.id == "b" else "ok")
        failed = {c.id for e in store.episodes(EpisodeFilters(task="b")) for c in store.calls(e.id)}
        bad = {c.id for e in store.episodes() for c in store.calls(e.id) if c.status != "ok"}
        assert not (failed | bad) & store.consumed().keys()


# A reward given twice


def test_a_reward_given_by_return_value_and_by_an_explicit_call_counts_once_by_name(engine, chat, store):
    async def run(task):
        async with openai.AsyncOpenAI(max_retries=0) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        return {"team": 1.0, "style": 0.5}

    (call,) = played(engine, chat, cotune.workflow(run), store)
    store.write([RewardRecord(call.episode, "team", 1.0), RewardRecord(call.episode, "judge", 0.25)])
    store.flush()
    assert store.rewards([call.episode])[call.episode] == {"team": 1.0, "style": 0.5, "judge": 0.25}
    (sample,) = collect(store, store.episodes(), plan="independent").samples
    assert sample.outcome == {"team": 1.0, "style": 0.5, "judge": 0.25}
    only_team = recipe("cory", weights={"team": 1.0, "style": 0.0, "judge": 0.0})
    assert prepare([sample], only_team).advantages.tolist() == [1.0]
    with cotune.trace() as t:
        t.reward(1.0)
        t.reward(team=1.0)
    assert t.rewards == {"team": 1.0}


# What is served is what was trained


def test_after_export_and_reload_the_hash_is_the_trained_ones_and_the_outputs_are_not_the_bases(trainer, tmp_path):
    trainer(application(first=letters, second=letters), steps=2, policies="lora", learner={"lr": 5e-2})
    trained = {policy.name: fingerprint(policy.weights) for policy in latest_policies(trainer.folder / "run")}
    manifest: Manifest = export_run(trainer.folder / "run", tmp_path / "export")
    assert {p.name: p.fingerprint for p in manifest.policies} == trained
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "say a"}],
        "temperature": 0,
        "max_tokens": 4,
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }

    def heard(url: str, model: str) -> list[float]:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            reply = client.chat.completions.create(model=model, **asked)
            return [token.logprob for token in reply.choices[0].logprobs.content]

    with serving(tmp_path / "export") as endpoint, openai.OpenAI(base_url=endpoint.url, api_key="none") as client:
        served = {model.id: model.fingerprint for model in client.models.list()}
        assert {name: served[name] for name in trained} == trained
        said = {name: heard(endpoint.url, name) for name in trained}
    with serving(trainer.base, names=list(trained)) as endpoint:
        plain = {name: heard(endpoint.url, name) for name in trained}
    for name in trained:
        assert said[name] != pytest.approx(plain[name], abs=1e-3)


# Nothing to train on


def test_a_step_without_a_usable_sample_stops_with_the_counts_by_reason(trainer):
    def broken(candidate, call, task):
        if call.episode.phase == "train":
            raise ValueError("the judge is away")
        return letters(candidate, call, task)

    async def run(task):
        said = await converse(task)
        if task["id"] == "c":
            raise RuntimeError("broken tool")
        return said

    with pytest.raises(GroupError) as caught:
        trainer(application(run, first=broken, second=broken), plan={"k": 4})
    first, *causes = caught.value.cause.split(" with: ")
    assert first == "Step 1 has no usable sample (scorer_failed: 24). 1 of 3 episodes failed"
    assert causes[0].startswith("The workflow 'solve' raised RuntimeError: broken tool")
    assert causes[0].endswith("6 calls failed or were not scored, 3 of them")
    assert causes[1].startswith(f"The scorer of role 'first' raised ValueError: the judge is away ({__file__}:")
    assert "cotune show" in caught.value.remedy
    assert not (trainer.folder / "run" / "metrics.jsonl").exists()


# Memory of a long run


class Counting:
    """A sink that keeps nothing but sizes."""

    def __init__(self) -> None:
        self.messages = self.tokens = self.calls = 0

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self.tokens += len(record.token_ids) if isinstance(record, Segment) else 0
            self.calls += isinstance(record, CallRecord)
            self.messages += type(record).__name__ == "Message"


def test_prompts_are_stored_once_not_once_per_turn(engine, chat, store):
    turns = 12

    async def run(task):
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        async with openai.AsyncOpenAI(max_retries=0) as client:
            for turn in range(turns):
                reply = await client.chat.completions.create(model="m", messages=messages)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
                messages.append({"role": "user", "content": f"turn {turn}"})
        return 1.0

    calls = played(engine, chat, cotune.workflow(run), store, limit=5)
    assert len(calls) == turns
    paths = [store.token_ids(call.prompt) for call in calls]
    assert all(later[: len(path)] == path for path, later in itertools.pairwise(paths))
    (stored,) = store.rows("SELECT sum(length(token_ids)) / 4 FROM segments")[0]
    assert stored == len(paths[-1])
    (bodies,) = store.rows("SELECT count(*) FROM messages")[0]
    assert bodies <= 2 * turns
    assert sum(map(len, paths)) > 5 * stored


def test_memory_of_a_long_run_stays_flat():
    """What ten episodes leave behind is far less than what one of them says."""
    recorded, sink, replies = Recorded(), Counting(), answer("yes")
    recorded.sink = sink  # type: ignore[assignment]

    def run(task):
        history = [{"role": "user", "content": "x" * 20_000}]
        for turn in range(4):
            client.chat.completions.create(model="m", messages=history)
            history += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": str(turn) * 20_000}]
        return 1.0

    def after(episodes: int) -> int:
        for _ in range(episodes):
            recorded(run, lambda call: replies)
        return min(held() for _ in range(10))

    def held() -> int:
        time.sleep(0.05)  # the thread of the last episode ends a moment after it
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with openai.OpenAI(max_retries=0) as client:
        recorded(run, lambda call: replies)
        gc.collect()
        gc.freeze()  # what the process held before is looked through no more
        tracemalloc.start()
        try:
            before = after(4)
            grown = after(10) - before
        finally:
            tracemalloc.stop()
            gc.unfreeze()
    assert (sink.calls, sink.messages) == (15 * 4, 15 * (4 + 1))
    assert grown < 4 * 20_000
