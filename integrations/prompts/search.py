"""A search by `gepa.optimize`. It depends only on its seed and on the answers of the problem.

The state of gepa is not saved, as it is a pickle. An interrupted search starts again with the same seed, and a problem
that has recorded its answers repeats them.
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
    """One run of a candidate on a task: its score, and any data that the problem needs later."""

    score: float
    of: Any


class Problem(Protocol):
    """The problem that a search solves. An error of `evaluate` ends the search. The other methods must not raise, as
    gepa hides their errors."""

    def evaluate(self, candidate: Candidate, tasks: Sequence[str]) -> list[Graded]:
        """Run a candidate on tasks, named by their ids."""
        ...

    def choose(self, candidate: Candidate, graded: Sequence[Graded]) -> list[str]:
        """Choose the parts to change next."""
        ...

    def propose(self, candidate: Candidate, parts: Sequence[str], graded: Sequence[Graded]) -> dict[str, str]:
        """Propose new texts for these parts. Parts without a usable text are left out."""
        ...

    def accepted(self, candidate: Candidate, scores: Mapping[str, float], parent: int | None) -> None:
        """Called for each candidate of the pool, first for the seed, with its scores on the validation tasks."""
        ...

    def stop(self) -> bool:
        """Whether to stop. Called before each iteration."""
        ...


def require() -> None:
    """Raise ModuleNotFoundError if gepa is not installed, before the search costs anything."""
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
    """Search until the problem says stop, and return the number of iterations. `perfect` is the highest possible score.
    If all scores of a minibatch are perfect, gepa does not reflect on it.

    Raises ModuleNotFoundError if gepa is not installed, and all errors of `problem.evaluate`.
    """
    from gepa import api

    optimize: Any = api.optimize  # its protocols are generic over types that it never uses
    iterations = _IterationCounter(problem)
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
        stop_callbacks=[iterations],
        callbacks=[_PoolObserver(problem)],
        logger=_LogMessages(),
        seed=seed,
        cache_evaluation=False,
        track_best_outputs=False,
        raise_on_exception=True,
    )
    return iterations.count


class _Ids:
    """A loader of task ids that uses the ids as keys. For lists, gepa would number both sets from 0."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = list(ids)

    def all_ids(self) -> list[str]:
        return list(self._ids)

    def fetch(self, ids: Sequence[str]) -> list[str]:
        return list(ids)

    def __len__(self) -> int:
        return len(self._ids)


class _Adapter:
    """The adapter for gepa. If the attribute `propose_new_texts` were missing, gepa would hide the AttributeError and
    spend the whole budget."""

    propose_new_texts = None

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def evaluate(self, batch: list[str], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Grade a candidate's prompts on a batch of tasks, in the form that GEPA asks for."""
        from gepa.core.adapter import EvaluationBatch

        graded = self._problem.evaluate(candidate, batch)
        return EvaluationBatch(
            outputs=[None] * len(graded),
            scores=[run.score for run in graded],
            trajectories=graded if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], evaluated: Any, parts: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """Pass the runs on unchanged. The problem decides which text to show of them."""
        dataset: dict[str, list[dict[str, Any]]] = {}
        for part in parts:
            dataset[part] = [{"run": run} for run in evaluated.trajectories]
        return dataset


def _proposer(problem: Problem) -> Any:
    """The function that GEPA calls for new prompts, from the graded runs of the current ones."""

    def propose(
        candidate: dict[str, str], dataset_of_part: Mapping[str, Sequence[Mapping[str, Any]]], parts: list[str]
    ) -> dict[str, str]:
        # `make_reflective_dataset` has given all parts the same runs.
        entries = next(iter(dataset_of_part.values()), ())
        graded = [entry["run"] for entry in entries]
        return problem.propose(candidate, parts, graded)

    return propose


class _Selector:
    """Lets the problem choose the parts of a candidate that gepa changes next."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def __call__(
        self, state: Any, trajectories: list[Graded], scores: list[float], index: int, candidate: dict[str, str]
    ) -> list[str]:
        return self._problem.choose(candidate, trajectories)


class _IterationCounter:
    """The stopper for gepa. It counts iterations, as gepa asks it before each one."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.count = -1  # the last question ends the search, and so begins no iteration

    def __call__(self, state: Any) -> bool:
        self.count += 1
        return self._problem.stop()


class _PoolObserver:
    """Tells the problem about each candidate that gepa adds to its pool."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        parents = [parent for parent in event["parent_ids"] if parent is not None]
        self._problem.accepted(event["candidate"], event["scores_by_val_id"], parents[0] if parents else None)


class _LogMessages:
    """Sends the messages of gepa, which would otherwise be printed, to the log. They are shown with -v."""

    def log(self, message: str) -> None:
        log.info("gepa: %s", message)
