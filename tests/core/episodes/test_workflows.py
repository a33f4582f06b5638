"""Workflows: made of functions, loaded by name, run as episodes, with every way to go wrong."""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import cotune
from cotune.episodes.episode import EpisodeOptions, outcome_of, run_episode
from cotune.episodes.workflows import load_workflow, workflow_of
from cotune.errors import ConfigError, WorkflowError
from cotune.recording.context import current_episode
from cotune.records.structs import Episode, RewardRecord, Task
from cotune.sampling.scoring import OfGroup, OfOne


class Sink(list):
    def write(self, records):
        self.extend(records)


def run(fn, given=None, **options):
    sink = Sink()
    task = Task(id="t", input={"q": 1} if given is None else given)
    return asyncio.run(run_episode(workflow_of(fn), task, sink=sink, options=EpisodeOptions(**options))), sink


@cotune.workflow
def module_level(task):
    return 1.0


# The decorator


def test_a_workflow_is_the_same_function_as_before():
    def plain(task: dict) -> float:
        """Docs."""
        return 0.5

    async def other(task):
        return 1

    assert cotune.workflow(plain) is plain
    assert inspect.iscoroutinefunction(cotune.workflow(other))
    assert not inspect.iscoroutinefunction(plain)
    assert (plain({}), plain.__doc__, str(inspect.signature(plain))) == (0.5, "Docs.", "(task: 'dict') -> 'float'")
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    assert (plain.cotune.name, plain.cotune.fn) == ("plain", plain)


def test_scorers_are_kept_by_role():
    @cotune.workflow
    def solve(task):
        return 1

    @solve.scorer("a")
    def local(candidate, call, task):
        return 1.0

    @solve.scorer("b/c")
    async def named(candidate, call, task):
        return {"style": 1.0}

    assert solve.cotune.scorers == {"a": OfOne(local), "b/c": OfOne(named)}
    assert local(None, None, None) == 1.0


def test_scorers_declare_their_bounds():
    @cotune.workflow
    def solve(task):
        return 1

    def local(candidate, call, task):
        return 1.0

    solve.scorer("a", bounds=(0, 1))(local)
    solve.scorer("b", group=True, bounds=(-1, 0.5))(local)
    solve.scorer("c")(local)
    assert solve.cotune.bounds == {"a": (0.0, 1.0), "b": (-1.0, 0.5)}
    for wrong in ((1, 0), (0, 0), (0, float("inf")), (0, float("nan")), (0,), 1, ("low", "high")):
        with pytest.raises(WorkflowError, match=r"The scorer of role 'd' has bounds = .*for example \(0, 1\)"):
            solve.scorer("d", bounds=wrong)(local)


def test_a_scorer_of_the_group_is_kept_as_one():
    @cotune.workflow
    async def solve(task):
        return 1.0

    @solve.scorer("a", group=True)
    def compare(candidates, call, task):
        return [1.0] * len(candidates)

    assert solve.cotune.scorers == {"a": OfGroup(compare)}
    with pytest.raises(WorkflowError, match="two scorers"):
        solve.scorer("a")(compare)
    with pytest.raises(WorkflowError, match="timeout = 0"):
        solve.scorer("c", timeout=0)
    with pytest.raises(WorkflowError, match="does not take three") as caught:
        solve.scorer("b", group=True)(lambda candidates: [])
    assert caught.value.remedy == "Define it as: def <lambda>(candidates, call, task) -> list[float]."


def test_a_workflow_has_one_judge_of_its_episodes_and_may_then_return_nothing():
    async def solve(task):
        return None

    failed, _ = run(cotune.workflow(solve))
    assert failed.error is not None and "returned None, which is not a reward" in failed.error.cause

    judged = cotune.workflow(solve)
    with pytest.raises(WorkflowError, match="does not take two") as caught:
        judged.judge(lambda episodes: [])
    assert caught.value.remedy == "Define it as: def <lambda>(episodes, task) -> list[float]."
    judge = judged.judge(lambda episodes, task: [0.0] * len(episodes))
    assert judged.cotune.episode_judge is judge
    with pytest.raises(WorkflowError, match="two judges"):
        judged.judge(judge)
    ended, sink = run(judged)
    assert (ended.error, ended.rewards, ended.episode.status) == (None, {}, "ok")
    assert not any(isinstance(record, RewardRecord) for record in sink)

    compared = cotune.workflow(solve)
    compared.scorer("a", group=True)(lambda candidates, call, task: [0.0])
    assert run(compared)[0].error is None


