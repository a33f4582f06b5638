"""Put candidates into groups, whose members are compared with each other."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence

import msgspec

from cotune.algorithms.method import Method
from cotune.algorithms.samples import Sample, keys
from cotune.errors import GroupError


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that agree in the recipe's key.

    `id` depends only on the call under a tree or replay plan, and otherwise on the key and the training step.
    """

    id: str
    key: tuple[Hashable, ...]
    samples: tuple[Sample, ...]


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """Groups in order of first appearance, and the number of samples without a group, by reason."""

    groups: tuple[Group, ...]
    left_out: Mapping[str, int]


def build_groups(samples: Sequence[Sample], recipe: Method, part: str = "") -> Groups:
    """Put samples into groups by the recipe's key. Samples that are alone in a group are counted as `group_of_one`.

    The members of a group depend on the key:

    - (task, role, turn, branch): candidates of one prompt. A group of one has one candidate.
    - (task, role), as in dr_mas: all calls of one role in the episodes of a task, whatever their prompts. A group of
      one has the calls of one episode.
    - (task,), as in grpo: all calls of all roles in the episodes of a task. A group of one is one episode.

    Recipes that compare nothing keep groups of one. Groups of another `part` have other ids (`prepare`).

    Raises GroupError if a group that must share one prompt has candidates of different prompts.
    """
    members_by_key: dict[Hashable, list[Sample]] = {}
    for sample, key in zip(samples, keys(samples, recipe.group_by), strict=True):
        members_by_key.setdefault(key, []).append(sample)
    groups: list[Group] = []
    alone = 0
    for key, members in members_by_key.items():
        assert isinstance(key, tuple)
        if one_prompt(recipe):
            _require_one_prompt(key, members, recipe)
        n_compared = len(members)  # candidates of one prompt, or else episodes
        if not one_prompt(recipe):
            n_compared = len({sample.rollout for sample in members})
        if recipe.compares and n_compared < 2:
            alone += len(members)
        else:
            groups.append(Group(id=_group_id(key, members, recipe, part), key=key, samples=tuple(members)))
    return Groups(groups=tuple(groups), left_out={"group_of_one": alone} if alone else {})


def one_prompt(recipe: Method) -> bool:
    """Whether all members of a group of this recipe must have identical prompt token ids."""
    return recipe.plan != "independent" or "branch" in recipe.group_by or "prompt" in recipe.group_by


def explain_alone(recipe: Method, alone: int, total: int) -> str:
    """A text with the number of samples that are alone in their groups, the cause and the remedy."""
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


def _require_one_prompt(key: Hashable, group: Sequence[Sample], recipe: Method) -> None:
    """Raise GroupError if candidates of a group answer different prompts, so that a comparison would be unfair."""
    prompts = {s.prompt for s in group}
    if len(prompts) > 1:
        raise GroupError(
            f"Group {key!r} of recipe {recipe.name} holds candidates of {len(prompts)} different prompts, "
            f"from calls {sorted({s.call for s in group})[:4]}.",
            "Only candidates with identical prompt token ids may be compared under this key.",
        )


def _group_id(key: tuple[Hashable, ...], group: Sequence[Sample], recipe: Method, part: str) -> str:
    """The id under which records and views know a group.

    Under the tree plan it is the call whose candidates are compared; under replay it is the call at which the episode
    was forked. Other groups are named by a hash of their training step, the fields they are grouped by (`key`), and
    `part`, which separates policies with recipes of their own.
    """
    if recipe.plan == "tree":
        return group[0].call
    if recipe.plan == "replay":
        return group[0].branch
    # The id must be the same after --resume, so it hashes content instead of counting.
    content = [group[0].training_step, list(recipe.group_by), [str(value) for value in key], *filter(None, [part])]
    return hashlib.blake2b(msgspec.json.encode(content), digest_size=16).hexdigest()
