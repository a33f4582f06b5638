"""Answering calls with policies: what is asked of the sampler, what is scored, what goes on."""

from __future__ import annotations

import asyncio
import math
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.algorithms.recipes import Attribution
from cotune.errors import SamplerError
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.ids import pack_ids
from cotune.records.plans import Plan
from cotune.records.structs import PolicyRef, Task
from cotune.sampling.protocol import Completion, SamplingParams, TokenBytes
from cotune.sampling.responder import PolicyResponder, choose, request_params

WRITER = PolicyRef("writer", 4)
LETTERS = {1: "a", 2: "b", 3: "c"}


class ScriptedSampler:
    """Gives the scripted replies, in order, and notes what it was asked."""

    def __init__(self, *replies: tuple[int, ...], finish: str = "stop") -> None:
        self.replies = replies
        self.finish = finish
        self.asked: list[tuple[list[int], int, SamplingParams, PolicyRef]] = []

    async def sample(self, prompt, n, params, policy):
        self.asked.append((list(prompt), n, params, policy))
        return [Completion(ids, (-0.5,) * len(ids), self.finish) for ids in self.replies[:n]]


class Chat:
    """A message is as many tokens as its text has letters; a reply is its letters up to a stop string."""

    def images(self, messages):
        return ()

    def render(self, messages, tools, *, earlier=()):
        return [9] * sum(len(m["content"]) for m in messages) + ([8] if tools else [])

    def parse(self, token_ids, stop=(), **_):
        text = "".join(LETTERS[t] for t in token_ids).split(stop[0] if stop else "\0")[0]
        return text, {"role": "assistant", "content": text}, "stop"


def call(role="writer", task="t", turn=0, tools=None, **params):
    episode = SimpleNamespace(phase="train", training_step=3, rollout=0)
    messages = [{"role": "user", "content": "hello"}]
    made = SimpleNamespace(
        role=role, task=Task(id=task, input="b"), turn=turn, messages=messages, tools=tools, params=params,
        episode=episode, earlier=lambda: [], rewritten=None, unsupported_reason="",
    )  # fmt: skip
    made.out = made
    return made


class Remembering(Chat):
    """Notes what it is given to reuse."""

    earlier = ()

    def render(self, messages, tools, *, earlier=()):
        self.earlier = list(earlier)
        return [*self.earlier[0], 9] if earlier else [9, 9]


def test_a_prompt_that_goes_on_from_a_reply_reuses_the_earlier_ids():
    chat, episode = Remembering(), LiveEpisode(SimpleNamespace(write=len), Task(id="t", input="b"), workflow="w")
    responder = PolicyResponder(ScriptedSampler((1, 2)), chat, {"writer": PolicyRef("p")})

    def turn(*messages):
        live = episode.start(CallerContext("writer", "test"), {"messages": list(messages)})
        live.finish(asyncio.run(responder.respond(live)))

    turn({"role": "user", "content": "a"})
    turn({"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"})
    assert chat.earlier == [pack_ids((9, 9, 1, 2)), pack_ids((9, 9))]
    turn({"role": "user", "content": "anew"})
    assert chat.earlier == []


def wants(candidate, call, task):
    return candidate.text.count(task)


def respond(responder, *calls):
    async def main():
        return [await responder.respond(c) for c in calls]

    return asyncio.run(main())


def test_a_tree_branches_at_a_role_with_a_scorer():
    sampler = ScriptedSampler((1,), (2, 2), (2, 1))
    responder = PolicyResponder(sampler, Chat(), {"writer": WRITER}, plan=Plan(k=3), scorers={"writer": wants}, seed=5)
    (answer,) = respond(responder, call())
    assert [c.text for c in answer.candidates] == ["a", "bb", "ba"]
    assert [c.index for c in answer.candidates] == [0, 1, 2]
    assert answer.rewards == ({"local": 0.0}, {"local": 2.0}, {"local": 1.0})
    assert answer.chosen == 1
    assert answer.prompt_ids == (9,) * 5
    assert answer.policy == WRITER
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 5)
    assert answer.candidates[2].token_ids == (2, 1)
    assert answer.candidates[2].logprobs == (-0.5, -0.5)
    assert answer.error is None


