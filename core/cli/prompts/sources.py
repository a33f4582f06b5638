"""Where the commands for prompts take them from: a file of prompts, records, or an application that is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cotune.errors import ConfigError
from cotune.near_names import did_you_mean, near_names
from cotune.prompts.edits import PromptPart, Prompts
from cotune.prompts.file import NAME, prompts_path, read_prompts
from cotune.prompts.parts import FoundParts, find_parts, patterns

SOURCE = "prompts.json, or a run folder or records file"


class Source(NamedTuple):
    """Prompts, and the file that keeps them, or would. `found` is set where they come from records."""

    prompts: Prompts
    file: Path
    found: FoundParts | None


def has_prompts(path: str) -> bool:
    """Whether a file of prompts is meant: it is one by its name, or the folder has one."""
    return path.endswith(".json") or (Path(path).is_dir() and prompts_path(path).is_file())


def found_in(records: str, *, roles: Sequence[str] = (), keep: Sequence[str] = ()) -> FoundParts:
    """The parts of recorded calls. Raises RunError where there are no records, ConfigError for an unknown role."""
    from cotune.storage.open_store import open_store

    with open_store(records, read_only=True) as store:
        found = find_parts(store, roles=roles, keep=patterns(keep, "--keep"))
        named = {role.name for role in found.roles}
        for role in (role for role in roles if role not in named):
            known = [one.name for one in find_parts(store).roles]
            raise ConfigError("--role", role, "made no recorded call", _there_are(role, known))
    return found


def source(path: str, *, keep: Sequence[str] = ()) -> Source:
    """The prompts at a path."""
    if has_prompts(path):
        return Source(read_prompts(path), prompts_path(path), None)
    found = found_in(path, keep=keep)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return Source(found.prompts(**made(path)), folder / NAME, found)


def made(records: str) -> dict[str, Any]:
    """What a file of prompts says of how it came about."""
    from datetime import UTC, datetime
    from importlib.metadata import version

    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created": now, "cotune": version("cotune"), "provenance": {"records": str(records)}}


def part_named(prompts: Prompts, name: str) -> PromptPart:
    """A part by its name, or by that which it would have under another of its roles. Raises ConfigError."""
    for part in prompts.parts:
        names = {part.name, *(part.name.replace(part.roles[0], role, 1) for role in part.roles)}
        if name in names:
            return part
    remedy = _there_are(name, [part.name for part in prompts.parts])
    raise ConfigError("--part", name, "is no part of these prompts", remedy)


def _there_are(name: str, known: Sequence[str]) -> str:
    near = did_you_mean(near_names(name, known))
    return near or (f"There are: {', '.join(known)}." if known else "There are none.")
