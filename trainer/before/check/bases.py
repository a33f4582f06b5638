"""The base models of a dry run: their chat templates, and how those differ. No weights are loaded."""

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
    """The base of each policy by name, and under "" the run's own, which others have; nothing for NO_MODEL. Of a
    Hugging Face id no weights are fetched. Raises ConfigError."""
    named = {model: names for model, names in config.bases.items() if model != NO_MODEL}
    places = {m: str(locate_model(m, weights=False)) if Path(m).expanduser().exists() else m for m in named}
    try:
        formats = {places[model]: config.tool_formats[model] for model in named}
        with without_torch(formats):
            templates = load_templates({places[model]: names for model, names in named.items()}, formats)
            contexts = {place: context_length(place) for place in templates}
    except ConfigError as error:
        if config.model == NO_MODEL and error.field == "model":  # the first is a policy's own
            raise of_policy(error, next(iter(named.values()))[0]) from None
        raise
    found: dict[str, CheckedBase] = {}
    for model, names in named.items():
        base = CheckedBase(places[model], templates[places[model]], contexts[places[model]])
        found |= dict.fromkeys(names, base) | ({"": base} if model == config.model else {})
    return found


def base_findings(bases: Mapping[str, CheckedBase | None]) -> Iterator[Finding]:
    """What differs between the bases of roles, a line for each."""
    roles: dict[CheckedBase, list[str]] = {}
    for role, base in bases.items():
        if base is not None:
            roles.setdefault(base, []).append(role)
    for (model, chat, context), names in roles.items() if len(roles) > 1 else ():
        text = f"base {model}: {len(chat.tokenizer)} tokens, context {context}, "
        text += f"its template shows {'' if chat.shows_tools else 'no '}tools, "
        text += f"it sees {'' if chat.image_tokens else 'no '}images."
        yield Finding("note", ", ".join(names), text)