@pytest.mark.parametrize(
    ("attribution", "chosen"),
    [
        (Attribution(), 0),  # 3 and 2
        (Attribution(weights={"right": 1.0}, other=0.0), 1),  # 0 and 2
        (Attribution(weights={"right": 1.0}, other=0.5), 1),  # 1.5 and 2
        (Attribution(weights={"loud": -1.0}), 1),  # -3 and 2
    ],
)
def test_the_selection_weighs_components_as_training_does(attribution, chosen):
    def scorer(candidate, call, task):
        return {"right": 0.0, "loud": 3.0} if candidate.text == "a" else {"right": 2.0, "loud": 0.0}

    responder = PolicyResponder(
        ScriptedSampler((1,), (2,)), Chat(), {"writer": WRITER}, plan=Plan(k=2), scorers={"writer": scorer},
        attribution=attribution,
    )  # fmt: skip
    assert respond(responder, call())[0].chosen == chosen


def test_team_rewards_are_weighed_in_the_selection():
    sampler = ScriptedSampler((1,), (2,))

    def scorer(candidate, call, task):
        return {"team": 1.0, "local": 0.0} if candidate.text == "a" else {"team": 0.0, "local": 0.75}

    for team_weight, chosen in ((1.0, 0), (0.5, 1)):
        responder = PolicyResponder(
            sampler,
            Chat(),
            {"writer": WRITER},
            plan=Plan(k=2),
            scorers={"writer": scorer},
            attribution=Attribution(team_weight=team_weight),
        )
        assert respond(responder, call())[0].chosen == chosen


@pytest.mark.parametrize(
    ("plan", "role", "asked", "count"),
    [
        (Plan(kind="tree", k=3), "writer", None, 3),
        (Plan(kind="tree", k=3), "editor", None, 1),
        (Plan(kind="tree", k=3), "writer", 5, 5),
        (Plan(kind="independent", k=3), "writer", None, 1),
        (None, "writer", 2, 2),
    ],
)
def test_how_many_candidates(plan, role, asked, count):
    sampler = ScriptedSampler(*[(1,)] * 5)
    policies = {"writer": WRITER, "editor": PolicyRef("editor")}
    responder = PolicyResponder(sampler, Chat(), policies, plan=plan, scorers={"writer": wants})
    (answer,) = respond(responder, call(role, **({"n": asked} if asked else {})))
    assert sampler.asked[0][1] == count == len(answer.candidates)
    assert len(answer.rewards) == (count if role == "writer" else 0)


def test_a_scorer_that_fails_costs_the_rewards_not_the_answer():
    def scorer(candidate, call, task):
        return float("nan") if call.turn else 1 / 0

    sampler = ScriptedSampler((1,), (2,))
    responder = PolicyResponder(sampler, Chat(), {"writer": WRITER}, plan=Plan(k=2), scorers={"writer": scorer})
    first, second, third = respond(responder, call(), call(), call(turn=1))
    for answer in (first, second, third):
        assert (len(answer.candidates), answer.rewards, answer.chosen) == (2, (), 0)
    where = f"{__file__}:{scorer.__code__.co_firstlineno + 1} in scorer"
    raised = f"The scorer of role 'writer' raised ZeroDivisionError: division by zero ({where})."
    assert first.error == f"{raised} Fix the scorer."
    assert dict(responder.scorer_errors) == {first.error: 4, third.error: 2}


def test_a_candidate_that_breaks_its_scorer_costs_neither_its_siblings_nor_the_selection():
    def scorer(candidate, call, task):
        return -1.0 if candidate.text == "b" else {"a": None, "ab": -2.0}[candidate.text]

    sampler = ScriptedSampler((1,), (2,), (1, 2))
    responder = PolicyResponder(sampler, Chat(), {"writer": WRITER}, plan=Plan(k=3), scorers={"writer": scorer})
    (answer,) = respond(responder, call())
    assert answer.rewards == ({}, {"local": -1.0}, {"local": -2.0})
    assert answer.chosen == 1
    assert answer.error.startswith("1 of 3 candidates have no reward: The scorer of role 'writer' returned local =")
    assert responder.scorer_errors.total() == 1


def test_seeds_depend_on_the_place_of_the_call_only():
    def seeds(seed, *calls):
        sampler = ScriptedSampler((1,))
        respond(PolicyResponder(sampler, Chat(), {"writer": WRITER}, seed=seed), *calls)
        return [params.seed for _, _, params, _ in sampler.asked]

    places = [call(), call(turn=1), call(task="u")]
    assert seeds(5, *places) == seeds(5, *reversed(places))[::-1]
    assert len(set(seeds(5, *places))) == 3
    assert seeds(6, call()) != seeds(5, call())
    assert seeds(None, call()) == [None]
    assert seeds(None, call(seed=11)) == [11]
    asked = seeds(5, call(seed=11), call(seed=11, turn=1), call(seed=12), call())
    assert len({11, *asked}) == 5
    assert seeds(5, call(seed=11)) == asked[:1]


