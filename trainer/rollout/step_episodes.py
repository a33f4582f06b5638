"""The episodes of one step: episodes to run, episodes that an interrupted run has finished, and faults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from cotune.episodes.rollout import EpisodeBatch
from cotune.errors import RunError
from cotune.records.policies import unlisted_roles_text
from cotune.records.structs import Episode
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.rollout.episodes import reuse_finished_episodes
from cotune.trainer.run.run import RolloutRun


class StepEpisodes:
    """Has the recorded episodes of a step, and makes batches of the episodes that are still to be run."""

    def __init__(self, run: RolloutRun, step: int, progress: Progress) -> None:
        """Read the recorded episodes of `step`."""
        self._run = run
        self._step = step
        drawn = run.state.drawn[step]
        self._tasks = {task.id: task for task in run.schedule.named([*drawn.own, *drawn.reserve])}
        self._recorded: dict[tuple[str, int], Episode] = {}  # by task and rollout

        finished, incomplete = reuse_finished_episodes(run, step, self._tasks)
        self.add(finished)
        if incomplete:
            progress.say(f"{incomplete} episodes of step {step + 1} lack records or rewards: they are run again")

    def add(self, episodes: Iterable[Episode]) -> None:
        """Add episodes that have ended."""
        for episode in episodes:
            self._recorded[episode.task.id, episode.rollout] = episode

    def batch(self, task_ids: Collection[str], on_episode: Callable[[Episode], None]) -> EpisodeBatch:
        """Return a batch of the episodes of these tasks, without branches. Recorded episodes in it are not run."""
        run = self._run
        done = [episode for episode in self._recorded.values() if episode.task.id in task_ids and episode.fork is None]
        is_replayed = run.plan.kind == "replay"  # branches repeat the episode
        return EpisodeBatch(
            tasks=[self._tasks[task_id] for task_id in task_ids],
            sink=run.store,
            phase="train",
            training_step=self._step,
            rollouts=run.plan.episodes_per_task,
            done=done,
            on_episode=on_episode,
            record_tools=is_replayed and run.config.replay.tools != "run",
            freeze=is_replayed and run.config.replay.tools == "frozen",
        )

    def branches(self, task_ids: Collection[str]) -> list[Episode]:
        """Return the recorded branches of these tasks (replay plan)."""
        return [episode for episode in self._recorded.values() if episode.fork and episode.task.id in task_ids]


def report_faults(run: RolloutRun, step: int, progress: Progress) -> None:
    """Report faults in the episodes of a step. Raises RunError if records of them were lost."""
    progress.scorer_errors(run.runner.scorer_errors)
    for role in run.runner.unlisted:
        progress.say_once(unlisted_roles_text(role, run.config.other_roles))
    lost = run.store.health.lost
    if lost:
        raise RunError(
            f"{lost} records could not be stored, so step {step + 1} is not trained on.",
            f"See the log; free some space, then {run.folder.way_on}",
        )
