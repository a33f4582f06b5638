"""The recipes, from the configurations that they are."""

from __future__ import annotations

import re
import tomllib
from inspect import cleandoc
from pathlib import Path

from wording import prose

from cotune.algorithms.catalogue import ANY_PLAN, RECIPES
from cotune.algorithms.published import METHODS, PUBLISHED
from cotune.algorithms.recipes import LossSpec, Recipe, Term

DIFFERS: dict[str, str] = tomllib.loads((Path(__file__).parent / "differences.toml").read_text())
"""By recipe, how it differs from its paper."""
PARTS = {"sample": "calls", "trajectory": "episodes", "token": "tokens"}


def recipes() -> str:
    """A table of all recipes: first those of the catalogue, then the published systems."""
    titles = ("recipe", "plan", "groups samples by", "reward", "advantage", "loss", "paper")
    rows = [titles, ["---"] * len(titles), *map(_row, RECIPES.values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def formulas() -> str:
    """Each published system with its formula, then how recipes differ from their papers."""
    parts = []
    for recipe in PUBLISHED:
        title, _, formula = cleandoc(recipe.about).partition("\n\n")
        differs = f" Here: {DIFFERS[recipe.name]}" if recipe.name in DIFFERS else ""
        parts.append(f"- **`{recipe.name}`**: {_links(prose(title))} {_links(prose(formula))}{differs}")
    parts += [f"- **`{recipe.name}`**: Here: {DIFFERS[recipe.name]}" for recipe in METHODS if recipe.name in DIFFERS]
    return "\n".join(parts)


def _row(recipe: Recipe) -> tuple[str, ...]:
    first = recipe.terms[0]
    papers = re.findall(r"\d{4}\.\d{5}", cleandoc(recipe.about).partition("\n\n")[0])
    return (
        f"`{recipe.name}`",
        "any" if recipe.name in ANY_PLAN else recipe.plan,
        "; ".join(", ".join(term.key) for term in recipe.terms),
        _reward(recipe),
        _advantage(recipe, first),
        _loss(recipe.loss),
        ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in papers),
    )


def _reward(recipe: Recipe) -> str:
    said = []
    for term in recipe.terms:
        how = term.attribution
        parts = [f"`{how.horizon}`"]
        parts += [f"γ {how.gamma:g}"] if how.horizon in ("reward_to_go", "mean_to_go") else []
        parts += ["with the outcome"] if how.outcome else []
        parts += [f"{how.scope} over the roles"] if how.scope != "own" else []
        parts += ["by seat"] if how.seats else []
        parts += [f"times {', '.join(how.gates)}"] if how.gates else []
        said.append(", ".join(parts))
    return "; ".join(said)


def _advantage(recipe: Recipe, term: Term) -> str:
    if recipe.loss.critic:
        return f"GAE ({recipe.loss.gae_gamma:g}, {recipe.loss.gae_lambda:g}) of a critic"
    baseline = {"none": "no baseline", "ema": f"ema {term.decay:g}"}.get(term.baseline, term.baseline)
    if term.baseline == "none" and term.scale == "none":
        return "none"
    scale = "no std" if term.scale == "none" else f"std by {', '.join(term.scale_key)}" if term.scale_key else "std"
    return f"{baseline.replace('_', ' ')}, {scale} over {PARTS[term.unit]}"


def _loss(loss: LossSpec) -> str:
    if loss.ratio == "none":
        parts = ["−A · log p"]
    else:
        unit = "one ratio per response" if loss.ratio == "sequence" else "ratio per token"
        parts = [f"{unit}, {loss.style} clip {loss.clip_low:g} / {loss.clip_high:g}"]
    parts += [f"dual clip {loss.dual_clip:g}"] if loss.dual_clip else []
    parts += [f"KL {loss.kl:g} in the {loss.kl_in}"] if loss.kl else []
    parts += [f"entropy {loss.entropy:g}"] if loss.entropy else []
    parts += [f"`tis_cap` {loss.tis_cap:g}"] if loss.tis_cap not in (None, LossSpec().tis_cap) else []
    return ", ".join([*parts, f"`{loss.aggregation}`"])


def _links(text: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
