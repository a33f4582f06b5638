"""The immutable records of a run: what the store keeps and every later layer reads.

Vocabulary: an episode is one run of a workflow on one task; a call is one LLM request by one role in it;
a candidate is one sampled completion of a call. Rewards are records of their own, so they may arrive late.
Structs made for every call are `gc=False`: they hold no cycles, and tracking them slows the application.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cotune.records.failure_cause import FailureCause
from cotune.records.ids import unpack_ids

CallStatus = Literal["ok", "error", "timeout", "cancelled", "malformed"]
EpisodeStatus = Literal["ok", "error", "cancelled"]

JUDGING = "judge"
"""Phase of the episodes in which a judge that is a role of the run has compared others."""
REFLECTING = "prompts-reflection"
"""Phase of the episodes in which a model has proposed prompts."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One input of the workflow. `input` is any JSON value; `id` is unique within a tasks file."""

    id: str
    input: Any


class PolicyRef(msgspec.Struct, frozen=True, gc=False):
    """A policy at a version; version 0 is the untrained policy."""

    name: str
    version: int = 0

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts as the engine or provider reports them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Message(msgspec.Struct, frozen=True, gc=False, tag="message"):
    """A chat message (or a tools list, or a grammar) in OpenAI form, stored once under its content address."""

    id: str
    body: Any


class Segment(msgspec.Struct, frozen=True, gc=False, tag="segment"):
    """Token ids added to a parent path, packed (`ids.pack_ids`). A prompt is the path from the root to one segment.

    `id` is the content address of the whole path, so equal ids mean identical token ids from the root.
    """

    id: str
    parent: str | None
    packed: bytes

    @property
    def token_ids(self) -> tuple[int, ...]:
        return unpack_ids(self.packed)


