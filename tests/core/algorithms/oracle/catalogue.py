"""The recipes by name, and one with single settings replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from cotune.errors import ConfigError, expectation_clause, field_and_fault
from cotune.near_names import did_you_mean, near_names
from tests.core.algorithms.oracle.published import METHODS, PUBLISHED
from tests.core.algorithms.oracle.recipes import PROMPT_KEY, USUAL, Attribution, Filters, LossSpec, Recipe, Shaping

S = TypeVar("S", bound=msgspec.Struct)

_REPLACE = msgspec.structs.replace

RECIPES: Mapping[str, Recipe] = {r.name: r for r in (*METHODS, *PUBLISHED)}

ANY_PLAN = ("gspo", "dapo", "cispo")
"""Recipes that are a loss for any grouping: under a tree plan they take the groups of at_grpo, under a replay plan
those of c3."""

_PARTS: dict[str, type[msgspec.Struct]] = {
    "loss": LossSpec,
    "filters": Filters,
    "shaping": Shaping,
    "attribution": Attribution,
}
_OWNER = {name: part for part, struct in _PARTS.items() for name in struct.__struct_fields__}
_TERM = ("key", "baseline", "scale", "scale_key", "ddof", "eps", "unit", "decay", "advantage")
SETTINGS = frozenset((*_OWNER, *_TERM))
"""What `recipe` takes, beside `plan`."""


def recipe(name: str, **overrides: Any) -> Recipe:
    """The recipe `name` with single settings replaced; each setting is named as in its struct.

    `team_weight`, `weights`, `horizon`, ... and `baseline`, `scale`, ... apply to every term. `weights` without `other`
    leaves unlisted components out, `critic` baseline and scale, and the filters `zero_variance` and `zero_advantage`.
    `plan` takes the groups with it: gspo, dapo and cispo compare siblings under a tree or replay plan, and own-turn
    rewards take in the outcome where each episode has one of its own. Raises ConfigError for an unknown name, setting
    or value.
    """
    if name not in RECIPES:
        raise ConfigError("recipe", name, f"is not one of {', '.join(sorted(RECIPES))}")
    chosen = RECIPES[name]
    if "plan" in overrides:
        chosen = _under(chosen, overrides.pop("plan"))
    if overrides.get("critic"):
        overrides = {"baseline": "none", "scale": "none", "zero_variance": False, "zero_advantage": False, **overrides}
    if "weights" in overrides:
        overrides.setdefault("other", 0.0)
    changes: dict[str, dict[str, Any]] = {"loss": {}, "filters": {}, "shaping": {}, "attribution": {}, "term": {}}
    for field, value in overrides.items():
        part = "term" if field in _TERM else _OWNER.get(field)
        if part is None:
            known = sorted([*SETTINGS, "plan"])
            raise ConfigError(
                field, value, f"is not a setting of recipes: {', '.join(known)}", did_you_mean(near_names(field, known))
            )
        changes[part][field] = value
    terms = tuple(
        _convert(term, {**changes["term"], "attribution": _convert(term.attribution, changes["attribution"])})
        for term in chosen.terms
    )
    return _REPLACE(
        chosen,
        terms=terms,
        loss=_convert(chosen.loss, changes["loss"]),
        filters=_convert(chosen.filters, changes["filters"]),
        shaping=_convert(chosen.shaping, changes["shaping"]),
    )


def takes_a_tree(name: str) -> bool:
    """Whether the recipe can compare the candidates of one call. Raises ConfigError for an unknown name."""
    return name in ANY_PLAN or recipe(name).plan == "tree"


def _under(chosen: Recipe, plan: Any) -> Recipe:
    if plan not in USUAL:
        raise ConfigError("plan", plan, f"is not one of {', '.join(USUAL)}")
    if chosen.plan == "replay" and plan != "replay":
        raise ConfigError(
            "plan.kind",
            plan,
            f"cannot be used with recipe {chosen.name}, which needs replay",
            f"Use --plan replay, or recipe {USUAL[plan]}.",
        )
    terms, loss = chosen.terms, chosen.loss
    if plan != "independent" and chosen.name in ANY_PLAN:
        terms = RECIPES[USUAL[plan]].terms
        if loss.aggregation == "trajectory_mean":
            loss = _REPLACE(loss, aggregation="sequence_mean")
    if plan != "independent" and not chosen.takes_rewards:  # nothing is compared
        terms = tuple(_REPLACE(t, key=PROMPT_KEY, attribution=Attribution()) for t in terms)
    if plan != "tree" and chosen.plan == "tree":
        terms = tuple(_REPLACE(t, attribution=_REPLACE(t.attribution, outcome=True)) for t in terms)
    return _REPLACE(chosen, plan=plan, terms=terms, loss=loss)


def _convert(struct: S, changes: Mapping[str, Any]) -> S:
    fields = {**msgspec.structs.asdict(struct), **changes}
    for field, value in changes.items():
        if isinstance(value, msgspec.Struct):
            fields[field] = msgspec.to_builtins(value)
    try:
        return msgspec.convert(fields, type(struct), strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        path, message = field_and_fault(error)
        field = re.split(r"\W", path)[0]
        options = get_args(get_type_hints(type(struct)).get(field))
        fault = (
            f"is not one of {', '.join(options)}"
            if options and isinstance(options[0], str)
            else expectation_clause(message)
        )
        raise ConfigError(field, fields.get(field), fault) from None
