"""Writes the README.md of an export, which is its model card on the Hub: roles, training, evaluation, cost, serving."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from cotune.adapters.curve import svg
from cotune.adapters.manifest import LLAMA_CPP_PORT, ExportedRole, Manifest, not_updated
from cotune.adapters.prompts import prompts_named
from cotune.integrations.models.folder.gguf import public_name
from cotune.intervals import Interval
from cotune.reading.curves import FIRST, Chart, charts, first_charts
from cotune.reading.evaluations import StoredEvaluation, read_evaluation
from cotune.reading.facts import Facts, facts
from cotune.reading.headline import PLAIN_COLUMN, Headline
from cotune.reading.run import OpenedRun
from cotune.reading.use import Totals, Use
from cotune.reading.words import change_text, interval_text
from cotune.storage.checkpoints import checkpoint_name
from cotune.tables import figure, sparkline

CURVE = "curve.svg"
"""File of the image in the card."""
_PORT = 8000
"""The default port of `cotune serve`."""
_TITLES = {"cotune": "cotune", "vllm": "vLLM, one server per line", "llama.cpp": "llama.cpp", "ollama": "Ollama"}
_OLLAMA = (
    "Ollama listens on port 11434. It may replace the model's chat template by one of its own. Compare "
    "`ollama show --template ROLE` with the template of the model; if they differ, add a `TEMPLATE` to the Modelfile."
)


class Background(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of an export's run."""

    facts: Facts
    charts: list[Chart]
    uses: dict[str, Use]
    """Tokens and cost of all calls, by role."""
    evaluated: StoredEvaluation | None
    headline: Headline
    unevaluated: str = ""
    """The reason why the exported weights have no evaluation, although the run has others; empty otherwise."""


def read_background(run: Path, evaluation: Path | None = None, steps: Collection[int] = ()) -> Background:
    """Read the figures of a run for the card of its export.

    `steps` are the numbers of steps of the exported checkpoints; empty for the newest checkpoint. The card shows the
    evaluation in the folder `evaluation`. By default it shows the run's newest evaluation of the exported weights; an
    evaluation of the run that cannot be read is left out with a warning. Raises ConfigError if the folder `evaluation`
    holds no evaluation, RunError.
    """
    named_evaluation = read_evaluation(evaluation) if evaluation else None
    with OpenedRun(run) as opened:
        headline, unevaluated = _headline_of_weights(opened, named_evaluation, set(steps))
        # The most informative chart of each section that a reader of the card cares about.
        shown_charts = []
        charts_by_information = first_charts(charts([opened]), most=len(FIRST))  # no limit: all titles in FIRST
        for section in ("Outcome", "Roles"):
            charts_of_section = [chart for chart in charts_by_information if chart.section == section]
            shown_charts += charts_of_section[:1]
        return Background(
            facts=facts(opened),
            charts=shown_charts,
            uses=dict(sorted(Totals(opened).by_role().items())),
            evaluated=named_evaluation or headline.evaluation,
            headline=headline,
            unevaluated=unevaluated,
        )


def _headline_of_weights(run: OpenedRun, named: StoredEvaluation | None, steps: set[int]) -> tuple[Headline, str]:
    """The headline results of exported weights, and a sentence if only other weights were evaluated, else "".

    `steps` are the steps of the checkpoints that the weights come from: one, several if the policies come from several
    checkpoints, or none for the newest checkpoint. The evaluation `named` by the user replaces the run's own ones.
    """
    if named:
        return run.headline_with([named], until=max(steps, default=None)), ""
    if not steps:
        return run.headline, ""
    evaluations = [evaluation for evaluation in run.evaluations if steps == {evaluation.steps}]
    headline = run.headline_with(evaluations, until=max(steps))
    # A checkpoint is named by its number of steps, a line of the metrics by the index of its step.
    evaluated_in_training = {line["step"] + 1 for line in run.metrics if line.get("held_out")}
    # An evaluation in training is of all policies after one step, so it covers no weights from several checkpoints.
    weights_evaluated_in_training = len(steps) == 1 and steps <= evaluated_in_training
    if evaluations or weights_evaluated_in_training:
        return headline, ""

    # The held-out figures are of other weights, and the figures of records of the whole run: neither may be shown.
    changes = tuple(change for change in headline.changes if change.kind not in ("held_out", "recorded"))
    of_these_weights = msgspec.structs.replace(headline, changes=changes)
    if len(steps) > 1:
        return of_these_weights, "This combination was not evaluated: its policies are from several checkpoints."
    if run.evaluations or evaluated_in_training:
        return of_these_weights, f"The checkpoint after step {max(steps)} was not evaluated."
    return of_these_weights, ""


