"""`cotune prompts show`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cotune.cli.command import APP, TASKS, Parser, add_repeated, printing_aside
from cotune.errors import ConfigError
from cotune.terminal import tell, terminal

TEXT = "Show the constant text of each role's prompts, and the slots that vary"
EXAMPLE = "cotune prompts show runs/traced"
RECORDED = "runs/prompts"
"""Run folder for the records of an application."""
_KINDS = ("system", "user", "assistant", "tool", "format")


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune prompts show`."""
    command.add_argument(
        "source", help=f"run folder, records file or prompts.json; or {APP}, which is recorded in {RECORDED} first"
    )
    command.add_argument("--tasks", metavar="FILE", help=f"with an application: {TASKS}")
    command.add_argument(
        "--limit", type=int, default=8, metavar="N", help="with an application: tasks to run (default: %(default)s)"
    )
    add_repeated(command, "--role", "NAME", "parts of this role only")
    command.add_argument(
        "--part", default="system,user", metavar="KINDS", help=f"any of {','.join(_KINDS)} (default: %(default)s)"
    )
    add_repeated(command, "--keep", "REGEX", "text that must not change: it becomes a slot")
    command.add_argument("--out", metavar="FILE", help="also write the parts as a file of prompts, to edit")
    command.add_argument("--full", action="store_true", help="whole texts")
    command.add_argument("--json", action="store_true", help="the parts as one JSON value")


def run(a: argparse.Namespace) -> int:
    """Show the parts of the prompts in a file or in records. An application is run and recorded first.

    Exit status: 1 if no part can be edited.
    """
    from cotune.cli.printing.prompts import parts_as_json, parts_of_prompts, shown_parts
    from cotune.cli.prompts.sources import has_prompts, parts_in_records, provenance
    from cotune.prompts.file import read_prompts, write_prompts

    kinds = tuple(a.part.split(","))
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise ConfigError("--part", unknown[0], "is not a kind of part", f"Kinds: {', '.join(_KINDS)}.")
    records = a.source
    if ":" in a.source and not Path(a.source).exists():
        records = _record_application(a)
    is_prompts_file = has_prompts(records) and not Path(records).is_dir()
    if is_prompts_file:
        found_parts = parts_of_prompts(read_prompts(records), a.role)
    else:
        found_parts = parts_in_records(records, roles=a.role, keep=a.keep)
    if a.json:
        print(json.dumps(parts_as_json(found_parts), ensure_ascii=False))
    else:
        terminal().print(shown_parts(found_parts, kinds, full=a.full))
    if a.out:
        file = write_prompts(a.out, found_parts.prompts(**provenance(records)))
        if not a.json:
            tell(f"written: {file}")
    # The suggested next command edits the first part that can be edited.
    a.result = ""
    for found_part in found_parts.parts:
        if not found_part.why:
            a.result = found_part.part.name
            break
    return 0 if found_parts.editable else 1


def _record_application(a: argparse.Namespace) -> str:
    """Record the application on its tasks, with its own model. Returns the folder of the records."""
    from cotune.cli.trace import TraceOptions, trace
    from cotune.storage.run_layout import RunLayout

    if not a.tasks:
        example = f"For example: cotune prompts show {a.source} --tasks tasks.jsonl --limit 8"
        raise ConfigError("--tasks", None, "is missing: the application is run to record its prompts", example)
    with printing_aside():
        if RunLayout(Path(RECORDED)).records.exists():
            tell(f"{RECORDED} has earlier records, which count too. To count only the new ones, move it away first")
        trace(a.source, a.tasks, RECORDED, TraceOptions(limit=a.limit), terminal(stderr=True))
    return RECORDED
