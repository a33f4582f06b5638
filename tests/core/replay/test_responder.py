"""Answering from a script: what is found, in which order, and what stops a replay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cotune.errors import ReplayDiverged
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveCall, LiveEpisode, Nowhere
from cotune.records.answers import Answer
from cotune.records.ids import message_id
from cotune.records.structs import Candidate, Task
from cotune.replay import responder as replaying
from cotune.replay.responder import ReplayResponder
from cotune.replay.script import Replay, Script, ScriptCall


def said(text: str, prompt: tuple[int, ...] = ()) -> Answer:
    message = {"role": "assistant", "content": text}
    return Answer(candidates=(Candidate(index=0, text=text, message=message),), prompt_ids=prompt)


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def script(*calls: tuple[str, str, float, float], **more: Any) -> Script:
    """Calls as (role, what is asked, started, ended); call i is answered `answer i`."""
    turns: dict[str, int] = {}
    made = []
    for step, (role, text, started, ended) in enumerate(calls):
        turn = turns[role] = turns.get(role, -1) + 1
        made.append(
            ScriptCall(
                id=f"c{step}",
                role=role,
                step=step,
                turn=turn,
                model="m",
                params={"temperature": 1.0},
                messages=(message_id(message(text)),),
                tools=None,
                started=started,
                ended=ended,
                answer=said(f"answer {step}", (1, 2)),
                **more,
            )
        )
    return Script("e", tuple(made), {message_id(message(text)): message(text) for _, text, _, _ in calls})


class Others:
    def __init__(self, prompt: tuple[int, ...] = (1, 2)) -> None:
        self.asked: list[str] = []
        self.prompt = prompt

    async def respond(self, call: LiveCall) -> Answer:
        self.asked.append(call.role)
        return said("new", self.prompt)


class Episode:
    """An episode that asks a responder, call by call."""

    def __init__(self, replay: Replay, others: Others | None = None) -> None:
        self.responder = ReplayResponder(replay, others)
        self.live = LiveEpisode(Nowhere(), Task(id="t", input=None), workflow="w")

    async def ask(self, role: str, text: str, **params: Any) -> str:
        body = {"model": "m", "messages": [message(text)], "temperature": 1.0, **params}
        answer = await self.responder.respond(self.live.start(CallerContext(role, "test"), body))
        assert answer is not None
        return answer.candidates[0].text

    def asks(self, *asked: tuple[str, str]) -> list[str]:
        async def main() -> list[str]:
            return [await self.ask(role, text) for role, text in asked]

        return asyncio.run(main())


CHAIN = script(("a", "x", 0, 1), ("b", "y", 2, 3), ("a", "z", 4, 5))


def test_equal_requests_are_answered_in_turn_and_others_by_what_they_ask():
    twice = script(("a", "x", 0, 1), ("a", "x", 2, 3), ("a", "y", 4, 5))
    assert Episode(Replay(script=twice)).asks(("a", "y"), ("a", "x"), ("a", "x")) == [
        "answer 2",
        "answer 0",
        "answer 1",
    ]


def test_the_role_the_model_and_the_parameters_tell_requests_apart():
    for asked, text in (
        ({"role": "b"}, "turn 0 of role 'b'"),
        ({"model": "other"}, "the model: recorded 'm', now 'other'"),
        ({"temperature": 0.5}, "the parameter temperature, character 1: recorded '1.0', now '0.5'"),
        ({"top_p": 0.5}, "the parameter top_p, character 1: recorded 'null', now '0.5'"),
        ({"tools": [{"type": "function"}]}, "tools, 1 are offered, recorded are 0"),
    ):
        episode = Episode(Replay(script=CHAIN))
        given = {"role": "a", "text": "x", **asked}
        with pytest.raises(ReplayDiverged, match="(?i)" + text.replace("(", r"\(")) as raised:
            asyncio.run(episode.ask(**given))
        assert (raised.value.role, raised.value.turn) == (given["role"], 0)


def test_after_a_divergence_nothing_is_answered_and_the_episode_fails():
    episode = Episode(Replay(script=CHAIN))
    with pytest.raises(ReplayDiverged):
        episode.asks(("a", "other"))
    with pytest.raises(ReplayDiverged, match="Turn 0 of role 'a' differs"):
        episode.asks(("b", "y"))
    with pytest.raises(ReplayDiverged, match="Turn 0 of role 'a' differs"):
        episode.responder.require_complete()


def test_from_the_fork_on_others_answer():
    others = Others()
    episode = Episode(Replay(script=CHAIN, fork="c1"), others)
    assert episode.asks(("a", "x"), ("b", "y"), ("a", "z"), ("c", "new")) == ["answer 0", "new", "new", "new"]
    assert others.asked == ["b", "a", "c"]
    episode.responder.require_complete()
    assert episode.live.fork is not None and episode.live.fork.call == "c1"


def test_calls_in_parallel_with_the_fork_may_be_new_too():
    parallel = script(("z", "w", 0, 1), ("a", "x", 1, 4), ("b", "y", 2, 3), ("c", "z", 3.5, 5))
    others = Others()
    episode = Episode(Replay(script=parallel, fork="c1", parallel=("c2", "c3")), others)

    async def main() -> list[str]:
        first = await episode.ask("z", "w")
        # The forked call may come after the others.
        asked = (episode.ask(role, text) for role, text in (("b", "y"), ("a", "x"), ("c", "z")))
        return [first, *await asyncio.gather(*asked)]

    assert asyncio.run(main()) == ["answer 0", "new", "new", "new"]
    assert others.asked == ["b", "a", "c"]
    episode.responder.require_complete()


def test_a_sibling_may_make_another_call_before_the_forked_call_ends():
    # Each branch writes, then checks its text. Branch b is done before the forked call of branch a has its answer.
    branches = script(("a", "write a", 0, 5), ("b", "write b", 0, 1), ("b", "check 1", 2, 3), ("a", "check 0", 6, 7))
    for fork_first in (True, False):
        others = Others()
        episode = Episode(Replay(script=branches, fork="c0", parallel=("c1", "c2")), others)

        async def branch(name: str, wait: float, episode: Episode = episode) -> None:
            await asyncio.sleep(wait)
            text = await episode.ask(name, f"write {name}")
            await episode.ask(name, f"check {text} of {name}")

        async def main(first: bool = fork_first) -> None:
            await asyncio.gather(branch("a", 0.0 if first else 0.05), branch("b", 0.05 if first else 0.0))

        asyncio.run(main())
        # "check 1" is never asked, as the text is another one.
        episode.responder.require_complete()
        assert sorted(others.asked) == ["a", "a", "b", "b"]
        assert episode.live.fork is not None and episode.live.fork.call == "c0"


def test_before_a_sibling_is_redrawn_a_request_must_be_in_the_record():
    parallel = script(("a", "x", 0, 4), ("b", "y", 1, 2))
    episode = Episode(Replay(script=parallel, fork="c0", parallel=("c1",)), Others())
    with pytest.raises(ReplayDiverged, match="Turn 0 of role 'b' differs"):
        episode.asks(("b", "other"))


def test_what_ran_beside_the_fork_stays_as_it_was():
    beside = script(("a", "x", 0, 3), ("b", "y", 1, 2), ("c", "z", 2.5, 4))
    others = Others()
    episode = Episode(Replay(script=beside, fork="c0"), others)

    async def main() -> list[str]:
        asked = (episode.ask(role, text) for role, text in (("a", "x"), ("b", "y"), ("c", "z")))
        return await asyncio.gather(*asked)

    assert asyncio.run(main()) == ["new", "answer 1", "answer 2"]
    assert others.asked == ["a"]


def test_other_prompt_tokens_at_the_fork_are_a_divergence():
    episode = Episode(Replay(script=CHAIN, fork="c0"), Others(prompt=(1, 3)))
    with pytest.raises(ReplayDiverged, match="messages are the same, but their token ids differ from token 2 on"):
        episode.asks(("a", "x"))


def test_a_call_that_had_no_answer_cannot_be_repeated():
    episode = Episode(Replay(script=script(("a", "x", 0, 1), fault="it had no answer (timeout)")))
    with pytest.raises(ReplayDiverged, match=r"cannot be answered again: it had no answer \(timeout\)"):
        episode.asks(("a", "x"))


def test_answers_side_by_side_keep_their_order_and_wait_for_no_one_for_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replaying, "PATIENCE", 0.05)
    beside = script(("a", "x", 0, 3), ("b", "y", 1, 2))  # b has its answer first
    episode, order = Episode(Replay(script=beside)), []

    async def one(role: str, text: str, delay: float) -> None:
        await asyncio.sleep(delay)
        await episode.ask(role, text)
        for _ in range(20 if role == "b" else 0):  # on its way to the application for longer
            await asyncio.sleep(0)
        order.append(role)

    async def main() -> None:
        await asyncio.gather(one("a", "x", 0), one("b", "y", 0.01))

    asyncio.run(main())
    assert order == ["b", "a"] and not episode.live.warnings
    late = Episode(Replay(script=beside))
    assert late.asks(("a", "x"), ("b", "y")) == ["answer 0", "answer 1"]
    assert late.live.warnings == {"replay_order": 1}
