"""`cotune trace`."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console

from cotune.cli.command import APP, TASKS, Parser, add_fields, fields_of
from cotune.episodes.episode import UNSEEN
from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import load_workflow
from cotune.errors import RunError, WorkflowError
from cotune.reading.prompt_use import PromptUse
from cotune.recording.chance import start_freezing
from cotune.records.structs import Episode
from cotune.records.tasks import load_tasks
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.run_layout import RunLayout
from cotune.storage.sql.figures import SuccessCount
from cotune.storage.trace_file import write_trace
from cotune.storage.whole_file import is_full
from cotune.tables import plural
from cotune.terminal import print_line, terminal

EXAMPLE = "cotune trace app:solve --tasks tasks.jsonl --out runs/traced"


class TraceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `cotune trace`. `redact` and `roles_by` are as in a run's configuration."""

    concurrency: int = 8
    """Episodes that run at the same time."""
    limit: int | None = None
    """Take only the first N tasks."""
    timeout: float = 600.0
    """Seconds for one episode."""
    record: Literal["tools", "frozen"] | None = None
    """Also record values for cotune replay. tools: the results of a framework's tools | frozen: these, and the values
    of clock, uuid and random."""
    otlp: str | None = None
    """Also send each episode's spans to this OTLP/HTTP endpoint."""
    redact: str | None = None
    roles_by: str | None = None
    prompts: str | None = None
    """File of edited prompts, or a folder that has one: calls are sent with them; see docs/how-to/prompts.md."""


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune trace`. Fields of TraceOptions become flags with the help texts of the reference."""
    command.add_argument("workflow", help=APP)
    command.add_argument("--tasks", required=True, metavar="FILE", help=TASKS)
    command.add_argument(
        "--out",
        default="runs/trace",
        metavar="DIR",
        help="run folder; records are added to it (default: %(default)s)",
    )
    add_fields(command, *TraceOptions.__struct_fields__, table=TraceOptions)


def run(a: argparse.Namespace) -> int:
    status, a.result = trace(a.workflow, a.tasks, a.out, TraceOptions(**fields_of(a)))
    return status


def trace(
    workflow: str, tasks: str, out: str, options: TraceOptions, console: Console | None = None
) -> tuple[int, int]:
    """Run every task once and record it in `out`.

    Returns the exit status (1 if every episode failed or records were lost) and the number of failed episodes.
    """
    from cotune.integrations.exchange.otel.exporter import LiveExport, otlp_exporter
    from cotune.trainer.reporting.progress import episode_bar

    if options.record == "frozen":
        start_freezing()
    flow = load_workflow(workflow).redacted(options.redact).named_by(options.roles_by)
    flow = flow.prompted(options.prompts)
    task_list = load_tasks(tasks)[: options.limit]
    console = console or terminal()
    exporter = otlp_exporter(options.otlp) if options.otlp else None
    store = _open_folder(Path(out).absolute(), workflow, options)
    live = LiveExport(store, exporter) if exporter else None
    prompt_use = PromptUse(live or store)
    ended: list[Episode] = []
    try:
        with episode_bar(console, len(task_list)) as advance:

            def count(episode: Episode) -> None:
                ended.append(episode)
                advance()

            batch = EpisodeBatch(
                tasks=task_list,
                sink=prompt_use,
                phase="trace",
                concurrency=options.concurrency,
                timeout=options.timeout,
                on_episode=count,
                record_tools=options.record is not None,
                freeze=options.record == "frozen",
            )
            episodes = run_sync(rollout(flow, batch))
        store.flush()
        lost = store.health.lost
        # If records were lost, the share of solved episodes among the others would mislead.
        solved = [] if lost else store.figures().success_counts(episode.id for episode in episodes)
    except KeyboardInterrupt:
        number = f"{len(ended)} of {plural(len(task_list), 'episode')}"
        print_line(console, f"{number} had ended and are recorded in {out}. See them with: cotune show {out}")
        raise
    finally:
        if live is not None:
            live.close()
            sent = plural(live.spans, "span")
            unsent = plural(live.failed, "episode")
            console.print(f"{sent} sent to {options.otlp}, {unsent} could not be sent")
        store.close()
    for line in prompt_use.lines():
        print_line(console, line)
    return _report(episodes, solved, lost, out, console)


def _open_folder(folder: Path, workflow: str, options: TraceOptions) -> Store:
    """Open the store of a new or earlier folder, and note there what is recorded. Raises RunError if the folder cannot
    be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holds_records = RunLayout(folder).records.exists()
        store = open_store(RunLayout(folder).records)
        functions = {"redact": options.redact, "roles_by": options.roles_by}
        write_trace(folder, workflow, functions, holds_records=holds_records)
    except OSError as error:
        cause = f"{folder} cannot be written: {error.strerror or error}."
        remedy = "Free some space, or name another --out." if is_full(error) else "Name another --out."
        raise RunError(cause, remedy) from None
    return store


def _report(
    episodes: list[Episode], solved: Sequence[SuccessCount], lost: int, out: str, console: Console
) -> tuple[int, int]:
    """Print the counts of recorded episodes, the share of solved ones and the most common errors. Returns the exit
    status, and the number of failed episodes.

    Raises WorkflowError if no call was recorded: then cotune does not see the clients of the application.
    """
    calls = sum(episode.calls for episode in episodes)
    failed = [episode for episode in episodes if episode.status != "ok"]
    counts = ((len(episodes), "episode"), (calls, "call"), (len(failed), "failed episode"), (lost, "lost record"))
    console.print(f"{', '.join(plural(*count) for count in counts)}: {out}")
    for row in solved:
        console.print(f"success {row.solved / row.episodes:.1%} ({row.solved} of {plural(row.episodes, 'episode')})")
    for error, count in Counter(episode.error for episode in failed).most_common(3):
        console.print(f"  {count} x {error}", markup=False)
    if not calls:
        raise WorkflowError("The workflow made no LLM call that cotune can see.", UNSEEN)
    status = 1 if lost or len(failed) == len(episodes) else 0
    return status, len(failed)
