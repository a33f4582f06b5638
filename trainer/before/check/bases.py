"""The base models of a dry run: their chat templates, and the differences between them. No weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.integrations.models.chat.formats import load_templates, without_torch
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.folder.folder import context_length, locate_model, of_policy
from cotune.trainer.before.findings import Finding

NO_MODEL = "none"
"""`model` of a dry run that names none."""


class CheckedBase(NamedTuple):
    model: str
    chat: ChatTemplate
    context: int
    """Most tokens of a prompt with its reply."""


def load_bases(config: TrainConfig) -> dict[str, CheckedBase]:
    """Load what a check needs of the base models: chat templates and context lengths, but no weights.

    Returns the base of each policy, by the policy's name; under "" the run's own base, for all other policies. Nothing
    is loaded for NO_MODEL. Raises ConfigError.
    """
    policies_of_model = {model: names for model, names in config.bases.items() if model != NO_MODEL}
    # The folder of a model on this machine, or its Hugging Face id.
    folders: dict[str, str] = {}
    for model in policies_of_model:
        is_local = Path(model).expanduser().exists()
        folders[model] = str(locate_model(model, weights=False)) if is_local else model
    try:
        formats = {folders[model]: config.tool_formats[model] for model in policies_of_model}
        with without_torch(formats):
            templates = load_templates({folders[model]: names for model, names in policies_of_model.items()}, formats)
            contexts = {folder: context_length(folder) for folder in templates}
    except ConfigError as error:
        if config.model == NO_MODEL and error.field == "model":  # the first is a policy's own
            first_policy = next(iter(policies_of_model.values()))[0]
            raise of_policy(error, first_policy) from None
        raise
    bases: dict[str, CheckedBase] = {}
    for model, names in policies_of_model.items():
        base = CheckedBase(folders[model], templates[folders[model]], contexts[folders[model]])
        bases |= dict.fromkeys(names, base)
        if model == config.model:
            bases[""] = base
    return bases


def base_findings(bases: Mapping[str, CheckedBase | None]) -> Iterator[Finding]:
    """A finding for each base model, if roles have different ones."""
    roles: dict[CheckedBase, list[str]] = {}
    for role, base in bases.items():
        if base is not None:
            roles.setdefault(base, []).append(role)
    if len(roles) < 2:
        return
    for (model, chat, context), names in roles.items():
        text = f"base {model}: {len(chat.tokenizer)} tokens, context {context}, "
        text += f"its template shows {'' if chat.shows_tools else 'no '}tools, "
        text += f"it sees {'' if chat.image_tokens else 'no '}images."
        yield Finding("note", ", ".join(names), text)
