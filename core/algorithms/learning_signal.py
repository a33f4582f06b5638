"""What each role learns from, by name: shown before anything is trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cotune.algorithms.recipes import Recipe


def learns_from(own: Mapping[str, Collection[str]], outcome: Collection[str], recipe: Recipe) -> dict[str, str]:
    """A sentence for each role on the rewards that it is trained on, as `0.5 x team`.

    `own` are the components that a role's scorer returned (none without a scorer), `outcome` those of the episodes.
    """
    if not recipe.takes_rewards:
        return dict.fromkeys(own, "learns from the teacher; rewards count for nothing")
    how = recipe.attribution
    sentences: dict[str, str] = {}
    for role, names in own.items():
        mine = [] if how.horizon == "terminal" else sorted(names)
        shared = sorted(set(outcome) - set(mine)) if how.takes_outcome else []
        scored = _weighed({name: how.weight(name, role) for name in mine})
        ended = _weighed({name: how.weight(name, role, outcome=True) for name in shared})
        parts = [f"{scored} (its scorer)"] if scored else []
        parts += [f"{ended} (the episode's outcome)"] if ended else []
        without = [name for name in mine if how.weight(name, role) == 0]
        without += [name for name in shared if how.weight(name, role, outcome=True) == 0]
        sentences[role] = f"learns from {' and '.join(parts) or 'nothing'}" + (
            f"; weight 0: {', '.join(without)}" if without else ""
        )
    return sentences


def scorers_unused(own: Mapping[str, Collection[str]], recipe: Recipe) -> tuple[str, str]:
    """What to know where scorers reward candidates and nobody is trained on it, and the remedy; empty elsewhere."""
    how, scored = recipe.attribution, sorted(role for role, names in own.items() if names)
    if not scored or how.horizon != "terminal" or how.gates or not recipe.takes_rewards:
        return "", ""
    return (
        f"what the scorers of {', '.join(scored)} give is shown and trains no role: recipe {recipe.name} takes the "
        "outcome of whole episodes alone.",
        "Use --plan tree to train on it, or remove these scorers, for which every call waits.",
    )


def outcome_unused(own: Mapping[str, Collection[str]], outcome: Collection[str], recipe: Recipe) -> tuple[str, str]:
    """What to know where a reward of the workflow's own trains nobody, and the remedy; empty where it does, where a
    scorer returns a component of that name, or where there is none."""
    scored = {name for names in own.values() for name in names}
    unused = sorted(set(outcome) - scored)
    if not unused or recipe.attribution.takes_outcome:
        return "", ""
    names = ", ".join(unused)
    return (
        f"the workflow's own reward ({names}) is shown and trains no role: under the plan {recipe.plan} the candidates "
        f"of one call are compared by their role's scorer, and share one outcome.",
        "Return it from a scorer as `team` to train on it, or use --plan independent.",
    )


def _weighed(weights: Mapping[str, float]) -> str:
    return ", ".join(name if w == 1 else f"{w:g} x {name}" for name, w in weights.items() if w)
