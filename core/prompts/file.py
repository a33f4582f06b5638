"""`prompts.json`: the prompts of an application with their edits, as a file."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import ConfigError, expectation_clause, field_and_fault
from cotune.prompts.chat_texts import Kind
from cotune.prompts.edits import FORMAT, PromptPart, Prompts, Support
from cotune.prompts.templates import Template, fault_of
from cotune.records.ids import canonical
from cotune.storage.whole_file import whole_file

NAME = "prompts.json"
_REMEDY = "Write it again: cotune prompts show RUN --out prompts.json."
_UNTOUCHED = "Change it with cotune prompts edit, which keeps the file consistent."


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part in the file. Texts are lists of constant texts and slot numbers, so that nothing must be escaped."""

    name: str
    roles: tuple[str, ...]
    kind: Kind
    key: str = ""
    old: tuple[str | int, ...]
    new: tuple[str | int, ...] | None = None
    old_sha256: str
    new_sha256: str = ""
    support: Support = Support()


class _File(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    id: str = ""
    cotune: str = ""
    created: str = ""
    workflow: str = ""
    models: tuple[str, ...] = ()
    trained_with: str = ""
    parts: tuple[_Part, ...]
    evaluation: dict[str, Any] = {}
    provenance: dict[str, Any] = {}


def prompts_path(path: str | Path) -> Path:
    """The file of prompts at a path: the path itself, or the file in a folder, for example a run or an export."""
    path = Path(path)
    return path / NAME if path.is_dir() else path


def read_prompts(path: str | Path) -> Prompts:
    """The prompts in a file, or in a folder with such a file. Raises ConfigError for a file that cannot be read, has
    another format, or was changed by hand: a text does not match its hash, or lost a slot."""
    file = prompts_path(path)
    if not file.is_file():
        raise ConfigError("prompts", str(path), "has no file of prompts", f"{file} does not exist.")

    # 1. The content in this version's format.
    try:
        raw = msgspec.json.decode(file.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("prompts", str(file), f"is not valid JSON ({error})", _REMEDY) from None
    format = raw.get("format") if isinstance(raw, dict) else None
    if format is None:
        raise ConfigError("prompts", str(file), "is not a file of prompts", _REMEDY)
    if format != FORMAT:
        fault = f"has format {format!r}, and this cotune reads {FORMAT}"
        raise ConfigError("prompts", str(file), fault, "Read it with a newer cotune.")
    try:
        stored = msgspec.convert(raw, _File)
    except msgspec.ValidationError as error:
        field, fault = field_and_fault(error)
        raise ConfigError("prompts", str(file), f"is broken: {field} {expectation_clause(fault)}", _REMEDY) from None

    # 2. Its parts: nobody has changed them by hand, and each name is there once.
    prompts = Prompts(
        parts=tuple(_checked_part(file, part) for part in stored.parts),
        workflow=stored.workflow,
        models=stored.models,
        created=stored.created,
        cotune=stored.cotune,
        provenance=stored.provenance,
        evaluation=stored.evaluation,
        trained_with=stored.trained_with,
    )
    names = Counter(part.name for part in prompts.parts)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise ConfigError("prompts", str(file), f"has two parts with the name {repeated[0]}", _REMEDY)
    if prompts.id != stored.id:
        raise ConfigError("prompts", str(file), "was changed: its parts do not match its id", _UNTOUCHED)
    return prompts


def write_prompts(path: str | Path, prompts: Prompts) -> Path:
    """Write a file of prompts completely, or not at all. Returns its path. Raises OSError."""
    file = prompts_path(path)
    with whole_file(file) as out:
        out.write(as_json(prompts))
    return file


def as_json(prompts: Prompts) -> bytes:
    """The content of a file of prompts."""
    written = _File(
        format=prompts.format,
        id=prompts.id,
        cotune=prompts.cotune,
        created=prompts.created,
        workflow=prompts.workflow,
        models=prompts.models,
        trained_with=prompts.trained_with,
        parts=tuple(map(_stored_part, prompts.parts)),
        evaluation=prompts.evaluation,
        provenance=prompts.provenance,
    )
    return msgspec.json.format(msgspec.json.encode(written), indent=2) + b"\n"


def _stored_part(part: PromptPart) -> _Part:
    """A part in the form of the file. The hashes show later whether somebody changed a text by hand."""
    return _Part(
        name=part.name,
        roles=part.roles,
        kind=part.kind,
        key=part.key,
        old=part.old.pieces,
        new=None if part.new is None else part.new.pieces,
        old_sha256=text_sha256(part.old),
        new_sha256="" if part.new is None else text_sha256(part.new),
        support=part.support,
    )


def _checked_part(file: Path, part: _Part) -> PromptPart:
    """A part from the file. Raises ConfigError if a text was changed by hand, or does not fit its slots."""
    old = Template(part.old)
    new = None if part.new is None else Template(part.new)
    for name, template, sha256 in (("old", old, part.old_sha256), ("new", new, part.new_sha256)):
        if template is not None and text_sha256(template) != sha256:
            fault = f"was changed: the {name} text of {part.name} does not match its {name}_sha256"
            raise ConfigError("prompts", str(file), fault, _UNTOUCHED)
    if fault := fault_of(old, new):
        raise ConfigError("prompts", str(file), f"cannot be used: in {part.name}, {fault}", _UNTOUCHED)
    return PromptPart(
        name=part.name, roles=part.roles, kind=part.kind, key=part.key, old=old, new=new, support=part.support
    )


def text_sha256(template: Template) -> str:
    """SHA-256 of a text and its slots."""
    return hashlib.sha256(canonical(template.pieces)).hexdigest()