class ShownToken(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A token with its log-probability as an application that asks for them is told of it.

    `bytes` are those of the token, None where they are the UTF-8 of `token`; `top_logprobs` the most likely tokens of
    its place, the likeliest first.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    top_logprobs: tuple[ShownToken, ...] = ()


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sampled completion of a call. `logprobs[i]` is log pi_sampler(token_ids[i]) in nats.

    `message` is the assistant message in OpenAI form as the application would receive it.
    Token ids and log-probabilities are empty where the engine or provider does not give them. `malformed` says that
    the text holds a tool call that could not be read: the application gets it as text. `shown` are the tokens as the
    application is told of them, None where it did not ask for log-probabilities. `stop` is the stop string that ended
    it, where the interface tells of it (Anthropic's).
    """

    index: int
    text: str
    message: dict[str, Any]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str = "stop"
    malformed: bool = False
    shown: tuple[ShownToken, ...] | None = None
    stop: str = ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Tool calls in OpenAI form; empty when the candidate called none."""
        return self.message.get("tool_calls") or []


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="call"):
    """One LLM request by one role, with all its candidates; written when the request has ended.

    `step` counts calls in the episode, `turn` counts calls of this role in it, both from 0 and both taken
    when the call started. `messages` and `tools` are `Message` ids, `prompt` is the id of the last `Segment`
    of its prompt path (None where token ids are unknown). `attempts` lists the requests that failed before
    the SDK's retry of them, each as `<status>: <cause>`. `redacted` says whether a redactor changed anything of it.
    `params` is what the application asked, `sampling` what was really used; its `grammar` is a `Message` id.
    `parents` are the calls of this episode whose outputs the prompt contains. `policy` is None when an outside
    provider answered. `replayed` is the id of the call of another episode whose recorded answer this one got.
    `prompts` is the id of the prompts that edit this role, empty without any. Where they changed the request, `sent`,
    `sent_tools` and `sent_format` are the ids of the messages, the tools and the response format that went out.
    `unedited` says why a call went out as it was asked although they edit its role: `prompt_unmatched` where its texts
    are not those that they know, `prompt_ambiguous` where one can be read in several ways.
    `app` is the name of the deployed application, empty where it gave none.
    """

    id: str
    episode: str
    role: str
    step: int
    turn: int
    parents: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    tools: str | None = None
    model: str = ""
    params: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    prompt: str | None = None
    prompt_tokens: int = 0
    policy: PolicyRef | None = None
    status: CallStatus = "ok"
    error: str | None = None
    attempts: tuple[str, ...] = ()
    streamed: bool = False
    started: float = 0.0
    latency: float = 0.0
    usage: Usage = Usage()
    candidates: tuple[Candidate, ...] = ()
    chosen: int | None = None
    integration: str = ""
    redacted: bool = False
    replayed: str | None = None
    prompts: str = ""
    sent: tuple[str, ...] = ()
    sent_tools: str | None = None
    sent_format: str | None = None
    unedited: str = ""
    app: str = ""

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt: those that were counted here, else those that the provider reports."""
        return self.prompt_tokens or self.usage.prompt_tokens

    @property
    def answer_length(self) -> int:
        """Tokens of all candidates: those that are stored, else those that the provider reports."""
        return sum(len(candidate.token_ids) for candidate in self.candidates) or self.usage.completion_tokens

    @property
    def messages_out(self) -> tuple[str, ...]:
        """Ids of the messages that went out: those that were asked, with the edits of the prompts."""
        return self.sent or self.messages

    @property
    def tools_out(self) -> str | None:
        """Id of the tools that went out."""
        return self.sent_tools or self.tools

    @property
    def edited(self) -> bool:
        """Whether prompts changed the request."""
        return bool(self.sent or self.sent_tools or self.sent_format)

    @property
    def changed(self) -> dict[int, str]:
        """Ids of the messages that went out in place of those that were asked, by their place among these."""
        pairs = enumerate(zip(self.messages, self.sent, strict=False))
        return {place: sent for place, (asked, sent) in pairs if sent != asked}


class Fork(msgspec.Struct, frozen=True, gc=False):
    """Where an episode leaves the one that it repeats: the recorded `call` of the episode `trunk`, and the id of the
    call that stands `at` its place here."""

    trunk: str
    call: str
    at: str


class ToolResult(msgspec.Struct, frozen=True, gc=False):
    """What a tool returned, for a replay to give again: `arguments` is a digest, `value` the id of a `Message` whose
    body is {"result": ...}, `started` in seconds since the epoch. `latency` is in seconds, 0 where it is not known.
    `call` is the id of the tool call that it answers, where the framework says so."""

    name: str
    arguments: str
    started: float
    value: str
    latency: float = 0.0
    call: str = ""


class Episode(msgspec.Struct, frozen=True, kw_only=True, tag="episode"):
    """One run of a workflow on one task; written when it has ended, so a stored episode is a finished one.

    `phase` is what it was run for ("train", "eval", "trace", ...), `training_step` the step of the loop it
    belongs to, `rollout` its number among the episodes of the same task in that step. `blame` is the cause of a
    failure: the policy, the infrastructure, or a replay that diverged. `fork` is set where the episode repeats another.
    `chance` is the id of a `Message` with what clock, uuid and random gave (`Chance.record`), where that is kept.
    `threads` are the LangGraph threads in which its calls were made. `prompts` is the id of the prompts that edited its
    calls. `app` is the name of the deployed application, and `key` what it calls this episode itself, such as an order
    number; both may be empty.
    """

    id: str
    task: Task
    workflow: str
    phase: str = "trace"
    training_step: int | None = None
    rollout: int = 0
    status: EpisodeStatus = "ok"
    error: str | None = None
    blame: FailureCause | None = None
    started: float = 0.0
    latency: float = 0.0
    calls: int = 0
    metrics: dict[str, float] = {}
    fork: Fork | None = None
    results: tuple[ToolResult, ...] = ()
    chance: str | None = None
    threads: tuple[str, ...] = ()
    prompts: str = ""
    app: str = ""
    key: str = ""

    @property
    def solved(self) -> bool | None:
        """Whether it reports that it solved its task: the metric `success` is at least 0.5, and it did not fail. None
        where it reports no success."""
        told = self.metrics.get("success")
        return None if told is None else self.status == "ok" and told >= 0.5

    @property
    def is_outcome(self) -> bool:
        """Whether it came to an end that says something of its policies: a good one, or a failure of theirs."""
        return self.status == "ok" or (self.status == "error" and self.blame in ("policy", None))


LARGEST_REWARD = 1e38
"""Most that a reward may be: the 32-bit numbers of training end a little above it."""


class RewardRecord(msgspec.Struct, frozen=True, gc=False, tag="reward"):
    """A named reward component. `target` is an episode id, a candidate id (`candidate_id`) or a key (`key_target`).

    Of the rewards of a name the one with the latest time `at` counts, and of the same time the last that was written,
    until the episode's groups are consumed. `app` is the application that gives it.
    """

    target: str
    name: str
    value: float
    at: float = 0.0
    app: str = ""


class FeedbackRecord(msgspec.Struct, frozen=True, gc=False, tag="feedback"):
    """Text beside the reward component `name` of `target`: why it is what it is.

    It belongs to the reward that was written with it, at the same time: one that replaces that reward takes it away.
    `name` may be that of a reward that nobody gave, or that was given before. `cut` are the characters that were left
    out of its middle.
    """

    target: str
    name: str
    text: str
    at: float = 0.0
    cut: int = 0
    app: str = ""


Record = Message | Segment | CallRecord | Episode | RewardRecord | FeedbackRecord
