"""Recorded token ids for another model than the recorded one, which gets texts where it cannot read them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import ConfigError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.folder.folder import loading, locate_model
from cotune.records.answers import Answer
from cotune.replay.script import Replay, ScriptCall
from cotune.sampling.protocol import ChatFormat
from cotune.storage.run_layout import is_run, read_run, read_run_json, relocated


class RecordedIds:
    """Tells whose recorded token ids another model reads as they were: those of a call whose policy had the vocabulary
    and the chat template of the one that answers now."""

    def __init__(self, run: Path, chat_of: Callable[[str], ChatFormat]) -> None:
        """`chat_of` has the chat format of who answers a role now."""
        self._folder, self._run = run, read_run(run) if is_run(run) else None
        self._chat_of = chat_of
        self._recorded = functools.cache(self._load)

    def readable(self, call: ScriptCall) -> bool:
        """Whether the ids of a call may be used; also where it has none."""
        if call.answer.policy is None or not call.answer.prompt_ids or self._run is None:
            return True
        model = self._run.base_of(call.answer.policy.name) or self._run.model
        now = self._chat_of(call.role)
        return isinstance(now, ChatTemplate) and model is not None and self._recorded(model) == _spelling(now.tokenizer)

    def _load(self, model: str) -> Any:
        """How a base of the run spells; None where it is not there any more."""
        from transformers import AutoTokenizer

        try:
            place = relocated(model, read_run_json(self._folder), self._folder.absolute())
            return _spelling(AutoTokenizer.from_pretrained(locate_model(place), **loading()))
        except (ConfigError, OSError, ValueError):
            return None


def without_foreign_ids(replay: Replay, ids: RecordedIds) -> tuple[Replay, bool]:
    """The replay with the texts alone of calls whose ids cannot be read, and whether there are any."""
    calls = tuple(call if ids.readable(call) else _as_text(call) for call in replay.script.calls)
    found = any(call.answer is not old.answer for call, old in zip(calls, replay.script.calls, strict=True))
    return msgspec.structs.replace(replay, script=msgspec.structs.replace(replay.script, calls=calls)), found


def _as_text(call: ScriptCall) -> ScriptCall:
    """The call as a provider would have answered it."""
    bare = tuple(msgspec.structs.replace(c, token_ids=(), logprobs=()) for c in call.answer.candidates)
    answer: Answer = msgspec.structs.replace(call.answer, candidates=bare, prompt_ids=())
    return msgspec.structs.replace(call, answer=answer)


def _spelling(tokenizer: Any) -> tuple[Any, Any]:
    return tokenizer.get_vocab(), tokenizer.chat_template
