"""Rollout workers: the same episodes as in this process, and what a broken application costs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.collect import collect
from cotune.algorithms.prepare import prepare
from cotune.config.cluster import ClusterConfig
from cotune.config.train import TrainConfig
from cotune.episodes.rollout import EpisodeBatch
from cotune.episodes.workflows import Workflow, load_workflow, workflow_of
from cotune.errors import ConfigError, WorkflowError
from cotune.integrations.cluster.sampler import RaySampler, start_sampler
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.prompts.edits import Prompts
from cotune.records.plans import Plan
from cotune.records.structs import Episode, PolicyRef, Record, Task
from cotune.records.tasks import as_tasks
from cotune.replay.script import Replay, read_script
from cotune.runtime.run_context import RunContext, current_run
from cotune.sampling.protocol import ChatFormats, SamplingParams
from cotune.storage.judge_ledger import FILE, Ledger
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.rollout.pool import WorkerLimits
from cotune.trainer.rollout.process_reaper import is_alive
from cotune.trainer.rollout.workers import RolloutWorkers
from cotune.trainer.run.episode_runner import LocalRunner, ResponderConfig
from tests.integrations.edits import part, prompts
from tests.trainer import trouble_app, worker_app
from tests.trainer.tiny_app import TASKS, letters

RESPONDER = ResponderConfig(
    policies={"first": PolicyRef("first"), "second": PolicyRef("second")},
    plan=Plan(k=4),
    defaults=SamplingParams(max_tokens=4),
    provider_roles=(),
    seed=7,
)
APP = "tests.trainer.worker_app:solve"
STEP = {"phase": "train", "training_step": 3}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
QUICK = WorkerLimits(heartbeat=6.0, start=200.0)


class Driver:
    """A pool on an event loop of its own, and what it said."""

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        self.runner = runner
        self.run: Callable[[Coroutine[Any, Any, Any]], Any] = runner.run
        self.folder = folder
        self.lost: list[str] = []
        self.seen: set[int] = set()
        self.workers: RolloutWorkers

    def open(
        self,
        path: str,
        sampler: Any,
        base: Path,
        workers: int = 2,
        limits: WorkerLimits = QUICK,
        edits: Prompts | None = None,
    ) -> None:
        config = configured(base, rollout_workers=workers)
        how = {"limits": limits, "on_loss": self.lost.append}
        flow = load_workflow(path).prompted(edits)
        self.workers = self.run(RolloutWorkers.open(flow, path, config, sampler, **how))

    def trouble(self, *deeds: dict[str, Any], **settings: Any) -> tuple[dict[str, Episode], list[Record]]:
        """Episodes by task, and the records."""
        sink = Sink()
        batch = EpisodeBatch(tasks=self.tasks(deeds), sink=sink, **{"timeout": 30.0, **STEP, **settings})
        episodes = self.run(self.workers.run(batch, None))
        return {episode.task.id: episode for episode in episodes}, sink.records

    def tasks(self, deeds: Sequence[dict[str, Any]]) -> list[Task]:
        self.lost.clear()
        self.folder /= "next"
        self.folder.mkdir()
        return as_tasks([{"folder": str(self.folder), **deed} for deed in deeds])

    def ran(self, task: str) -> list[int]:
        """Processes that have run the task, in order."""
        return [int(file.read_text()) for file in sorted(self.folder.glob(f"{task}-*"))]


def configured(base: Path, **cluster: Any) -> TrainConfig:
    return TrainConfig(model=str(base), cluster=ClusterConfig(address="local", **cluster))


class Sink:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, records: Sequence[Record]) -> None:
        self.records.extend(records)


def nothings(count: int, seconds: float = 0.0) -> list[dict[str, Any]]:
    return [{"id": f"n{i}", "do": "nothing", "seconds": seconds} for i in range(count)]


def ended(records: Sequence[Record]) -> Counter[str]:
    """Ends of episodes among records, by task."""
    return Counter(record.task.id for record in records if isinstance(record, Episode))


def test_judges_in_all_processes_share_the_budget_of_the_run(troubled: Driver) -> None:
    episodes, _ = troubled.trouble(*({"id": f"s{i}", "do": "spend"} for i in range(8)))
    assert {episode.status for episode in episodes.values()} == {"ok"}
    assert len({process for task in episodes for process in troubled.ran(task)}) == 2
    kept = [parent for parent in troubled.folder.parents if (parent / FILE).is_file()]
    assert len(kept) == 1 and Ledger(kept[0]).totals()["requests"] == 3


@contextlib.contextmanager
def driver(folder: Path) -> Iterator[Driver]:
    with asyncio.Runner() as runner:
        made = Driver(runner, folder)
        try:
            yield made
        finally:
            runner.run(made.workers.aclose())


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        yield


@pytest.fixture(scope="module")
def pair(
    ray_runtime: str, environment: None, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Driver, RaySampler]]:
    """Two workers that sample from a real engine in an actor."""
    opener = "cotune.integrations.models.transformers.sampler:TransformersSampler.open"
    with driver(tmp_path_factory.mktemp("pair")) as made:
        sampler = made.run(start_sampler(opener, {"model": str(tiny_base), "host": "thread", "device": "cpu"}))
        made.open(APP, sampler, tiny_base)
        yield made, sampler
        made.run(sampler.aclose())


@pytest.fixture(scope="module")
def troubled(
    ray_runtime: str, environment: None, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    """Two workers with the application that does what its task says, in a run that has a folder."""
    folder = tmp_path_factory.mktemp("troubled")
    token = current_run.set(RunContext(folder=folder))
    with driver(folder) as made:
        made.open("tests.trainer.trouble_app:trouble", None, tiny_base)
        current_run.reset(token)
        yield made


def recorded(store: SqliteStore, episodes: Sequence[Episode]) -> list[Any]:
    """What a step is trained on, without ids and times."""
    facts = []
    for episode in episodes:
        for call in store.calls(episode.id):
            rewards = store.rewards([f"{call.id}.{c.index}" for c in call.candidates])
            scores = [rewards[f"{call.id}.{c.index}"] for c in call.candidates]
            ids = [c.token_ids for c in call.candidates]
            texts = [store.message(message) for message in call.messages]
            facts.append((episode.task, episode.rollout, episode.status, call.role, call.turn, call.step, call.policy))
            facts.append((call.sampling, call.params, texts, store.token_ids(call.prompt)))
            facts.append((call.chosen, ids, scores, [c.message for c in call.candidates]))
            reasons = store.feedback([f"{call.id}.{c.index}" for c in call.candidates])
            assert all(reasons.values()) == (call.role == "second")
            facts.append([*reasons.values()])
        facts.append(store.rewards([episode.id])[episode.id])
    return facts


def groups(store: SqliteStore, episodes: Sequence[Episode]) -> list[Any]:
    """Advantages in each group of a step."""
    prepared = prepare(collect(store, episodes).samples, recipe("at_grpo"))
    advantages = dict(zip((sample.id for sample in prepared.samples), prepared.advantages.tolist(), strict=True))
    found = [
        [(sample.task, sample.role, sample.turn, advantages[sample.id]) for sample in group.samples]
        for group in prepared.groups
    ]
    assert found
    return sorted(found)


def test_the_same_step_as_in_this_process(pair: tuple[Driver, RaySampler], tiny_base: Path, tmp_path: Path) -> None:
    made, _ = pair
    tasks = as_tasks(TASKS)
    flow = workflow_of(worker_app.solve)

    async def here(store: SqliteStore) -> list[Episode]:
        sampler = await TransformersSampler.open(tiny_base, host="thread", device="cpu")
        try:
            batch = EpisodeBatch(tasks=tasks, sink=store, rollouts=2, **STEP)
            return await LocalRunner(flow, sampler, ChatFormats(ChatTemplate.load(tiny_base))).run(batch, RESPONDER)
        finally:
            await sampler.aclose()

    local, remote = (SqliteStore.open(tmp_path / f"{name}.db") for name in ("local", "remote"))
    ours = made.run(here(local))
    batch = EpisodeBatch(tasks=tasks, sink=remote, rollouts=2, **STEP)
    theirs = made.run(made.workers.run(batch, RESPONDER))
    for store in (local, remote):
        store.flush()
    assert [(e.task.id, e.rollout) for e in theirs] == [(t["id"], i) for i in range(2) for t in TASKS]
    assert recorded(remote, theirs) == recorded(local, ours)
    assert groups(remote, theirs) == groups(local, ours)
    first, second = (
        [c.logprobs for e in episodes for call in store.calls(e.id) for c in call.candidates]
        for store, episodes in ((local, ours), (remote, theirs))
    )
    assert [x for row in second for x in row] == pytest.approx([x for row in first for x in row], abs=1e-5)
    for store in (local, remote):
        store.close()


def test_workers_send_edited_prompts(pair: tuple[Driver, RaySampler], tiny_base: Path, tmp_path: Path) -> None:
    made, sampler = pair
    edits = prompts(part(["say ", 1], ["tell me ", 1], role="first", kind="user"))
    other = Driver(made.runner, tmp_path)
    other.open(APP, sampler, tiny_base, workers=1, edits=edits)
    try:
        with SqliteStore.open(tmp_path / "edited.db") as store:
            batch = EpisodeBatch(tasks=as_tasks(TASKS), sink=store, **STEP)
            episodes = other.run(other.workers.run(batch, RESPONDER))
            store.flush()
            sent = [
                (call.role, call.prompts, *(store.message(id)["content"] for id in call.messages_out))
                for episode in episodes
                for call in store.calls(episode.id)
            ]
    finally:
        other.run(other.workers.aclose())
    assert sent[::2] == [("first", edits.id, f"tell me {letter}") for letter in "abc"]
    assert {(role, id) for role, id, _ in sent[1::2]} == {("second", "")}


def test_finished_episodes_are_not_run_again(pair: tuple[Driver, RaySampler]) -> None:
    made, _ = pair
    tasks, sink, seen = as_tasks(TASKS), Sink(), []
    done = made.run(made.workers.run(EpisodeBatch(tasks=tasks[1:2], sink=Sink(), **STEP), RESPONDER))
    batch = EpisodeBatch(tasks=tasks, sink=sink, done=done, on_episode=seen.append, **STEP)
    episodes = made.run(made.workers.run(batch, RESPONDER))
    assert [episode.task.id for episode in episodes] == ["a", "b", "c"]
    assert episodes[1] is done[0]
    assert ended(sink.records) == {"a": 1, "c": 1}
    assert sorted(episode.task.id for episode in seen) == ["a", "c"]


def test_branches_repeat_their_trunk_in_a_worker(pair: tuple[Driver, RaySampler], tmp_path: Path) -> None:
    made, _ = pair
    tasks, store = as_tasks(TASKS[:1]), SqliteStore.open(tmp_path)
    (trunk,) = made.run(made.workers.run(EpisodeBatch(tasks=tasks, sink=store, **STEP), RESPONDER))
    store.flush()
    first, second = store.calls(trunk.id)
    replay = Replay(script=read_script(store, trunk.id), fork=second.id)
    batch = EpisodeBatch(tasks=tasks, sink=store, replays={("a", 1): replay, ("a", 2): replay}, **STEP)
    branches = made.run(made.workers.run(batch, RESPONDER))
    store.flush()
    for branch in branches:
        repeated, at = store.calls(branch.id)
        assert repeated.replayed == first.id and at.replayed is None and at.prompt == second.prompt
        assert (branch.fork.trunk, branch.fork.call, branch.fork.at) == (trunk.id, second.id, at.id)
    assert [branch.rollout for branch in branches] == [1, 2]
    store.close()


def test_several_rollouts_at_once(pair: tuple[Driver, RaySampler]) -> None:
    made, _ = pair
    tasks = as_tasks(TASKS)

    async def steps() -> list[list[Episode]]:
        rolling = (
            made.workers.run(EpisodeBatch(tasks=tasks, sink=Sink(), phase="train", training_step=step), RESPONDER)
            for step in range(3)
        )
        return await asyncio.gather(*rolling)

    for step, episodes in enumerate(made.run(steps())):
        assert [(e.task.id, e.training_step, e.status) for e in episodes] == [(t["id"], step, "ok") for t in TASKS]


def test_scorer_errors_come_back(pair: tuple[Driver, RaySampler]) -> None:
    made, _ = pair
    batch = EpisodeBatch(tasks=as_tasks([{"id": "q", "letter": "q"}]), sink=Sink(), **STEP)
    (episode,) = made.run(made.workers.run(batch, RESPONDER))
    assert episode.status == "ok"
    ((error, count),) = made.workers.scorer_errors.items()
    assert error.startswith("The scorer of role 'second' raised ValueError: no judgement on q (")
    source = Path(worker_app.__file__)
    lines = source.read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "raise ValueError" in text)
    assert error.endswith(f"{source.name}:{line} in judge). Fix the scorer.")
    assert count == 4


def test_workers_are_light(pair: tuple[Driver, RaySampler]) -> None:
    made, _ = pair
    process = psutil.Process(made.workers._pool._workers[0].process.pid)
    assert not any("torch" in mapped.path for mapped in process.memory_maps())
    assert process.memory_info().rss < 350 << 20


def test_workers_share_the_work(troubled: Driver) -> None:
    episodes, records = troubled.trouble(
        {"id": "slow", "do": "nothing", "seconds": 4.0}, *nothings(12, 0.2), {"id": "l", "do": "leave"}, concurrency=2
    )
    (busy,) = troubled.ran("slow")
    others = Counter(pid for n in range(12) for pid in troubled.ran(f"n{n}"))
    assert others[busy] < others.total() == 12
    assert "sys.exit(4)" in episodes.pop("l").error
    assert {episode.status for episode in episodes.values()} == {"ok"}
    assert ended(records) == dict.fromkeys([*episodes, "l"], 1)
    assert troubled.lost == []


def test_a_crash_costs_its_episode_only(troubled: Driver) -> None:
    before = Counter(troubled.workers.counters)
    episodes, records = troubled.trouble(*nothings(5, 1.0), {"id": "bad", "do": "crash"})
    assert {task for task, episode in episodes.items() if episode.status != "ok"} == {"bad"}
    assert ended(records) == dict.fromkeys(episodes, 1)
    bad = episodes["bad"]
    assert (bad.status, bad.training_step) == ("error", 3)
    assert "its process ended by itself or was killed" in bad.error
    runs = troubled.ran("bad")
    assert len(runs) == len(set(runs)) == 3
    assert not any(map(is_alive, runs))
    counted = Counter(troubled.workers.counters) - before
    assert counted["episodes_lost"] == 1
    assert counted["workers_lost"] == len(runs) == len(troubled.lost)
    assert troubled.lost[-1].endswith("; failed: bad/0")


def test_an_episode_that_loses_its_worker_once_is_run_again(troubled: Driver) -> None:
    episodes, records = troubled.trouble({"id": "once", "do": "exit_once"})
    assert episodes["once"].status == "ok"
    assert ended(records) == {"once": 1}
    first, second = troubled.ran("once")
    assert first != second
    (lost,) = troubled.lost
    assert f"(process {first}) was replaced: " in lost
    assert lost.endswith("; run again: once/0")


def test_code_that_blocks_its_worker_is_a_timeout_of_its_episode(troubled: Driver) -> None:
    episodes, _ = troubled.trouble({"id": "hung", "do": "block"}, *nothings(3, 0.5), timeout=8.0)
    assert {task for task, episode in episodes.items() if episode.status != "ok"} == {"hung"}
    assert "in block: time.sleep(60), by the episode hung/0, which has a time-out of 8.0 s" in episodes["hung"].error
    assert len(troubled.ran("hung")) == 1
    assert ["failed: hung/0" in lost for lost in troubled.lost] == [True]


def test_a_process_that_does_not_answer_is_replaced(troubled: Driver) -> None:
    episodes, _ = troubled.trouble({"id": "still", "do": "stop"}, *nothings(1))
    assert episodes["still"].status == "error"
    assert "did not answer for 6 s" in episodes["still"].error
    assert (episodes["n0"].status, episodes["n0"].error) == ("ok", None)
    assert not any(map(is_alive, troubled.ran("still")))


def test_what_a_dead_worker_leaves_running_is_killed(troubled: Driver) -> None:
    """A child and a grandchild, and others in a session of their own or without the environment."""
    episodes, _ = troubled.trouble({"id": "left", "do": "leak", "then": "exit"})
    assert episodes["left"].status == "error"
    assert leaked(troubled) == 8
    wait_until(lambda: gone(troubled))


def test_a_result_that_comes_twice_is_stored_once(troubled: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = troubled.workers._pool
    before, deliver = pool.counters["results_dropped"], type(pool).deliver

    def twice(*arguments: Any) -> None:
        deliver(pool, *arguments)
        deliver(pool, *arguments)

    monkeypatch.setattr(pool, "deliver", twice)
    _, records = troubled.trouble(*nothings(3))
    assert ended(records) == {"n0": 1, "n1": 1, "n2": 1}
    assert pool.counters["results_dropped"] == before + 3


def test_cancelled_rollouts_keep_what_has_finished(troubled: Driver) -> None:
    tasks = troubled.tasks([*nothings(4), *({"id": f"long{i}", "do": "nothing", "seconds": 100.0} for i in range(6))])
    sink, finished = Sink(), []

    async def interrupted() -> None:
        batch = EpisodeBatch(tasks=tasks, sink=sink, on_episode=finished.append, concurrency=8, **STEP)
        rolling = asyncio.ensure_future(troubled.workers.run(batch, None))
        while len(finished) < 4 or sum(len(troubled.ran(f"long{i}")) for i in range(6)) < 6:
            await asyncio.sleep(0.05)
        rolling.cancel()
        await rolling

    with pytest.raises(asyncio.CancelledError):
        troubled.run(interrupted())
    statuses = {record.task.id: record.status for record in sink.records if isinstance(record, Episode)}
    assert statuses == {task.id: "ok" if task.id.startswith("n") else "cancelled" for task in tasks}
    assert ended(sink.records) == dict.fromkeys(statuses, 1)
    assert troubled.lost == []
    episodes, _ = troubled.trouble(*nothings(2))
    assert {episode.status for episode in episodes.values()} == {"ok"}


def test_workers_that_die_again_and_again_stop_the_rollout(
    ray_runtime: str, environment: None, tiny_base: Path, tmp_path: Path
) -> None:
    with driver(tmp_path) as made:
        made.open("tests.trainer.trouble_app:trouble", None, tiny_base, 1, msgspec.structs.replace(QUICK, deaths=2))
        with pytest.raises(WorkflowError, match="2 rollout workers were lost one after another, and no episode finish"):
            made.trouble(*({"id": f"bad{i}", "do": "exit"} for i in range(4)))


def test_nothing_is_left_of_closed_workers(troubled: Driver) -> None:
    """The last test of these workers: it closes them."""
    import ray._private.state

    troubled.trouble({"id": "left", "do": "leak"})
    assert leaked(troubled) == 4
    pids = {worker.process.pid for worker in troubled.workers._pool._workers}
    troubled.run(troubled.workers.aclose())
    troubled.run(troubled.workers.aclose())
    wait_until(lambda: not any(map(is_alive, pids)))
    wait_until(lambda: gone(troubled))
    wait_until(lambda: not reapers(pids))
    actors = ray._private.state.actors().values()
    assert {a["State"] for a in actors if a["Pid"] in pids} <= {"DEAD"}


def test_a_plain_function_that_no_timeout_stops(ray_runtime: str, tiny_base: Path, tmp_path: Path) -> None:
    with driver(tmp_path) as made:
        made.open("tests.trainer.trouble_app:plain", None, tiny_base, workers=1)
        tasks = as_tasks([{"id": "long", "seconds": 600}, {"id": "short", "seconds": 0}])
        rolling = made.workers.run(EpisodeBatch(tasks=tasks, sink=Sink(), timeout=2.0, **STEP), None)
        long, short = made.run(rolling)
        assert "did not finish within 2.0 seconds" in long.error
        assert short.status == "ok"
        deadline = time.monotonic() + 30
        while not made.lost and time.monotonic() < deadline:
            made.run(asyncio.sleep(0.2))
        assert "code of 1 episodes that have ended still runs in it" in made.lost[0]


def leaked(made: Driver) -> int:
    return len(list(made.folder.glob("child-*")))


def gone(made: Driver) -> bool:
    """Whether nothing runs of what the application has left, in any of its tests."""
    top = next(folder for folder in made.folder.parents if folder.name != "next")
    return not any(is_alive(int(file.name.removeprefix("child-"))) for file in top.rglob("child-*"))


def reapers(pids: set[int]) -> list[list[str]]:
    """Reapers of these workers that still run."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(file.read_bytes().decode().split("\0"))
    return [words for words in lines if any("process_reaper" in w for w in words) and set(map(str, pids)) & set(words)]


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def failing(path: str, base: Path, flow: Workflow | None = None, sampler: Any = None, **cluster: Any) -> None:
    limits = cluster.pop("limits", QUICK)
    config = configured(base, **cluster)
    asyncio.run(RolloutWorkers.open(flow or load_workflow(path), path, config, sampler, limits=limits))


