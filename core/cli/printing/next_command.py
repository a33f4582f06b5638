"""The commands to type after each command, which `main` prints on a terminal.

`a` are the arguments of the command. If the next command depends on the result, `run` has stored the result in
`a.result`.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cotune.storage.checkpoints import read_best
from cotune.storage.open_store import without_password
from cotune.storage.run_layout import RunLayout, is_run, read_run_json

APP = "app:solve"
TASKS = "tasks.jsonl"
HELD_OUT = "held_out.jsonl"
MODEL = "Qwen/Qwen3-1.7B"
"""Placeholders for an application, files and a model that the user has not named yet."""
_OF_TRAINING = {
    "config": "--config", "policies": "--policies", "plan.kind": "--plan", "plan.k": "-k", "recipe": "--recipe",
    "cluster.address": "--cluster",
}  # fmt: skip
"""Settings that `check` and `doctor` have in common with `train`."""


def next_commands(a: argparse.Namespace, status: int) -> Sequence[str]:
    """The commands to continue with, the usual one first.

    Empty for a command without an entry in the table, and after an error or interruption whose message names a command.
    """
    name = f"{a.command} {a.subcommand}" if getattr(a, "subcommand", None) else a.command
    suggest = _NEXT.get(name)
    if suggest is None:
        # A server names its address when it starts. After a page, a list or a folder of texts nothing is left to do.
        return []
    return [shlex.join(without_password(word) for word in words if word) for words in suggest(a, status)]


Words = Sequence[str | None]


def _check(a: argparse.Namespace, status: int) -> list[Words]:
    if status == 1:  # the user must fix the application first
        return []
    return [["cotune", "train", a.workflow, "--tasks", a.tasks, "--model", a.model or MODEL, *_same_flags(a)]]


def _doctor(a: argparse.Namespace, status: int) -> list[Words]:
    """Commands after a look at the machine: forecast a run with a model. After a forecast: train with the same
    settings."""
    if status:
        return []
    if not a.model and not a.config:
        return [["cotune", "doctor", "--model", MODEL]]
    model = ["--model", a.model] if a.model else []
    return [["cotune", "train", APP, "--tasks", TASKS, *model, *_same_flags(a)]]


def _same_flags(a: argparse.Namespace) -> list[str]:
    """The flags of this command that set fields of training, to pass to the next command."""
    words: list[str] = []
    for name, flag in _OF_TRAINING.items():
        value = getattr(a, name, None)
        if value is not None:
            words += [flag, str(value)]
    for text in a.set:
        words += ["--set", text]
    return words


def _train(a: argparse.Namespace, status: int) -> list[Words]:
    """Commands after training: resume a run that stopped; look at one that never updated a policy; else evaluate,
    export, view it."""
    summary = getattr(a, "result", None)
    if summary is None:  # nothing was trained: `--explain` described the columns of the progress table
        return []
    path = _relative_path(summary.path)
    if not summary.finished:
        return [["cotune", "train", "--resume", path]]
    if not summary.versions:  # no policy was ever updated
        has_groups = summary.groups or summary.candidates
        return [["cotune", "show", path, "--groups" if has_groups else "--steps"]]
    app = a.workflow or read_run_json(path)["workflow"] or APP
    best = ["--step", "best"] if read_best(RunLayout(path).checkpoints) else []
    return [
        ["cotune", "eval", app, "--run", path, "--tasks", summary.held_out or HELD_OUT],
        ["cotune", "export", path, "--out", "adapters/", *best],
        ["cotune", "view", path],
    ]


def _eval(a: argparse.Namespace, status: int) -> list[Words]:
    """Commands after an evaluation: export a run, or serve an export, that is better than its base beyond doubt; else
    look for the reason. No command follows the evaluation of a team or of base models.

    Better beyond doubt means that the lower end of the interval of the first comparison is above 0.
    """
    report = a.result
    if report.broken:
        return [["cotune", "show", _relative_path(report.stored), "--status", "error"]] if report.stored else []
    if a.run is None:  # the sources were named by --use or --base
        return []
    is_better = False
    if report.comparisons:
        comparison = report.comparisons[0]
        difference = comparison.success or comparison.reward or comparison.outcome
        is_better = difference is not None and difference.low is not None and difference.low > 0
    source_is_run = is_run(a.run)
    if is_better and source_is_run:
        return [["cotune", "export", a.run, "--out", "adapters/"]]
    if is_better:
        return [["cotune", "serve", a.run]]
    if source_is_run:
        return [["cotune", "show", a.run, "--steps", "--explain"]]
    return []


def _export(a: argparse.Namespace, status: int) -> list[Words]:
    if a.gguf:
        return [["cat", str(Path(a.out) / "README.md")]]
    return [["cotune", "serve", a.out]]


def _trace(a: argparse.Namespace, status: int) -> list[Words]:
    failed = ["--status", "error"] if getattr(a, "result", 0) else []
    return [["cotune", "show", a.out, *failed]]


def _replay(a: argparse.Namespace, status: int) -> list[Words]:
    """Commands after a replay: show the new records, or else an episode whose repetition failed or that was replayed
    alone."""
    report = a.result
    if a.out:
        return [["cotune", "show", a.out]]
    if a.all:
        for repetition in report.repetitions:
            if any(new.episode.status != "ok" for new in repetition.new):
                return [["cotune", "replay", a.run, "--episode", repetition.old.episode.id]]
    return [["cotune", "show", a.run, "--episode", a.episode]] if a.episode else []


def _blame(a: argparse.Namespace, status: int) -> list[Words]:
    """Commands after `cotune blame`: if a role is at fault, improve its prompt, or train it. If no role was swapped,
    run the command again with a --reference to swap in. Otherwise show the runs."""
    result = getattr(a, "result", None)
    if result is None or a.json:
        return []
    tasks = a.tasks or TASKS  # recorded episodes may have been analysed, without a file of tasks
    if result.verdict == "named":
        role = result.at_fault[0]
        improve = ["cotune", "prompts", "improve", a.workflow, "--tasks", tasks, "--reflection", "gpt-5-mini"]
        improve += ["--set", f'roles=["{role}"]', "--out", "runs/prompts"]
        return [improve, ["cotune", "train", a.workflow, "--tasks", tasks, "--model", a.model or MODEL]]
    if result.verdict == "untested" and not a.without:
        again = ["cotune", "blame", a.workflow, "--tasks", tasks]
        return [[*again, "--reference", "openai:gpt-5", "--out", "runs/swapped"]]
    return [["cotune", "show", _relative_path(result.path)]]


def _score(a: argparse.Namespace, status: int) -> list[Words]:
    """Commands after scoring records: store the new rewards, or show the records if they are stored."""
    if status:
        return []
    if a.write:
        return [["cotune", "show", a.run]]
    role = ["--role", a.role] if a.role else []
    redact = ["--redact", a.redact] if a.redact else []
    return [["cotune", "records", "score", a.run, a.workflow, *role, *redact, "--write"]]


def _judge(a: argparse.Namespace, status: int) -> list[Words]:
    """Commands after `cotune records judge`.

    If it wrote a file for people to label, the next command compares their labels with the scorers. If it compared
    labels, the next command scores the records with these scorers.
    """
    if not a.to_label:
        return [["cotune", "records", "score", a.run, a.app or _workflow_of(a.run), "--write"]]
    wrote_no_candidates = status != 0
    if wrote_no_candidates:
        return []
    app = ["--app", a.app] if a.app else []
    return [["cotune", "records", "judge", a.run, "--labels", a.to_label, *app]]


def _sft(a: argparse.Namespace, status: int) -> list[Words]:
    """Commands after writing answers for fine-tuning: train on the same answers."""
    if status:
        return []
    min_reward = [] if a.min_reward is None else ["--set", f"records.min_reward={a.min_reward:g}"]
    source = ["--recipe", "sft", "--records", a.run]
    return [["cotune", "train", _workflow_of(a.run), *source, "--model", MODEL, *min_reward]]


def _show(a: argparse.Namespace, status: int) -> list[Words]:
    """Commands after a list of runs: show the newest. After an episode: replay it. After a run: view it in the
    browser."""
    if a.json or a.html:
        return []
    if newest := getattr(a, "result", None):  # it listed a folder of runs
        return [["cotune", "show", _relative_path(newest)]]
    if a.episode:
        return [["cotune", "replay", a.run, "--episode", a.episode]]
    return [["cotune", "view", a.run]]


def _otel_import(a: argparse.Namespace, status: int) -> list[Words]:
    return [["cotune", "show", a.out]] if not status else []


def _records_changed(a: argparse.Namespace, status: int) -> list[Words]:
    return [] if status else [["cotune", "records", "list", getattr(a, "target", a.store)]]


def _prompts_show(a: argparse.Namespace, status: int) -> list[Words]:
    if a.json or status or not a.result:
        return []
    return [["cotune", "prompts", "edit", a.out or a.source, "--part", a.result]]


def _prompts_edit(a: argparse.Namespace, status: int) -> list[Words]:
    file = a.result
    if not file:  # the text is as it was
        return []
    return [["cotune", "trace", a.app or APP, "--tasks", a.tasks or TASKS, "--prompts", file]]


def _prompts_improve(a: argparse.Namespace, status: int) -> list[Words]:
    return [["cotune", "prompts", "diff", a.out]]


def _prompts_diff(a: argparse.Namespace, status: int) -> list[Words]:
    return [["cotune", "prompts", "export", a.other or a.prompts, "--out", "prompts/"]]


def _relative_path(path: str) -> str:
    """A path relative to the current folder, if it is below it."""
    current = Path.cwd()
    return str(Path(path).relative_to(current) if Path(path).is_relative_to(current) else path)


def _workflow_of(run: str) -> str:
    """The workflow of a run; a placeholder if it is not known."""
    workflow = read_run_json(run).get("workflow") if is_run(run) else None
    return str(workflow or APP)


_NEXT: Mapping[str, Callable[[argparse.Namespace, int], list[Words]]] = {
    "check": _check,
    "train": _train,
    "eval": _eval,
    "trace": _trace,
    "replay": _replay,
    "blame": _blame,
    "show": _show,
    "records score": _score,
    "records judge": _judge,
    "records sft": _sft,
    "records prune": _records_changed,
    "records delete": _records_changed,
    "records copy": _records_changed,
    "records upgrade": _records_changed,
    "otel import": _otel_import,
    "prompts show": _prompts_show,
    "prompts edit": _prompts_edit,
    "prompts improve": _prompts_improve,
    "prompts diff": _prompts_diff,
    "export": _export,
    "doctor": _doctor,
}
