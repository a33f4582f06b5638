"""A judge against a real HTTP server: one request for all siblings, checked, kept, within its budget."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cotune
from cotune.errors import ConfigError, JudgeError
from cotune.recording.call_records import CallerContext
from cotune.recording.context import Judging, judging
from cotune.recording.recorder import LiveEpisode, Nowhere
from cotune.recording.redaction import Redaction, each_text
from cotune.records.structs import Candidate, Task
from cotune.runtime.run_context import RunContext, current_run
from cotune.runtime.user_code import context_value
from cotune.storage.judge_ledger import FILE, Ledger
from cotune.types import JudgeSettings
from tests.integrations.judge_server import by, entries, ranking, says
from tests.integrations.provider import Provider, json_reply, serving

CALL = SimpleNamespace(
    messages=[{"role": "system", "content": "Write well."}, {"role": "user", "content": "A word for joy?"}],
    tools=[{"type": "function", "function": {"name": "look_up", "description": "finds a word"}}],
    task=Task(id="t", input={}),
)
LENGTHS = [3, 1, 8, 2, 7, 4, 6, 5]
EIGHT = [Candidate(index=i, text="x" * n, message={"content": "x" * n}) for i, n in enumerate(LENGTHS)]


@pytest.fixture
def server() -> Iterator[Provider]:
    with serving() as made:
        made.reply = by(len)
        yield made


@pytest.fixture(autouse=True)
def _in_run(tmp_path: Path) -> Iterator[None]:
    token = current_run.set(RunContext(folder=tmp_path))
    yield
    current_run.reset(token)


def judge(server: Provider, **settings: Any) -> cotune.Judge:
    given = {"model": "strict", "rubric": "Longer is better.", "timeout": 10.0, **settings}
    return cotune.Judge(base_url=server.url, api_key="none", **in_two(given))


def in_two(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a judge, those of its settings among them."""
    rest = {name: given.pop(name) for name in list(given) if name in JudgeSettings.__struct_fields__}
    return {**given, "settings": JudgeSettings(**rest)}


def told(made: cotune.Judge, candidates: Any = EIGHT, call: Any = CALL) -> Any:
    return asyncio.run(made(candidates, call, call.task.input))


def ask(made: cotune.Judge, candidates: Any = EIGHT) -> Any:
    """The rewards that a judge gives."""
    return [one and one.reward for one in told(made, candidates)]


def totals(folder: Path) -> dict[str, float]:
    return dict(Ledger(folder).totals())


def test_eight_siblings_are_one_request_and_a_second_run_makes_none(server: Provider, tmp_path: Path) -> None:
    found = ask(judge(server))
    assert found == [{"judge": (n - 1) / 7} for n in LENGTHS]
    assert ask(judge(server)) == found
    assert ask(judge(server), EIGHT[::-1]) == found[::-1]
    assert len(server.requests) == 1
    assert totals(tmp_path) == {
        "requests": 1, "prompt_tokens": 7, "completion_tokens": 3, "cost": 0.0, "cached": 2
    }  # fmt: skip


def test_the_reason_is_told_of_each_answer_by_its_letter_and_kept(server: Provider, tmp_path: Path) -> None:
    server.reply = lambda body, number: says('{"reason": " xxx beats x ", "ranking": [["B", "A"], ["C"]], "more": 1}')
    found = told(judge(server), EIGHT[:3])
    letters = {text: label for label, text in entries(server.requests[0]).items()}
    assert [one.text for one in found] == [f"This is {letters[c.text]}. xxx beats x" for c in EIGHT[:3]]
    assert told(judge(server), EIGHT[:3]) == found and len(server.requests) == 1
    kept = sqlite3.connect(tmp_path / FILE).execute("SELECT text FROM answers").fetchall()
    assert kept == [('{"ranking":[["B","A"],["C"]],"reason":"xxx beats x"}',)]


