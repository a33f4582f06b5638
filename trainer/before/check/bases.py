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
"""The value of `model` in a dry run without a model."""


class CheckedBase(NamedTuple):
    """The parts of a base model that a dry run needs."""

    model: str
    chat: ChatTemplate
    context: int
    """Most tokens of a prompt with its reply."""


def load_bases(config: TrainConfig) -> dict[str, CheckedBase]:
    """Load the chat templates and context lengths of the base models, but no weights.

    Returns the base of each policy by the policy's name, and under "" the run's own base, for all other policies.
    Nothing is loaded for NO_MODEL. Raises ConfigError.
    """
    # 1. The place of each model: its folder on this machine, or its Hugging Face id.
    policies_of_model = {model: names for model, names in config.bases.items() if model != NO_MODEL}
    folders: dict[str, str] = {}
    for model in policies_of_model:
        is_local = Path(model).expanduser().exists()
        folders[model] = str(locate_model(model, weights=False)) if is_local else model

    # 2. Load the templates and the lengths.
    try:
        formats = {folders[model]: config.tool_formats[model] for model in policies_of_model}
        with without_torch(formats):
            templates = load_templates({folders[model]: names for model, names in policies_of_model.items()}, formats)
            contexts = {folder: context_length(folder) for folder in templates}
    except ConfigError as error:
        # Without a model of the run, the model that cannot be loaded is a policy's own: the error names the policy.
        if config.model == NO_MODEL and error.field == "model":
            first_policy = next(iter(policies_of_model.values()))[0]
            raise of_policy(error, first_policy) from None
        raise

    # 3. The bases by policy.
    bases: dict[str, CheckedBase] = {}
    for model, names in policies_of_model.items():
        base = CheckedBase(folders[model], templates[folders[model]], contexts[folders[model]])
        bases |= dict.fromkeys(names, base)
        if model == config.model:
            bases[""] = base
    return bases


def base_findings(bases: Mapping[str, CheckedBase | None]) -> Iterator[Finding]:
    """Yield a finding for each base model, if roles have different ones. `bases` has the base of each role."""
    roles_by_base: dict[CheckedBase, list[str]] = {}
    for role, base in bases.items():
        if base is not None:
            roles_by_base.setdefault(base, []).append(role)
    if len(roles_by_base) < 2:
        return
    for base, roles in roles_by_base.items():
        tools = "tools" if base.chat.shows_tools else "no tools"
        images = "images" if base.chat.image_tokens else "no images"
        text = (
            f"base {base.model}: {len(base.chat.tokenizer)} tokens, context {base.context}, "
            f"its template shows {tools}, it sees {images}."
        )
        yield Finding("note", ", ".join(roles), text)