def test_wrong_scorers():
    @cotune.workflow
    def solve(task):
        return 1

    solve.scorer("a")(lambda candidate, call, task: 1)
    with pytest.raises(WorkflowError, match="two scorers"):
        solve.scorer("a")(lambda candidate, call, task: 2)
    with pytest.raises(WorkflowError, match="three arguments"):
        solve.scorer("b")(lambda candidate: 1)


@pytest.mark.parametrize(
    ("app", "said"),
    [
        (42, "42 is not a workflow"),
        (dict, "is not a workflow"),
        (lambda: 1, "cannot be called with one argument"),
        (lambda a, b: 1, "cannot be called with one argument"),
        ("x".upper, "cannot be called"),
    ],
)
def test_what_is_no_workflow(app, said):
    with pytest.raises(WorkflowError, match=said):
        cotune.workflow(app)


def test_a_function_takes_no_inputs_or_reward():
    with pytest.raises(WorkflowError, match="no inputs= or reward="):
        cotune.workflow(lambda task: 1, reward=lambda state, task: 1)


def test_workflow_of_anything_else():
    with pytest.raises(WorkflowError, match="Decorate the function with @cotune"):
        workflow_of(lambda task: 1)
    assert workflow_of(module_level.cotune) is module_level.cotune


# Loading

