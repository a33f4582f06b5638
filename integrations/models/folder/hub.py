"""Uploads an export to the Hugging Face Hub as a repository."""

from __future__ import annotations

from pathlib import Path

from cotune.errors import AdapterError, ConfigError


def check_repository(name: str) -> None:
    """Raise ConfigError for an invalid name of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError("push", name, f"must be USER/NAME ({error})") from None
    if "/" not in name:
        raise ConfigError("push", name, "must be USER/NAME: the user or organisation that owns it, and its name")


def push(folder: Path, name: str, *, private: bool, without: str) -> str:
    """Upload a folder, except the folder `without` in it, as the newest version of the model repository `name`.

    Creates the repository if it does not exist. Returns its address. Raises AdapterError.
    """
    from huggingface_hub import HfApi

    # The end of the error message: what the user finds on the Hub after a failure.
    state_on_hub = f"{name} may not exist."
    try:
        repository = HfApi().create_repo(name, private=private, exist_ok=True)
        state_on_hub = f"{name} exists, but may lack this version."
        HfApi().upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Policies trained with cotune",
            ignore_patterns=[f"{without}/*"],
        )
    except Exception as error:
        # The Hub's errors have several lines, and the last one has the reason.
        lines = str(error).strip().splitlines() or ["no reason given"]
        reason = lines[-1].rstrip(".")
        cause = f"{folder} could not be pushed to {name}: {type(error).__name__}: {reason}. {state_on_hub}"
        remedy = f"{_first_step(error)}The export itself is whole: {push_again(folder, name, without)}"
        raise AdapterError(cause, remedy) from error
    return str(repository)


def push_again(folder: Path, name: str, without: str) -> str:
    """The end of a sentence that says how to upload an export on disk again."""
    return f"push it again with `hf upload {name} {folder} --exclude '{without}/*'`."


def _first_step(error: Exception) -> str:
    """Advice for the user before another push; empty without any."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return "Log in with `hf auth login`, or set HF_TOKEN, with the right to write there. "
    return "" if status else "Check that the Hub can be reached. "
