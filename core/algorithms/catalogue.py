"""The recipes by name. `recipe` makes one with some settings replaced. To add a recipe, add its class to `RECIPES`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from cotune.algorithms.method import Method
from cotune.algorithms.methods.advantage_alignment import AdvantageAlignment
from cotune.algorithms.methods.afm_rl import AfmRl
from cotune.algorithms.methods.any_plan import AnyPlan
from cotune.algorithms.methods.at_grpo import AtGrpo
from cotune.algorithms.methods.c3 import C3
from cotune.algorithms.methods.c3_branches import C3Branches
from cotune.algorithms.methods.cispo import Cispo
from cotune.algorithms.methods.comas import CoMas
from cotune.algorithms.methods.cory import Cory
from cotune.algorithms.methods.cpmobius import CpMobius
from cotune.algorithms.methods.dapo import Dapo
from cotune.algorithms.methods.dart import Dart
from cotune.algorithms.methods.distill import Distill
from cotune.algorithms.methods.dr_grpo import DrGrpo
from cotune.algorithms.methods.dr_mas import DrMas
from cotune.algorithms.methods.gigpo import GiGpo
from cotune.algorithms.methods.grpo import Grpo
from cotune.algorithms.methods.gspo import Gspo
from cotune.algorithms.methods.m_grpo import MGrpo
from cotune.algorithms.methods.magrpo import MaGrpo
from cotune.algorithms.methods.maporl import MaPoRl
from cotune.algorithms.methods.marshal import Marshal
from cotune.algorithms.methods.mmedagent_rl import MMedAgentRl
from cotune.algorithms.methods.reinforce_pp import ReinforcePp
from cotune.algorithms.methods.reinforce_pp_baseline import ReinforcePpBaseline
from cotune.algorithms.methods.rloo import Rloo
from cotune.algorithms.methods.self_distill import SelfDistill
from cotune.algorithms.methods.self_redteam import SelfRedTeam
from cotune.algorithms.methods.spiral import Spiral
from cotune.algorithms.recipes import USUAL, Attribution, Filters, LossSpec
from cotune.config.methods import LossSettings, RewardSettings
from cotune.errors import ConfigError, expectation_clause, field_and_fault
from cotune.near_names import did_you_mean, near_names
from cotune.user_objects import load_object

S = TypeVar("S", bound=msgspec.Struct)

GENERAL: tuple[type[Method], ...] = (AtGrpo, DrMas, Grpo, DrGrpo, Rloo, Gspo, Dapo, Cispo)
"""Methods for any application."""
PUBLISHED: tuple[type[Method], ...] = (
    AdvantageAlignment, AfmRl, C3, C3Branches, CoMas, Cory, CpMobius, Dart, Distill, GiGpo, MGrpo, MaGrpo, MaPoRl,
    Marshal, MMedAgentRl, ReinforcePp, ReinforcePpBaseline, SelfDistill, SelfRedTeam, Spiral,
)  # fmt: skip
"""Published systems: a method with the application that it was made for."""
RECIPES: Mapping[str, type[Method]] = {method.name: method for method in (*GENERAL, *PUBLISHED)}
ANY_PLAN = tuple(name for name, method in RECIPES.items() if issubclass(method, AnyPlan))
"""Recipes that are a loss for any plan."""

_FILTERS = ("zero_variance", "drop_truncated")
"""Settings of [rewards] that leave samples out, and so belong to a method's `filters`."""
SETTINGS: Mapping[str, str] = {
    **dict.fromkeys(RewardSettings.__struct_fields__, "attribution"),
    **dict.fromkeys(_FILTERS, "filters"),
    **dict.fromkeys(LossSettings.__struct_fields__, "loss"),
}
"""The settings that a run may change, each with the attribute of a method that holds it."""

_METHOD = "Choose a recipe that does this, or write a method of your own; see docs/reference/recipes.md."
_SIMILAR = ("key", "baseline", "scale", "scale_key", "ddof", "eps", "unit", "decay", "horizon", "outcome", "gamma")
_ATTRIBUTE = "Write it into a method of your own, as in {}; see docs/reference/recipes.md."
REMOVED: Mapping[str, str] = {
    **dict.fromkeys((*_SIMILAR, "scope", "seats", "gates", "opponent", "opponent_gamma", "style"), _METHOD),
    **dict.fromkeys(("ties", "mean_range_roles", "zero_advantage", "top_entropy", "align_to", "entropy_by"), _METHOD),
    **dict.fromkeys(("critic", "gae_gamma", "gae_lambda"), "Use recipe cory or maporl, or derive from one."),
    "critic_sees": _ATTRIBUTE.format('loss = LossSpec(critic=True, critic_sees="reference")'),
    "advantage": 'Write a class with advantages(step, rewards), and set recipe = "my_method.py:Ranked".',
    "other": "List every component that counts in `weights`.",
    "timeout_penalty": _ATTRIBUTE.format("attribution = Attribution(outcome=True, timeout_penalty=0.5)"),
    "mean_range": _ATTRIBUTE.format("filters = Filters(mean_range=(0.2, 0.8))"),
    "drop_timed_out": _ATTRIBUTE.format("filters = Filters(drop_timed_out=True)"),
    "dual_clip": _ATTRIBUTE.format("loss = LossSpec(dual_clip=3.0)"),
    "kl_in": _ATTRIBUTE.format('loss = LossSpec(kl=0.01, kl_in="reward")'),
    "mask_low": "Use mask_range = [LOW, HIGH].",
    "mask_high": "Use mask_range = [LOW, HIGH].",
    "token_loss": _ATTRIBUTE.format('loss = LossSpec(token_loss=f"{__file__}:soft_clip")'),
    "critic_lr": _ATTRIBUTE.format("loss = LossSpec(critic=True, critic_lr=0.01)"),
    "constant_length": "Leave it out: it is the run's response limit, sampling.max_tokens.",
}
"""Settings that recipes had, and what to use instead."""


