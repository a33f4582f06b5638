"""Edited prompts beside weights: which ones a policy was trained with, and that it gets no others unawares."""

from __future__ import annotations

from pathlib import Path

from cotune.adapters.manifest import MANIFEST, is_export, read_manifest
from cotune.errors import AdapterError
from cotune.prompts.edits import AS_WRITTEN, Prompts
from cotune.prompts.file import prompts_path, read_prompts
from cotune.storage.run_layout import is_run, read_run


def prompts_named(id: str) -> str:
    """Prompts by their id, for people; the application's own have none."""
    return "the application's own prompts" if id in ("", AS_WRITTEN) else f"prompts {id[:12]}"


def prompts_of(source: str | Path | None) -> Prompts | None:
    """The edited prompts that go with the weights of a run or an export; None where there are none, also for a plain
    model. Raises ConfigError for a file that is missing, AdapterError for another than roles.json or run.json names."""
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


def trained_with(source: str | Path | None) -> str:
    """The id of the prompts that the weights of a run or an export were trained with, or AS_WRITTEN; "" for a plain
    model."""
    folder = Path(source) if source is not None else None
    if folder is not None and is_export(folder):
        manifest = read_manifest(folder)
        return manifest.trained_with or manifest.prompts or AS_WRITTEN
    if folder is not None and is_run(folder):
        return read_run(folder).prompts or AS_WRITTEN
    return ""


def prompts_for(
    source: str | Path | None, given: Prompts | str | Path | None = None, *, any_prompts: bool = False
) -> Prompts | None:
    """The prompts to use with the weights of a run or an export: those that are `given`, else those that go with it.

    Raises AdapterError for others than it was trained with, unless they were found for these weights or `any_prompts`
    allows it; ConfigError for a file that cannot be used.
    """
    own = prompts_of(source)
    if given is None or given == "":
        return own
    chosen = given if isinstance(given, Prompts) else read_prompts(given)
    known = trained_with(source)
    fitting = (known, own.id if own is not None else AS_WRITTEN)
    if not known or any_prompts or (chosen.id or AS_WRITTEN) in fitting or chosen.trained_with == known:
        return chosen
    cause = f"{source} was trained with {prompts_named(known)}, and is given {prompts_named(chosen.id)}."
    remedy = (
        f"Leave prompts out, find some for these weights (cotune prompts improve --run {source}), or allow others: "
        "any_prompts (--any-prompts)."
    )
    raise AdapterError(cause, remedy)


def told(prompts: Prompts | None) -> str:
    """A line on the prompts in use; empty without any."""
    return "" if prompts is None else f"edited prompts {prompts.id[:12]} of {', '.join(prompts.roles)}"
