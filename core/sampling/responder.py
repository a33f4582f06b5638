"""Answers an application's calls with policies: render, sample K candidates, score all, choose one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cotune.algorithms.attribution import Length, attribute_siblings
from cotune.algorithms.recipes import Attribution
from cotune.errors import PromptTooLong, RequestRefused, SamplerError, WorkflowError
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.images import holds_images, image_id
from cotune.records.plans import Plan, choose, seed_of
from cotune.records.structs import Candidate, PolicyRef, ShownToken, Usage
from cotune.runtime.bounded_cache import INLINE, bytes_of
from cotune.sampling.protocol import NEVER, UNSHAPED, ChatFormat, Completion, Sampler, SamplingParams
from cotune.sampling.request_params import asks_logprobs, fixes_form, request_params, template_options, tools_shown
from cotune.sampling.scoring import AnyScorer, score
from cotune.sampling.shown_tokens import shown_tokens


@dataclass(eq=False)
class PolicyResponder:
    """Answers each call with the policy of its role.

    Roles in `provider_roles` are left to the application's provider. Any other role without a policy is answered by
    `others`, or left to the provider too where that is None, and counted in `unlisted`.
    `policies` maps roles to the version that answers. Under a tree plan a role with a scorer gets `plan.k`
    candidates, and `attribution` says which is best; any other role gets one. `override` replaces what the application
    asks for (temperature, ...). With a `seed` every call draws from a stream of its own, derived from its place and
    from a seed that the application asks for; without one the application's holds. The place begins with the
    episode's phase, or with `stream` where phases are to draw the same numbers. With `max_model_len` (tokens) a prompt
    that leaves no room for a reply is refused before it is sampled, and a reply is cut to the room that there is.
    `chats` are the formats of policies whose base has another one than `chat`, by name.
    """

    sampler: Sampler
    chat: ChatFormat
    policies: Mapping[str, PolicyRef]
    plan: Plan | None = None
    scorers: Mapping[str, AnyScorer] = field(default_factory=dict)
    attribution: Attribution = field(default_factory=Attribution)
    defaults: SamplingParams = field(default_factory=SamplingParams)
    override: Mapping[str, Any] | None = None
    provider_roles: Collection[str] = ()
    others: PolicyRef | None = None
    seed: int | None = None
    stream: str = ""
    max_model_len: int | None = None
    chats: Mapping[str, ChatFormat] = field(default_factory=dict)
    passed_through: Counter[str] = field(default_factory=Counter, init=False)
    """Calls by role that the application's provider answers."""
    unlisted: Counter[str] = field(default_factory=Counter, init=False)
    """Calls by role that has neither a policy nor a place among `provider_roles`, whoever answers."""
    scorer_errors: Counter[str] = field(default_factory=Counter, init=False)
    scoring: list[tuple[float, float]] = field(default_factory=list, init=False)
    """From when to when scorers were at work, in seconds since 1970."""

    async def respond(self, call: LiveCall) -> Answer | None:
        """Answer with K scored candidates, or None for a role that no policy here plays.

        A scorer that fails costs the candidate its rewards, never its siblings theirs or the application its answer.
        """
        # 1. Who answers: the role's policy, or the application's provider.
        policy = self._policy(call.role)
        if policy is None:
            self.passed_through[call.role] += 1
            return None
        if call.unsupported_reason:
            error = SamplerError(
                f"Role {call.role!r} asks for {call.unsupported_reason}, which no policy can answer.",
                "Take it out of the request, or give the role a policy of kind provider.",
            )
            call.episode.warn("unanswerable", str(error))
            raise error
        # 2. Sample: all K candidates where a scorer can compare them, else as many as the application asks for.
        prompt, params = await self.prepare(call)
        asked = int(call.params.get("n") or 1)
        branches = self.plan is not None and self.plan.kind == "tree" and call.role in self.scorers
        count = max(asked, self.plan.k) if branches and self.plan else asked
        candidates = await self.read(
            call, prompt, params, list(await self.sampler.sample(prompt, count, params, policy))
        )
        # 3. Reward all of them, and choose the one that the application gets.
        rewards, failure = await self._rewards(call, candidates)
        lengths = [Length(len(c.token_ids), params.max_tokens, c.finish_reason == "length") for c in candidates]
        compared = attribute_siblings(rewards, call.role, self.attribution, lengths).tolist()
        return Answer(
            candidates=candidates,
            chosen=choose(compared, self.plan.select if self.plan else "first", params.seed or 0),
            prompt_ids=tuple(prompt),
            policy=policy,
            usage=Usage(len(prompt), sum([length.tokens for length in lengths])),
            rewards=rewards,
            sampling=_recorded(params),
            error=failure,
        )

    async def prepare(self, call: LiveCall) -> tuple[list[int], SamplingParams]:
        """The prompt, and how its reply is sampled; raises as `request` does.

        In a thread where it may take long, so that no other call on this loop waits.
        """
        earlier = call.earlier()
        if fixes_form(call.params, call.tools) or bytes_of(call.messages, INLINE) > INLINE:
            return await asyncio.to_thread(self.request, call, earlier)
        return self.request(call, earlier)

    async def read(
        self, call: LiveCall, prompt: Sequence[int], params: SamplingParams, completions: list[Completion]
    ) -> tuple[Candidate, ...]:
        """The candidates that were sampled. Empties the list: long completions take a while to be freed."""
        return self.candidates(call, prompt, params, completions)

    def candidates(
        self, call: LiveCall, prompt: Sequence[int], params: SamplingParams, completions: list[Completion]
    ) -> tuple[Candidate, ...]:
        """`read`, in this thread."""
        found: list[Candidate] = []
        while completions:
            found.append(self._candidate(call, prompt, params, len(found), completions.pop(0)))
        return tuple(found)

    def _policy(self, role: str) -> PolicyRef | None:
        policy = self.policies.get(role)
        if policy is not None or role in self.provider_roles:
            return policy
        self.unlisted[role] += 1
        return self.others

    def chat_of(self, role: str) -> ChatFormat:
        """The chat format of the policy that answers a role."""
        policy = self.policies.get(role)
        return self.chat if policy is None else self.chats.get(policy.name, self.chat)

    def longest(self, role: str) -> int | None:
        """How many tokens a prompt of a role and its reply may have; None where the sampler says so."""
        return self.max_model_len

    def request(self, call: LiveCall, earlier: Sequence[Sequence[int]]) -> tuple[list[int], SamplingParams]:
        """The prompt, and how its reply is sampled. `earlier` are token paths that the prompt may go on from.

        Raises RequestRefused for what cannot be honoured, counted.
        """
        asked, tools, chat = call.params, tools_shown(call.params, call.tools), self.chat_of(call.role)
        try:
            params = self._params(call)
            if holds_images(call.messages):
                params = self._seeing(call, params)
            options = template_options(asked)
            for name in options:
                if not chat.reads(name):
                    call.episode.warn("unread_option", f"The model's chat template does not know {name}.")
            more: dict[str, Any] = {"options": options} if options else {}
            longest = self.longest(call.role)
            if longest is not None:
                more["most"] = longest - 1
            prompt = chat.render(call.messages, tools, earlier=earlier, **more)
            if longest is not None:
                room = longest - len(prompt)
                if room < 1:  # earlier token ids may be more than the template's
                    raise PromptTooLong(
                        f"The prompt has {len(prompt)} tokens; the model takes {longest} with the reply."
                    )
                params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))
            if fixes_form(asked, call.tools):
                params = msgspec.structs.replace(params, grammar=chat.grammar(asked, call.tools, prompt))
        except RequestRefused as error:
            call.episode.warn("refused", f"Role {call.role!r} asks for what cannot be honoured.", error)
            raise
        return prompt, params

    def _seeing(self, call: LiveCall, params: SamplingParams) -> SamplingParams:
        """The parameters with the images of a request. A reply may hold no token that stands for one: nothing would."""
        chat = self.chat_of(call.role)
        try:
            images = chat.images(call.messages)
            never = tuple((token, NEVER) for token in chat.image_tokens)
            return msgspec.structs.replace(params, images=images, logit_bias=(*params.logit_bias, *never))
        except RequestRefused as error:
            where = f"Call {call.step}, turn {call.turn} of role {call.role!r}, has an image"
            raise RequestRefused(f"{where}. {error.cause}", error.remedy) from None

    def _params(self, call: LiveCall) -> SamplingParams:
        params = request_params(call.params, self.defaults, self.override)
        # What training sets otherwise is told here; of the temperature `cotune check` speaks.
        for name, value in (self.override or {}).items():
            asked = call.params.get(name)
            if name in UNSHAPED and asked is not None and asked != value:
                call.episode.warn(
                    f"replaced_{name}", f"Role {call.role!r} asks for {name} = {asked}; it is sampled with {value:g}."
                )
        if self.seed is None:
            return params
        episode = call.episode
        stream = self.stream or episode.phase
        place = (stream, episode.training_step, call.task.id, episode.rollout, call.role, call.turn)
        own_seed = () if params.seed is None else (params.seed,)
        return msgspec.structs.replace(params, seed=seed_of(self.seed, *place, *own_seed))

    def _candidate(
        self, call: LiveCall, prompt: Sequence[int], params: SamplingParams, index: int, completion: Completion
    ) -> Candidate:
        tools = tools_shown(call.params, call.tools)
        text, message, finish = self.chat_of(call.role).parse(
            completion.token_ids, params.stop, prompt=prompt, tools=tools
        )
        if malformed := finish == "malformed":
            finish = "tool_calls" if message.get("tool_calls") else "stop"
        return Candidate(
            index=index,
            text=text,
            message=message,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish_reason="length" if completion.finish_reason == "length" else finish,
            malformed=malformed,
            shown=self._shown(call, completion, message) if asks_logprobs(call.params) else None,
        )

    def _shown(self, call: LiveCall, completion: Completion, message: Mapping[str, Any]) -> tuple[ShownToken, ...]:
        token_bytes = self.chat_of(call.role).token_bytes
        return shown_tokens(completion, message, token_bytes, bool(call.params.get("return_token_ids")))

    async def _rewards(
        self, call: LiveCall, candidates: tuple[Candidate, ...]
    ) -> tuple[tuple[Mapping[str, float], ...], str | None]:
        scorer = self.scorers.get(call.role)
        if scorer is None:
            return (), None
        call.stage = "its scorer was running"
        began = time.time()
        scored = await score(scorer, candidates, call, call.role)
        self.scoring.append((began, time.time()))
        rewards = tuple([{} if isinstance(found, WorkflowError) else found for found in scored])
        errors = Counter([str(found) for found in scored if isinstance(found, WorkflowError)])
        if not errors:
            return rewards, None
        self.scorer_errors.update(errors)
        first, failed = next(iter(errors)), errors.total()
        if failed == len(scored):
            return (), first
        return rewards, f"{failed} of {len(scored)} candidates have no reward: {first}"


def _recorded(params: SamplingParams) -> dict[str, Any]:
    """Parameters as they are recorded: images by their hash, and only where there are some, as are top_logprobs."""
    found = msgspec.structs.asdict(params)
    images = found.pop("images")
    if not params.top_logprobs:
        del found["top_logprobs"]
    return {**found, "images": [image_id(data) for data in images]} if images else found
