"""Recorded token ids for another model than the one that has sampled them. A model that cannot read them gets the texts
instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import ConfigError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.folder.folder import loading_options, locate_model
from cotune.records.answers import Answer
from cotune.records.structs import Candidate
from cotune.replay.script import Replay, ScriptCall
from cotune.sampling.protocol import ChatFormat
from cotune.storage.run_layout import is_run, read_run, read_run_json, relocated


class RecordedIds:
    """Decides whether the model that answers now can read the recorded token ids of a call. It must have the same
    vocabulary and chat template as the policy that has answered the call."""

    def __init__(self, run: Path, chat_of: Callable[[str], ChatFormat]) -> None:
        """`chat_of` returns the chat format of the model that answers a role now."""
        self._folder = run
        self._run = read_run(run) if is_run(run) else None
        self._chat_of = chat_of
        self._recorded = functools.cache(self._load)

    def readable(self, call: ScriptCall) -> bool:
        """Return whether the model that answers now can read the token ids of a call. True if the call has none, or if
        the records are of no run, whose models would be known."""
        if call.answer.policy is None or not call.answer.prompt_ids or self._run is None:
            return True
        model = self._run.base_of(call.answer.policy.name) or self._run.model
        chat = self._chat_of(call.role)
        if model is None or not isinstance(chat, ChatTemplate):
            return False
        return bool(self._recorded(model) == _vocabulary_digest(chat.tokenizer))

    def _load(self, model: str) -> Any:
        """Load the vocabulary and the chat template of a base model of the run; None if the model is gone."""
        from transformers import AutoTokenizer

        try:
            place = relocated(model, read_run_json(self._folder), self._folder.absolute())
            return _vocabulary_digest(AutoTokenizer.from_pretrained(locate_model(place), **loading_options()))
        except (ConfigError, OSError, ValueError):
            return None


def without_foreign_ids(replay: Replay, ids: RecordedIds) -> tuple[Replay, bool]:
    """Return the replay without the token ids that cannot be read, and whether there are any."""
    calls: list[ScriptCall] = []
    any_foreign = False
    for call in replay.script.calls:
        if ids.readable(call):
            calls.append(call)
        else:
            calls.append(_as_text(call))
            any_foreign = True
    script = msgspec.structs.replace(replay.script, calls=tuple(calls))
    return msgspec.structs.replace(replay, script=script), any_foreign


def _as_text(call: ScriptCall) -> ScriptCall:
    """Return the call without token ids, as if a provider had answered it."""
    candidates: list[Candidate] = []
    for candidate in call.answer.candidates:
        candidates.append(msgspec.structs.replace(candidate, token_ids=(), logprobs=()))
    answer: Answer = msgspec.structs.replace(call.answer, candidates=tuple(candidates), prompt_ids=())
    return msgspec.structs.replace(call, answer=answer)


def _vocabulary_digest(tokenizer: Any) -> tuple[Any, Any]:
    return tokenizer.get_vocab(), tokenizer.chat_template
