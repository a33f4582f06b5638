"""The recipes, from the configurations that they are."""

from __future__ import annotations

import importlib
import pkgutil
import re
import tomllib
from pathlib import Path

from wording import prose

from cotune.algorithms import published
from cotune.algorithms.catalogue import ANY_PLAN, RECIPES
from cotune.algorithms.recipes import LossSpec, Recipe, Term

PAPERS = {
    "at_grpo": "2510.11062",
    "dr_mas": "2602.08847",
    "grpo": "2402.03300",
    "dr_grpo": "2503.20783",
    "rloo": "2402.14740",
    "gspo": "2507.18071",
    "dapo": "2503.14476",
    "cispo": "2506.13585",
}
"""Of the recipes in the catalogue itself; the others have theirs in the docstrings of their modules."""
DIFFERS: dict[str, str] = tomllib.loads((Path(__file__).parent / "differences.toml").read_text())
"""By recipe, how it differs from its paper."""
PARTS = {"sample": "calls", "trajectory": "episodes", "token": "tokens"}


def recipes() -> str:
    """A table of all recipes: first those of the catalogue, then the published systems."""
    titles = ("recipe", "plan", "groups samples by", "reward", "advantage", "loss", "paper")
    ordered = [*(RECIPES[name] for name in PAPERS), *(recipe for name, recipe in RECIPES.items() if name not in PAPERS)]
    rows = [titles, ["---"] * len(titles), *map(_row, ordered)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def formulas() -> str:
    """Each published system with its formula, then how recipes differ from their papers."""
    parts = []
    for names, text in _documented().items():
        title, _, formula = text.partition("\n\n")
        differs = " ".join(DIFFERS.get(name, "") for name in names.split("`, `")).strip()
        here = f" Here: {differs}" if differs else ""
        parts.append(f"`{names}`\n:   {_links(prose(title))} {_links(prose(formula))}{here}\n")
    parts += [f"`{name}`\n:   Here: {DIFFERS[name]}\n" for name in PAPERS if name in DIFFERS]
    return "\n".join(parts)


def _documented() -> dict[str, str]:
    """The docstring of the module of each published system, by the names of its recipes."""
    found: dict[str, str] = {}
    for info in pkgutil.iter_modules(published.__path__):
        module = importlib.import_module(f"{published.__name__}.{info.name}")
        names = [value.name for value in vars(module).values() if isinstance(value, Recipe)]
        found["`, `".join(names)] = (module.__doc__ or "").strip()
    return found


def _row(recipe: Recipe) -> tuple[str, ...]:
    first = recipe.terms[0]
    text = next((text for names, text in _documented().items() if recipe.name in names.split("`, `")), "")
    papers = [PAPERS[recipe.name]] if recipe.name in PAPERS else re.findall(r"\d{4}\.\d{5}", text.partition("\n\n")[0])
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
