"""`strategy = "p, w, p"`: searches for prompts and trainings of weights in turn, each kept only if it is better."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.text import Text

from cotune.adapters.prompts import prompts_of
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import WorkflowSource, workflow_of
from cotune.errors import ConfigError, RunError
from cotune.integrations.gepa.search import require
from cotune.integrations.models.folder.folder import locate_model
from cotune.prompts.edits import Prompts
from cotune.prompts.file import prompts_path, read_prompts, write_prompts
from cotune.records.tasks import as_tasks, load_tasks
from cotune.runtime.process_exit import go_on
from cotune.storage.file_lock import FileLock
from cotune.storage.judge_ledger import run_folder
from cotune.storage.open_store import open_store
from cotune.storage.run_layout import RunLayout, is_run, whole_address
from cotune.tables import GOOD, grid
from cotune.terminal import terminal
from cotune.trainer.config.strategy import STAGES, stages_of
from cotune.trainer.config.train import NO_TASKS, TrainConfig
from cotune.trainer.config.withheld import written
from cotune.trainer.evaluation.statistics import shown
from cotune.trainer.prompting.evaluations import HELD_OUT, Evaluations, answering_in_search, check_judge
from cotune.trainer.prompting.held_out import HeldOut, compared
from cotune.trainer.prompting.improve import improve
from cotune.trainer.prompting.kept import FILE, is_strategy
from cotune.trainer.prompting.options import ImproveOptions, PromptRun
from cotune.trainer.prompting.spending import Spending
from cotune.trainer.prompting.stages import Described, Stage, changed, read_strategy
from cotune.trainer.prompting.tasks import split_for_search
from cotune.trainer.prompting.tried import Tried
from cotune.trainer.reporting.progress import episode_bar
from cotune.trainer.run.run_folder import write_atomically
from cotune.trainer.run.warm_start import check_source
from cotune.trainer.train import resume as resume_training
from cotune.trainer.train import train, with_whole_paths

_EXAMPLE = 'For example: cotune train app:solve --tasks train.jsonl --eval-tasks held.jsonl --strategy "p, w, p" ...'


class StrategyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The stages that are done. `finished` is False where the run was stopped; `prompts` and `run` are the folders of
    what is kept, empty where that is what the run started from."""

    path: str
    stages: tuple[Stage, ...]
    finished: bool
    prompts: str = ""
    run: str = ""


def run_strategy(
    workflow: WorkflowSource,
    tasks: str | Path | list[Any],
    config: TrainConfig,
    search: ImproveOptions,
    *,
    out: str | Path,
    reflector: Any = None,
) -> StrategyReport:
    """Run the stages of `config.strategy` in the new folder `out`, one after the other. Blocks until done or stopped.

    Each stage starts from what is kept so far, and is kept itself if it is better on the tasks of
    `config.evaluation.tasks`, paired. `search` are the options of the searches, whose limits they share evenly;
    `reflector` answers in place of the reflection model. Raises CotuneError subclasses before work starts for bad
    input.
    """
    listed = as_tasks(tasks)
    check_strategy(workflow, listed, config, search, reflects=reflector is not None)
    config = with_whole_paths(config)
    described = Described(
        app=whole_address(workflow) if isinstance(workflow, str) else "",
        tasks=str(Path(tasks).resolve()) if isinstance(tasks, str | Path) else "",
        task_ids=tuple(task.id for task in listed),
        cwd=str(Path.cwd()),
        config=written(config),
        search=search,
    )
    folder = Path(out).absolute()
    if folder.is_dir() and any(folder.iterdir()):
        remedy = f"Go on with: cotune train --resume {folder}." if is_strategy(folder) else "Choose another --out."
        raise RunError(f"{folder} already holds other files.", remedy)
    folder.mkdir(parents=True, exist_ok=True)
    return _Stages(folder, workflow, tasks, config, described, reflector).run()


