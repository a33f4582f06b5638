"""The sources of prompts for the commands: a file of prompts, records, or an application that is recorded."""

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
    """Prompts, and the file to write them to. `found` are the recorded parts if the prompts come from records."""

    prompts: Prompts
    file: Path
    found: FoundParts | None


def has_prompts(path: str) -> bool:
    """Whether a path is a file of prompts, by its name, or a folder with such a file."""
    return path.endswith(".json") or (Path(path).is_dir() and prompts_path(path).is_file())


def parts_in_records(records: str, *, roles: Sequence[str] = (), keep: Sequence[str] = ()) -> FoundParts:
    """The parts of recorded calls. Raises RunError without records, ConfigError for an unknown role."""
    from cotune.storage.open_store import open_store

    with open_store(records, read_only=True) as store:
        found_parts = find_parts(store, roles=roles, keep=patterns(keep, "--keep"))
        found_roles = {role.name for role in found_parts.roles}
        for role in roles:
            if role not in found_roles:
                recorded_roles = [recorded.name for recorded in find_parts(store).roles]
                raise ConfigError("--role", role, "made no recorded call", _existing_names(role, recorded_roles))
    return found_parts


def source(path: str, *, keep: Sequence[str] = ()) -> Source:
    """The prompts at a path."""
    if has_prompts(path):
        return Source(read_prompts(path), prompts_path(path), None)
    found = parts_in_records(path, keep=keep)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return Source(found.prompts(**provenance(path)), folder / NAME, found)


def provenance(records: str) -> dict[str, Any]:
    """The fields of a file of prompts about its origin."""
    from datetime import UTC, datetime
    from importlib.metadata import version

    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created": now, "cotune": version("cotune"), "provenance": {"records": str(records)}}


def part_named(prompts: Prompts, name: str) -> PromptPart:
    """A part by its name. If several roles share the part, its name may begin with any of them. Raises ConfigError."""
    for part in prompts.parts:
        names = {part.name, *(part.name.replace(part.roles[0], role, 1) for role in part.roles)}
        if name in names:
            return part
    remedy = _existing_names(name, [part.name for part in prompts.parts])
    raise ConfigError("--part", name, "is not a part of these prompts", remedy)


def _existing_names(name: str, names: Sequence[str]) -> str:
    """A remedy for an unknown name: similar names, or all names."""
    suggestion = did_you_mean(near_names(name, names))
    if suggestion:
        return suggestion
    return f"There are: {', '.join(names)}." if names else "There are none."
