"""Answer an application's calls with policies: render, sample K candidates, score all, choose one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np

from cotune.algorithms.attribution import Length, attribute_siblings
from cotune.algorithms.recipes import Attribution
from cotune.algorithms.samples import Floats
from cotune.errors import PromptTooLong, RequestRefused, SamplerError, WorkflowError
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.images import image_id
from cotune.records.plans import Plan, Select, seed_of
from cotune.records.structs import Candidate, PolicyRef, Usage
from cotune.runtime.bounded_cache import INLINE, bytes_of
from cotune.sampling.protocol import NEVER, UNSHAPED, ChatFormat, Completion, Sampler, SamplingParams
from cotune.sampling.request_params import (
    CONTINUE,
    asks_logprobs,
    check_supported,
    continues_reply,
    ends_itself,
    fixes_form,
    fixes_structure,
    request_params,
    template_options,
    tools_shown,
    unknown_fields,
)
from cotune.sampling.scoring import AnyScorer, Scored, score
from cotune.sampling.shown_tokens import shown_tokens


@dataclass(eq=False)
class PolicyResponder:
    """Answers each call with the policy of its role.

    `policies` maps roles to the policy version that answers. The application's provider answers roles in
    `provider_roles`. Other roles without a policy are counted in `unlisted`; `others` answers them, or the provider if
    `others` is None. `chats` are the chat formats of policies whose format is not `chat`, by name.

    Under a tree plan, a role with a scorer gets `plan.k` candidates, and the best is chosen with `attribution` (for
    some roles with the one in `attribution_of_role`). Other roles get one candidate. `override` replaces the
    application's parameters (temperature, ...). With a `seed`, every call draws from a separate random stream, which
    depends on its place and on the seed that the application asks for; without one, only the application's seed is
    used. The place begins with the episode's phase, or with `stream` if several phases should draw the same numbers.
    With `max_model_len` (tokens), a prompt without room for a reply is refused before sampling, and a reply is limited
    to the remaining room.
    """

    sampler: Sampler
    chat: ChatFormat
    policies: Mapping[str, PolicyRef]
    plan: Plan | None = None
    plans: Mapping[str, Plan] = field(default_factory=dict)
    """Plans of the roles whose policy has a K or a choice of its own; without a `plan` they are not used."""
    scorers: Mapping[str, AnyScorer] = field(default_factory=dict)
    attribution: Attribution = field(default_factory=Attribution)
    attribution_of_role: Mapping[str, Attribution] = field(default_factory=dict)
    defaults: SamplingParams = field(default_factory=SamplingParams)
    override: Mapping[str, Any] | None = None
    sampling_of_role: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of the roles whose policy has its own, which replace those of `override`; without an `override` the
    application's settings hold."""
    provider_roles: Collection[str] = ()
    others: PolicyRef | None = None
    seed: int | None = None
    stream: str = ""
    max_model_len: int | None = None
    chats: Mapping[str, ChatFormat] = field(default_factory=dict)
    passed_through: Counter[str] = field(default_factory=Counter, init=False)
    """Number of calls of each role that the application's provider answers."""
    unlisted: Counter[str] = field(default_factory=Counter, init=False)
    """Number of calls of each role that has no policy and is not in `provider_roles`."""
    scorer_errors: Counter[str] = field(default_factory=Counter, init=False)
    reads_aside: ClassVar[bool] = False
    """Whether replies are read in a thread, so that long ones delay no other call."""

    async def respond(self, call: LiveCall) -> Answer | None:
        """Answer a call with a policy. Returns all sampled candidates with their rewards, and the index of the one that
        the application gets. None for a role that the application's own provider answers.

        If a scorer fails for a candidate, only this candidate has no rewards. The application still gets its answer.
        """
        # 1. Find the policy of the role, or leave the call to the application's provider.
        policy = self._policy(call.role)
        if policy is None:
            self.passed_through[call.role] += 1
            return None
        if call.unsupported_reason:
            error = SamplerError(
                f"Role {call.role!r} asks for {call.unsupported_reason}, which no policy can answer.",
                "Remove it from the request, or give the role a policy of kind provider.",
            )
            call.episode.warn("unanswerable", str(error))
            raise error

        # 2. Sample the candidates: under a tree plan K of them, if a scorer can compare them, else the number that the
        #    application asks for.
        prompt, params = await self.prepare(call)
        n_candidates = int(call.params.get("n") or 1)
        plan = None
        if self.plan is not None:
            plan = self.plans.get(call.role, self.plan)
        has_scorer = call.role in self.scorers
        if plan is not None and plan.kind == "tree" and has_scorer:
            n_candidates = max(n_candidates, plan.k)
        completions = list(await self.sampler.sample(prompt, n_candidates, params, policy))
        if self.reads_aside:  # long replies take time to read
            candidates = await asyncio.to_thread(self.read, call, prompt, params, completions)
        else:
            candidates = self.read(call, prompt, params, completions)

        # 3. Reward all candidates.
        scored, failure = await self._score(call, candidates)
        rewards = tuple([result.rewards for result in scored])

        # 4. Choose the candidate that the application gets, by one number for each: the rewards are weighted, and
        #    penalties for long answers subtracted, as in training.
        lengths: list[Length] = []
        for candidate in candidates:
            is_cut = candidate.finish_reason == "length"
            lengths.append(Length(len(candidate.token_ids), params.max_tokens, truncated=is_cut))
        attribution = self.attribution_of_role.get(call.role, self.attribution)
        compared_rewards = attribute_siblings(rewards, call.role, attribution, lengths)
        select = "first" if plan is None else plan.select
        return Answer(
            candidates=candidates,
            chosen=choose(compared_rewards, select, params.seed or 0),
            prompt_ids=tuple(prompt),
            policy=policy,
            usage=Usage(len(prompt), sum(length.tokens for length in lengths)),
            rewards=rewards,
            feedback=tuple([result.text for result in scored]),
            sampling=_recorded_params(params),
            error=failure,
        )

    async def prepare(self, call: LiveCall) -> tuple[list[int], SamplingParams]:
        """The prompt of a call and its sampling parameters. Raises like `request`.

        Long messages, and a grammar for a fixed form of the reply, take time. They are handled in a thread, so that
        other calls on this loop do not wait.
        """
        earlier = call.earlier()
        chat_request = call.rewritten or call  # the request with edited prompts, if there are any
        may_take_long = fixes_form(call.params, call.tools) or bytes_of(chat_request.messages, INLINE) > INLINE
        if may_take_long:
            return await asyncio.to_thread(self.request, call, earlier)
        return self.request(call, earlier)

    def _policy(self, role: str) -> PolicyRef | None:
        """The policy that answers a role; None if the application's provider does. Counts roles without a policy."""
        policy = self.policies.get(role)
        if policy is not None or role in self.provider_roles:
            return policy
        self.unlisted[role] += 1
        return self.others

    def chat_of(self, role: str) -> ChatFormat:
        """The chat format of the policy that answers a role."""
        policy = self.policies.get(role, self.others)
        return self.chat if policy is None else self.chats.get(policy.name, self.chat)

    def longest(self, role: str) -> int | None:
        """The maximum number of tokens of a role's prompt with its reply; None if only the sampler knows it."""
        return self.max_model_len

    def request(self, call: LiveCall, earlier: Sequence[bytes]) -> tuple[list[int], SamplingParams]:
        """The prompt of a call and its sampling parameters. `earlier` are the packed token ids of earlier prompts of
        the role, with and without their replies: the prompt reuses the ids of the longest one that it extends.

        Raises RequestRefused, and counts it, if the request asks for something that is not supported.
        """
        chat_request = call.rewritten or call  # the request with edited prompts, if there are any
        episode = call.episode
        chat = self.chat_of(call.role)
        requested = chat_request.params
        try:
            # 1. The parameters.
            check_supported(requested)
            self._warn_of_parameters(call, requested)
            params = self._with_seed(call, request_params(requested, self.defaults, self._override_of(call.role)))

            # 2. The images, and the tokens that the reply must not have. A reply with image tokens would refer to an
            #    image that does not exist.
            images = self._images_of(call, chat)
            if images:
                params = _never_drawing(msgspec.structs.replace(params, images=images), chat.image_tokens)
            # The application may forbid the tokens that end a reply (`ignore_eos`). Then it continues to `max_tokens`.
            may_forbid_end = requested.get("ignore_eos") or requested.get("allowed_token_ids")
            if may_forbid_end and not ends_itself(requested, chat.end_token_ids):
                params = _never_drawing(params, chat.end_token_ids)

            # 3. The prompt, and the room that it leaves for the reply.
            render_arguments: dict[str, Any] = {"earlier": earlier}
            options = self._template_options(call, chat)
            if options:
                render_arguments["options"] = options
            longest = self.longest(call.role)  # maximum tokens of prompt and reply
            if longest is not None:
                render_arguments["most"] = longest - 1  # at least one token for the reply
            prompt = chat.render(chat_request.messages, tools_shown(requested, chat_request.tools), **render_arguments)
            if longest is not None:
                tokens_left = longest - len(prompt)
                # `render` refuses by the template's own token ids. The reused earlier ids may be more.
                if tokens_left < 1:
                    raise PromptTooLong(
                        f"The prompt has {len(prompt)} tokens; the model takes {longest} with the reply."
                    )
                params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, tokens_left))

            # 4. The form of the reply.
            if fixes_form(requested, chat_request.tools):
                params = msgspec.structs.replace(params, grammar=chat.grammar(requested, chat_request.tools, prompt))
        except RequestRefused as error:
            episode.warn("refused", f"A request of role {call.role!r} is not supported.", error)
            raise
        return prompt, params

    def _images_of(self, call: LiveCall, chat: ChatFormat) -> tuple[bytes, ...]:
        """The encoded images of a call. Raises RequestRefused, which names the call, for images that the model cannot
        see."""
        try:
            return chat.images((call.rewritten or call).messages)
        except RequestRefused as error:
            where = f"Call {call.step}, turn {call.turn} of role {call.role!r}, has an image"
            raise RequestRefused(f"{where}. {error.cause}", error.remedy) from None

    def _template_options(self, call: LiveCall, chat: ChatFormat) -> dict[str, Any]:
        """The variables of the chat template for a call. Warns of variables that the template does not read. Raises
        RequestRefused for a request to continue the last message that also fixes the form of the reply."""
        chat_request = call.rewritten or call
        options = template_options(chat_request.params)
        for name in options:
            if not chat.reads(name):
                call.episode.warn("unread_option", f"The model's chat template does not know {name}.")
        if continues_reply(chat_request.params, chat_request.messages):
            if fixes_structure(chat_request.params, chat_request.tools):
                raise RequestRefused(
                    "The request asks to continue the last message and to return a fixed form.",
                    "Ask for only one of the two: the form applies to a whole reply.",
                )
            options[CONTINUE] = True
        return options

    def _override_of(self, role: str) -> Mapping[str, Any] | None:
        """The values that replace the application's parameters in calls of a role."""
        if self.override is None:
            return None
        return {**self.override, **self.sampling_of_role.get(role, {})}

    def _with_seed(self, call: LiveCall, params: SamplingParams) -> SamplingParams:
        """The parameters with the seed of the call.

        Under the seed of a run, each call gets a different seed, which depends on its episode, role and turn, and on
        the seed that the application asks for. Without a seed of the run, the parameters stay as they are.
        """
        if self.seed is None:
            return params
        episode = call.episode
        episode_key = (self.stream or episode.phase, episode.training_step, call.task.id, episode.rollout)
        requested_seed = () if params.seed is None else (params.seed,)
        seed = seed_of(self.seed, *episode_key, call.role, call.turn, *requested_seed)
        return msgspec.structs.replace(params, seed=seed)

    def _warn_of_parameters(self, call: LiveCall, requested: Mapping[str, Any]) -> None:
        """Warn of parameters of a request that policies do not know, and of parameters that training replaces."""
        for name in unknown_fields(requested):
            text = f"Role {call.role!r} asks for {name}, which policies do not know: it changes nothing."
            call.episode.warn("not_enforced", text)
        # `override` holds the temperature and the parameters in UNSHAPED, such as `top_p`, which training turns off.
        # `cotune check` reports the temperature, so this warns only of the others.
        for name, value in (self._override_of(call.role) or {}).items():
            if name in UNSHAPED and requested.get(name) not in (None, value):
                text = f"Role {call.role!r} asks for {name} = {requested[name]}; it is sampled with {value:g}."
                call.episode.warn(f"replaced_{name}", text)

    def read(
        self, call: LiveCall, prompt: Sequence[int], params: SamplingParams, completions: list[Completion]
    ) -> tuple[Candidate, ...]:
        """Turn sampled tokens into candidates: text, message, tool calls and finish reason.

        The list `completions` is emptied on the way, so that the memory of long ones is freed early.
        """
        chat = self.chat_of(call.role)
        tools = tools_shown(call.params, call.tools)
        with_logprobs = asks_logprobs(call.params)
        with_ids = bool(call.params.get("return_token_ids"))
        # Anthropic's API names the stop sequence that ended the answer; OpenAI's does not.
        names_stop = call.params.get("api") == "messages"
        candidates: list[Candidate] = []
        while completions:
            completion = completions.pop(0)
            ids = completion.token_ids
            if completion.finish_reason == "stop" and ids and ids[-1] in params.stop_token_ids:
                ids = ids[:-1]  # the token that stopped the reply is not part of its text
            text, message, parsed_reason = chat.parse(ids, params.stop, prompt=prompt, tools=tools)
            malformed = parsed_reason == "malformed"
            # The application gets a reason that its client knows, which "malformed" is not.
            if completion.finish_reason == "length":
                finish_reason = "length"
            elif not malformed:
                finish_reason = parsed_reason
            elif message.get("tool_calls"):
                finish_reason = "tool_calls"
            else:
                finish_reason = "stop"
            stop = ""
            if params.stop and names_stop:
                stop = chat.stopped_by(ids, params.stop)
            shown = None
            if with_logprobs:
                shown = shown_tokens(completion, message, chat.token_bytes, whole=with_ids)
            candidate = Candidate(
                index=len(candidates),
                text=text,
                message=message,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                finish_reason=finish_reason,
                malformed=malformed,
                stop=stop,
                shown=shown,
            )
            candidates.append(candidate)
        return tuple(candidates)

    async def _score(self, call: LiveCall, candidates: tuple[Candidate, ...]) -> tuple[tuple[Scored, ...], str | None]:
        """Let the role's scorer reward the candidates. Returns its result for each candidate, and a description of its
        errors, None without errors.

        The results are empty without a scorer, and if it failed for every candidate. A single candidate for which it
        failed has a result without rewards.
        """
        scorer = self.scorers.get(call.role)
        if scorer is None:
            return (), None
        call.stage = "its scorer was running"
        scored = await score(scorer, candidates, call, call.role)
        results: list[Scored] = []
        errors: Counter[str] = Counter()
        for result in scored:
            if isinstance(result, WorkflowError):
                errors[str(result)] += 1
                results.append(Scored({}))
            else:
                results.append(result)
        self.scorer_errors.update(errors)
        if not errors:
            return tuple(results), None
        first_error = next(iter(errors))
        if errors.total() == len(scored):
            return (), first_error
        return tuple(results), f"{errors.total()} of {len(scored)} candidates have no reward: {first_error}"


def _recorded_params(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters in the form of records: images as hashes, and two rare parameters only if they are
    set."""
    recorded = msgspec.structs.asdict(params)
    images = recorded.pop("images")
    if images:
        recorded["images"] = [image_id(data) for data in images]
    for name in ("top_logprobs", "stop_token_ids"):
        if not recorded[name]:
            del recorded[name]
    return recorded


def _never_drawing(params: SamplingParams, tokens: Sequence[int]) -> SamplingParams:
    """The parameters with a bias that keeps these tokens out of the reply."""
    biases = tuple((token, NEVER) for token in tokens)
    return msgspec.structs.replace(params, logit_bias=(*params.logit_bias, *biases))


def choose(rewards: Sequence[float] | Floats, select: Select, seed: int) -> int:
    """Index of the candidate that the application gets: the first, one drawn at random with `seed`, or the best.

    Among equal best candidates the first is chosen. NaN is lower than any reward.
    """
    if select == "first" or not len(rewards):
        return 0
    if select == "sample":
        return random.Random(seed).randrange(len(rewards))
    return int(np.argmax(np.where(np.isnan(rewards), -np.inf, rewards)))
