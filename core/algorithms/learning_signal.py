"""Name the rewards that each role learns from, before anything is trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from cotune.algorithms.attribution import weight_of
from cotune.algorithms.method import Method
from cotune.errors import ConfigError
from cotune.near_names import did_you_mean, near_names


def learns_from(own: Mapping[str, Collection[str]], outcome: Collection[str], recipe: Method) -> dict[str, str]:
    """A sentence for each role that names the rewards that it is trained on, with their weights: `0.5 x team`.

    `own` has the names of the components that each role's scorer returned (none without a scorer), and `outcome` the
    names of the components of the episodes.
    """
    if not recipe.takes_rewards:
        return dict.fromkeys(own, "learns from the teacher; rewards count for nothing")
    attribution = recipe.attribution
    sentences: dict[str, str] = {}
    for role, names in own.items():
        weights: dict[str, float] = {}
        if attribution.own:
            weights = {name: weight_of(name, role, attribution) for name in sorted(names)}
        outcome_weights: dict[str, float] = {}
        if attribution.outcome:
            for name in sorted(set(outcome) - weights.keys()):  # a component of both counts once, as the scorer's
                outcome_weights[name] = weight_of(name, role, attribution, outcome=True)

        sources: list[str] = []
        if weighted_scores := _weighted_names(weights):
            sources.append(f"{weighted_scores} (its scorer)")
        if weighted_outcome := _weighted_names(outcome_weights):
            sources.append(f"{weighted_outcome} (the episode's outcome)")
        sentence = f"learns from {' and '.join(sources) or 'nothing'}"
        without_weight = [name for name, weight in [*weights.items(), *outcome_weights.items()] if weight == 0]
        if without_weight:
            sentence += f"; weight 0: {', '.join(without_weight)}"
        sentences[role] = sentence
    return sentences


class Note(NamedTuple):
    """A note for the user: a sentence, and its remedy. Both are empty if there is nothing to say."""

    text: str
    remedy: str


NO_NOTE = Note("", "")


def scorers_unused(own: Mapping[str, Collection[str]], recipe: Method) -> Note:
    """A note if scorers return rewards and the recipe does not use them. `own` has the names of the components that
    each role's scorer returned."""
    roles_with_scorer = sorted(role for role, names in own.items() if names)
    uses_scores = recipe.attribution.own or recipe.attribution.gates
    if not roles_with_scorer or uses_scores or not recipe.takes_rewards:
        return NO_NOTE
    return Note(
        f"the rewards of the scorers of {', '.join(roles_with_scorer)} are shown and train no role: recipe "
        f"{recipe.name} takes the outcome of whole episodes alone.",
        "Use --plan tree to train on it, or remove these scorers, for which every call waits.",
    )


def outcome_unused(own: Mapping[str, Collection[str]], outcome: Collection[str], recipe: Method) -> Note:
    """A note if the workflow returns rewards that train no role, because the recipe does not use outcomes.

    A reward that a scorer returns under the same name is used. For the arguments see `learns_from`.
    """
    names_of_scorers = set().union(*own.values())
    unused = sorted(set(outcome) - names_of_scorers)
    if not unused or recipe.attribution.outcome:
        return NO_NOTE
    names = ", ".join(unused)
    return Note(
        f"the workflow's own reward ({names}) is shown and trains no role: under the plan {recipe.plan} the candidates "
        f"of one call are compared by their role's scorer, and share one outcome.",
        "Return it from a scorer as `team` to train on it, or use --plan independent.",
    )


def unknown_names(
    recipe: Method, own: Mapping[str, Collection[str]], outcome: Collection[str], roles: Collection[str]
) -> tuple[list[ConfigError], list[str]]:
    """Check the rewards and roles that a recipe names in its settings.

    Returns errors for misspelt rewards and for roles that do not exist, and notes on rewards that no episode had. For
    the arguments see `learns_from`; `roles` are all roles.
    """
    errors: list[ConfigError] = []
    notes: list[str] = []
    names_of_scorers = set().union(*own.values())
    for setting, name, existing_names in _unknown_settings(recipe, names_of_scorers, outcome, roles):
        suggestion = did_you_mean(near_names(name, existing_names))
        is_role = setting == "mean_range_roles"
        if not is_role and not suggestion:
            # It resembles no other name, so it may be right: a reward that only few episodes have.
            note = f"{setting} names {name!r}, a reward that no episode had so far: it changes nothing there"
            if name == "success":
                note += "; `success` is a metric, return a reward under another name"
            notes.append(note)
            continue

        fault = f"not a reward that was returned: {', '.join(existing_names)}"
        remedy = f"{suggestion} If it is another reward that few episodes carry, return it in all of them."
        if is_role:
            fault = f"not a role of the application: {', '.join(existing_names)}"
            remedy = f"{suggestion} Name the role so, or list it under `roles` if it shows only on some tasks.".strip()
        # A user names weights; all other names come with the recipe, and the application has to follow them.
        if setting == "weights":
            errors.append(ConfigError("rewards.weights", name, f"is {fault}", remedy))
        else:
            errors.append(ConfigError("recipe", recipe.name, f"has {name!r} in `{setting}`, which is {fault}", remedy))
    return errors, notes


def _unknown_settings(
    recipe: Method, scored: Collection[str], outcome: Collection[str], roles: Collection[str]
) -> Iterator[tuple[str, str, list[str]]]:
    """The names in a method's settings that do not exist, as (setting, name, existing names).

    `scored` are the names of rewards that scorers give, and `outcome` those that the workflow returns. While both are
    empty, no name of a reward is refused.
    """
    entropy_by = recipe.loss.entropy_by
    if outcome and entropy_by and entropy_by not in outcome:
        yield "entropy_by", entropy_by, sorted(outcome)
    returned = sorted({*outcome, *scored})
    for gate in dict.fromkeys(recipe.attribution.gates):
        if returned and gate not in returned:
            yield "gates", gate, returned
    # A weight may be for one role only: `planner/local`.
    for name in dict.fromkeys(name.rpartition("/")[2] for name in recipe.attribution.weights):
        if returned and name not in returned:
            yield "weights", name, returned
    for role in recipe.filters.mean_range_roles:
        if role not in roles:
            yield "mean_range_roles", role, sorted({*roles})


def _weighted_names(weights: Mapping[str, float]) -> str:
    """The names of components with their weights, as `team, 0.5 x local`, without components of weight 0."""
    texts: list[str] = []
    for name, weight in weights.items():
        if weight == 1:
            texts.append(name)
        elif weight:
            texts.append(f"{weight:g} x {name}")
    return ", ".join(texts)
