"""`cotune eval`: the trained policies against the base, at temperature 1 and greedy, and with roles swapped."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cotune.adapters.manifest import is_export
from cotune.errors import ConfigError
from cotune.integrations.chat.template import ChatTemplate
from cotune.integrations.samplers.transformers.sampler import TransformersSampler
from cotune.policies import stand_in
from cotune.recording.records import Task
from cotune.runtime.run_sync import run_sync
from cotune.sampling.protocol import SamplingParams
from cotune.storage.protocol import Store
from cotune.storage.run_layout import RunLayout, read_run_json
from cotune.storage.sqlite_store import SqliteStore
from cotune.tasks import as_tasks, load_tasks
from cotune.trainer.config.train import convert
from cotune.trainer.evaluation.cost import Prices
from cotune.trainer.evaluation.modes import USUAL, check_modes, lineups, pairs
from cotune.trainer.evaluation.policies import open_evaluated_policies
from cotune.trainer.evaluation.progress import EvaluationProgress, OnMode
from cotune.trainer.evaluation.remarks import remarks
from cotune.trainer.evaluation.report import EvaluationReport, compare
from cotune.trainer.evaluation.run import Evaluation, EvaluationOptions, Players, evaluate_episodes, evaluate_policies
from cotune.trainer.run_folder import write_atomically
from cotune.workflows import Workflow, WorkflowSource, load_workflow, workflow_of


def evaluate(
    source: str | Path,
    workflow: WorkflowSource,
    tasks: str | Path | Iterable[Any],
    *,
    modes: Sequence[str] = USUAL,
    limit: int | None = None,
    model: str | None = None,
    max_tokens: int | None = None,
    concurrency: int = 64,
    timeout: float | None = 600.0,
    seed: int = 0,
    threads: int = 1,
    out: str | Path | None = None,
    prices: Prices | None = None,
    roles_by: str | None = None,
) -> EvaluationReport:
    """Evaluate a run's newest checkpoint, or an export, on held-out tasks, one episode per task and mode.

    `workflow` is a workflow or its name (`app:solve`); `tasks` a file of JSON lines or a sequence, of which the
    first `limit` are taken. `max_tokens` limits answers where the application does not (default: as in training, or
    256 for an export; in the modes `as_deployed` the model's context, as in `deployed`). An episode that takes longer
    than `timeout` seconds has failed. `out` is a folder for the records and `evaluation.json`; without it nothing is
    stored. `roles_by` says what names the roles (default: what did in the run). Raises CotuneError subclasses for bad
    input, before any model is loaded, and WorkflowError when every episode failed.
    """
    chosen = check_modes(modes)
    out = None if out is None else Path(out).absolute()
    app = load_workflow(workflow) if isinstance(workflow, str) else workflow_of(workflow)
    held_out = load_tasks(tasks) if isinstance(tasks, str | Path) else as_tasks(tasks)
    held_out = held_out[:limit]
    if not held_out:
        raise ConfigError("limit", limit, "1 or more")
    _check_out(out)
    if timeout is not None and not timeout > 0:
        raise ConfigError("timeout", timeout, "seconds above 0")
    evaluated = open_evaluated_policies(source, model)
    trained = None if is_export(Path(source)) else convert(read_run_json(source)["config"])
    app = app.named_by(roles_by or (trained.roles_by if trained else None))
    params = SamplingParams(max_tokens=max_tokens or (trained.sampling if trained else SamplingParams()).max_tokens)

    async def run() -> EvaluationReport:
        async with contextlib.AsyncExitStack() as stack:
            progress = stack.enter_context(EvaluationProgress())
            progress.say(f"loading the model {evaluated.model} ...")
            chat = ChatTemplate.load(evaluated.model, evaluated.tool_format)
            sampler = await TransformersSampler.open(evaluated.model, threads=threads)
            stack.push_async_callback(sampler.aclose)
            progress.say("publishing the policies ...")
            await evaluated.publish(sampler)
            info = await sampler.info()
            players = Players(
                sampler=sampler,
                chat=chat,
                roles=evaluated.roles,
                provider_roles=evaluated.provider_roles,
                others=stand_in(evaluated.other_roles),
            )
            options = EvaluationOptions(
                concurrency=concurrency,
                timeout=timeout,
                sink=_open_store(out, stack),
                seed=seed,
                prices=prices or {},
            )
            return await evaluate_modes(
                app,
                held_out,
                players,
                trained=evaluated.trained,
                modes=chosen,
                params=params,
                deployed_params=params if max_tokens else SamplingParams(max_tokens=info.max_model_len),
                options=options,
                on_mode=progress.mode,
            )

    report = run_sync(run())
    if out is not None:
        write_atomically(Path(out) / "evaluation.json", json.dumps(report.to_json(), indent=2).encode())
    report.require_some_episode()
    return report


async def evaluate_modes(
    workflow: Workflow,
    tasks: Sequence[Task],
    players: Players,
    *,
    trained: Collection[str],
    modes: Sequence[str] = USUAL,
    params: SamplingParams | None = None,
    deployed_params: SamplingParams | None = None,
    options: EvaluationOptions | None = None,
    on_mode: OnMode | None = None,
) -> EvaluationReport:
    """Evaluate each mode on the same tasks and compare them pairwise.

    `players` play in the mode `trained`; of their policies `trained` names those that were. `params` hold where the
    application asks for nothing, `deployed_params` in the modes that sample as it asks. `on_mode(mode, episodes)`
    returns what to call after each episode (or None).
    """
    options = options or EvaluationOptions()
    played, notes = lineups(players.roles, trained, check_modes(modes))
    evaluations: dict[str, Evaluation] = {}
    for mode, lineup in played.items():
        phase = f"eval-{mode}"
        own = replace(options, on_episode=on_mode(mode, len(tasks)) if on_mode else None)
        if lineup.policies is None:
            evaluations[mode] = await evaluate_episodes(workflow, tasks, label=mode, phase=phase, options=own)
            continue
        evaluations[mode] = await evaluate_policies(
            workflow,
            tasks,
            replace(players, roles=lineup.policies),
            label=mode,
            phase=phase,
            params=deployed_params or params if lineup.temperature is None else params,
            temperature=lineup.temperature,
            options=own,
        )
    sound = [mode for mode, found in evaluations.items() if found.all_failed is None]
    return EvaluationReport(
        evaluations=evaluations,
        comparisons=tuple(compare(evaluations[mode], evaluations[other]) for mode, other in pairs(sound)),
        notes=(*notes, *remarks(evaluations, players)),
    )


def _open_store(out: str | Path | None, stack: contextlib.AsyncExitStack) -> Store | None:
    if out is None:
        return None
    Path(out).mkdir(parents=True, exist_ok=True)
    store = SqliteStore.open(RunLayout(out).records)
    stack.callback(store.close)
    return store


def _check_out(out: str | Path | None) -> None:
    """An evaluation has a folder of its own: with other records in it, neither could be told from the other."""
    if out is None:
        return
    layout = RunLayout(out)
    files = (layout.records, layout.path / "evaluation.json", layout.run_json)
    taken = next((file.name for file in files if file.exists()), None)
    if taken:
        raise ConfigError("out", str(out), f"a folder without records; this one has {taken}", "Name a new folder.")
