"""The immutable records of a run, which stores keep and all other layers read.

Vocabulary: an episode is one run of a workflow on one task; a call is one LLM request by one role in it; a candidate is
one sampled completion of a call. Rewards are separate records, so they may arrive late. Structs that are created for
every call have `gc=False`: they hold no cycles, and the garbage collector would slow the application.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cotune.records.failure_cause import FailureCause
from cotune.records.ids import unpack_ids

CallStatus = Literal["ok", "error", "timeout", "cancelled", "malformed"]
EpisodeStatus = Literal["ok", "error", "cancelled"]

JUDGING = "judge"
"""Phase of episodes in which a judge that is a role of the run compared other episodes."""
REFLECTING = "prompts-reflection"
"""Phase of episodes in which a model proposed prompts."""


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
    """A token with its log-probability, in the form for an application that asks for log-probabilities.

    `bytes` are the bytes of the token, None if they are the UTF-8 of `token`. `top_logprobs` are the most likely tokens
    at its place, the likeliest first.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    top_logprobs: tuple[ShownToken, ...] = ()


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sampled completion of a call. `logprobs[i]` is log pi_sampler(token_ids[i]) in nats.

    `message` is the assistant message in OpenAI form that the application would receive. Token ids and
    log-probabilities are empty if the engine or provider does not return them. `malformed` is whether the text holds a
    tool call that could not be read: the application gets it as text. `shown` are the tokens for an application that
    asks for log-probabilities, else None. `stop` is the stop string that ended the candidate, if the interface reports
    it (Anthropic's).
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

    `step` counts the calls of the episode, `turn` the calls of this role in it, both from 0; a call gets both when it
    starts. `messages` and `tools` are `Message` ids, `prompt` is the id of the last `Segment` of its prompt path (None
    if token ids are unknown). `attempts` lists the requests that failed before a retry of the SDK, each as
    `<status>: <cause>`. `redacted` is whether a redactor changed anything. `params` are the parameters that the
    application asked for, `sampling` the parameters that were used; its `grammar` is a `Message` id. `parents` are the
    calls of this episode whose outputs the prompt contains. `policy` is None if an outside provider answered.
    `replayed` is the id of the call in another episode whose recorded answer was used.

    `prompts` is the id of the prompts that edit this role, empty without any. If they changed the request, `sent`,
    `sent_tools` and `sent_format` are the ids of the messages, the tools and the response format that were sent. If the
    call was sent unedited although prompts edit its role, `unedited` is the reason: `prompt_unmatched` if its texts do
    not match the prompts, `prompt_ambiguous` if they match in several ways. `app` is the name of the deployed
    application, empty without one.
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
        """Number of prompt tokens: counted by cotune, or else reported by the provider."""
        return self.prompt_tokens or self.usage.prompt_tokens

    @property
    def answer_length(self) -> int:
        """Number of tokens of all candidates: the stored token ids, or else the number reported by the provider."""
        return sum(len(candidate.token_ids) for candidate in self.candidates) or self.usage.completion_tokens

    @property
    def messages_out(self) -> tuple[str, ...]:
        """Ids of the messages that were sent: the application's, with the edits of the prompts."""
        return self.sent or self.messages

    @property
    def tools_out(self) -> str | None:
        """Id of the tools that were sent."""
        return self.sent_tools or self.tools

    @property
    def edited(self) -> bool:
        """Whether prompts changed the request."""
        return bool(self.sent or self.sent_tools or self.sent_format)

    @property
    def changed(self) -> dict[int, str]:
        """Ids of sent messages that differ from the application's, by their position in the request."""
        changed = {}
        for position, (asked, sent) in enumerate(zip(self.messages, self.sent, strict=False)):
            if sent != asked:
                changed[position] = sent
        return changed


class Fork(msgspec.Struct, frozen=True, gc=False):
    """The point at which an episode differs from the episode `trunk` that it repeats: the recorded `call` of the trunk,
    and the id of the call of this episode in its place (`at`)."""

    trunk: str
    call: str
    at: str


class ToolResult(msgspec.Struct, frozen=True, gc=False):
    """The result of a tool, which a replay returns again. `arguments` is a digest, `value` the id of a `Message` with
    the body {"result": ...}, `started` is in seconds since the epoch. `latency` is in seconds, 0 if unknown. `call` is
    the id of the tool call that the result answers, if the framework reports it."""

    name: str
    arguments: str
    started: float
    value: str
    latency: float = 0.0
    call: str = ""


class Episode(msgspec.Struct, frozen=True, kw_only=True, tag="episode"):
    """One run of a workflow on one task; written when it has ended, so a stored episode is a finished one.

    `phase` is its purpose ("train", "eval", "trace", ...), `training_step` the step of the training loop, `rollout` its
    number among the episodes of the same task in that step. `blame` is the cause of a failure: the policy, the
    infrastructure, or a replay that diverged. `fork` is set if the episode repeats another one. `chance` is the id of a
    `Message` with the values of clock, uuid and random (`Chance.record`), if they were recorded. `threads` are the
    LangGraph threads of its calls. `prompts` is the id of the prompts that edited its calls. `app` is the name of the
    deployed application, and `key` the application's own name for this episode, for example an order number; both may
    be empty.
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
        """Whether the episode reports that it solved its task: its metric `success` is at least 0.5, and it did not
        fail. None if it reports no success."""
        success = self.metrics.get("success")
        if success is None:
            return None
        return self.status == "ok" and success >= 0.5

    @property
    def is_outcome(self) -> bool:
        """Whether its end depends on its policies: it finished without an error, or the policy failed it."""
        return self.status == "ok" or (self.status == "error" and self.blame in ("policy", None))


LARGEST_REWARD = 1e38
"""Maximum absolute value of a reward: the 32-bit numbers of training end a little above it."""


class RewardRecord(msgspec.Struct, frozen=True, gc=False, tag="reward"):
    """A named reward component. `target` is an episode id, a candidate id (`candidate_id`) or a key (`key_target`).

    If a name has several rewards, the latest time `at` counts; at equal times, the last one written. After the
    episode's groups are consumed, later rewards do not count. `app` is the application that gives the reward.
    """

    target: str
    name: str
    value: float
    at: float = 0.0
    app: str = ""


class FeedbackRecord(msgspec.Struct, frozen=True, gc=False, tag="feedback"):
    """A text with the reason for the reward component `name` of `target`.

    It belongs to the reward that was written with it, at the same time: when that reward is replaced, the text is gone.
    There may be no reward with this `name`, or an earlier one. `cut` is the number of characters left out of its
    middle.
    """

    target: str
    name: str
    text: str
    at: float = 0.0
    cut: int = 0
    app: str = ""


Record = Message | Segment | CallRecord | Episode | RewardRecord | FeedbackRecord
