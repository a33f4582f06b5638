"""`cotune eval`: the trained policies against the base, at temperature 1 and greedy, and with roles swapped."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from cotune.adapters.manifest import is_export
from cotune.anywhere import run_anywhere
from cotune.errors import ConfigError
from cotune.integrations.chat_format import ChatTemplate
from cotune.integrations.transformers_sampler import TransformersSampler
from cotune.records import PolicyRef, Task
from cotune.sampler import ChatFormat, Sampler, SamplingParams
from cotune.sqlite_store import SqliteStore
from cotune.store import Store
from cotune.tasks import as_tasks, load_tasks
from cotune.trainer.config import convert
from cotune.trainer.contestants import open_contestants
from cotune.trainer.evaluation import Evaluation, evaluate_policies
from cotune.trainer.evaluation_progress import OnMode, shown_progress
from cotune.trainer.evaluation_report import Comparison, EvaluationReport, compare
from cotune.trainer.run_folder import describe, write_atomically
from cotune.workflow import Workflow, load_workflow, workflow_of

Mode = Literal["base", "trained", "base_greedy", "greedy", "swapped"]
MODES: tuple[Mode, ...] = get_args(Mode)
AGAINST: Mapping[Mode, tuple[Mode, ...]] = {
    "trained": ("base",),
    "greedy": ("base_greedy", "base"),
    "swapped": ("trained", "base"),
}
"""What each mode is compared with: the first of these that was run."""


def check_modes(modes: Sequence[str]) -> tuple[Mode, ...]:
    """The modes without repeats. Raises ConfigError for an unknown one or none."""
    for mode in modes:
        if mode not in MODES:
            raise ConfigError("modes", mode, f"one of {', '.join(MODES)}")
    if not modes:
        raise ConfigError("modes", (), f"one or more of {', '.join(MODES)}")
    return tuple(dict.fromkeys(modes))  # type: ignore[arg-type]


def swap(roles: Mapping[str, PolicyRef], trained: Collection[str]) -> dict[str, PolicyRef] | None:
    """Hand each trained policy to the roles of the one before it, in role order; None with fewer than two.

    `trained` are names of policies; roles of other policies keep theirs.
    """
    ring = list(dict.fromkeys(ref for ref in roles.values() if ref.name in trained))
    if len(ring) < 2:
        return None
    following = dict(zip(ring, ring[1:] + ring[:1], strict=True))
    return {role: following.get(ref, ref) for role, ref in roles.items()}


def lineups(
    roles: Mapping[str, PolicyRef], trained: Collection[str], modes: Sequence[Mode]
) -> tuple[dict[Mode, dict[str, PolicyRef]], list[str]]:
    """Who plays each role in each mode, and a note for each mode that cannot be played."""
    base = {role: PolicyRef(ref.name, 0) for role, ref in roles.items()}
    swapped = swap(roles, trained)
    found: dict[Mode, dict[str, PolicyRef]] = {}
    notes: list[str] = []
    for mode in modes:
        if mode == "swapped":
            if swapped is None:
                notes.append("swapped was not run: fewer than two trained policies play a role.")
                continue
            found[mode] = swapped
        else:
            found[mode] = base if mode.startswith("base") else dict(roles)
    return found, notes


def evaluate(
    source: str | Path,
    workflow: Any,
    tasks: str | Path | Iterable[Any],
    *,
    modes: Sequence[str] = MODES,
    limit: int | None = None,
    model: str | None = None,
    max_tokens: int | None = None,
    concurrency: int = 64,
    timeout: float | None = 600.0,
    seed: int = 0,
    threads: int = 1,
    out: str | Path | None = None,
) -> EvaluationReport:
    """Evaluate a run's newest checkpoint, or an export, on held-out tasks, one episode per task and mode.

    `workflow` is a workflow or its name (`app:solve`); `tasks` a file of JSON lines or a sequence, of which the
    first `limit` are taken. `max_tokens` limits answers where the application does not (default: as in training, or
    256 for an export). `out` is a folder for the records and `evaluation.json`; without it nothing is stored. Raises
    CotuneError subclasses for bad input, before any model is loaded.
    """
    chosen = check_modes(modes)
    app = load_workflow(workflow) if isinstance(workflow, str) else workflow_of(workflow)
    held_out = load_tasks(tasks) if isinstance(tasks, str | Path) else as_tasks(tasks)
    held_out = held_out[:limit]
    contestants = open_contestants(source, model)
    params = SamplingParams(max_tokens=max_tokens or _trained_limit(Path(source)))

    async def run() -> EvaluationReport:
        async with contextlib.AsyncExitStack() as stack:
            chat = ChatTemplate.load(contestants.model)
            sampler = await TransformersSampler.open(contestants.model, threads=threads)
            stack.push_async_callback(sampler.aclose)
            await contestants.publish(sampler)
            store = _open_store(out, stack)
            return await evaluate_modes(
                app,
                held_out,
                sampler=sampler,
                chat=chat,
                roles=contestants.roles,
                trained=contestants.trained,
                provider_roles=contestants.provider_roles,
                modes=chosen,
                params=params,
                concurrency=concurrency,
                timeout=timeout,
                seed=seed,
                sink=store,
                on_mode=stack.enter_context(shown_progress()),
            )

    report = run_anywhere(run())
    if out is not None:
        write_atomically(Path(out) / "evaluation.json", json.dumps(report.to_json(), indent=2).encode())
    return report


async def evaluate_modes(
    workflow: Workflow,
    tasks: Sequence[Task],
    *,
    sampler: Sampler,
    chat: ChatFormat,
    roles: Mapping[str, PolicyRef],
    trained: Collection[str],
    modes: Sequence[str] = MODES,
    on_mode: OnMode | None = None,
    **options: Any,
) -> EvaluationReport:
    """Evaluate each mode on the same tasks and compare them pairwise.

    `roles` maps roles to their trained versions, which the sampler serves; `trained` are the names of the trained
    policies. `on_mode(mode, episodes)` returns what to call after each episode (or None). `options` go to
    `evaluate_policies`.
    """
    played, notes = lineups(roles, trained, check_modes(modes))
    evaluations: dict[str, Evaluation] = {}
    for mode, policies in played.items():
        evaluations[mode] = await evaluate_policies(
            workflow,
            tasks,
            sampler=sampler,
            chat=chat,
            policies=policies,
            label=mode,
            temperature=0.0 if mode.endswith("greedy") else 1.0,
            phase=f"eval-{mode}",
            on_episode=on_mode(mode, len(tasks)) if on_mode else None,
            **options,
        )
    return EvaluationReport(
        evaluations=evaluations, comparisons=_comparisons(evaluations), notes=(*notes, *_remarks(evaluations, roles))
    )


def _trained_limit(source: Path) -> int:
    """Token limit of the run's own sampling; the default's for an export."""
    if is_export(source):
        return SamplingParams().max_tokens
    return convert(describe(source)["config"]).sampling.max_tokens


def _open_store(out: str | Path | None, stack: contextlib.AsyncExitStack) -> Store | None:
    if out is None:
        return None
    Path(out).mkdir(parents=True, exist_ok=True)
    store = SqliteStore.open(Path(out) / "records.db")
    stack.callback(store.close)
    return store


def _comparisons(evaluations: Mapping[str, Evaluation]) -> tuple[Comparison, ...]:
    pairs = (
        (mode, next((other for other in others if other in evaluations), None))
        for mode, others in AGAINST.items()
        if mode in evaluations
    )
    return tuple(compare(evaluations[mode], evaluations[other]) for mode, other in pairs if other)


def _remarks(evaluations: Mapping[str, Evaluation], roles: Mapping[str, PolicyRef]) -> list[str]:
    notes = []
    if all(e.success is None for e in evaluations.values()):
        notes.append("No success rate: the workflow returns no `success`, so only its reward is reported.")
    seen = {role for e in evaluations.values() for role in e.roles}
    for role in sorted(set(roles) - seen):
        notes.append(f"Role {role!r} made no call.")
    for role in sorted(seen - set(roles)):
        notes.append(f"Role {role!r} was left to the application's own provider.")
    return notes
