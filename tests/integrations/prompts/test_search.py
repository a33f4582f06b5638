from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from cotune.integrations.prompts.search import Graded, search


class Longer:
    """A longer text is better; every proposal adds one letter."""

    def __init__(self, rounds: int = 12, fails: str = "") -> None:
        self.left, self.fails = rounds, fails
        self.runs: list[tuple[str, tuple[str, ...]]] = []
        self.pool: list[tuple[str, Mapping[str, float], int | None]] = []
        self.seen: list[list[str]] = []

    def evaluate(self, candidate: Mapping[str, str], tasks: Sequence[str]) -> list[Graded]:
        if candidate["a"] == self.fails:
            raise RuntimeError("the provider is gone")
        self.runs.append((candidate["a"], tuple(tasks)))
        return [Graded(len(candidate["a"]) / 10, task) for task in tasks]

    def choose(self, candidate: Mapping[str, str], graded: Sequence[Graded]) -> list[str]:
        return ["a"]

    def propose(self, candidate: Mapping[str, str], parts: Sequence[str], graded: Sequence[Graded]) -> dict[str, str]:
        self.seen.append([one.of for one in graded])
        return {"a": candidate["a"] + "x"}

    def accepted(self, candidate: Mapping[str, str], scores: Mapping[str, float], parent: int | None) -> None:
        self.pool.append((candidate["a"], scores, parent))

    def stop(self) -> bool:
        self.left -= 1
        return self.left < 0


TRAIN, VALIDATION = ["t1", "t2", "t3"], ["v1", "v2"]


def test_a_better_candidate_of_a_minibatch_runs_on_all_validation_tasks() -> None:
    problem = Longer()
    search(problem, {"a": "."}, TRAIN, VALIDATION, minibatch=2, perfect=0.5)
    assert problem.pool[:3] == [
        (".", {"v1": 0.1, "v2": 0.1}, None),
        (".x", {"v1": 0.2, "v2": 0.2}, 0),
        (".xx", {"v1": 0.3, "v2": 0.3}, 1),
    ]
    # Ids of both sets stay apart, and what is perfect on its minibatch is not reflected on.
    assert {task for tasks in problem.seen for task in tasks} == set(TRAIN)
    assert max(len(text) for text, _, _ in problem.pool) == 5


def test_a_search_is_a_function_of_its_seed() -> None:
    first, again, other = Longer(), Longer(), Longer()
    search(first, {"a": "."}, TRAIN, VALIDATION, minibatch=2, seed=1)
    search(again, {"a": "."}, TRAIN, VALIDATION, minibatch=2, seed=1)
    search(other, {"a": "."}, TRAIN, VALIDATION, minibatch=2, seed=2)
    assert first.runs == again.runs and first.runs != other.runs


def test_an_evaluation_that_raises_ends_the_search() -> None:
    problem = Longer(fails=".xx")
    with pytest.raises(RuntimeError, match="the provider is gone"):
        search(problem, {"a": "."}, TRAIN, VALIDATION, minibatch=2)
    assert [text for text, _, _ in problem.pool] == [".", ".x"]
