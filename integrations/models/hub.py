"""The Hugging Face Hub: an export put there as a repository."""

from __future__ import annotations

from pathlib import Path

from cotune.errors import AdapterError, ConfigError


def check_repository(name: str) -> None:
    """Raises ConfigError for what cannot name a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError("push", name, f"USER/NAME ({error})") from None
    if "/" not in name:
        raise ConfigError("push", name, "USER/NAME, of the user or organisation that it belongs to")


def push(folder: Path, name: str, *, private: bool) -> str:
    """Upload a folder as the newest version of the model repository `name`, made where there is none; return its
    address. Raises AdapterError."""
    from huggingface_hub import HfApi

    try:
        repository = HfApi().create_repo(name, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="Policies trained with cotune")
    except Exception as error:
        why = str(error).strip().splitlines()[-1]
        raise AdapterError(
            f"{folder} could not be pushed to {name}: {type(error).__name__}: {why}",
            "The export itself is whole. Log in with `hf auth login`, or set HF_TOKEN, and push again.",
        ) from error
    return str(repository)