APP = """
import cotune
from nearby import answer

@cotune.workflow
def solve(task):
    return answer

def undecorated(task):
    return 1

class Box:
    inner = solve
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "an_app.py").write_text(APP)
    (tmp_path / "nearby.py").write_text("answer = 7")
    (tmp_path / "broken_app.py").write_text("import no_such_thing_anywhere")
    (tmp_path / "wrong_app.py").write_text("x = (")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("an_app", "nearby", "broken_app", "wrong_app"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("an_app", "nearby"):
        sys.modules.pop(name, None)


def test_loads_by_module_and_by_file(folder: Path):
    assert load_workflow("an_app:solve").fn(None) == 7
    assert load_workflow("an_app:Box.inner").name == "solve"
    assert load_workflow("an_app.py:solve") is load_workflow("an_app:solve")


def test_a_workflow_knows_the_variable_that_holds_it(folder: Path):
    assert workflow_of(module_level).variable == "module_level"
    assert load_workflow("an_app:Box.inner").variable == "Box.inner"


def test_loads_a_file_from_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir("/")
    assert load_workflow(f"{folder}/an_app.py:solve").fn(None) == 7


def test_a_file_in_a_package_is_its_module(folder: Path, monkeypatch: pytest.MonkeyPatch):
    package = folder / "src" / "packaged_app" / "parts"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    (package.parent / "settings.py").write_text("answer = 7")
    (package / "beside.py").write_text("word = 'seven'")
    (package / "train.py").write_text(
        "import cotune, beside, packaged_app.settings\nfrom ..settings import answer\n"
        "@cotune.workflow\ndef solve(task): return answer, beside.word\n"
    )
    try:
        with pytest.raises(ConfigError, match=r"\(src/packaged_app/parts/train.py:solve\)"):
            load_workflow("packaged_app.parts.train:solve")
        solve = load_workflow("src/packaged_app/parts/train.py:solve")
        assert solve.fn(None) == (7, "seven")
        assert solve is load_workflow("packaged_app.parts.train:solve")
        # Another package of that name is not what the file is part of.
        other = folder / "packaged_app"
        other.mkdir()
        (other / "__init__.py").touch()
        (other / "train.py").write_text(APP)
        (folder / "packaged_app" / "nearby.py").write_text("answer = 8")
        assert load_workflow("packaged_app/train.py:solve").fn(None) == 8
    finally:
        for name in [name for name in sys.modules if name.startswith(("packaged_app", "beside", "train"))]:
            del sys.modules[name]


@pytest.mark.parametrize(
    "line",
    [
        "raise KeyError('OPENAI_API_KEY')",
        "raise ValueError('OPENAI_API_KEY is required')",
        "import openai; openai.OpenAI()",
    ],
)
def test_a_key_that_is_missing_is_asked_for(folder: Path, line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (folder / "broken_app.py").write_text(f"import cotune\n@cotune.workflow\ndef solve(task):\n  {line}\n")
    outcome, _ = run(load_workflow("broken_app:solve"))
    assert "any text will do: export OPENAI_API_KEY=none" in outcome.error.remedy
    (folder / "keyless_app.py").write_text(line)
    with pytest.raises(ConfigError, match="any text will do: export OPENAI_API_KEY=none"):
        load_workflow("keyless_app:solve")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("an_app", "module:name or path/to/file.py:name"),
        ("no_such_app:solve", "a module on sys.path"),
        ("no/such/file.py:solve", "No file is at"),
        ("an_app:missing", "workflows there: solve"),
        ("an_app:slove", r"Did you mean an_app:solve\?"),
        ("broken_app:solve", "No module named 'no_such_thing_anywhere'"),
        ("broken_app.py:solve", r"No module named .no_such_thing_anywhere. \(.*broken_app\.py:\d+\)"),
        ("wrong_app:solve", r"SyntaxError: .*wrong_app\.py:\d+\)"),
    ],
)
def test_apps_that_do_not_exist(folder: Path, spec: str, said: str):
    with pytest.raises(ConfigError, match=said) as raised:
        load_workflow(spec)
    assert (raised.value.field, raised.value.value) == ("app", spec)


def test_an_app_that_is_no_workflow(folder: Path):
    with pytest.raises(WorkflowError, match="is not a workflow"):
        load_workflow("an_app:undecorated")


# Outcomes


@pytest.mark.parametrize(
    ("value", "rewards", "metrics"),
    [
        (0.5, {"team": 0.5}, {}),
        (2, {"team": 2.0}, {}),
        (True, {"team": 1.0}, {"success": 1.0}),
        (np.True_, {"team": 1.0}, {"success": 1.0}),
        (np.float32(0.5), {"team": 0.5}, {}),
        ({"team": 1, "style": 0.5}, {"team": 1.0, "style": 0.5}, {}),
        ({"team": 1.5, "success": True}, {"team": 1.5}, {"success": 1.0}),
        ({"success": False}, {"team": 0.0}, {"success": 0.0}),
        ({"team": 1, "metrics": {"turns": 3}}, {"team": 1.0}, {"turns": 3.0}),
        ({"team": None}, {}, {}),
        ({"success": None}, {}, {}),
        ({"team": None, "style": 0.5, "metrics": None}, {"style": 0.5}, {}),
        ({"team": None, "metrics": {"turns": 3}}, {}, {"turns": 3.0}),
    ],
)
def test_what_a_workflow_may_return(value, rewards, metrics):
    assert outcome_of(value, "it") == (rewards, metrics)


def test_a_bool_of_torch_is_a_success():
    import torch

    assert outcome_of(torch.tensor(True), "it") == ({"team": 1.0}, {"success": 1.0})
    assert outcome_of(torch.tensor(1.0), "it") == ({"team": 1.0}, {})


@pytest.mark.parametrize(
    "value",
    [None, math.nan, math.inf, "1.0", "good", [1], {}, {"team": math.nan}, {"success": math.nan}, {"team": "x"}],
)
def test_what_it_may_not(value):
    outcome, sink = run(cotune.workflow(lambda task: value))
    assert isinstance(outcome.error, WorkflowError)
    assert outcome.rewards == {}
    assert [(type(r), r.status, bool(r.error)) for r in sink] == [(Episode, "error", True)]


@pytest.mark.parametrize(
    ("value", "name"), [(math.nan, "team"), ({"style": math.nan}, "style"), ({"success": math.nan}, "success")]
)
def test_what_is_no_number_has_a_way_to_say_that_nobody_knows(value, name):
    """The remedy works: what it names is taken."""
    with pytest.raises(WorkflowError) as caught:
        outcome_of(value, "it")
    assert caught.value.remedy == f'Return finite numbers only; if it is unknown, return {{"{name}": None}}.'
    assert outcome_of({name: None}, "it") == ({}, {})
    with pytest.raises(WorkflowError) as metric:
        outcome_of({"team": 1, "metrics": {"turns": math.nan}}, "it")
    assert metric.value.remedy == "Return finite numbers only."


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Executor is already running.", "Several episodes run at the same time"),
        ("This event loop is already running", "Fix the workflow."),
        ("Connection error.", "No answer came from the address that it calls"),
        ("Error code: 401 - {'error': 'invalid key'}", "The provider refuses the key"),
        ("Error code: 429 - slow down", "The provider has too many requests"),
        ("LengthFinishReasonError: Could not parse response content", "Raise max_tokens of that call"),
    ],
)
def test_what_an_error_says_has_a_remedy_of_its_own(said, remedy):
    def solve(task):
        raise RuntimeError(said)

    assert run(cotune.workflow(solve))[0].error.remedy.startswith(remedy)


# Episodes


def test_records_the_episode_and_its_rewards():
    async def solve(task):
        assert current_episode.get().task.input == task
        return {"team": task["x"], "success": True}

    outcome, sink = run(cotune.workflow(solve), {"x": 2}, phase="train", training_step=4, rollout=1, timeout=60)
    reward, record = sink
    assert (type(reward), reward.target, reward.name, reward.value) == (RewardRecord, record.id, "team", 2.0)
    assert record == outcome.episode
    assert (record.task.id, record.workflow, record.phase, record.training_step, record.rollout) == (
        "t", "solve", "train", 4, 1,
    )  # fmt: skip
    assert (record.status, record.metrics, outcome.error) == ("ok", {"success": 1.0}, None)
    assert current_episode.get() is None


def test_a_workflow_that_raises_is_a_failed_episode_that_says_where():
    def solve(task):
        raise KeyError("colour")

    outcome, _ = run(cotune.workflow(solve))
    assert outcome.episode.status == "error"
    assert "raised KeyError: 'colour'" in outcome.episode.error
    assert "test_workflows.py" in outcome.episode.error
    assert isinstance(outcome.error.__cause__, KeyError)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError(), r"raised ValueError \("),
        (asyncio.CancelledError(), r"raised CancelledError: something in it was cancelled \(.*in solve\)\. Look for"),
        (asyncio.CancelledError("by the user"), r"raised CancelledError: by the user \(.*in solve\)"),
    ],
)
def test_an_error_without_a_text_is_told_without_a_colon_and_a_cancellation_with_a_cause(
    error: BaseException, said: str
) -> None:
    async def solve(task):
        raise error

    outcome, _ = run(cotune.workflow(solve))
    assert outcome.episode.status == "error"
    assert re.search(said, str(outcome.error))


def test_sync_workflows_run_at_once_each_in_its_own_context():
    """More of them than asyncio's own pool has threads."""
    count = 64
    barrier = threading.Barrier(count)

    @cotune.workflow
    def solve(task):
        barrier.wait(30)
        return current_episode.get().task.input == task

    async def main():
        tasks = [Task(id=str(i), input=i) for i in range(count)]
        return await asyncio.gather(*(run_episode(solve.cotune, t, sink=Sink()) for t in tasks))

    assert [o.rewards for o in asyncio.run(main())] == [{"team": 1.0}] * count


