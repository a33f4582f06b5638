"""An advantage of the user's own in the place of baseline and scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.own import check_own
from cotune.algorithms.prepare import Prepared, prepare
from cotune.algorithms.samples import Sample
from cotune.errors import ConfigError, GroupError
from cotune.records.structs import PolicyRef

Write = Callable[[str], str]


@pytest.fixture
def written(tmp_path: Path, request: pytest.FixtureRequest) -> Write:
    """Writes a file of a method and returns its path; each test has a name of its own."""

    def write(code: str) -> str:
        path = tmp_path / f"method_{abs(hash(request.node.name))}.py"
        path.write_text(code)
        return str(path)

    return write


def siblings(call: str, rewards: Sequence[float]) -> list[Sample]:
    place = {"task": "t", "rollout": "e", "role": "a", "turn": 0, "step": 0, "branch": call, "prompt": call}
    return [
        Sample(id=f"{call}.{i}", rewards={"local": value}, policy=PolicyRef("a", 1), tokens=1, **place)
        for i, value in enumerate(rewards)
    ]


def made(named: str, *groups: Sequence[float], **settings: object) -> Prepared:
    samples = [sample for number, rewards in enumerate(groups) for sample in siblings(f"c{number}", rewards)]
    return prepare(samples, recipe("at_grpo", advantage=named, **settings))


def test_each_group_gets_what_the_function_says_of_it(written: Write) -> None:
    named = written("def double(samples, rewards):\n    return 2 * rewards + len(samples)\n") + ":double"
    found = made(named, [1.0, 0.0], [3.0, 1.0, 1.0])
    assert found.advantages.tolist() == [4.0, 2.0, 9.0, 5.0, 5.0]
    assert [sample.id for sample in found.samples] == ["c0.0", "c0.1", "c1.0", "c1.1", "c1.2"]


def test_filters_before_the_advantages_hold_until_they_are_taken_away(written: Write) -> None:
    named = written("def one(samples, rewards):\n    return [1.0] * len(samples)\n") + ":one"
    assert made(named, [1.0, 1.0], [1.0, 0.0]).left_out == {"zero_variance": 2}
    assert made(named, [1.0, 1.0], [1.0, 0.0], zero_variance=False).advantages.tolist() == [1.0] * 4
    assert made(named, [1.0], [1.0, 0.0]).left_out == {"group_of_one": 1}
    assert made(named, [1.0], zero_variance=False, baseline="none", scale="none").advantages.tolist() == [1.0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return rewards[:1]", r"returned \[1.0\] for the rewards \[1.0, 0.0\]"),
        ("return rewards / 0 * 0", "returned .*nan"),
        ("return 'good'", "raised ValueError"),
        ("return rewards / samples[0].nothing", r"raised AttributeError.*method_\d+\.py:2 in bad"),
    ],
)
def test_what_it_may_not_return_is_named_with_its_line(written: Write, body: str, said: str) -> None:
    with pytest.raises(GroupError, match=said), np.errstate(all="ignore"):
        made(written(f"def bad(samples, rewards):\n    {body}\n") + ":bad", [1.0, 0.0])


def test_a_function_that_is_not_there_or_takes_something_else_is_refused_before_work_starts(written: Write) -> None:
    path = written("def few(samples):\n    return samples\n\n\ndef many(tokens, more):\n    return tokens\n")
    with pytest.raises(ConfigError, match=r"overrides.advantage.*functions there: few, many"):
        check_own(recipe("at_grpo", advantage=f"{path}:ranked"))
    with pytest.raises(ConfigError, match=r"a function that takes \(samples, rewards\)"):
        check_own(recipe("at_grpo", advantage=f"{path}:few"))
    with pytest.raises(ConfigError, match=r"a function that takes \(tokens\)"):
        check_own(recipe("at_grpo", token_loss=f"{path}:many"))


def test_it_is_refused_beside_a_critic() -> None:
    with pytest.raises(ConfigError, match="advantage = 'm:f' cannot be used with a critic"):
        recipe("dr_mas", critic=True, advantage="m:f")