def resume_strategy(
    out: str | Path,
    *,
    workflow: WorkflowSource | None = None,
    tasks: str | Path | list[Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    search: Mapping[str, Any] | None = None,
    reflector: Any = None,
) -> StrategyReport:
    """Go on with the stages in `out` from where they stopped, also within a stage. `workflow` and `tasks` are needed
    only where they were given as objects. `changes` are fields of TrainConfig, and `search` options of the searches, as
    a resumed training and a resumed search may change them. Raises as `run_strategy` does."""
    folder = Path(out).absolute()
    described, config, changes = changed(read_strategy(folder), changes or {}, search or {})
    for name, given in (("workflow", workflow or described.app), ("tasks", tasks or described.tasks)):
        if not given:
            raise ConfigError(name, None, "is missing: the run was started from Python with an object", f"Pass {name}.")
    tasks = tasks or described.tasks
    if tuple(task.id for task in as_tasks(tasks)) != described.task_ids:
        raise ConfigError("tasks", None, "are others than those that the run began with", "Name the same file.")
    return _Stages(folder, workflow or described.app, tasks, config, described, reflector, changes).run()


def check_strategy(
    workflow: WorkflowSource,
    tasks: str | Path | Iterable[Any],
    config: TrainConfig,
    search: ImproveOptions,
    *,
    reflects: bool = False,
) -> None:
    """Raise ConfigError for what would only fail in a later stage. `reflects`: something answers in place of the
    reflection model."""
    letters = stages_of(config.strategy)
    if not letters:
        raise ConfigError("strategy", config.strategy, "is missing", _EXAMPLE)
    if config.evaluation.tasks in ("", NO_TASKS):
        fault = "is missing: each stage is kept only if it is better on held-out tasks"
        raise ConfigError("evaluation.tasks", config.evaluation.tasks, fault, "Pass --eval-tasks FILE.")
    held_out = load_tasks(config.evaluation.tasks)
    if len(held_out) < 2:
        fault = f"has {len(held_out)} task; the comparison of a stage needs at least 2"
        raise ConfigError("evaluation.tasks", config.evaluation.tasks, fault, "Give more held-out tasks.")
    check_judge(workflow_of(workflow))
    for name in ("run", "model"):
        if getattr(search, name) is not None:
            fault = "cannot be used with a strategy, in which the policies of the run answer"
            raise ConfigError(f"prompts.{name}", getattr(search, name), fault, "Leave it out.")
    for name in ("redact", "roles_by"):
        if getattr(search, name) not in (None, getattr(config, name)):
            fault = "is of all stages: the trainings would not have it"
            remedy = f"Name it outside of [prompts]: --{name.replace('_', '-')}."
            raise ConfigError(f"prompts.{name}", getattr(search, name), fault, remedy)
    if config.from_records and "w" in letters:
        fault = "learns from records, and a stage w trains on tasks"
        raise ConfigError("recipe", config.recipe, fault, "Run it first, and start from it with --init.")
    check_source(config.init)
    if config.prompts:
        read_prompts(config.prompts)
    if "p" not in letters:
        return
    require()
    if search.reflection is None and not reflects:
        fault = "is missing: the stage p needs a model that writes texts"
        raise ConfigError("reflection", None, fault, "For example: --reflection gpt-5-mini")
    own = [one.name for one in config.policy if one.model or one.kind == "provider"]
    if own and not config.init and "w" not in letters[: letters.index("p")]:
        fault = f"begins with p, and {', '.join(own)} has another model than the run's: there is no run yet that has it"
        raise ConfigError("strategy", config.strategy, fault, "Begin with w, or start from a run with --init.")
    split_for_search(as_tasks(tasks), msgspec.structs.replace(search, eval_tasks=config.evaluation.tasks))
    locate_model(config.model)


class _Stages:
    """The stages of one folder, from the first that is not done."""

    def __init__(
        self,
        folder: Path,
        workflow: WorkflowSource,
        tasks: str | Path | list[Any],
        config: TrainConfig,
        described: Described,
        reflector: Any,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.workflow, self.tasks = folder, workflow, tasks
        self.config, self.described, self.reflector, self.changes = config, described, reflector, changes
        self.letters = stages_of(config.strategy)
        self.held_out = load_tasks(config.evaluation.tasks)
        self.console = terminal(stderr=True)
        self.prompts, self.weights = config.prompts, config.init
        """Folders of what is kept so far; empty for the application's own prompts, and for the untrained model."""

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=not self.console.is_terminal)

    def run(self) -> StrategyReport:
        way_on = f"To go on: cotune train --resume {self.folder}"
        with self._held():
            for number, letter in enumerate(self.letters, 1):
                if number > len(self.described.stages):
                    self.say(f"stage {number} of {len(self.letters)}: {STAGES[letter]}")
                    go_on.set(way_on)
                    stage = self._searched(number) if letter == "p" else self._trained(number)
                    if stage is None:
                        return self._report(finished=False)
                    self._keep(stage)
                self._take(self.described.stages[number - 1])
            if self.prompts:
                write_prompts(self.folder, read_prompts(self.prompts))
            else:  # those of a search that has gone on since
                prompts_path(self.folder).unlink(missing_ok=True)
        return self._report(finished=True)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        lock = FileLock(self.folder / "lock", f"The run {self.folder}")
        try:
            self._write()
            yield
        finally:
            lock.release()

    def _write(self) -> None:
        content = msgspec.json.format(msgspec.json.encode(self.described), indent=2)
        write_atomically(self.folder / FILE, content)

    def _keep(self, stage: Stage) -> None:
        self.described = msgspec.structs.replace(self.described, stages=(*self.described.stages, stage))
        self._write()
        self.say(f"stage {stage.number}: {'kept' if stage.kept else 'not kept'}; {_found(stage)}")

    def _take(self, stage: Stage) -> None:
        if not stage.kept:
            return
        if stage.letter == "p":
            self.prompts = str(self.folder / stage.folder)
        else:
            self.weights = str(self.folder / stage.folder)

    def _report(self, *, finished: bool) -> StrategyReport:
        return StrategyReport(
            path=str(self.folder),
            stages=self.described.stages,
            finished=finished,
            prompts="" if self.prompts == self.config.prompts else self.prompts,
            run="" if self.weights == self.config.init else self.weights,
        )

    def _options(self, number: int) -> ImproveOptions:
        """Those of a search, or of a comparison: the policies that are kept answer, or the untrained model."""
        search, config, searches = self.described.search, self.config, self.letters.count("p") or 1
        return msgspec.structs.replace(
            search,
            eval_tasks=config.evaluation.tasks,
            max_calls=max(1, search.max_calls // searches),
            max_cost=None if search.max_cost is None else search.max_cost / searches,
            seed=search.seed + number - 1,
            run=self.weights or None,
            model=None if self.weights else config.model,
            max_tokens=config.sampling.max_tokens,
            concurrency=min(search.concurrency, config.concurrency),
            timeout=config.episode_timeout,
            prompts=self.prompts or None,
            roles_by=config.roles_by or None,
            redact=config.redact or None,
        )

    def _searched(self, number: int) -> Stage:
        name = f"{number}-prompts"
        report = improve(
            self.workflow,
            self.tasks,
            self._options(number),
            out=self.folder / name,
            resume=PromptRun(self.folder / name).described.is_file(),
            reflector=self.reflector,
            comparisons=len(self.letters),
        )
        note = report.ended if report.held_out is None else ""
        note = note or ("" if report.held_out else "no better prompts were found")
        kept = report.verdict == "better"
        limited = bool(report.ended)
        return Stage(
            number=number, letter="p", folder=name, kept=kept, held_out=report.held_out, note=note, limited=limited
        )

    def _trained(self, number: int) -> Stage | None:
        """The stage; None where the training was stopped."""
        name, replace = f"{number}-weights", msgspec.structs.replace
        run = self.folder / name
        if is_run(run):
            summary = resume_training(run, workflow=self.workflow, tasks=self.tasks, changes=self.changes)
        else:
            # The held-out tasks are asked once, by the comparison: a run that chose by them would be luck in part.
            evaluation = replace(self.config.evaluation, tasks="")
            config = replace(
                self.config,
                strategy="",
                prompts=self.prompts,
                init=self.weights,
                seed=self.config.seed + number - 1,
                evaluation=evaluation,
            )
            summary = train(self.workflow, self.tasks, config, out=run)
        if not summary.finished:
            return None
        if not summary.versions:
            return Stage(number=number, letter="w", folder=name, kept=False, note="no policy was updated")
        self.say(f"comparing with what was kept before, on {len(self.held_out)} held-out tasks ...")
        held = run_sync(self._compared(run, self._options(number)))
        note = "" if held is not None else "the held-out tasks have no outcome"
        kept = held is not None and held.verdict == "better"
        return Stage(number=number, letter="w", folder=name, kept=kept, held_out=held, note=note)

    async def _compared(self, run: Path, options: ImproveOptions) -> HeldOut | None:
        """The policies of a run and those kept before it, with the prompts that it was trained with."""
        prompts = prompts_of(run) or Prompts(parts=())
        after = msgspec.structs.replace(options, run=str(run), model=None)
        found = [
            await self._played(prompts, one, run.with_name(f"{run.name}-compared") / name)
            for name, one in (("before", options), ("after", after))
        ]
        return compared(*found, asked=len(self.letters))

    async def _played(self, prompts: Prompts, options: ImproveOptions, folder: Path) -> list[Tried]:
        """The held-out tasks, once each; what the folder has of them is not run again."""
        flow = workflow_of(self.workflow).redacted(options.redact).named_by(options.roles_by)
        folder.mkdir(parents=True, exist_ok=True)
        run_folder.set(folder)
        unlimited = Spending(1 << 60, None, {})
        async with contextlib.AsyncExitStack() as stack:
            store = stack.enter_context(open_store(RunLayout(folder).records))
            responder = await stack.enter_async_context(answering_in_search(flow, options, self.say))
            bar = stack.enter_context(episode_bar(self.console, len(self.held_out), folder.name))
            evaluations = Evaluations(flow, store, responder, options, unlimited, bar)
            return await evaluations.run(prompts, self.held_out, phase=HELD_OUT)


def _found(stage: Stage) -> str:
    held = stage.held_out
    if held is None:
        return stage.note
    return f"{held.base:.3f} before, {held.best:.3f} after, difference {shown(held.difference, '+.3f')}"


def render(report: StrategyReport) -> Group:
    """What each stage gave on the held-out tasks, and what is kept."""
    table = grid("stage", "", "before", "after", "difference", "kept")
    for stage in report.stages:
        held, name = stage.held_out, STAGES[stage.letter]
        figures = (
            (stage.note, "", "")
            if held is None
            else (f"{held.base:.3f}", f"{held.best:.3f}", shown(held.difference, "+.3f"))
        )
        table.add_row(str(stage.number), name, *figures, Text("yes", style=GOOD) if stage.kept else Text("no"))
    first = next((stage.held_out for stage in report.stages if stage.held_out is not None), None)
    lines = [Text(f"{first.tasks} held-out tasks, paired; intervals of {100 * first.level:.1f}%.")] if first else []
    return Group(table, *lines)