def test_threads_of_a_workflow_stay_in_its_episode_and_pools_do_not_keep_it():
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    found = []

    @cotune.workflow
    def solve(task):
        here = current_episode.get()
        thread = threading.Thread(target=lambda: found.append(current_episode.get() is here))
        thread.start()
        thread.join()
        found.append(pool.submit(current_episode.get).result() is here)
        return 1

    run(solve)
    run(solve)
    assert found == [True] * 4
    assert pool.submit(current_episode.get).result() is None
    pool.shutdown()


def test_a_callable_object_and_a_sync_function_that_returns_a_coroutine():
    class App:
        async def __call__(self, task):
            return task["q"]

    async def inner(task):
        return 0.25

    assert run(cotune.workflow(App()))[0].rewards == {"team": 1.0}
    assert run(cotune.workflow(lambda task: inner(task)))[0].rewards == {"team": 0.25}


@pytest.mark.parametrize("way", ["sync", "async"])
def test_timeout(way):
    release = threading.Event()

    async def waits(task):
        await asyncio.Event().wait()

    def blocks(task):
        release.wait(20)

    async def main():
        try:
            solve = cotune.workflow(waits if way == "async" else blocks)
            return await run_episode(
                solve.cotune, Task(id="t", input=0), sink=Sink(), options=EpisodeOptions(timeout=0.05)
            )
        finally:
            release.set()

    outcome = asyncio.run(main())
    assert outcome.episode.status == "error"
    assert "did not finish within 0.05 seconds" in outcome.episode.error
    assert outcome.live.ended


def test_a_timeout_error_of_the_workflow_is_its_own():
    def solve(task):
        raise TimeoutError("mine")

    assert "raised TimeoutError: mine" in str(run(cotune.workflow(solve), timeout=60)[0].error)


def test_cancelling_records_the_episode_as_cancelled():
    sink = Sink()
    started = asyncio.Event()

    async def solve(task):
        started.set()
        await asyncio.Event().wait()

    async def main():
        task = asyncio.create_task(run_episode(cotune.workflow(solve).cotune, Task(id="t", input=0), sink=sink))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [r.status for r in sink] == ["cancelled"]


def test_a_workflow_that_cancels_itself_is_a_failed_episode():
    async def solve(task):
        raise asyncio.CancelledError

    assert run(cotune.workflow(solve))[0].episode.status == "error"
