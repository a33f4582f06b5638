"""A run's learner is opened and called in one thread, which ends with it."""

import asyncio
import gc
import threading

import pytest

from cotune.algorithms.recipes import LossSpec
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError, GroupError
from cotune.records.policies import policies_for
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.opening.open_run import open_local_learner
from cotune.trainer.run.own_thread import OwnThread
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows, same


def test_a_runs_learner_works_in_one_thread_that_ends_with_it(base, monkeypatch, tmp_path):
    seen = []
    for name in ("open", "check", "update", "logprobs", "weights", "save", "load"):
        method = getattr(LocalLearner, name)

        def noted(*args, method=method, **more):
            seen.append(threading.current_thread())
            return method(*args, **more)

        monkeypatch.setattr(LocalLearner, name, noted)

    async def work():
        config = TrainConfig(model=base, learner=FAST)
        learner = await open_local_learner(config, policies_for("lora", ["a"], SMALL), LossSpec(), {})
        for _ in range(2):
            await asyncio.gather(*(asyncio.to_thread(learner.update, "a", make_rows()) for _ in range(3)))
        learner.logprobs("a", make_rows())
        assert learner.weights("a")
        learner.save(tmp_path)
        learner.load(tmp_path)

    asyncio.run(work())
    assert len(seen) >= 11
    assert len(set(seen)) == 1
    assert seen[0] is not threading.main_thread()
    gc.collect()
    seen[0].join(10)
    assert not seen[0].is_alive()


def test_adapters_start_from_the_seed_of_the_run(base):
    async def started(seed):
        config = TrainConfig(model=base, learner=FAST, seed=seed)
        learner = await open_local_learner(config, policies_for("lora", ["a"], SMALL), LossSpec(), {})
        return learner.weights("a")

    first, again, other = (asyncio.run(started(seed)) for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)


def test_errors_come_out_of_the_thread(base):
    with pytest.raises(ConfigError, match=r"learner\.memory"):
        OwnThread(
            lambda: LocalLearner.open(base, policies_for("lora", ["a"], SMALL), change(FAST, memory="1MiB"), LossSpec())
        )
    learner = OwnThread(lambda: LocalLearner.open(base, policies_for("lora", ["a"], SMALL), FAST, LossSpec()))
    with pytest.raises(GroupError, match="no rows"):
        learner.update("a", [])
