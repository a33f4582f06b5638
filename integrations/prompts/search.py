"""One search by `gepa.optimize`: a function of its seed and of what the problem answers.

Nothing of gepa's is written or loaded: its saved state is a pickle. A search that was interrupted begins anew with the
same seed, and a problem that keeps its answers gives them again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

log = logging.getLogger("cotune")

Candidate = Mapping[str, str]
"""A text for each part, by its name."""


class Graded(NamedTuple):
    """One run of a candidate on a task: its score, and whatever else the problem knows of it."""

    score: float
    of: Any


class Problem(Protocol):
    """What a search asks. `evaluate` may raise, which ends the search; the others must not: gepa hides errors there."""

    def evaluate(self, candidate: Candidate, tasks: Sequence[str]) -> list[Graded]:
        """Run a candidate on tasks, named by their ids."""
        ...

    def choose(self, candidate: Candidate, graded: Sequence[Graded]) -> list[str]:
        """The parts that are to be changed next."""
        ...

    def propose(self, candidate: Candidate, parts: Sequence[str], graded: Sequence[Graded]) -> dict[str, str]:
        """New texts for these parts; nothing for those without a usable one."""
        ...

    def accepted(self, candidate: Candidate, scores: Mapping[str, float], parent: int | None) -> None:
        """Told of each candidate of the pool, the first being the seed, with its scores on the validation tasks."""
        ...

    def stop(self) -> bool:
        """Asked before each iteration."""
        ...


def require() -> None:
    """Raise ModuleNotFoundError without gepa: before anything is spent."""
    import_module("gepa.api")


def search(
    problem: Problem,
    start: Candidate,
    train: Sequence[str],
    validation: Sequence[str],
    *,
    minibatch: int = 4,
    perfect: float | None = None,
    seed: int = 0,
) -> int:
    """Search until the problem says stop; returns the number of iterations. `perfect` is a score that nothing exceeds:
    a minibatch of such scores is not reflected on.

    Raises ModuleNotFoundError without gepa, and what `problem.evaluate` raises.
    """
    from gepa import api

    optimize: Any = api.optimize  # by duck typing: its own protocols are generic over what it never looks at
    rounds = _Rounds(problem)
    optimize(
        seed_candidate=dict(start),
        trainset=_Ids(train),
        valset=_Ids(validation),
        adapter=_Adapter(problem),
        custom_candidate_proposer=_proposer(problem),
        module_selector=_Selector(problem),
        reflection_minibatch_size=min(minibatch, len(train)),
        skip_perfect_score=perfect is not None,
        perfect_score=1.0 if perfect is None else perfect,
        stop_callbacks=[rounds],
        callbacks=[_Told(problem)],
        logger=_Quiet(),
        seed=seed,
        cache_evaluation=False,
        track_best_outputs=False,
        raise_on_exception=True,
    )
    return rounds.count


class _Ids:
    """A loader of task ids, which are their own keys: with lists gepa numbers both sets from 0."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = list(ids)

    def all_ids(self) -> list[str]:
        return list(self._ids)

    def fetch(self, ids: Sequence[str]) -> list[str]:
        return list(ids)

    def __len__(self) -> int:
        return len(self._ids)


class _Adapter:
    """gepa's adapter, by duck typing. Without `propose_new_texts` gepa raises, swallows that, and spends all."""

    propose_new_texts = None

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def evaluate(self, batch: list[str], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        from gepa.core.adapter import EvaluationBatch

        graded = self._problem.evaluate(candidate, batch)
        return EvaluationBatch(
            outputs=[None] * len(graded),
            scores=[one.score for one in graded],
            trajectories=graded if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], evaluated: Any, parts: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """The runs as they are: what is shown of them is the problem's."""
        return {part: [{"run": one} for one in evaluated.trajectories] for part in parts}


def _proposer(problem: Problem) -> Any:
    def propose(
        candidate: dict[str, str], shown: Mapping[str, Sequence[Mapping[str, Any]]], parts: list[str]
    ) -> dict[str, str]:
        graded = [one["run"] for one in next(iter(shown.values()), ())]
        return problem.propose(candidate, parts, graded)

    return propose


class _Selector:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def __call__(
        self, state: Any, trajectories: list[Graded], scores: list[float], index: int, candidate: dict[str, str]
    ) -> list[str]:
        return self._problem.choose(candidate, trajectories)


class _Rounds:
    """gepa's stopper; counts iterations."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.count = -1

    def __call__(self, state: Any) -> bool:
        self.count += 1
        return self._problem.stop()


class _Told:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        parents = [one for one in event["parent_ids"] if one is not None]
        self._problem.accepted(event["candidate"], event["scores_by_val_id"], parents[0] if parents else None)


class _Quiet:
    """gepa prints what it does; here that is seen with -v."""

    def log(self, message: str) -> None:
        log.info("gepa: %s", message)