@pytest.mark.parametrize("reason", ["", '"reason": "  ", ', '"reason": ["a"], ', '"reason": null, '])
def test_without_a_reason_there_is_no_text(server: Provider, reason: str) -> None:
    server.reply = lambda body, number: says(f'{{{reason}"ranking": [["B", "A"], ["C"]]}}')
    assert {one.text for one in told(judge(server), EIGHT[:3])} == {""}


def test_a_reason_with_half_a_sign_is_kept(server: Provider) -> None:
    server.reply = lambda body, number: says(r'{"reason": "fine \ud83d", "ranking": [["B", "A"], ["C"]]}')
    found = told(judge(server), EIGHT[:3])
    assert all(one.text.endswith(r". fine \ud83d") for one in found)
    assert told(judge(server), EIGHT[:3]) == found and len(server.requests) == 1


def test_each_pass_has_its_reason(server: Provider) -> None:
    server.reply = lambda body, number: says(
        f'{{"reason": "pass {number}", "ranking": [{", ".join(f"[{chr(34)}{label}{chr(34)}]" for label in "ABC")}]}}'
    )
    first, *_ = told(judge(server, passes=2, concurrency=1), EIGHT[:3])
    assert re.fullmatch(r"This is [ABC]\. pass \d\nThis is [ABC]\. pass \d", first.text)


@pytest.mark.parametrize("live", [True, False])
def test_a_reason_is_kept_as_the_redactors_of_the_application_leave_it(
    server: Provider, tmp_path: Path, live: bool
) -> None:
    server.reply = lambda body, number: says('{"reason": "card 1234 is named", "ranking": [["B", "A"], ["C"]]}')
    hide = each_text(lambda text: text.replace("1234", "[card]"))
    episode = LiveEpisode(Nowhere(), CALL.task, workflow="w", redactors=[hide])
    call = episode.start(CallerContext("writer", "test"), {"messages": CALL.messages})
    with context_value(judging, Judging(redaction=None if live else Redaction([hide]))):
        first, *_ = told(judge(server), EIGHT[:3], call if live else CALL)
    assert first.text.endswith("card 1234 is named"), "the recorder redacts what it stores"
    ((kept,),) = sqlite3.connect(tmp_path / FILE).execute("SELECT text FROM answers").fetchall()
    assert "1234" not in kept and "card [card] is named" in kept


def test_what_the_judge_is_shown(server: Provider) -> None:
    called = {"tool_calls": [{"function": {"name": "look_up", "arguments": '{"word": "joy"}'}}]}
    pictured = {"content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:..."}}]}
    ask(
        judge(server), [*EIGHT[:1], *(Candidate(index=i, text="", message=m) for i, m in enumerate((called, pictured)))]
    )
    body = server.requests[0]
    text = body["messages"][1]["content"]
    assert text.count("A word for joy?") == 1 and "Longer is better." in text and "- look_up: finds a word" in text
    assert sorted(entries(body).values()) == ['calls look_up({"word": "joy"})', "see\n(image_url)", "xxx"]
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0, 1024, "strict")
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["ranking"]["items"]["items"]["enum"] == ["A", "B", "C"]


def test_order_is_by_seed_and_a_second_pass_reverses_it(server: Provider) -> None:
    shown = []
    for seed in range(4):
        ask(judge(server, seed=seed))
        shown.append(tuple(entries(server.requests[-1]).values()))
    assert len(set(shown)) > 1 and len({frozenset(order) for order in shown}) == 1

    server.requests.clear()
    ask(judge(server, passes=2, rubric="Twice."))
    first, second = (list(entries(body).values()) for body in server.requests)
    assert len(server.requests) == 2 and second == first[::-1]


def test_two_passes_cancel_a_judge_that_prefers_what_stands_first(server: Provider) -> None:
    server.reply = lambda body, number: ranking([[label] for label in entries(body)])
    assert ask(judge(server)) != [{"judge": 0.5}] * 8
    assert ask(judge(server, passes=2)) == [{"judge": 0.5}] * 8


