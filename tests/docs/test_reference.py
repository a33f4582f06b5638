"""The reference holds every public name, flag, field and reason: it is made from them, and loses none on the way."""

from __future__ import annotations

import argparse
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cotune
import cotune.types
from cotune.algorithms.catalogue import ANY_PLAN, RECIPES
from cotune.algorithms.filters import REASONS
from cotune.algorithms.recipes import Attribution, Filters, LossSpec
from cotune.cli.main import parser
from cotune.config.policy import EvaluationSampling, PolicyConfig
from cotune.config.prompts import SearchSettings
from cotune.config.train import TrainConfig

ROOT = Path(__file__).parents[2]


def page(site: Path, name: str) -> str:
    return (site / "reference" / f"{name}.html").read_text()


def section(text: str, heading: str) -> str:
    """What stands below a heading of the third level, up to the next one."""
    return re.split(r"<h[23][ >]", text.partition(f'<h3 id="{heading}"')[2])[0]


def codes(text: str) -> set[str]:
    """What stands in code."""
    return {html.unescape(found) for found in re.findall(r"<code>([^<]+)</code>", text)}


NAMES = [f"{module.__name__}.{name}" for module in (cotune, cotune.types) for name in module.__all__]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_with_what_it_says(built_site: Path, name: str) -> None:
    text = re.sub(r"<[^>]+>", "", section(page(built_site, "api"), name))
    assert len(text.split()) > 10


@pytest.mark.parametrize("name", cotune.__all__)
def test_every_function_is_there_with_its_signature_and_an_example(built_site: Path, name: str) -> None:
    text = section(page(built_site, "api"), f"cotune.{name}")
    assert "doc-signature" in text
    assert 'class="highlight"' in text


def commands(command: argparse.ArgumentParser, words: str = "cotune") -> Iterator[tuple[str, argparse.Action]]:
    """Every argument and flag, with the words of its command."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands(below, f"{words} {name}")
        elif words != "cotune" and action.dest not in ("help", "help_all"):
            yield words, action


def test_every_flag_is_there_with_its_help(built_site: Path) -> None:
    text = page(built_site, "cli")
    found = list(commands(parser()))
    for words, action in found:
        below = section(text, words.replace(" ", "-"))
        terms = {
            word
            for term in re.findall(r"<strong><code>([^<]+)</code></strong>", below)
            for word in re.split(r"[ ,]+", term)
        }
        assert terms.issuperset(action.option_strings or [action.metavar or action.dest]), (words, action.dest)
        assert action.help, (words, action.dest)
    assert {"cotune train", "cotune otel import", "cotune show"} <= {words for words, _ in found}


def test_every_example_is_a_line_of_its_own(built_site: Path) -> None:
    lines = re.sub(r"<[^>]+>", "", section(page(built_site, "cli"), "cotune-replay")).splitlines()
    assert sum(line.startswith("cotune replay runs/") for line in lines) == 4


def fields(kind: Any, prefix: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from fields(field.type, f"{field.encode_name}.")
        else:
            yield prefix + field.encode_name


def test_every_field_is_there(built_site: Path) -> None:
    terms = re.findall(r"<strong><code>([^<]+)</code></strong>", page(built_site, "configuration"))
    policy = [name for name in fields(PolicyConfig, "policy.") if name.startswith("policy.")]
    of_policies_alone = fields(EvaluationSampling, "policy.evaluation.")
    searches = fields(SearchSettings, "prompts.")
    assert sorted(terms) == sorted([*fields(TrainConfig), *policy, *of_policies_alone, *searches])


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("plan.k", "integer, default 4"),
        ("plan.select", '"argmax" | "sample" | "first", default "argmax"'),
        ("model", "text, required"),
        ("learner.lr", "Allowed: a number above 0."),
        ("steps", "Allowed: a number above 0."),
        ("learner.betas", "list of 2, each number, default [0.9, 0.999]"),
        ("policy", "list of tables, default []"),
        ("roles", "list of text, default []: Roles that the application has but shows only on some tasks."),
        ("on_failure", "reward:<number>"),
    ],
)
def test_a_field_says_its_type_default_and_what_is_allowed(built_site: Path, field: str, said: str) -> None:
    entry = (
        page(built_site, "configuration").partition(f"<strong><code>{field}</code></strong>")[2].partition("</li>")[0]
    )
    assert said in " ".join(html.unescape(re.sub(r"<[^>]+>", "", entry)).split())


def test_every_attribute_of_a_method_is_there(built_site: Path) -> None:
    names = {name for kind in (Attribution, Filters, LossSpec) for name in kind.__struct_fields__}
    assert names <= codes(page(built_site, "recipes"))


def test_every_recipe_is_there_with_its_plan_and_paper(built_site: Path) -> None:
    text = page(built_site, "recipes")
    rows = re.findall(r"<tr>\s*<td><code>(\w+)</code></td>\s*<td>(\w+)</td>", text)
    plans = {name: "any" if name in ANY_PLAN else recipe.plan for name, recipe in RECIPES.items()}
    assert dict(rows) == plans
    assert set(re.findall(r'<h3 id="(\w+)"', text)) >= set(RECIPES)
    differing = [name for name, recipe in RECIPES.items() if "Difference: " in (recipe.__doc__ or "")]
    assert text.count("<strong>Difference:</strong>") == len(differing) > 20


def test_every_measurement_is_there() -> None:
    """All tables that are made from benchmarks/figures are on a page, and one says what its lines say."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    asked = results + "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    folder = ROOT / "benchmarks" / "figures"
    measured = [json.loads(line)["table"] for line in (folder / "measured.jsonl").read_text().splitlines()]
    shown = re.findall(r"^<!-- generated: figures (.+) -->$", asked, re.MULTILINE)
    assert len(shown) == len(set(shown)) and set(shown) > set(measured)
    runs = {path.stem for path in folder.glob("*.jsonl")} - {"measured", "stress"}
    assert runs == {name.partition(",")[0] for name in shown} - {*measured, "without_tool"}
    assert "| trained together, a LoRA per role | 88.7% | 90.5% | 82.5% | 93.1% |" in results


def test_every_reason_is_there(built_site: Path) -> None:
    assert set(REASONS) <= codes(page(built_site, "metrics"))


def test_every_public_name_has_a_description_in_the_table() -> None:
    """Of an alias, the text below it: not that of its type, and not nothing."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\|$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    assert len(rows) == len(NAMES)
    assert [name for name, text in rows if not text or "PEP 604" in text] == []
