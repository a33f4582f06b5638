"""What `cotune show` says of a run before its records, and of a run that has none of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from cotune.algorithms.from_records import FROM_RECORDS
from cotune.errors import RunError
from cotune.reading.headline import Headline, read_headline
from cotune.reading.words import change_text
from cotune.storage.run_layout import RunLayout, is_run, read_metrics, read_run
from cotune.tables import QUIET, plural


def headline_lines(found: Headline) -> Iterator[Text]:
    """The figures of a run, a line each, and its verdict."""
    for change in found.changes:
        yield Text(change_text(change), style=QUIET if change.kind == "selected" else "")
    if found.verdict and found.evaluation:
        yield Text.assemble((found.verdict, "bold"), (f" ({found.evaluation.name})", QUIET))


def learned_from(path: Path | str) -> str:
    """The path of the records that a run learns from; empty for a run that makes episodes of its own, and for records.
    Raises RunError where run.json is broken."""
    layout = RunLayout(path)
    if not is_run(path) or layout.records.is_file() or (config := read_run(path).config).recipe not in FROM_RECORDS:
        return ""
    if not config.records.path:
        cause = f"{layout.run_json} is broken: it has no config.records.path."
        raise RunError(cause, "Restore it, or start a new run.")
    return config.records.path


def show_learned(path: Path | str, records: str) -> Iterator[RenderableType]:
    """A run that learns from records: what from, its losses, and what was left out."""
    lines = [*read_metrics(path)]
    config = read_run(path).config
    yield Text.assemble(("run ", "bold"), f"{path}: recipe {config.recipe}, learns from {records}")
    done = f"{len(lines)} of {plural(config.steps, 'step')}" if config.steps else plural(len(lines), "step")
    if not lines:
        yield Text(f"{done}: no figures yet", style=QUIET)
        return
    yield Text(f"{done}, {plural(sum(line['rows'] for line in lines), 'row')} trained on\n")
    yield from headline_lines(read_headline(path))
    for note in lines[0].get("notes") or ():
        yield Text(note)
    yield Text(f"\nby step: cotune show {path} --steps; episodes: cotune show {records}", style=QUIET)
