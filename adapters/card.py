"""README.md of an export, its card on the Hub: its roles, the training, the evaluation, the cost, how to serve it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from cotune.adapters.curve import svg
from cotune.adapters.manifest import ExportedRole, Manifest, not_updated
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
"""Image in the card."""
_PORT, _GGUF_PORT = 8000, 8001
_TITLES = {"cotune": "cotune", "vllm": "vLLM, one server per line", "llama.cpp": "llama.cpp", "ollama": "Ollama"}
_OLLAMA = (
    "Ollama listens on port 11434. It has chat templates of its own and takes the one that it knows for the model's: "
    "compare `ollama show --template ROLE` with the model's own; where they differ, add a `TEMPLATE` to the Modelfile."
)


class Background(msgspec.Struct, frozen=True, kw_only=True):
    """The run of an export. `uses` are by role, over all its calls. `unevaluated` says why there is no evaluation of
    the exported weights, although the run has some."""

    facts: Facts
    charts: list[Chart]
    uses: dict[str, Use]
    evaluated: StoredEvaluation | None
    headline: Headline
    unevaluated: str = ""


def read_background(run: Path, evaluation: Path | None = None, steps: Collection[int] = ()) -> Background:
    """The background from a run folder.

    `steps` are those of the exported checkpoints; empty if they are the newest. The evaluation is that of the folder
    `evaluation`, else the newest one of the run that tried the exported weights. One of the run that cannot be read is
    left out with a warning. Raises ConfigError if `evaluation` holds none, RunError.
    """
    named = read_evaluation(evaluation) if evaluation else None
    with OpenedRun(run) as opened:
        found = first_charts(charts([opened]), most=len(FIRST))
        told, unevaluated = _figures_of(opened, named, set(steps))
        chosen = [next((c for c in found if c.section == section), None) for section in ("Outcome", "Roles")]
        return Background(
            facts=facts(opened),
            charts=[chart for chart in chosen if chart is not None],
            uses=dict(sorted(Totals(opened).by_role().items())),
            evaluated=named or told.evaluation,
            headline=told,
            unevaluated=unevaluated,
        )


def _figures_of(run: OpenedRun, named: StoredEvaluation | None, steps: set[int]) -> tuple[Headline, str]:
    """The figures of the weights after these steps, and why they have no evaluation although the run has some."""
    if named:
        return run.headline_with([named], until=max(steps, default=None)), ""
    if not steps:
        return run.headline, ""
    of_these = [one for one in run.evaluations if steps == {one.steps}]
    told = run.headline_with(of_these, until=max(steps))
    in_lines = {line["step"] + 1 for line in run.metrics if line.get("held_out")}
    if of_these or (len(steps) == 1 and steps <= in_lines):
        return told, ""

    # Held-out figures are of other weights, and those of records are of the whole run.
    changes = tuple(change for change in told.changes if change.kind not in ("held_out", "recorded"))
    told = msgspec.structs.replace(told, changes=changes)
    if len(steps) > 1:
        return told, "This combination was not evaluated: its policies are from several checkpoints."
    if run.evaluations or in_lines:
        return told, f"The checkpoint after step {max(steps)} was not evaluated."
    return told, ""


def write_card(folder: Path, manifest: Manifest, background: Background | None) -> None:
    """Write README.md into an export, and the image of its curves where there are any."""
    if background is not None and _has_image(background):
        (folder / CURVE).write_text(svg(background.charts), encoding="utf-8")
    (folder / "README.md").write_text(card(manifest, background), encoding="utf-8")


def card(manifest: Manifest, background: Background | None) -> str:
    """The card in Markdown, with the front matter that the Hub reads."""
    parts = [
        f"---\n{_front_matter(manifest)}\n---",
        f"# Role policies{f' of run {manifest.run}' if manifest.run else ''}",
        "Each role of a multi-agent application has its policy, trained with cotune. "
        "`roles.json` holds hashes, versions and metrics.",
        _roles(manifest),
        *_checkpoints(manifest),
        *(f"{text}." for text in not_updated(manifest)),
        *_prompts(manifest),
    ]
    if background is not None:
        parts += [*_reached(background), *_curves(background), *_evaluation(background), *_bill(background)]
    parts += [*_serve(manifest), *_in_an_application(manifest)]
    return "\n\n".join(parts) + "\n"


def _prompts(manifest: Manifest) -> list[str]:
    if not manifest.prompts:
        return []
    trained = manifest.trained_with or manifest.prompts
    these = "these" if trained == manifest.prompts else prompts_named(trained)
    return [
        f"Use them with the edited prompts of `prompts.json` (`{manifest.prompts[:12]}`): `cotune serve` and "
        f"`cotune.deployed` do so by themselves, other servers do not. They were trained with {these}."
    ]


def _checkpoints(manifest: Manifest) -> Iterator[str]:
    """Which checkpoints of the run the policies are from."""
    steps = {policy.name: policy.step for policy in manifest.policies if policy.folder and policy.step is not None}
    names = {name: f"`{checkpoint_name(step)}`" for name, step in steps.items()}
    if len(set(names.values())) > 1:
        yield f"Checkpoints: {', '.join(f'{policy} {name}' for policy, name in names.items())}."
    elif names:
        yield f"Checkpoint: {next(iter(names.values()))}."


def _front_matter(manifest: Manifest) -> str:
    from huggingface_hub import ModelCardData

    bases = dict.fromkeys(policy.base.model for policy in manifest.policies if policy.base)
    ids = [name for name in map(public_name, bases) if "/" in name]
    trained = [policy for policy in manifest.policies if policy.folder]
    # One library and one form for the whole repository, or none: some of its folders may be adapters, others models.
    forms = {"lora" if policy.lora else "gguf" if policy.gguf else "" for policy in trained}
    (form,) = forms if len(forms) == 1 else ("mixed",)
    tags = ["cotune", "reinforcement-learning", *([form] if form in ("lora", "gguf") else [])]
    data = ModelCardData(
        base_model=ids or None,
        library_name={"lora": "peft", "": "transformers"}.get(form),
        pipeline_tag="image-text-to-text" if _sees_images(manifest) else "text-generation",
        tags=tags,
    )
    return data.to_yaml()


def _roles(manifest: Manifest) -> str:
    heads = ("role", "policy", "version", "kind", "folder", "base", "weights SHA-256")
    return _table(heads, [_role(manifest, entry) for entry in manifest.roles])


def _role(manifest: Manifest, entry: ExportedRole) -> Sequence[str]:
    policy = manifest.policy(entry.role)
    digest = next((digest for name, digest in policy.files.items() if name.endswith((".safetensors", ".gguf"))), "")
    base = public_name(policy.base.model) if policy.base else "the application's own provider"
    kind = f"GGUF, {policy.gguf}" if policy.gguf else policy.kind
    return (entry.role, policy.name, str(policy.version), kind, policy.folder or "", base, digest[:12])


def _reached(about: Background) -> Iterator[str]:
    """The headline of the run, without outcomes selected among candidates."""
    told = [change for change in about.headline.changes if change.kind != "selected"]
    if told:
        yield "## Results"
        if about.headline.verdict:
            yield f"**{about.headline.verdict}**"
        yield "\n".join(f"- {change_text(change)}" for change in told)


def _has_image(about: Background) -> bool:
    """Whether there is a line to draw: a single step is a figure."""
    return any(len(chart.steps) > 1 for chart in about.charts)


def _curves(about: Background) -> Iterator[str]:
    if not about.charts:
        return
    steps = f"{about.facts.steps} steps" if about.facts.steps else "Training"
    yield "## Training"
    recipe = f" of recipe `{about.facts.recipe}`" if about.facts.recipe else ""
    yield f"{steps}{recipe}, {about.facts.seconds / 60:,.1f} minutes."
    if _has_image(about):
        yield f"![{' and '.join(chart.title for chart in about.charts)}, by step]({CURVE})"
    rows = []
    for chart in about.charts:
        for line in chart.series:
            known = [value for value in line.values if value is not None]
            first, last = (figure(value, chart.percent) for value in (known[0], known[-1]))
            rows.append((chart.title, line.label, first, last, sparkline(line.values)))
    yield _table(("", "of", "first", "last", "steps"), rows)
    yield "\n".join(f"- {chart.title}: {chart.help}" for chart in about.charts)


def _evaluation(about: Background) -> Iterator[str]:
    if about.unevaluated:
        yield "## Evaluation"
        yield f"{about.unevaluated} To evaluate it:"
        yield f"```sh\n{evaluation_command(about.facts.workflow, 'PATH/TO/THIS/FOLDER')}\n```"
    if about.evaluated is None:
        return
    yield "## Evaluation"
    yield (
        "On held-out tasks, with 95% intervals and the number of tasks. `base` is untrained, `swapped` gives each role "
        "another's policy. The policies were trained on `reward`."
    )
    found = about.evaluated.evaluations
    plain = any(mode.outcome for mode in found.values())
    rows = [
        (
            label,
            _counted(mode.success, True),
            _counted(mode.reward),
            *([_counted(mode.outcome)] if plain else []),
            str(mode.episodes),
            str(mode.failures),
        )
        for label, mode in found.items()
    ]
    yield _table(("", "success", "reward", *([PLAIN_COLUMN] if plain else []), "episodes", "failed"), rows)
    if verdicts := [f"- {compared.verdict}" for compared in about.evaluated.comparisons if compared.verdict]:
        yield "\n".join(verdicts)


def evaluation_command(workflow: str, export: str | Path) -> str:
    """The command that evaluates an export."""
    return shlex.join(["cotune", "eval", workflow or "app:solve", "--run", str(export), "--tasks", "held_out.jsonl"])


def _counted(found: Interval | None, percent: bool = False) -> str:
    return f"{interval_text(found, percent)} of {found.n}" if found else ""


def _bill(about: Background) -> Iterator[str]:
    """Tokens, and money where every model has a price: those of `[prices]` of the run, or of its evaluation."""
    rows = [
        (f"training: {role}", f"{use.calls:,}", f"{use.prompt:,}", f"{use.completion:,}", _money(use.cost))
        for role, use in about.uses.items()
    ]
    if about.facts.judge_cost:
        rows.append(("training: judges", "", "", "", _money(about.facts.judge_cost)))
    for mode, found in (about.evaluated.evaluations if about.evaluated else {}).items():
        cost = None if found.use.unpriced else found.use.cost
        per = "" if cost is None else f" ({1000 * cost / max(found.episodes, 1):.4g} per 1,000 tasks)"
        tokens = (f"{found.use.prompt_tokens:,}", f"{found.use.completion_tokens:,}")
        rows.append((f"evaluation: {mode}", "", *tokens, _money(cost) + per))
    if rows:
        yield "## What it took"
        priced = 5 if any(row[-1] for row in rows) else 4
        heads = ("", "calls", "prompt tokens", "completion tokens", "cost")
        yield _table(heads[:priced], [row[:priced] for row in rows])


def _money(cost: float | None) -> str:
    return "" if cost is None else f"{cost:.4g}"


def _serve(manifest: Manifest) -> Iterator[str]:
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
    role = json.dumps(manifest.roles[0].role)
    gguf = any(policy.gguf for policy in manifest.policies)
    vision = _sees_images(manifest)
    url = f"http://127.0.0.1:{_GGUF_PORT if gguf else _PORT}/v1"
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
    """Whether a base model reads images; GGUF files of such models are not written."""
    return any(policy.base.sees_images for policy in manifest.policies if policy.base)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
