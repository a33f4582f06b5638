"""A method of the user's own: a class in a file of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cotune.algorithms.catalogue import ANY_PLAN, RECIPES, recipe, takes_a_tree
from cotune.algorithms.prepare import Prepared, prepare
from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.run_recipe import policy_recipes, taught_by
from cotune.algorithms.samples import Sample
from cotune.algorithms.trial import check_own
from cotune.config.methods import LossSettings
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError, GroupError
from cotune.records.plans import PlanKind
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


METHOD = """
import numpy as np

from cotune.methods import AtGrpo


class Own(AtGrpo):
    def advantages(self, step, rewards):
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            {body}
        return advantages
"""


def prepared(named: str, *groups: Sequence[float], **settings: object) -> Prepared:
    samples = [sample for number, rewards in enumerate(groups) for sample in siblings(f"c{number}", rewards)]
    return prepare(samples, recipe(named, plan="tree", **settings))


def test_each_group_gets_what_the_class_says_of_it(written: Write) -> None:
    named = written(METHOD.format(body="advantages[group] = 2 * rewards[group] + len(group)")) + ":Own"
    found = prepared(named, [1.0, 0.0], [3.0, 1.0, 1.0])
    assert found.advantages.tolist() == [4.0, 2.0, 9.0, 5.0, 5.0]
    assert [sample.id for sample in found.samples] == ["c0.0", "c0.1", "c1.0", "c1.1", "c1.2"]
    method = recipe(named, clip_high=0.28)
    assert (method.name, method.plan, method.loss.clip_high, method.is_own) == (named, "tree", 0.28, True)
    check_own(method)


def test_its_filters_are_those_of_its_base_and_settings_change_them(written: Write) -> None:
    named = written(METHOD.format(body="advantages[group] = 1.0")) + ":Own"
    assert prepared(named, [1.0, 1.0], [1.0, 0.0]).left_out == {"zero_variance": 2}
    assert prepared(named, [1.0, 1.0], [1.0, 0.0], zero_variance=False).advantages.tolist() == [1.0] * 4
    assert prepared(named, [1.0], [1.0, 0.0]).left_out == {"group_of_one": 1}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("advantages = rewards[:1]", r"returned an array of shape \(1,\) for \d+ samples"),
        ("advantages[group] = np.nan", "returned the advantages .*nan"),
        ("advantages[group] = 'good'", "raised ValueError"),
        ("advantages[group] = step.nothing", r"raised AttributeError.*method_\d+\.py:11 in advantages"),
    ],
)
def test_what_it_may_not_return_is_named_with_its_line_before_and_in_a_run(
    written: Write, body: str, text: str
) -> None:
    named = written(METHOD.format(body=body)) + ":Own"
    with pytest.raises(GroupError, match=text):
        prepared(named, [1.0, 0.0])
    with pytest.raises(ConfigError, match=f"recipe = .* fails on made-up samples: .*{text}"):
        check_own(recipe(named, plan="tree"))


@pytest.mark.parametrize("plan", ["tree", "independent", "replay"])
def test_every_published_method_passes_the_trial_of_a_users_own(plan: PlanKind) -> None:
    tried = 0
    for name, method in RECIPES.items():
        if method.plan == plan or name in ANY_PLAN:
            own = type("Own", (method,), {"__module__": "my_method"})()
            check_own(own.under(plan))
            tried += 1
    assert tried >= 4


def test_a_class_derived_from_a_method_for_any_plan_takes_a_tree(written: Write) -> None:
    path = written(
        "from cotune.methods import Dapo, Grpo\n\n\nclass A(Dapo):\n    pass\n\n\nclass B(Grpo):\n    pass\n"
    )
    assert takes_a_tree(f"{path}:A") and not takes_a_tree(f"{path}:B")


def test_an_attribute_of_the_wrong_type_is_refused(written: Write) -> None:
    path = written("from cotune.methods import Grpo\n\n\nclass Own(Grpo):\n    loss = {'kl': 0.1}\n")
    with pytest.raises(ConfigError, match=r"has loss = \{'kl': 0.1\}, which is not of type LossSpec. Write loss"):
        recipe(f"{path}:Own", plan="tree")


def test_a_class_that_learns_from_a_teacher_needs_it_in_the_configuration(written: Write) -> None:
    named = written("from cotune.methods import Distill\n\n\nclass Own(Distill):\n    pass\n") + ":Own"
    with pytest.raises(ConfigError, match=r"recipe = .*kl_to = 'teacher'.* Set kl_to = \"teacher\" in \[loss\]"):
        policy_recipes(TrainConfig(recipe=named), "independent")
    config = TrainConfig(recipe=named, loss=LossSettings(kl_to="teacher"))
    assert taught_by(config) == policy_recipes(config, "independent").run.loss.kl_to == "teacher"


def test_a_class_or_function_that_is_not_there_is_refused_before_work_starts(written: Write) -> None:
    path = written("import cotune.methods\n\nclass Other:\n    pass\n\n\ndef many(tokens, more):\n    return tokens\n")
    with pytest.raises(ConfigError, match=r"recipe = .*Ranked.* must be a name in .*; methods there: none"):
        recipe(f"{path}:Ranked")
    with pytest.raises(ConfigError, match=r"is not a class that derives from cotune.methods.Method"):
        recipe(f"{path}:Other")
    with pytest.raises(ConfigError, match=r"a function that takes \(tokens\)"):
        check_own(recipe("at_grpo").replaced(loss=LossSpec(token_loss=f"{path}:many")))
    with pytest.raises(ConfigError, match=r"No file is at .*nowhere.py"):
        recipe("nowhere.py:Ranked")