def test_parameters_go_over_defaults_and_under_overrides():
    defaults = SamplingParams(max_tokens=16, timeout=2.0)
    body = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 7, "stop": "END", "n": 2, "seed": None}
    assert request_params(body, defaults) == SamplingParams(
        temperature=0.2, top_p=0.9, max_tokens=7, stop=("END",), timeout=2.0
    )
    assert request_params(body, defaults, {"temperature": 1.0, "top_p": 1.0}).temperature == 1.0
    assert request_params({"max_completion_tokens": 3, "stop": ["a", "b"]}, defaults) == SamplingParams(
        max_tokens=3, stop=("a", "b"), timeout=2.0
    )
    assert request_params({"temperature": 0}, defaults).temperature == 0.0
    assert request_params({}, defaults) == defaults


def test_what_was_really_used_is_in_the_answer():
    sampler = ScriptedSampler((1,))
    responder = PolicyResponder(sampler, Chat(), {"writer": WRITER}, override={"temperature": 1.0})
    (answer,) = respond(responder, call(temperature=0.1, max_tokens=3))
    assert (answer.sampling["temperature"], answer.sampling["max_tokens"]) == (1.0, 3)


def test_a_candidate_cut_by_the_limit_says_so():
    responder = PolicyResponder(ScriptedSampler((1,), finish="length"), Chat(), {"writer": WRITER})
    assert respond(responder, call())[0].candidates[0].finish_reason == "length"


def test_tools_are_rendered_and_stop_strings_parsed():
    sampler = ScriptedSampler((1, 2, 3))
    responder = PolicyResponder(sampler, Chat(), {"writer": WRITER})
    (answer,) = respond(responder, call(tools=[{}], stop=["b"]))
    assert sampler.asked[0][0] == [9] * 5 + [8]
    assert answer.candidates[0].text == "a"
    assert answer.candidates[0].token_ids == (1, 2, 3)


def test_roles_of_the_provider_pass_through_and_are_counted():
    responder = PolicyResponder(ScriptedSampler((1,)), Chat(), {"writer": WRITER}, provider_roles=["judge"])
    assert respond(responder, call("judge"), call("judge")) == [None, None]
    assert responder.passed_through == {"judge": 2}


def test_a_role_without_a_policy_is_played_by_the_one_for_others_and_counted():
    sampler = ScriptedSampler((1,))
    responder = PolicyResponder(sampler, Chat(), {"writer": WRITER}, provider_roles=["judge"], others=PolicyRef("base"))
    answer, none = respond(responder, call("critic"), call("judge"))
    assert (answer.policy, none) == (PolicyRef("base", 0), None)
    assert (dict(responder.unlisted), dict(responder.passed_through)) == ({"critic": 1}, {"judge": 1})


def test_without_one_for_others_every_role_without_a_policy_passes_through():
    responder = PolicyResponder(ScriptedSampler((1,)), Chat(), {"writer": WRITER})
    assert respond(responder, call("critic")) == [None]
    assert responder.passed_through == responder.unlisted == {"critic": 1}


