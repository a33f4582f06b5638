"""Episodes whose calls a policy answers with scripted replies: real template, parser and records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cotune
from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.records.plans import Plan
from cotune.records.structs import CallRecord, Episode, PolicyRef, Task
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams
from cotune.sampling.responder import PolicyResponder
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations import tiny_models

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
"""A tool in chat form."""


def weather_call(arguments: str) -> str:
    """A reply that calls the tool, as Hermes models write it."""
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


def bytes_chat(template: str | None = None) -> ChatTemplate:
    """A chat format with a byte-level tokenizer, which can write any text; `template` replaces its chat template."""
    tokenizer = tiny_models.byte_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id])


class ScriptedSampler:
    """Candidate i of every request is reply i. Keeps what it was asked, as (prompt ids, parameters)."""

    def __init__(self, chat: ChatTemplate, replies: Sequence[str], end: bool) -> None:
        self.chat = chat
        self.end = [chat.end_token_ids[0]] if end else []
        self.replies = replies
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def sample(
        self, prompt: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        self.asked.append((list(prompt), params))
        completions = []
        for candidate in range(n):
            text = self.replies[candidate % len(self.replies)]
            ids = [*self.chat.tokenizer.encode(text, add_special_tokens=False), *self.end]
            completions.append(Completion(tuple(ids), (-0.5,) * len(ids), "stop"))
        return completions

    async def info(self) -> SamplerInfo:
        return SamplerInfo(name="scripted", max_model_len=4000)


class ScriptedEpisode(NamedTuple):
    """An episode as it was stored."""

    episode: Episode
    calls: list[CallRecord]
    lost: int
    """Records that the store did not take."""
    asked: list[tuple[list[int], SamplingParams]]
    """Prompts and parameters that the sampler was asked for."""


def run_scripted(
    folder: Path, fn: Callable[..., Any], chat: ChatTemplate, *replies: str, k: int = 1, end: bool = True
) -> ScriptedEpisode:
    """Run a workflow once; the policy `a` plays the role `a`. With `k` above 1 its calls branch.

    Without `end`, the replies have no end token: something in the request stops them.
    """
    workflow: Any = fn if hasattr(fn, "cotune") else cotune.workflow(fn)
    store, sampler = SqliteStore.open(folder), ScriptedSampler(chat, replies, end)
    responder = PolicyResponder(sampler, chat, {"a": PolicyRef("a")})
    if k > 1:
        responder.plan, responder.scorers = Plan(kind="tree", k=k), workflow.cotune.scorers
    options = EpisodeOptions(phase="train", training_step=0)
    task = Task(id="t", input={})
    asyncio.run(run_episode(workflow.cotune, task, sink=store, responder=responder, options=options))
    store.flush()
    [episode] = store.episodes()
    result = ScriptedEpisode(episode, list(store.calls(episode.id)), store.health.lost, sampler.asked)
    store.close()
    return result
