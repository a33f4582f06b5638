"""The subject of an evaluation: a run or an export, a team of several, or untrained models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cotune.adapters.bases import Moved
from cotune.adapters.export import TrainedPolicy
from cotune.adapters.manifest import is_export
from cotune.adapters.prompts import prompts_for, prompts_named, prompts_text, trained_with
from cotune.errors import ConfigError
from cotune.prompts.edits import Prompts
from cotune.records.structs import PolicyRef, Task
from cotune.records.tasks import load_tasks
from cotune.storage.run_code import open_run_code
from cotune.storage.run_layout import is_run, known_workflow, read_run_json, relocated
from cotune.trainer.evaluation.modes import (
    MODES,
    Contest,
    EvaluationOptions,
    Mode,
    OtherPlayers,
    Side,
    Temperature,
    contest_of_models,
    contest_of_run,
    contest_of_sides,
    model_side,
)
from cotune.trainer.evaluation.policies import EvaluatedPolicies, open_evaluated_policies, open_models
from cotune.trainer.evaluation.sources import Source, read_source, read_sources, read_trained
from cotune.trainer.evaluation.split import FILE as HELD_OUT_FILE
from cotune.trainer.evaluation.split import overlap
from cotune.trainer.evaluation.team import SharedBases, open_source, open_team, unique_names

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """The policies that are evaluated, and their sources: runs, exports and models.

    `contest` says who plays in each mode, at a temperature. `own_run` is the folder of the only run, in which its
    evaluations are stored. `note` is a sentence for the user, or empty.
    """

    policies: EvaluatedPolicies
    sources: Sequence[Source]
    contest: Callable[[Sequence[Mode], Temperature], Contest]
    own_run: Path | None = None
    note: str = ""

    @property
    def runs(self) -> list[Path]:
        """The folders of the runs in which some of the policies were trained."""
        runs = (Path(source.place).absolute() for source in self.sources if source.kind == "run")
        return list(dict.fromkeys(runs))

    @property
    def trained_sources(self) -> int:
        """The number of runs and exports."""
        return sum(source.kind != "model" for source in self.sources)

    @property
    def steps(self) -> int | None:
        """The number of steps that the policies of the only run were trained; None if they differ or are not known."""
        if self.own_run is None:
            return None
        steps = {policy.step for policy in self.policies.policies if policy.weights is not None}
        return steps.pop() if len(steps) == 1 else None

    def prompts(self, chosen: Prompts | str | Path | None) -> Prompts | None:
        """Return the edited prompts of the evaluation, see `prompts_together`."""
        return prompts_together(self.sources, chosen)

    def prompts_note(self, prompts: Prompts | None) -> str:
        """Name the edited prompts of the calls, and policies that were trained with others; empty without prompts."""
        if prompts is None:
            return ""
        note = f"All modes except today have {prompts_text(prompts)}."
        for source in self.sources:
            trained = trained_with(source.place) if source.kind != "model" else ""
            if trained and trained != prompts.id:
                whose = "The policies" if self.trained_sources == 1 else f"The policies of {source.text}"
                note += f" {whose} were trained with {prompts_named(trained)}."
        return note


def open_subject(source: str | Path | Mapping[str, str | Path] | None, options: EvaluationOptions) -> Subject:
    """Open the subject of an evaluation with its weights, and check its base models.

    Raises ConfigError unless `source` and the options name exactly one run, export or team, or base models.
    """
    # 1. Base models alone.
    if source is None:
        if options.against is not None:
            remedy = "Name both as base models: --base A --base B."
            raise ConfigError("against", str(options.against), "needs a run or an export", remedy)
        return _open_models(options)
    if options.bases:
        models = ", ".join(map(str, options.bases))
        raise ConfigError("bases", models, "cannot be combined with a run, an export or a team", "Name one of them.")

    # 2. A team: a source for each role.
    if isinstance(source, Mapping):
        if options.against is not None:
            fault = "needs a single run or export, and a team is evaluated"
            raise ConfigError(
                "against", str(options.against), fault, "Export the team, and name the folder with --run."
            )
        team = open_team(read_sources(source, "use"), options.model)
        distinct_sources = list(dict.fromkeys(team.sources.values()))
        return Subject(team.policies, distinct_sources, _contest_of(team.policies), note=team.note)

    # 3. A run or an export, which may be compared with another source.
    trained = read_trained(source, "run")
    folder = Path(trained.place)
    if (folder / "config.json").is_file() and not is_run(folder) and not is_export(folder):
        remedy = f"Evaluate the model alone: --base {source}"
        raise ConfigError("run", str(source), "is a model, not a run or an export", remedy)
    if options.against is not None:
        return _open_against(trained, read_source(options.against, "against"), options.model)
    policies = open_evaluated_policies(trained.place, options.model, step=trained.step)
    policies.check_bases()
    own_run = Path(trained.place).absolute() if trained.kind == "run" else None
    return Subject(policies, [trained], _contest_of(policies), own_run)


def _open_models(options: EvaluationOptions) -> Subject:
    """Open untrained base models, to evaluate without a run. Raises ConfigError."""
    if options.model is not None:
        fault = "says where the base model of a run lies, and no run is evaluated"
        raise ConfigError("model", str(options.model), fault, "Name the model with --base alone.")
    policies = open_models(options.bases)
    names = [policy.name for policy in policies.policies]
    sources = [Source(str(model), "model", str(model)) for model in options.bases]
    return Subject(policies, sources, lambda modes, temperature: contest_of_models(names, modes, temperature))


def _open_against(source: Source, against: Source, moved: Moved) -> Subject:
    """Open a run or an export with another source to compare it with: each is a side."""
    # Folders are compared, not texts: runs/r1 and runs/r1/ are the same run.
    same_place = Path(source.place).resolve() == Path(against.place).resolve()
    if same_place and source.kind == against.kind and source.step == against.step:
        raise ConfigError("against", against.text, "is the run itself", "Name another one.")
    sources = (source, against)
    # The short names of the sources are the labels of the sides, unless they are equal or the name of a mode.
    labels = [side.name for side in sources]
    if labels[0] == labels[1] or set(labels) & set(MODES):
        labels = [side.text for side in sources]

    # Both may have policies of the same name. One sampler serves both, so all policies get unique names.
    bases = SharedBases()
    policies_of_source = {side: open_source(side, moved, bases) for side in sources}
    present_names: list[tuple[Source, str]] = []
    for side, policies in policies_of_source.items():
        present_names += [(side, policy.name) for policy in policies.policies]
    names = unique_names(present_names)

    all_policies: list[TrainedPolicy] = []
    sides: dict[str, Side] = {}
    for label, (side, policies) in zip(labels, policies_of_source.items(), strict=True):
        renamed = [dataclasses.replace(policy, name=names[side, policy.name]) for policy in policies.policies]
        all_policies += renamed
        if side.kind == "model":
            sides[label] = model_side(renamed[0].name)
            continue
        # The player of roles without a policy: the base of this side, or None for the application's own provider.
        stand_in = None
        if policies.other_roles == "frozen":
            frozen = TrainedPolicy(
                name=f"base of {label}",
                kind="frozen",
                version=0,
                roles=(),
                model=policies.model,
                tool_format=policies.tool_format,
            )
            all_policies.append(frozen)
            stand_in = PolicyRef(frozen.name)
        policies_of_side = dataclasses.replace(policies, policies=renamed)
        sides[label] = Side(policies_of_side.roles, OtherPlayers(stand_in, policies_of_side.provider_roles))
    return Subject(
        EvaluatedPolicies(policies_of_source[source].model, all_policies),
        sources,
        lambda modes, temperature: contest_of_sides(sides, [(labels[0], labels[1:])], modes, temperature),
    )


def _contest_of(policies: EvaluatedPolicies) -> Callable[[Sequence[Mode], Temperature], Contest]:
    return lambda modes, temperature: contest_of_run(policies.roles, policies.trained, modes, temperature)


def prompts_together(
    sources: Sequence[Source], chosen: Prompts | str | Path | None, *, any_prompts: bool = True
) -> Prompts | None:
    """The edited prompts to use with policies from several sources: the `chosen` ones, otherwise those that they were
    trained with.

    Raises ConfigError if they were trained with different prompts and none are chosen; AdapterError as `prompts_for`
    does.
    """
    folders = [source.place for source in sources if source.kind != "model"]
    if chosen is None:
        agreed("prompts", {folder: trained_with(folder) for folder in folders}, prompts_named)
        return prompts_for(folders[0]) if folders else None
    prompts = prompts_for(None, chosen)
    for folder in folders:
        prompts = prompts_for(folder, chosen, any_prompts=any_prompts)
    return prompts


def agreed(field: str, values: Mapping[Any, T], describe: Callable[[T], str] = str) -> T | None:
    """Return the value that all runs and exports have for a setting; None without any.

    Raises ConfigError, which names two that differ, if they do not agree.
    """
    if not values:
        return None
    (first, value), *others = values.items()
    for name, other in others:
        if other != value:
            fault = f"differs: {first} has {describe(value)}, {name} has {describe(other)}"
            raise ConfigError(field, None, fault, f"Say which to use: --{field.replace('_', '-')}.")
    return value


def workflow_of_run(run: str | Path) -> str:
    """Return the address of the workflow that a run was trained with, and allow its code to be loaded.

    Raises ConfigError if the run does not name one, UntrustedFolderError if this user has not written the folder or
    trusted it, RunError.
    """
    folder = Path(read_trained(run, "run").place).absolute()
    address = None if is_export(folder) else known_workflow(read_run_json(folder), folder)
    if address is None:
        fault = f"is missing, and {run} does not name it"
        raise ConfigError("workflow", None, fault, "Name it: cotune eval app:solve ...")
    open_run_code(folder, only=("workflow",))
    return address


def tasks_of_run(run: str | Path) -> str:
    """Return the file of the tasks that a run held out of training. Raises ConfigError if there is none, RunError."""
    folder = Path(read_trained(run, "run").place).absolute()
    if not is_export(folder):
        described = read_run_json(folder)
        files = [folder / HELD_OUT_FILE]
        if configured := (described.get("config") or {}).get("evaluation", {}).get("tasks"):
            files.append(Path(relocated(configured, described, folder)))
        for file in files:
            if file.is_file():
                return str(file)
    raise ConfigError(
        "--tasks", None, f"is missing, and {run} held out no tasks", "Name a file: --tasks held_out.jsonl"
    )


def trained_on_notes(runs: Sequence[Path], tasks: Sequence[Task]) -> Iterator[str]:
    """Yield a note for each run that has trained on some of the tasks. A run whose tasks file is gone has none."""
    for run in runs:
        run_json = read_run_json(run)
        file = run_json.get("tasks")
        if not isinstance(file, str):
            continue  # the tasks were passed as objects, in Python
        tasks_file = Path(relocated(file, run_json, run))
        if not tasks_file.is_file():
            continue
        # The run has trained on the tasks of its file, without the ones that it held out.
        held_out_ids = set((run_json.get("held") or {}).get("held_out", ()))
        trained_tasks = [task for task in load_tasks(tasks_file) if task.id not in held_out_ids]
        for text in overlap(trained_tasks, tasks):
            yield f"{run.name}: {text}."