def recipe(name: str, **settings: Any) -> Method:
    """The recipe `name`, or the user's class that `name` gives as `file.py:Class`, with some settings replaced.

    With `weights`, components that are not listed do not count. `plan` also decides the groups: gspo, dapo and cispo
    compare siblings under a tree or replay plan, and a method for trees adds the outcome if each episode has a separate
    one. Raises ConfigError for an unknown name, setting or value.
    """
    method = recipe_class(name)()
    method.name = name
    for attribute, kind in (("attribution", Attribution), ("filters", Filters), ("loss", LossSpec)):
        value = getattr(method, attribute)
        if not isinstance(value, kind):
            fault = f"has {attribute} = {value!r}, which is not of type {kind.__name__}"
            raise ConfigError("recipe", name, fault, f"Write {attribute} = {kind.__name__}(...).")
    if "plan" in settings:
        plan = settings.pop("plan")
        if plan not in USUAL:
            raise ConfigError("plan", plan, f"is not one of {', '.join(USUAL)}")
        method = method.under(plan)
    changes: dict[str, dict[str, Any]] = {"attribution": {}, "filters": {}, "loss": {}}
    if "weights" in settings:
        changes["attribution"]["other"] = 0.0
    for field, value in settings.items():
        if field in REMOVED:
            raise ConfigError(field, value, "was removed from the settings of recipes", REMOVED[field])
        if field not in SETTINGS:
            names = sorted([*SETTINGS, "plan"])
            fault = f"is not a setting of recipes: {', '.join(names)}"
            raise ConfigError(field, value, fault, did_you_mean(near_names(field, names)))
        changes[SETTINGS[field]][field] = value
    method = method.replaced(
        attribution=_convert(method.attribution, changes["attribution"]),
        filters=_convert(method.filters, changes["filters"]),
        loss=_convert(method.loss, changes["loss"]),
    )
    method.check()
    return method


def recipe_class(name: str) -> type[Method]:
    """The class of a recipe. A user's class is loaded from its file or module. Raises ConfigError."""
    if name in RECIPES:
        return RECIPES[name]
    if not is_own(name):
        remedy = "A class of your own: my_method.py:Ranked."
        if nearest := did_you_mean(near_names(name, RECIPES)):
            remedy = f"{nearest} {remedy}"
        raise ConfigError("recipe", name, f"is not one of {', '.join(sorted(RECIPES))}", remedy)
    loaded = load_object("recipe", name, "my_method.py:Ranked", kind="methods", is_wanted=_is_own_method)
    if not _is_method(loaded):
        raise ConfigError("recipe", name, "is not a class that derives from cotune.methods.Method")
    method: type[Method] = loaded
    return method


def is_own(name: str) -> bool:
    """Whether a recipe's name names a class of the user."""
    return ":" in name


def takes_a_tree(name: str) -> bool:
    """Whether the recipe can compare the candidates of one call. Raises ConfigError for an unknown name."""
    method = recipe_class(name)
    return issubclass(method, AnyPlan) or method.plan == "tree"


def _is_method(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Method) and value is not Method


def _is_own_method(value: Any) -> bool:
    return _is_method(value) and not value.__module__.startswith("cotune.")


def _convert(struct: S, changes: Mapping[str, Any]) -> S:
    """A copy of `struct` with some fields replaced by `changes`, whose values may be text from the command line.

    Raises ConfigError that names the field and, if its type lists them, the allowed values.
    """
    fields = {**msgspec.structs.asdict(struct), **changes}
    try:
        return msgspec.convert(fields, type(struct), strict=False)
    except msgspec.ValidationError as error:
        # The struct's own check (`__post_init__`) failed: its error already names the field and the remedy.
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        path, message = field_and_fault(error)
        field = re.split(r"\W", path)[0]  # the field of the struct at the start of a path such as `weights[...]`
        fault = expectation_clause(message)
        options = get_args(get_type_hints(type(struct)).get(field))
        if options and isinstance(options[0], str):  # the values of a Literal
            fault = f"is not one of {', '.join(options)}"
        raise ConfigError(field, fields.get(field), fault) from None
