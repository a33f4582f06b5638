"""`cotune prompts edit`."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from cotune.cli.command import APP, TASKS, Parser, add_repeated
from cotune.errors import ConfigError
from cotune.prompts.edits import PromptPart, Prompts
from cotune.prompts.templates import Template, fault_of
from cotune.prompts.wording import Wording
from cotune.records.ids import new_id
from cotune.terminal import ask_yes_no, tell, terminal

TEXT = "Change a part of a role's prompts in your editor, and compare before and after"
EXAMPLE = "cotune prompts edit runs/traced --part writer.system"


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune prompts edit`."""
    from cotune.cli.prompts.sources import SOURCE

    command.add_argument("source", metavar="PROMPTS", help=SOURCE)
    command.add_argument(
        "--part", required=True, metavar="NAME", help="part to change, such as writer.system (see cotune prompts show)"
    )
    command.add_argument("--out", metavar="FILE", help="file of prompts to write (default: the file that was read)")
    command.add_argument("--text", metavar="FILE", help="take the new text from FILE, or - for standard input")
    command.add_argument("--undo", action="store_true", help="restore the application's own text")
    add_repeated(command, "--keep", "REGEX", "with records: text that stays as it is")
    command.add_argument("--app", metavar="APP", help=f"compare before and after with it: {APP}")
    command.add_argument("--tasks", metavar="FILE", help=f"with --app: {TASKS}; each is run twice")


def run(a: argparse.Namespace) -> int:
    """Change the text of one part and write the file of prompts. With --app, compare both texts by running the
    application.
    """
    from cotune.cli.printing.prompts import shown_diff
    from cotune.cli.prompts.sources import part_named, source
    from cotune.prompts.file import prompts_path, write_prompts
    from cotune.prompts.parts import why_not

    if bool(a.app) != bool(a.tasks):
        fault = "needs --tasks" if a.app else "is missing: --tasks needs it"
        raise ConfigError("--app", a.app, fault, "For example: --app app:solve --tasks tasks.jsonl")
    # 1. The prompts, and the file to write. From records, never write over a file that may have the user's edits.
    prompts, source_file, recorded = source(a.source, keep=a.keep)
    file = prompts_path(a.out) if a.out else source_file
    if recorded is not None and file.is_file():
        raise ConfigError("--out", str(file), "exists already", f"Edit it: cotune prompts edit {file} --part ...")

    # 2. The part, if it can be edited. Records may have another reason than the part itself: that its texts also match
    #    another part.
    part = part_named(prompts, a.part)
    reason = why_not(part.kind, part.old, part.support.tasks)
    for found_part in recorded.parts if recorded is not None else ():
        if found_part.part == part and found_part.why:
            reason = found_part.why
            break
    if reason:
        raise ConfigError(
            "--part",
            part.name,
            f"cannot be edited: {reason}",
            "Record tasks that differ more: then cotune sees which texts are constant.",
        )

    # 3. Its new text.
    before = part.now
    new = part.old if a.undo else _new_text(a, part, prompts)
    a.result = ""
    if new == before:
        tell(f"{part.name} is as it was; nothing is written")
        return 0
    changed = msgspec.structs.replace(part, new=None if new == part.old else new)
    parts = tuple(changed if other is part else other for other in prompts.parts)
    # The stored evaluation is of the old texts, so it is dropped.
    after = msgspec.structs.replace(prompts, parts=parts, evaluation={})
    write_prompts(file, after)
    terminal().print(shown_diff([(changed, before, new)]))
    tell(f"written: {file}")
    a.result = str(file)
    if a.app:
        _compare(a, prompts, after, file)
    return 0


def _compare(a: argparse.Namespace, before: Prompts, after: Prompts, file: Path) -> None:
    """Run the application with both prompts, print the result, and store it with the prompts."""
    from cotune.prompts.file import write_prompts
    from cotune.trainer.prompts.by_hand import compare_prompts, result_sentence

    folder = file.parent / f"compared-{new_id()}"
    comparison = compare_prompts(a.app, a.tasks, before, after, folder)
    if comparison is None:
        tell(f"nothing to compare: the workflow gave no outcome; its episodes: cotune show {folder}")
        return
    evaluation = {"verdict": comparison.verdict, "held_out": comparison.to_json(), "records": str(folder)}
    write_prompts(file, msgspec.structs.replace(after, evaluation=evaluation))
    tell(f"{result_sentence(comparison)}; episodes: cotune show {folder}")


def _new_text(a: argparse.Namespace, part: PromptPart, prompts: Prompts) -> Template:
    """The new text of a part, with every slot: from --text, or from the user's editor. Raises ConfigError.

    A text that cannot be used is shown to the user, who may edit it again. The draft stays on disk until a text is
    accepted, so that no work is lost.
    """
    wording = Wording(prompts.parts)
    old = wording.text(part.now)
    if a.text:
        text = sys.stdin.read() if a.text == "-" else _text_of(Path(a.text))
        return _edited_template(part, wording, text, old, a.text)
    with tempfile.NamedTemporaryFile("w", suffix=".md", prefix="prompt-", delete=False, encoding="utf-8") as draft:
        draft.write(old)
    path = Path(draft.name)
    if part.old.slots:
        marks = ", ".join(map(wording.mark, part.old.slots))
        tell(f"{marks}: text that differs from call to call; each mark must stay in the text, once, at any place")
    while True:
        _open_editor(path)
        try:
            new = _edited_template(part, wording, _text_of(path), old, str(path))
        except ConfigError as error:
            if not sys.stdin.isatty() or not ask_yes_no(f"{error} Edit again? [Y/n] ", default=True):
                raise
        else:
            path.unlink()
            return new


def _edited_template(part: PromptPart, wording: Wording, text: str, old: str, where: str) -> Template:
    """The template of a text that the user wrote. `where` names its file. Raises ConfigError if it is empty or lacks a
    slot.

    Editors add a line end to a file; it is removed unless the `old` text ended with one.
    """
    if text.endswith("\n") and not old.endswith("\n"):
        text = text.removesuffix("\n").removesuffix("\r")
    new = wording.template(text)
    if not text.strip():
        raise ConfigError("text", where, "is empty", "Write a text, or use --undo to restore the application's own.")
    if fault := fault_of(part.old, new):
        marks = ", ".join(map(wording.mark, part.old.slots)) or "none"
        raise ConfigError("text", where, f"cannot replace {part.name}: {fault}", f"Use its slots once each: {marks}.")
    return new


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError("text", str(path), "is not in UTF-8", "Save it in this encoding.") from None


def _open_editor(path: Path) -> None:
    """Open a file in the user's editor (VISUAL, EDITOR, or vi) and wait until it is closed. Raises ConfigError."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        process = subprocess.run([*shlex.split(editor), str(path)], check=False)
    except (OSError, ValueError) as error:
        remedy = "Set EDITOR to an editor, or pass the text: --text FILE."
        raise ConfigError("EDITOR", editor, f"cannot be started ({error})", remedy) from None
    if process.returncode:
        raise ConfigError("EDITOR", editor, f"failed with status {process.returncode}", f"Your text is in {path}.")