def test_all_that_belongs_to_a_base_is_that_of_the_policy_of_a_role():
    class Shouting(Chat):
        """Another base: twice the tokens, capitals, a grammar, log-probabilities and images of its own."""

        image_tokens = (77,)

        def render(self, messages, tools, *, earlier=(), options=None):
            return super().render(messages, tools) * 2

        def parse(self, token_ids, stop=(), **_):
            text = "".join(LETTERS[t] for t in token_ids).upper()
            return text, {"role": "assistant", "content": text}, "stop"

        def reads(self, option):
            return option == "enable_thinking"

        def grammar(self, asked, tools, prompt):
            return f"of {len(prompt)} tokens"

        def images(self, messages):
            return (b"seen",)

        def token_bytes(self, ids):
            return [TokenBytes(LETTERS[id].upper().encode()) for id in ids]

    sampler = ScriptedSampler((1, 2))
    policies = {"writer": WRITER, "herald": PolicyRef("herald", 1), "second herald": PolicyRef("herald", 1)}
    responder = PolicyResponder(sampler, Chat(), policies, chats={"herald": Shouting()})
    plain, loud, again = respond(responder, call(), call("herald", logprobs=True), call("second herald"))
    assert [answer.candidates[0].text for answer in (plain, loud, again)] == ["ab", "AB", "AB"]
    assert [len(asked) for asked, *_ in sampler.asked] == [5, 10, 10]
    assert [shown.token for shown in loud.candidates[0].shown] == ["A", "B"]
    formed = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"enable_thinking": False}}
    seeing = call("herald", **formed)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    seeing.messages.append({"role": "user", "content": [image]})
    respond(responder, seeing)
    params = sampler.asked[-1][2]
    assert (params.grammar, params.images) == ("of 12 tokens", (b"seen",))
    assert [token for token, _ in params.logit_bias] == [77]


def test_a_malformed_tool_call_is_marked_and_ends_as_a_text():
    class Broken(Chat):
        def parse(self, token_ids, stop=(), **_):
            return "<tool_call>", {"role": "assistant", "content": "<tool_call>"}, "malformed"

    for finish in ("stop", "length"):
        responder = PolicyResponder(ScriptedSampler((1,), finish=finish), Broken(), {"writer": WRITER})
        candidate = asyncio.run(responder.respond(call())).candidates[0]
        assert (candidate.malformed, candidate.finish_reason) == (True, finish)


def test_a_request_that_only_a_provider_can_serve_is_refused_without_sampling():
    sampler = ScriptedSampler((1,))
    responder = PolicyResponder(sampler, Chat(), {"writer": WRITER})
    live = LiveEpisode(SimpleNamespace(write=len), Task(id="t", input="b"), workflow="w")
    asked = live.start(CallerContext("writer", "test"), {"messages": [{"role": "user", "content": "hello"}]})
    asked.unsupported_reason = "a web search"
    with pytest.raises(SamplerError, match="asks for a web search, which no policy can answer"):
        asyncio.run(responder.respond(asked))
    assert sampler.asked == []
    assert live.warnings == {"unanswerable": 1}
    other = live.start(CallerContext("editor", "test"), {"messages": []})
    other.unsupported_reason = "a web search"
    assert asyncio.run(responder.respond(other)) is None


@pytest.mark.parametrize("asked", [{"response_format": {"type": "json_object"}}, {"content": "x" * 100_000}])
def test_what_takes_long_to_prepare_holds_up_no_other_call(asked):
    """Two prompts are rendered at once: in threads, as each waits for the other."""
    both = threading.Barrier(2)

    class Slow(Chat):
        def render(self, messages, tools, *, earlier=()):
            both.wait(20)
            return super().render(messages, tools)

        def grammar(self, asked, tools, prompt):
            return "start: /./"

    calls = [call(**asked) for _ in range(2)]
    for made in calls:
        made.messages[0]["content"] = made.params.pop("content", "hello")
    responder = PolicyResponder(ScriptedSampler((1,)), Slow(), {"writer": WRITER})

    async def main():
        return await asyncio.gather(*map(responder.respond, calls))

    assert [len(found.candidates) for found in asyncio.run(main())] == [1, 1]


@pytest.mark.parametrize(
    ("rewards", "select", "chosen"),
    [
        ([0.1, 0.9, 0.3], "argmax", 1),
        ([0.5, 0.9, 0.9], "argmax", 1),
        ([-1.0, -0.5], "argmax", 1),
        ([0.1, 0.9], "first", 0),
        ([math.nan, -5.0], "argmax", 1),
        ([math.nan, math.nan], "argmax", 0),
        ([], "argmax", 0),
        ([], "sample", 0),
    ],
)
def test_choose(rewards, select, chosen):
    assert choose(rewards, select, seed=7) == chosen


def test_sample_takes_every_candidate_and_repeats():
    drawn = [choose([0.0] * 4, "sample", seed) for seed in range(64)]
    assert set(drawn) == {0, 1, 2, 3}
    assert drawn == [choose([0.0] * 4, "sample", seed) for seed in range(64)]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(0, 2**31 - 1))
def test_argmax_is_the_earliest_best(rewards, seed):
    index = choose(rewards, "argmax", seed)
    assert rewards[index] == max(rewards)
    assert max(rewards) not in rewards[:index]
