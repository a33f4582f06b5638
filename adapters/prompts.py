"""Edited prompts of runs and exports. Policies are refused prompts that they were not trained with."""

from __future__ import annotations

from pathlib import Path

from cotune.adapters.manifest import MANIFEST, is_export, read_manifest
from cotune.errors import AdapterError
from cotune.prompts.edits import AS_WRITTEN, Prompts
from cotune.prompts.file import prompts_path, read_prompts
from cotune.storage.run_layout import is_run, read_run


def prompts_named(id: str) -> str:
    """A name for messages, from the id of prompts; an application's unedited prompts have no id."""
    return "the application's own prompts" if id in ("", AS_WRITTEN) else f"prompts {id[:12]}"


def prompts_of(source: str | Path | None) -> Prompts | None:
    """The edited prompts that a run or an export uses; None if it has none, and for a plain model.

    Raises ConfigError if the file is missing, AdapterError if it is not the one that roles.json or run.json names.
    """
    folder = Path(source) if source is not None else None
    if folder is None:
        return None
    if is_export(folder):
        recorded_id = read_manifest(folder).prompts
        record = MANIFEST
        remedy = "Export the run again."
    elif is_run(folder):
        recorded_id = read_run(folder).prompts
        record = "run.json"
        remedy = "Put the file of the run back."
    else:
        return None
    if not recorded_id:
        return None

    prompts = read_prompts(folder)
    if prompts.id != recorded_id:
        present = prompts_named(prompts.id)
        recorded = prompts_named(recorded_id)
        raise AdapterError(f"{prompts_path(folder)} holds {present}, and {record} names {recorded}.", remedy)
    return prompts


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
    source: str | Path | None, prompts: Prompts | str | Path | None = None, *, any_prompts: bool = False
) -> Prompts | None:
    """The edited prompts to use with the weights in `source`, a run, an export or a model folder.

    They are `prompts` if passed, else the ones stored in `source`. Raises AdapterError for passed prompts that the
    weights were not trained with, unless they were improved for these weights or `any_prompts` is set. Raises
    ConfigError for a file that cannot be used.
    """
    stored = prompts_of(source)
    if prompts is None or prompts == "":
        return stored
    chosen = prompts if isinstance(prompts, Prompts) else read_prompts(prompts)
    training_id = trained_with(source)
    if any_prompts or not training_id:  # a plain model was trained with no prompts
        return chosen

    # `cotune prompts improve` notes in its prompts which prompts the weights were trained with.
    improved_for_these_weights = chosen.trained_with == training_id
    stored_id = AS_WRITTEN if stored is None else stored.id
    chosen_id = chosen.id or AS_WRITTEN
    if improved_for_these_weights or chosen_id in (training_id, stored_id):
        return chosen
    cause = f"{source} was trained with {prompts_named(training_id)}, and is given {prompts_named(chosen.id)}."
    remedy = (
        f"Leave prompts out, find some for these weights (cotune prompts improve --run {source}), or allow others: "
        "any_prompts (--any-prompts)."
    )
    raise AdapterError(cause, remedy)


def prompts_text(prompts: Prompts | None) -> str:
    """A text that names the prompts in use and their roles; empty for None."""
    return "" if prompts is None else f"edited prompts {prompts.id[:12]} of {', '.join(prompts.roles)}"