def test_equal_answers_get_equal_rewards_and_nobody_is_asked_about_them(server: Provider) -> None:
    assert ask(judge(server), EIGHT[:1] * 4) == [{"judge": 0.5}] * 4
    assert ask(judge(server), EIGHT[:1]) == [None]
    assert server.requests == []
    assert ask(judge(server), [EIGHT[0], EIGHT[2], EIGHT[0]]) == [{"judge": 0.25}, {"judge": 1.0}, {"judge": 0.25}]
    assert len(entries(server.requests[0])) == 2


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("B is best", "it has no JSON object with a ranking"),
        ('{"ranking": "B"}', "it has no JSON object with a ranking"),
        ('{"ranking": [["A"], ["B"]]}', "its ranking does not have each letter once"),
        ('{"ranking": [["A"], ["B"], ["C"], ["A"]]}', "its ranking does not have each letter once"),
        ('{"ranking": [[1], ["B"], ["C"]]}', "its ranking is no list of lists of letters"),
    ],
)
def test_nonsense_is_asked_again_once_and_then_an_error(
    server: Provider, tmp_path: Path, said: str, fault: str
) -> None:
    server.reply = lambda body, number: says(said)
    with pytest.raises(JudgeError) as caught:
        ask(judge(server), EIGHT[:3])
    assert caught.value.cause == f"The judge strict was asked twice in vain: its answer cannot be used: {fault}."
    assert len(server.requests) == 2
    told = server.requests[1]["messages"][2:]
    assert told == [
        {"role": "assistant", "content": said},
        {"role": "user", "content": f"This cannot be used: {fault}. Answer with the JSON object alone."},
    ]
    assert totals(tmp_path)["asked_again"] == totals(tmp_path)["dropped"] == 1

    server.reply = lambda body, number: by(len)(body, number) if len(body["messages"]) > 2 else says(said)
    assert ask(judge(server), EIGHT[:3]) == [{"judge": 0.5}, {"judge": 0.0}, {"judge": 1.0}]
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    "said",
    [
        '<think>A {maybe}?</think>```json\n{"reason": "r", "ranking": [["C"], ["A", "B"]]}\n```',
        '{"ranking": ["C", ["A", "B"]]} I hope that {helps}.',
    ],
)
def test_an_answer_may_think_aloud(server: Provider, said: str) -> None:
    server.reply = lambda body, number: says(said)
    found = ask(judge(server, structured=False), EIGHT[:3])
    assert sorted(value["judge"] for value in found) == [0.25, 0.25, 1.0]
    assert "response_format" not in server.requests[0]


def test_a_judge_that_hangs_is_asked_again_and_then_an_error(server: Provider, tmp_path: Path) -> None:
    server.reply = lambda body, number: (200, "application/json", [Provider.HANG])
    with pytest.raises(JudgeError, match=r"asked twice in vain: no answer within 0\.3 s"):
        ask(judge(server, timeout=0.3, price=(1.0, 1.0)))
    found = totals(tmp_path)
    assert found["requests"] == found["timeouts"] == 2
    assert found["cost"] > 2 * 1024 / 1e6, "what may have been billed counts as spent"


def test_a_refusal_is_an_error_at_once(server: Provider, tmp_path: Path) -> None:
    server.reply = lambda body, number: json_reply({"error": {"message": "no such model"}}, 404)
    with pytest.raises(JudgeError, match=r"The judge strict was refused: status 404: .*no such model"):
        ask(judge(server))
    assert len(server.requests) == 1 and totals(tmp_path)["cost"] == 0.0


def test_a_server_that_recovers_is_asked_again(server: Provider) -> None:
    server.reply = lambda body, number: by(len)(body, number) if number else json_reply({"error": "busy"}, 503)
    assert ask(judge(server))[2] == {"judge": 1.0}
    assert len(server.requests) == 2


def group(number: int) -> list[Candidate]:
    return [Candidate(index=i, text=text, message={"content": text}) for i, text in enumerate((f"{number}", "long"))]


