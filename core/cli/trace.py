"""`cotune trace`: record episodes of an application with the model that it uses today."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console

from cotune.errors import RunError, WorkflowError
from cotune.recording.records import Episode
from cotune.recording.rollout import EpisodeBatch, rollout
from cotune.runtime.run_sync import run_sync
from cotune.storage.run_layout import RunLayout
from cotune.storage.sqlite_store import SqliteStore
from cotune.tasks import load_tasks
from cotune.terminal import terminal
from cotune.workflows import load_workflow


def trace(
    workflow: str,
    tasks: str,
    out: str,
    *,
    concurrency: int = 8,
    limit: int | None = None,
    timeout: float | None = None,
    redact: str | None = None,
    roles_by: str | None = None,
    otlp: str | None = None,
    otlp_content: bool = False,
    record_tools: bool = False,
    console: Console | None = None,
) -> int:
    """Run every task once and record it in `out`; return 1 when every episode failed or records were lost.

    `redact` names a `module:function` that sees each message before it is stored, `roles_by` one that names the role of
    each call (or is `caller`). With `otlp`, an OTLP/HTTP endpoint, each episode is sent there as spans when it has
    ended; with `otlp_content`, what its messages say too. With `record_tools` what a framework's tools return is kept,
    for `cotune replay`.
    """
    from cotune.integrations.otel.exporter import LiveExport, otlp_exporter
    from cotune.integrations.otel.spans import Detail
    from cotune.trainer.reporting.progress import episode_bar

    flow = load_workflow(workflow).redacted(redact).named_by(roles_by)
    listed = load_tasks(tasks)[:limit]
    console = console or terminal()
    exporter = otlp_exporter(otlp) if otlp else None
    folder = Path(out).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store = SqliteStore.open(RunLayout(folder).records)
    except OSError as error:
        why = error.strerror or str(error)
        raise RunError(f"{folder} cannot be written: {why}.", "Free some space, or name another --out.") from None
    live = LiveExport(store, exporter, detail=Detail(content=otlp_content)) if exporter else None
    try:
        with episode_bar(console, len(listed)) as advance:
            batch = EpisodeBatch(
                tasks=listed,
                sink=live or store,
                phase="trace",
                concurrency=concurrency,
                timeout=timeout,
                on_episode=advance,
                record_tools=record_tools,
            )
            episodes = run_sync(rollout(flow, batch))
        store.flush()
        lost = store.lost
    finally:
        if live is not None:
            live.close()
            console.print(f"{live.spans} spans sent to {otlp}, {live.failed} episodes could not be sent")
        store.close()
    return _report(episodes, lost, out, console)


def _report(episodes: list[Episode], lost: int, out: str, console: Console) -> int:
    calls = sum(episode.calls for episode in episodes)
    failed = [episode for episode in episodes if episode.status != "ok"]
    console.print(f"{len(episodes)} episodes, {calls} calls, {len(failed)} failed episodes, {lost} lost records: {out}")
    succeeded = [episode.metrics.get("success", 0.0) >= 0.5 for episode in episodes if episode.status == "ok"]
    if any("success" in episode.metrics for episode in episodes):
        console.print(f"success {sum(succeeded) / len(episodes):.1%} ({sum(succeeded)} of {len(episodes)} episodes)")
    for error, count in Counter(episode.error for episode in failed).most_common(3):
        console.print(f"  {count} x {error}", markup=False)
    if not calls:
        raise WorkflowError(
            "The workflow made no LLM call that cotune can see.",
            "Call models through the OpenAI SDK or a LangChain chat model, inside the workflow function.",
        )
    console.print(f"next: cotune show {out}")
    return 1 if lost or len(failed) == len(episodes) else 0