def write_card(folder: Path, manifest: Manifest, background: Background | None) -> None:
    """Write README.md into an export, and an image of its curves if there are any."""
    if background is not None and _has_image(background):
        (folder / CURVE).write_text(svg(background.charts), encoding="utf-8")
    (folder / "README.md").write_text(card(manifest, background), encoding="utf-8")


def card(manifest: Manifest, background: Background | None) -> str:
    """The card in Markdown, with the front matter that the Hub reads."""
    role_heads = ("role", "policy", "version", "kind", "folder", "base", "weights SHA-256")
    parts = [
        f"---\n{_front_matter(manifest)}\n---",
        f"# Role policies{f' of run {manifest.run}' if manifest.run else ''}",
        "Each role of a multi-agent application has its policy, trained with cotune. "
        "`roles.json` holds hashes, versions and metrics.",
        _table(role_heads, [_role_row(manifest, entry) for entry in manifest.roles]),
        *_checkpoints(manifest),
        *(f"{text}." for text in not_updated(manifest)),
        *_prompts(manifest),
    ]
    if background is not None:
        parts += [*_results(background), *_curves(background), *_evaluation(background), *_costs(background)]
    parts += [*_serve(manifest), *_in_an_application(manifest)]
    return "\n\n".join(parts) + "\n"


def _prompts(manifest: Manifest) -> list[str]:
    """The paragraph about edited prompts; empty if the export has none. It names the prompts that the policies were
    trained with.
    """
    if not manifest.prompts:
        return []
    trained_with = manifest.trained_with or manifest.prompts
    trained_with_text = "these" if trained_with == manifest.prompts else prompts_named(trained_with)
    return [
        f"Use them with the edited prompts of `prompts.json` (`{manifest.prompts[:12]}`): `cotune serve` and "
        f"`cotune.deployed` do so by themselves, other servers do not. They were trained with {trained_with_text}."
    ]


def _checkpoints(manifest: Manifest) -> Iterator[str]:
    """A line with the checkpoint of the run that the policies come from, or with the checkpoint of each."""
    checkpoint_of_policy: dict[str, str] = {}
    for policy in manifest.policies:
        if policy.folder and policy.step is not None:
            checkpoint_of_policy[policy.name] = f"`{checkpoint_name(policy.step)}`"
    checkpoints = list(dict.fromkeys(checkpoint_of_policy.values()))
    if len(checkpoints) == 1:
        yield f"Checkpoint: {checkpoints[0]}."
    elif checkpoints:
        yield f"Checkpoints: {', '.join(f'{policy} {name}' for policy, name in checkpoint_of_policy.items())}."


def _front_matter(manifest: Manifest) -> str:
    """The YAML at the top of the card, from which the Hub derives the page's links, library and filters."""
    from huggingface_hub import ModelCardData

    base_models = dict.fromkeys(policy.base.model for policy in manifest.policies if policy.base)
    # Local folders have no name that the Hub could link to.
    hub_ids = [name for name in map(public_name, base_models) if "/" in name]

    # The Hub knows one library and one form for a repository. A mixture of adapters and models has neither.
    forms = set()
    for policy in manifest.policies:
        if policy.folder and policy.lora:
            forms.add("lora")
        elif policy.folder:
            forms.add("gguf" if policy.gguf else "model")
    form = forms.pop() if len(forms) == 1 else "mixed"
    tags = ["cotune", "reinforcement-learning"]
    if form in ("lora", "gguf"):
        tags.append(form)
    data = ModelCardData(
        base_model=hub_ids or None,
        library_name={"lora": "peft", "model": "transformers"}.get(form),
        pipeline_tag="image-text-to-text" if _sees_images(manifest) else "text-generation",
        tags=tags,
    )
    return data.to_yaml()


