"""Groups: the candidates that are compared with each other."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence

import msgspec

from cotune.algorithms.samples import Sample, codes, keys
from cotune.errors import GroupError
from tests.core.algorithms.oracle.recipes import Recipe


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that agree in the recipe's key.

    `id` depends on nothing but what is grouped: the call under a tree or replay plan, else the key and the training
    step.
    """

    id: str
    key: tuple[Hashable, ...]
    samples: tuple[Sample, ...]


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """Groups in order of first appearance, and how many samples are in none of them, by reason."""

    groups: tuple[Group, ...]
    left_out: Mapping[str, int]


def build_groups(samples: Sequence[Sample], recipe: Recipe, part: str = "") -> Groups:
    """Put samples into groups by the recipe's key; samples alone in theirs are counted as `group_of_one`.

    What a group holds depends on the key. (task, role, turn, branch): candidates of one prompt, which is asserted.
    (task, role), as in dr_mas: all calls of one role in the episodes of a task, whatever their prompts.
    (task,), as in grpo: all calls of all roles in the episodes of a task. For the latter two, a group of one is a
    group of one episode. Recipes that compare nothing (baseline `ema` or `none`) keep groups of one. Groups of another
    `part` have other ids (`prepare`).

    Raises GroupError when candidates of different prompts meet in a group that must share one.
    """
    numbers, distinct = codes(keys(samples, recipe.key))
    members: list[list[Sample]] = [[] for _ in distinct]
    for sample, number in zip(samples, numbers.tolist(), strict=True):
        members[number].append(sample)
    groups: list[Group] = []
    alone = 0
    for key, group in zip(distinct, members, strict=True):
        assert isinstance(key, tuple)
        if one_prompt(recipe):
            _assert_one_prompt(key, group, recipe)
        if recipe.terms[0].compares and _size(group, recipe) < 2:
            alone += len(group)
        else:
            groups.append(Group(id=_group_id(key, group, recipe, part), key=key, samples=tuple(group)))
    return Groups(groups=tuple(groups), left_out={"group_of_one": alone} if alone else {})


def one_prompt(recipe: Recipe) -> bool:
    """Whether all members of a group of this recipe must have identical prompt token ids."""
    return recipe.plan != "independent" or "branch" in recipe.key or "prompt" in recipe.key


def explain_alone(recipe: Recipe, alone: int, total: int) -> str:
    """A sentence that says how many samples stood alone, why, and what to do."""
    share = f"{alone} of {total} candidates ({alone / total:.0%}) stood alone in their group."
    if recipe.plan != "independent":
        return f"{share} Their siblings were left out, for the other reasons that are counted."
    if one_prompt(recipe):
        return (
            f"{share} Recipe {recipe.name} compares candidates of one prompt, and independent rollouts share none "
            "after a role's first turn. Use the plan `tree`, or a recipe that compares whole rollouts (dr_mas, grpo)."
        )
    return (
        f"{share} Recipe {recipe.name} compares the episodes of a task, and no other episode of the task has a call to "
        "compare these with, or it was left out. If a role seldom acts, run more episodes of each task (plan.k)."
    )


def _size(group: Sequence[Sample], recipe: Recipe) -> int:
    return len(group) if one_prompt(recipe) else len({s.rollout for s in group})


def _assert_one_prompt(key: Hashable, group: Sequence[Sample], recipe: Recipe) -> None:
    prompts = {s.prompt for s in group}
    if len(prompts) > 1:
        raise GroupError(
            f"Group {key!r} of recipe {recipe.name} holds candidates of {len(prompts)} different prompts, "
            f"from calls {sorted({s.call for s in group})[:4]}.",
            "Only candidates with identical prompt token ids may be compared under this key.",
        )


def _group_id(key: tuple[Hashable, ...], group: Sequence[Sample], recipe: Recipe, part: str) -> str:
    if recipe.plan == "tree":
        return group[0].call
    if recipe.plan == "replay":
        return group[0].branch
    content = [group[0].training_step, list(recipe.key), [str(value) for value in key], *filter(None, [part])]
    return hashlib.blake2b(msgspec.json.encode(content), digest_size=16).hexdigest()
