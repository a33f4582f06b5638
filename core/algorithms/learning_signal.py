"""What each role learns from, by name: shown before anything is trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from cotune.algorithms.attribution import weight_of
from cotune.algorithms.method import Method
from cotune.errors import ConfigError
from cotune.near_names import did_you_mean, near_names


def learns_from(own: Mapping[str, Collection[str]], outcome: Collection[str], recipe: Method) -> dict[str, str]:
    """A sentence for each role on the rewards that it is trained on, as `0.5 x team`.

    `own` are the components that a role's scorer returned (none without a scorer), `outcome` those of the episodes.
    """
    if not recipe.takes_rewards:
        return dict.fromkeys(own, "learns from the teacher; rewards count for nothing")
    how = recipe.attribution
    sentences: dict[str, str] = {}
    for role, names in own.items():
        mine = sorted(names) if how.own else []
        shared = sorted(set(outcome) - set(mine)) if how.outcome else []
        scored = _weighed({name: weight_of(name, role, how) for name in mine})
        ended = _weighed({name: weight_of(name, role, how, outcome=True) for name in shared})
        parts = [f"{scored} (its scorer)"] if scored else []
        parts += [f"{ended} (the episode's outcome)"] if ended else []
        without = [name for name in mine if weight_of(name, role, how) == 0]
        without += [name for name in shared if weight_of(name, role, how, outcome=True) == 0]
        sentences[role] = f"learns from {' and '.join(parts) or 'nothing'}" + (
            f"; weight 0: {', '.join(without)}" if without else ""
        )
    return sentences


def scorers_unused(own: Mapping[str, Collection[str]], recipe: Method) -> tuple[str, str]:
    """What to know where scorers reward candidates and nobody is trained on it, and the remedy; empty elsewhere."""
    how, scored = recipe.attribution, sorted(role for role, names in own.items() if names)
    if not scored or how.own or how.gates or not recipe.takes_rewards:
        return "", ""
    return (
        f"what the scorers of {', '.join(scored)} give is shown and trains no role: recipe {recipe.name} takes the "
        "outcome of whole episodes alone.",
        "Use --plan tree to train on it, or remove these scorers, for which every call waits.",
    )


def outcome_unused(own: Mapping[str, Collection[str]], outcome: Collection[str], recipe: Method) -> tuple[str, str]:
    """What to know where a reward of the workflow's own trains nobody, and the remedy; empty where it does, where a
    scorer returns a component of that name, or where there is none."""
    scored = {name for names in own.values() for name in names}
    unused = sorted(set(outcome) - scored)
    if not unused or recipe.attribution.outcome:
        return "", ""
    names = ", ".join(unused)
    return (
        f"the workflow's own reward ({names}) is shown and trains no role: under the plan {recipe.plan} the candidates "
        f"of one call are compared by their role's scorer, and share one outcome.",
        "Return it from a scorer as `team` to train on it, or use --plan independent.",
    )


def unknown_names(
    recipe: Method, own: Mapping[str, Collection[str]], outcome: Collection[str], roles: Collection[str]
) -> tuple[list[ConfigError], list[str]]:
    """What is wrong with the rewards and roles that a recipe names: errors for names that are nearly another's and for
    roles that are none, and notes on rewards that nobody carried. Arguments as for `learns_from`; `roles` are all."""
    errors: list[ConfigError] = []
    notes: list[str] = []
    for setting, name, known in _unknown(recipe, {n for names in own.values() for n in names}, outcome, roles):
        near = did_you_mean(near_names(name, known))
        seen = ", ".join(known)
        # A user names weights; all other names come with the recipe, and the application has to follow them.
        field, value, subject = "rewards.weights", name, "is"
        if setting != "weights":
            field, value, subject = "recipe", recipe.name, f"has {name!r} in `{setting}`, which is"
        if setting == "mean_range_roles":
            remedy = f"{near} Name the role so, or list it under `roles` if it shows only on some tasks.".strip()
            errors.append(ConfigError(field, value, f"{subject} not a role of the application: {seen}", remedy))
        elif near:
            remedy = f"{near} If it is another reward that few episodes carry, return it in all of them."
            errors.append(ConfigError(field, value, f"{subject} not a reward that was returned: {seen}", remedy))
        else:
            metric = "; `success` is a metric, return a reward under another name" if name == "success" else ""
            notes.append(
                f"{setting} names {name!r}, which nothing carried that was looked at: it changes nothing there{metric}"
            )
    return errors, notes


def _unknown(
    recipe: Method, scored: Collection[str], outcome: Collection[str], roles: Collection[str]
) -> Iterator[tuple[str, str, list[str]]]:
    """(setting, name, those that there are)."""
    weighing = recipe.loss.entropy_by
    if outcome and weighing and weighing not in outcome:
        yield "entropy_by", weighing, sorted(outcome)
    returned = sorted({*outcome, *scored})
    for gate in dict.fromkeys(recipe.attribution.gates):
        if returned and gate not in returned:
            yield "gates", gate, returned
    for name in dict.fromkeys(name.rpartition("/")[2] for name in recipe.attribution.weights):
        if returned and name not in returned:
            yield "weights", name, returned
    for role in recipe.filters.mean_range_roles:
        if role not in roles:
            yield "mean_range_roles", role, sorted({*roles})


def _weighed(weights: Mapping[str, float]) -> str:
    return ", ".join(name if w == 1 else f"{w:g} x {name}" for name, w in weights.items() if w)