def _role_row(manifest: Manifest, entry: ExportedRole) -> Sequence[str]:
    policy = manifest.policy(entry.role)
    weights = [digest for name, digest in policy.files.items() if name.endswith((".safetensors", ".gguf"))]
    digest = weights[0][:12] if weights else ""
    base = public_name(policy.base.model) if policy.base else "the application's own provider"
    kind = f"GGUF, {policy.gguf}" if policy.gguf else policy.kind
    return (entry.role, policy.name, str(policy.version), kind, policy.folder or "", base, digest)


def _results(background: Background) -> Iterator[str]:
    """The headline of the run, without outcomes selected among candidates."""
    changes = [change for change in background.headline.changes if change.kind != "selected"]
    if changes:
        yield "## Results"
        if background.headline.verdict:
            yield f"**{background.headline.verdict}**"
        yield "\n".join(f"- {change_text(change)}" for change in changes)


def _has_image(background: Background) -> bool:
    """Whether there is a curve to draw. A single step is shown as a figure only."""
    return any(len(chart.steps) > 1 for chart in background.charts)


def _curves(background: Background) -> Iterator[str]:
    """The section about training: a chart if there is an image of one, and a table of the first and last figures."""
    if not background.charts:
        return
    yield "## Training"
    steps = f"{background.facts.steps} steps" if background.facts.steps else "Training"
    recipe = f" of recipe `{background.facts.recipe}`" if background.facts.recipe else ""
    yield f"{steps}{recipe}, {background.facts.seconds / 60:,.1f} minutes."
    if _has_image(background):
        yield f"![{' and '.join(chart.title for chart in background.charts)}, by step]({CURVE})"
    rows = []
    for chart in background.charts:
        for line in chart.series:
            values = [value for value in line.values if value is not None]
            first = figure(values[0], chart.percent)
            last = figure(values[-1], chart.percent)
            rows.append((chart.title, line.label, first, last, sparkline(line.values)))
    yield _table(("", "of", "first", "last", "steps"), rows)
    yield "\n".join(f"- {chart.title}: {chart.help}" for chart in background.charts)


def _evaluation(background: Background) -> Iterator[str]:
    """The section about held-out tasks: the figures of each mode, or the command that evaluates the export."""
    if background.unevaluated:
        yield "## Evaluation"
        yield f"{background.unevaluated} To evaluate it:"
        yield f"```sh\n{evaluation_command(background.facts.workflow, 'PATH/TO/THIS/FOLDER')}\n```"
    if background.evaluated is None:
        return
    yield "## Evaluation"
    yield (
        "On held-out tasks, with 95% intervals and the number of tasks. `base` is untrained, `swapped` gives each role "
        "another's policy. The policies were trained on `reward`."
    )
    evaluations = background.evaluated.evaluations
    # If the trained reward differs from the application's plain outcome, both have a column.
    has_plain_outcome = any(evaluation.outcome for evaluation in evaluations.values())
    plain_head = [PLAIN_COLUMN] if has_plain_outcome else []
    rows = []
    for mode, evaluation in evaluations.items():
        plain_cell = [_interval_cell(evaluation.outcome)] if has_plain_outcome else []
        counts = [str(evaluation.episodes), str(evaluation.failures)]
        success = _interval_cell(evaluation.success, percent=True)
        rows.append([mode, success, _interval_cell(evaluation.reward), *plain_cell, *counts])
    yield _table(["", "success", "reward", *plain_head, "episodes", "failed"], rows)
    verdicts = [comparison.verdict for comparison in background.evaluated.comparisons if comparison.verdict]
    if verdicts:
        yield "\n".join(f"- {verdict}" for verdict in verdicts)


