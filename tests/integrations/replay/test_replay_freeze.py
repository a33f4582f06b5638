"""Clock, uuid and random in a replay: as in the trunk up to the fork, and free after it."""

from __future__ import annotations

import asyncio
import datetime
import random
import secrets
import sys
import time
import uuid
from pathlib import Path
from random import choice
from random import random as drawn
from time import perf_counter
from time import time as now
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.integrations.replay import clock
from cotune.records.structs import Episode, Task
from cotune.replay.script import Replay, read_script
from tests.integrations import replay_apps
from tests.integrations.recorded import Responder
from tests.integrations.replay.test_replay import Lab, reply

pytestmark = pytest.mark.usefixtures("nowhere")


def chances() -> list[Any]:
    """One of all that is frozen, by the ways in which it is asked."""
    return [
        time.time(), now(), time.time_ns(), time.strftime("%X"), time.monotonic(), perf_counter(),
        datetime.datetime.now(), datetime.datetime.now(datetime.UTC), datetime.datetime.today(), datetime.date.today(),
        uuid.uuid4(), uuid.uuid1(), random.random(), drawn(), random.getrandbits(40), choice(range(10**6)),
        random.gauss(0, 1), random.sample(range(1000), 3), random.Random().random(), random.SystemRandom().random(),
        secrets.token_hex(), secrets.choice(range(10**6)),
    ]  # fmt: skip


def left() -> str:
    return f"left {[str(one) for one in chances()]}"


def right() -> str:
    return f"right {[str(one) for one in chances()]}"


async def ask(text: str) -> str:
    return str((await replay_apps.model.ainvoke(text)).content)


async def chancy(task: Any) -> float:
    """All of it in the workflow, in two threads side by side, and again after a call."""
    await ask(f"{task['n']} {[str(one) for one in chances()]}")
    sides = await asyncio.gather(asyncio.to_thread(left), asyncio.to_thread(right))
    await asyncio.gather(*map(ask, sides))
    await ask(f"{[str(one) for one in chances()]}")
    return 1.0


async def run(lab: Lab, numbers: Any, replays: Any = None, *, freeze: bool = True) -> list[Episode]:
    batch = EpisodeBatch(
        tasks=[Task(id=str(n), input={"n": n}) for n in numbers],
        sink=lab.store,
        phase="trace",
        concurrency=20,
        replays=replays or {},
        freeze=freeze,
    )
    episodes = await rollout(lab.flow, batch, lab.policy if replays else Responder(reply))
    lab.store.flush()
    return episodes


def scripts(lab: Lab, trunks: list[Episode], often: int = 1, **fork: Any) -> dict[tuple[str, int], Replay]:
    found = {e.id: read_script(lab.store, e.id) for e in trunks}
    return {(e.task.id, 1 + i): Replay(script=found[e.id], **fork) for e in trunks for i in range(often)}


def test_many_at_once_see_what_each_trunk_saw(tmp_path: Path):
    lab = Lab(tmp_path, chancy)
    trunks = asyncio.run(run(lab, range(6)))
    assert [e.error for e in trunks] == [None] * 6
    again = asyncio.run(run(lab, range(6), scripts(lab, trunks, 2)))
    assert [e.error for e in again] == [None] * 12 and lab.policy.calls == []
    assert [lab.requests(e) for e in again] == [lab.requests(e) for e in (*trunks, *trunks)]
    prompts = {lab.store.calls(e.id)[0].messages for e in trunks}
    assert len(prompts) == 6


def test_after_the_fork_all_is_free_and_the_clock_goes_on(tmp_path: Path):
    seen: list[float] = []

    async def app(task: Any) -> float:
        seen.append(time.time())
        said = await ask(f"first {uuid.uuid4()}")
        seen.append(time.time())
        await ask(f"then {said} {uuid.uuid4()}")
        return 1.0

    lab = Lab(tmp_path, app)
    (trunk,) = asyncio.run(run(lab, [0]))
    time.sleep(0.3)
    fork = lab.store.calls(trunk.id)[0]
    one, two = asyncio.run(run(lab, [0], scripts(lab, [trunk], 2, fork=fork.id)))
    after = time.time()
    assert (one.error, two.error) == (None, None)
    calls = [lab.store.calls(e.id) for e in (trunk, one, two)]
    assert len({first.messages for first, _ in calls}) == 1 and len({later.messages for _, later in calls}) == 3
    was, _, *branches = seen
    begun, ended = branches[:2], branches[2:]
    assert begun == [was, was]
    assert all(was <= at < after - 0.3 for at in ended)  # behind by what passed in between


@pytest.mark.parametrize("name", list(replay_apps.APPLICATIONS))
def test_frameworks_run_frozen_side_by_side(tmp_path: Path, name: str):
    lab = Lab(tmp_path, replay_apps.APPLICATIONS[name])
    trunks = asyncio.run(run(lab, range(2)))
    again = asyncio.run(run(lab, range(2), scripts(lab, trunks, 2)))
    assert [e.error for e in again] == [None] * 4 and lab.policy.calls == []
    assert [lab.requests(e) for e in again] == [lab.requests(e) for e in trunks * 2]


FORMS = {
    "a uuid": lambda: uuid.uuid4(),
    "a date": lambda: f"{datetime.date.today() + datetime.timedelta(days=random.randrange(3, 300)):%d %B %Y}",
    "a time": lambda: datetime.datetime.now().isoformat(),
    "a random number": lambda: random.random(),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_without_it_the_divergence_names_what_it_looks_like(tmp_path: Path, form: str):
    async def app(task: Any) -> float:
        await ask(f"Answer at {FORMS[form]()} please.")
        return 1.0

    lab = Lab(tmp_path, app)
    trunks = asyncio.run(run(lab, [0], freeze=False))
    (again,) = asyncio.run(run(lab, [0], scripts(lab, trunks), freeze=False))
    assert again.blame == "divergence"
    assert f"(it looks like {form})" in again.error and 'Set replay.tools = "frozen"' in again.error
    (frozen,) = asyncio.run(run(lab, [1]))
    assert asyncio.run(run(lab, [1], scripts(lab, [frozen])))[0].error is None


def test_outside_frozen_episodes_nothing_is_kept(tmp_path: Path):
    lab = Lab(tmp_path, chancy)
    (trunk,) = asyncio.run(run(lab, [0]))
    (plain,) = asyncio.run(run(lab, [0], freeze=False))
    assert trunk.chance is not None and plain.chance is None
    before = time.time_ns()
    assert before <= time.time_ns() and abs(time.time() - datetime.datetime.now().timestamp()) < 5
    state = random.getstate()
    one = (random.random(), random.getrandbits(8))
    random.setstate(state)
    assert (random.random(), random.getrandbits(8)) == one and random.Random(3).random() == random.Random(3).random()


def test_without_its_package_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(clock, "install", clock.install.__wrapped__)  # as in a process that has not installed it yet
    monkeypatch.setitem(sys.modules, "time_machine", None)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"n": 1}\n')
    assert (
        main(["trace", "nowhere:app", "--tasks", str(tasks), "--out", str(tmp_path / "out"), "--record", "frozen"]) == 1
    )
    said = " ".join(capsys.readouterr().err.split())
    assert "replay.tools = 'frozen'" in said and "pip install time-machine" in said and not (tmp_path / "out").exists()
