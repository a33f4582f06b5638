"""What `cotune show` says of a run before its records, and of a run that has none of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from cotune.algorithms.from_records import FROM_RECORDS
from cotune.reading.headline import Headline, read_headline
from cotune.reading.words import change_text
from cotune.storage.run_layout import RunLayout, is_run, read_config, read_metrics
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
    if not is_run(path) or RunLayout(path).records.is_file():
        return ""
    config = read_config(path)
    return str(config["records"]["path"]) if config.get("recipe") in FROM_RECORDS else ""


def show_learned(path: Path | str, records: str) -> Iterator[RenderableType]:
    """A run that learns from records: what from, its losses, and what was left out."""
    lines = [*read_metrics(path)]
    config = read_config(path)
    yield Text.assemble(("run ", "bold"), f"{path}: recipe {config['recipe']}, learns from {records}")
    done = f"{len(lines)} of {plural(config['steps'], 'step')}"
    if not lines:
        yield Text(f"{done}: no figures yet", style=QUIET)
        return
    yield Text(f"{done}, {plural(sum(line['rows'] for line in lines), 'row')} trained on\n")
    yield from headline_lines(read_headline(path))
    for note in lines[0].get("notes") or ():
        yield Text(note)
    yield Text(f"\nby step: cotune show {path} --steps; episodes: cotune show {records}", style=QUIET)
