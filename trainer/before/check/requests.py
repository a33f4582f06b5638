"""What a model's chat template and the grammars of replies say of the calls of a dry run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cotune.errors import SamplerError
from cotune.integrations.models.chat.content import for_template
from cotune.integrations.models.chat.reply_grammar import unenforceable
from cotune.records.images import holds_images, images_of
from cotune.records.structs import CallRecord
from cotune.storage.protocol import Store
from cotune.trainer.before.check.findings import blocking
from cotune.trainer.before.check.report import Finding
from cotune.trainer.config.train import TrainConfig


def chat_of(model: str | None, config: TrainConfig) -> Any:
    """The model's chat template. Of a Hugging Face id no weights are fetched."""
    if model is None:
        return None
    from cotune.integrations.models.chat.template import ChatTemplate
    from cotune.integrations.models.folder.folder import locate_model

    found = locate_model(model) if Path(model).expanduser().exists() else model
    return ChatTemplate.load(found, config.tool_format)


def tokens(chat: Any, calls: Sequence[CallRecord], store: Store) -> tuple[dict[str, int], list[Finding]]:
    """Tokens of each call's prompt, and the calls that the model's chat template refuses."""
    counts: dict[str, int] = {}
    found: dict[str, Finding] = {}
    for call in calls if chat is not None else ():
        tools = store.message(call.tools) if call.tools else None
        try:
            counts[call.id] = len(chat.render([store.message(name) for name in call.messages], tools))
        except SamplerError as error:
            found[call.role] = blocking(error, call.role)
    return counts, [*found.values(), *_unshown_tools(chat, calls)]


def _unshown_tools(chat: Any, calls: Sequence[CallRecord]) -> Iterator[Finding]:
    offered = dict.fromkeys(call.role for call in calls if call.tools)
    if chat is not None and offered and not chat.shows_tools:
        from cotune.integrations.models.chat.template import SHOW_TOOLS, UNSHOWN_TOOLS

        yield Finding("warns", ", ".join(offered), UNSHOWN_TOOLS, SHOW_TOOLS)


def forms(calls: Sequence[CallRecord], store: Store, chat: Any) -> list[Finding]:
    """Content that no policy can read, and forms of replies that no sampler can enforce: such a call is an error in
    training."""
    found: dict[tuple[str, str], Finding] = {}
    for call in calls:
        cause = unenforceable(call.params, store.message(call.tools) if call.tools else None)
        remedy = "Change the request, or give the role a policy of kind provider."
        try:
            messages = [store.message(name) for name in call.messages]
            for message in messages:
                for_template(message, parts=True)
            if chat is None and holds_images(messages):  # a model that is known has been asked
                images_of(messages)
        except SamplerError as error:
            cause, remedy = error.cause, f"{error.remedy} Or give the role a policy of kind provider."
        if cause:
            found[call.role, cause] = Finding("blocks", call.role, cause, remedy)
    return list(found.values())
