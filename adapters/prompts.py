"""Edited prompts beside weights: which ones a policy was trained with, and that it gets no others unawares."""

from __future__ import annotations

from pathlib import Path

from cotune.adapters.manifest import MANIFEST, is_export, read_manifest
from cotune.errors import AdapterError
from cotune.prompts.edits import Prompts
from cotune.prompts.file import prompts_path, read_prompts
from cotune.storage.run_layout import is_run, read_run


def prompts_named(id: str) -> str:
    """Prompts by their id, for people; the application's own have none."""
    return f"prompts {id[:12]}" if id else "the application's own prompts"


def prompts_of(source: str | Path | None) -> Prompts | None:
    """The edited prompts that the weights of a run or an export were trained with; None where there are none, also for
    a plain model. Raises ConfigError for a file that is missing, AdapterError for another than roles.json or run.json
    names."""
    folder = Path(source) if source is not None else None
    if folder is None or not (is_export(folder) or is_run(folder)):
        return None
    exported = is_export(folder)
    named = read_manifest(folder).prompts if exported else read_run(folder).prompts
    if not named:
        return None
    found = read_prompts(folder)
    if found.id != named:
        file = MANIFEST if exported else "run.json"
        cause = f"{prompts_path(folder)} holds {prompts_named(found.id)}, and {file} names {prompts_named(named)}."
        raise AdapterError(cause, "Export the run again." if exported else "Put the file of the run back.")
    return found


def prompts_for(
    source: str | Path | None, given: Prompts | str | Path | None = None, *, any_prompts: bool = False
) -> Prompts | None:
    """The prompts to use with the weights of a run or an export: those that are `given`, else those that it was trained
    with.

    Raises AdapterError for others than it was trained with, unless they were found for these weights or `any_prompts`
    allows it; ConfigError for a file that cannot be used.
    """
    own = prompts_of(source)
    if given is None or given == "":
        return own
    chosen = given if isinstance(given, Prompts) else read_prompts(given)
    check_prompts(source, own, chosen, any_prompts=any_prompts)
    return chosen


def check_prompts(source: str | Path | None, own: Prompts | None, chosen: Prompts, *, any_prompts: bool) -> None:
    """Raises AdapterError where weights get prompts that they were not trained with, as `prompts_for` does."""
    known = own.id if own is not None else ""
    trained = source is not None and (is_export(Path(source)) or is_run(source))
    if not trained or any_prompts or chosen.id == known or (known and chosen.trained_with == known):
        return
    cause = f"{source} was trained with {prompts_named(known)}, and is given {prompts_named(chosen.id)}."
    remedy = "Leave prompts out for those that it was trained with, or allow others: any_prompts (--any-prompts)."
    raise AdapterError(cause, remedy)


def told(prompts: Prompts | None) -> str:
    """A line on the prompts in use; empty without any."""
    return "" if prompts is None else f"edited prompts {prompts.id[:12]} of {', '.join(prompts.roles)}"