@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_cost_cap_stops_before_it_is_passed(server: Provider, tmp_path: Path, concurrency: int) -> None:
    """Each request costs 0.7 cents of prompt and 30 cents of answer; its most is far more, and is given back."""
    made = judge(server, price=(1000.0, 100_000.0), max_tokens=10, max_cost=6.0, concurrency=concurrency)

    async def main() -> list[Any]:
        return await asyncio.gather(*(made(group(n), CALL, {}) for n in range(24)), return_exceptions=True)

    found = asyncio.run(main())
    refused = [error for error in found if isinstance(error, JudgeError)]
    assert {str(error) for error in refused} == {
        "The judge strict has used its budget: another request would exceed max_cost = 6.0. "
        "Raise max_cost of this cotune.Judge, and continue with --resume."
    }
    spent = totals(tmp_path)
    assert len(server.requests) == spent["requests"] == 24 - len(refused)
    assert spent["cost"] == pytest.approx(0.307 * spent["requests"]) and 1.0 < spent["cost"] <= 6.0
    assert spent["over_budget"] == len(refused) > 0

    again = asyncio.run(judge(server, price=(1000.0, 100_000.0), max_tokens=10, max_cost=60.0)(group(23), CALL, {}))
    assert len(again) == 2, "a larger cap goes on"


def test_the_cap_of_calls_counts_every_request(server: Provider) -> None:
    server.reply = lambda body, number: says("no")
    made = judge(server, max_calls=3)
    with pytest.raises(JudgeError, match="asked twice"):
        ask(made, group(1))
    with pytest.raises(JudgeError, match=r"another request would exceed max_calls = 3"):
        ask(made, group(2))
    assert len(server.requests) == 3


def test_an_answer_without_a_count_of_tokens_costs_the_most(server: Provider, tmp_path: Path) -> None:
    server.reply = lambda body, number: ranking([[label] for label in entries(body)], usage=None)
    ask(judge(server, price=(0.0, 1e6), max_tokens=5))
    assert totals(tmp_path)["uncounted"] == 1 and totals(tmp_path)["cost"] == 5.0


def test_no_more_requests_at_once_than_allowed(server: Provider) -> None:
    import threading
    import time

    under_way, most, lock, three = [0], [0], threading.Lock(), threading.Barrier(3)

    def slow(body: dict[str, Any], number: int) -> Any:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        three.wait(60)
        time.sleep(0.05)  # for a fourth to come
        with lock:
            under_way[0] -= 1
        return by(len)(body, number)

    server.reply = slow
    made = judge(server, concurrency=3)

    async def main() -> None:
        await asyncio.gather(*(made(group(n), CALL, {}) for n in range(12)))

    asyncio.run(main())
    assert most[0] == 3 and len(server.requests) == 12


def test_answers_are_kept_in_a_folder_of_the_users_or_in_memory(server: Provider, tmp_path: Path) -> None:
    shared = tmp_path / "kept" / "here"
    ask(judge(server, folder=shared))
    ask(judge(server, folder=shared))
    assert len(server.requests) == 1 and (shared / FILE).is_file() and not (tmp_path / FILE).exists()
    current_run.set(RunContext())
    made = judge(server)
    assert ask(made) == ask(made)
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"rubric": " "}, "Judge.rubric"),
        ({"model": None}, "Judge.model"),
        ({"role": "critic"}, "Judge.model"),
        ({"model": None, "role": "critic", "max_calls": 3}, "Judge.role"),
        ({"passes": 0}, "Judge.settings.passes"),
        ({"max_cost": 1.0}, "Judge.max_cost"),
        ({"max_cost": 0.0, "price": (1.0, 1.0)}, "Judge.max_cost"),
        ({"max_calls": 0}, "Judge.settings.max_calls"),
        ({"price": (1.0,)}, "Judge.price"),
        ({"price": (-1.0, 1.0)}, "Judge.price"),
        ({"timeout": 0}, "Judge.settings.timeout"),
        ({"concurrency": 0}, "Judge.settings.concurrency"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cotune.Judge(**in_two({"model": "m", "rubric": "Longer is better.", **settings}))
    assert caught.value.field == field
