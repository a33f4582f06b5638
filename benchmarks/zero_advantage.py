"""The updates of one recorded step with its rows of advantage 0 left out of the passes, against all rows passed.

    python -m benchmarks.zero_advantage RUN [--step 1] [--rounds 3] [--threads 1]

RUN is a run of `cotune train` with a LoRA per role; steps count from 1. The run's recipe groups and weighs the
candidates of the step, and each policy is updated on its rows. Two ways alternate in one process: rows of advantage 0
as they are, and with an advantage of 1e-9, so that they are passed. Seconds are CPU seconds of the process, medians of
the rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

import msgspec

from cotune.algorithms.prepare import train_rows
from cotune.algorithms.run_recipe import recipes_of, regroup, trained_roles
from cotune.algorithms.samples import TrainRow
from cotune.records.policies import policies_for
from cotune.storage.checkpoints import newest_checkpoint, read_policies
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.metrics_file import read_metrics
from cotune.storage.run_layout import RunLayout, read_run, read_run_json
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.forced import ForcedSettings


def rows_of(run: Path, step: int) -> dict[str, list[TrainRow]]:
    """The rows of a step (from 0) by role."""
    store = SqliteStore.open(run)
    try:
        chosen, _ = recipes_of(store)
        roles = trained_roles(store, step)
        grouped = regroup(
            store,
            store.episodes(EpisodeFilters(phase="train", training_step=step)),
            chosen,
            read_run(run).config,
            roles,
        )
        assert grouped.prepared is not None, grouped.problems
        return train_rows(grouped.prepared, grouped.collected, store)
    finally:
        store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    rows = rows_of(args.run, args.step - 1)
    store = SqliteStore.open(args.run)
    loss = recipes_of(store)[0].run.loss
    store.close()
    checkpoint = newest_checkpoint(RunLayout(args.run).checkpoints)
    assert checkpoint is not None
    lora = next(policy.lora for policy in read_policies(checkpoint) if policy.lora is not None)
    learner_settings = {**read_run_json(args.run)["config"]["learner"], "threads": args.threads, "device": "cpu"}
    settings = msgspec.convert(learner_settings, ForcedSettings)
    model = read_run(args.run).model
    assert model is not None
    policies = policies_for("lora", sorted(rows), lora)
    ways = {"passed": 1e-9, "left out": 0.0}
    learners = {way: LocalLearner.open(model, policies, settings, loss) for way in ways}
    seconds, tokens = defaultdict(list), defaultdict(float)
    for number in range(args.rounds):
        for way, advantage in ways.items():
            began = time.process_time()
            for role, role_rows in rows.items():
                given_rows = [msgspec.structs.replace(r, advantage=r.advantage or advantage) for r in role_rows]
                figures = learners[way].update(role, given_rows)
                tokens[way] += figures["computed_tokens"] if number == 0 else 0.0
            seconds[way].append(time.process_time() - began)
    silent = sum(not row.advantage for role_rows in rows.values() for row in role_rows)
    line = next(line for line in read_metrics(args.run) if line["step"] == args.step - 1)
    print(f"{sum(map(len, rows.values()))} rows, {silent} of advantage 0; rollout {line['seconds']['rollout']:.0f} s")
    median = {way: statistics.median(times) for way, times in seconds.items()}
    for way in ways:
        print(f"{way:10} {tokens[way]:10,.0f} tokens computed {median[way]:8.1f} s of CPU")
    print(json.dumps({"seconds": round(median["passed"] / median["left out"], 2)}))


if __name__ == "__main__":
    main()
