"""The recipe that a run was trained with, read from its folder, or the usual one for records by themselves."""

from __future__ import annotations

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.recipes import USUAL, Recipe
from cotune.sampling.plans import PlanKind
from cotune.storage.run_layout import RunConfig, is_run, read_run
from cotune.storage.sqlite_store import SqliteStore


def recipe_of(store: SqliteStore) -> tuple[Recipe, str]:
    """The run's recipe as its run.json tells, else the default one for the plan that the records look like."""
    config = config_of(store)
    plan = config.plan.kind or _plan_of(store)
    name = config.recipe or USUAL[plan]
    settings = {"plan": plan, "alpha": config.alpha, **config.overrides}
    source = "as the run was configured" if is_run(store.path.parent) else "as the records suggest"
    return recipe(name, **settings), f"plan {plan}, recipe {name}, {source}"


def _plan_of(store: SqliteStore) -> PlanKind:
    several = store.rows("SELECT 1 FROM calls WHERE json_array_length(candidates) > 1 LIMIT 1")
    return "tree" if several else "independent"


def config_of(store: SqliteStore) -> RunConfig:
    """The configuration of the run that the records belong to; the defaults where they belong to none."""
    folder = store.path.parent
    return read_run(folder).config if is_run(folder) else RunConfig()