def test_training_that_a_worker_would_start_is_refused(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTUNE_ROLLOUT_WORKER", "some")
    with pytest.raises(ConfigError, match="__main__"):
        failing(APP, tiny_base)


def test_a_worker_that_finds_another_workflow_is_refused(ray_runtime: str, tiny_base: Path) -> None:
    flow = workflow_of(trouble_app.trouble)
    more = Workflow(flow.name, flow.fn, {**flow.scorers, "third": letters})
    with pytest.raises(ConfigError, match="scorers") as refused:
        failing("tests.trainer.trouble_app:trouble", tiny_base, more)
    assert "third" in str(refused.value)


def test_a_sampler_that_stays_where_it_is_is_refused(ray_runtime: str, tiny_base: Path) -> None:
    with pytest.raises(ConfigError, match="does not cross processes"):
        failing("tests.trainer.trouble_app:plain", tiny_base, sampler=threading.Lock())


def test_an_application_that_ends_its_process_when_imported(ray_runtime: str, tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nif 'COTUNE_ROLLOUT_WORKER' in os.environ: os._exit(1)\n" + PLAIN)
    with pytest.raises(WorkflowError, match=r"died while it imported .*deadly.py:solve"):
        failing(f"{tmp_path}/deadly.py:solve", tiny_base)


def test_environment_and_errors_of_the_import(ray_runtime: str, tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "keyed.py").write_text("import os\n" + PLAIN + "\nif 'HIS_KEY' in os.environ: raise ValueError('mine')")
    with pytest.raises(ConfigError, match="ValueError: mine"):
        failing(f"{tmp_path}/keyed.py:solve", tiny_base, env={"HIS_KEY": "1"})


def test_a_folder_that_ray_brings(
    ray_runtime: str, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sent.py").write_text(
        f"import os\n{PLAIN}\nif 'COTUNE_ROLLOUT_WORKER' in os.environ: raise ValueError(__file__)"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"ValueError: \S*working_dir_files\S*sent.py"):
        failing("sent:solve", tiny_base, runtime_env={"working_dir": str(tmp_path)})


def test_no_room_for_the_workers(ray_runtime: str, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotune.trainer.rollout.pool.CPUS", 1e6)
    with pytest.raises(ConfigError, match="more than the cluster has room for") as refused:
        failing(APP, tiny_base, limits=WorkerLimits(start=2.0))
    assert "fewer workers" in refused.value.remedy


PLAIN = "import cotune\n@cotune.workflow\nasync def solve(task): return 1.0"


def test_leftover_helpers_see_this_process() -> None:
    assert is_alive(os.getpid())
    child = os.fork()
    if not child:
        signal.pause()
    assert is_alive(child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not is_alive(child)