def evaluation_command(workflow: str, export: str | Path) -> str:
    """The command that evaluates an export."""
    return shlex.join(["cotune", "eval", workflow or "app:solve", "--run", str(export), "--tasks", "held_out.jsonl"])


def _interval_cell(interval: Interval | None, percent: bool = False) -> str:
    return f"{interval_text(interval, percent)} of {interval.n}" if interval else ""


def _costs(background: Background) -> Iterator[str]:
    """The section about tokens, and about money if every model has a price in `[prices]` of the run or of its
    evaluation.
    """
    rows = []  # source, calls, prompt tokens, completion tokens, cost
    for role, use in background.uses.items():
        tokens = (f"{use.prompt:,}", f"{use.completion:,}")
        rows.append((f"training: {role}", f"{use.calls:,}", *tokens, _money(use.cost)))
    if background.facts.judge_cost:
        rows.append(("training: judges", "", "", "", _money(background.facts.judge_cost)))
    if background.evaluated:
        for mode, evaluation in background.evaluated.evaluations.items():
            tokens = (f"{evaluation.use.prompt_tokens:,}", f"{evaluation.use.completion_tokens:,}")
            cost = evaluation.use.cost
            cost_text = ""
            if cost is not None and not evaluation.use.unpriced:
                cost_text = f"{_money(cost)} ({1000 * cost / max(evaluation.episodes, 1):.4g} per 1,000 tasks)"
            rows.append((f"evaluation: {mode}", "", *tokens, cost_text))
    if rows:
        yield "## Cost"
        heads = ("", "calls", "prompt tokens", "completion tokens", "cost")
        has_costs = any(row[-1] for row in rows)
        columns = len(heads) if has_costs else len(heads) - 1
        yield _table(heads[:columns], [row[:columns] for row in rows])


def _money(cost: float | None) -> str:
    return "" if cost is None else f"{cost:.4g}"


def _serve(manifest: Manifest) -> Iterator[str]:
    """The section with the commands that start each server for this export."""
    yield "## Serve"
    yield "In this folder; the model names of a server are the roles."
    for server, commands in manifest.serve.items():
        if commands:
            yield f"{_TITLES[server]}:"
            yield "```sh\n" + "\n".join(commands) + "\n```"
    if "ollama" in manifest.serve:
        yield _OLLAMA
    if any(policy.kind == "lora" for policy in manifest.policies) and not _sees_images(manifest):
        yield "For llama.cpp and Ollama export the run with `--gguf`."


def _in_an_application(manifest: Manifest) -> Iterator[str]:
    """The section with code that uses the policies in each framework, in the same process and from a server."""
    role = json.dumps(manifest.roles[0].role)
    gguf = any(policy.gguf for policy in manifest.policies)
    vision = _sees_images(manifest)
    url = f"http://127.0.0.1:{LLAMA_CPP_PORT if gguf else _PORT}/v1"
    yield "## In an application"
    if not gguf:
        yield "In its process, unchanged; every role is answered by its policy:"
        yield '```python\nimport cotune\n\nwith cotune.deployed("PATH/TO/THIS/FOLDER"):\n    graph.invoke(...)\n```'
    yield "From a server, as any OpenAI-compatible model:"
    yield f"""```python
# LangGraph, LangChain
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model={role}, base_url="{url}", api_key="none")
```"""
    yield f"""```python
# AutoGen
from autogen_ext.models.openai import OpenAIChatCompletionClient

client = OpenAIChatCompletionClient(
    model={role},
    base_url="{url}",
    api_key="none",
    model_info=dict(family="unknown", function_calling=True, json_output=True, structured_output=True, vision={vision}),
)
```"""
    yield f"""```python
# CrewAI
from crewai import LLM

llm = LLM(model="openai/" + {role}, base_url="{url}", api_key="none")
```"""


def _sees_images(manifest: Manifest) -> bool:
    """Whether a base model reads images. cotune writes no GGUF files of these models."""
    return any(policy.base.sees_images for policy in manifest.policies if policy.base)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
