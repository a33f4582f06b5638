"""The recipes, from the classes that they are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from inspect import cleandoc

from wording import prose

from cotune.algorithms.catalogue import ANY_PLAN, GENERAL, PUBLISHED, RECIPES
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import Attribution, LossSpec


def recipes() -> str:
    """A table of all recipes: first the methods for any application, then the published systems."""
    titles = ("recipe", "plan", "groups samples by", "rewards that count", "loss", "paper")
    rows = [titles, ["---"] * len(titles), *map(_row, RECIPES.values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def methods() -> str:
    """The methods for any application, with their equations."""
    return _entries(GENERAL)


def published() -> str:
    """The published systems, with their equations."""
    return _entries(PUBLISHED)


def _row(method: type[Method]) -> tuple[str, ...]:
    title = cleandoc(method.__doc__ or "").partition("\n\n")[0]
    return (
        f"`{method.name}`",
        "any" if method.name in ANY_PLAN else method.plan,
        ", ".join(method.group_by),
        _rewards(method.attribution),
        _loss(method.loss),
        ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in re.findall(r"\d{4}\.\d{5}", title)),
    )


def _rewards(how: Attribution) -> str:
    parts = ["own"] if how.own else []
    parts += ["outcome"] if how.outcome else []
    text = " and ".join(parts)
    if how.seats:
        text += ", by seat"
    if how.gates:
        text += f", times {', '.join(how.gates)}"
    return text


def _loss(loss: LossSpec) -> str:
    if loss.ratio == "none":
        parts = ["−A · log p"]
    else:
        unit = "one ratio per response" if loss.ratio == "sequence" else "ratio per token"
        parts = [f"{unit}, {loss.style} clip {loss.clip_low:g} / {loss.clip_high:g}"]
    parts += [f"GAE ({loss.gae_gamma:g}, {loss.gae_lambda:g}) of a critic"] if loss.critic else []
    parts += [f"dual clip {loss.dual_clip:g}"] if loss.dual_clip else []
    parts += [f"KL {loss.kl:g} in the {loss.kl_in}"] if loss.kl else []
    parts += [f"entropy {loss.entropy:g}"] if loss.entropy else []
    parts += [f"`tis_cap` {loss.tis_cap:g}"] if loss.tis_cap not in (None, LossSpec().tis_cap) else []
    return ", ".join([*parts, f"`{loss.aggregation}`"])


def _entries(listed: Iterable[type[Method]]) -> str:
    """The docstring of each method: its paragraphs as text, its indented equations as blocks."""
    parts: list[str] = []
    for method in listed:
        parts.append(f"### {method.name} {{#{method.name}}}")
        for paragraph in cleandoc(method.__doc__ or "").split("\n\n"):
            if paragraph.startswith("    "):
                equations = "\n".join(line.removeprefix("    ") for line in paragraph.splitlines())
                parts.append(f"```text\n{equations}\n```")
            else:
                parts.append(_links(prose(paragraph)).replace("Difference: ", "**Difference:** ", 1))
    return "\n\n".join(parts)


def _links(text: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
