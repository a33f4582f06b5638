"""Answers as lines for supervised fine-tuning, and what is left out and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cotune.cli.main import main
from cotune.reading.sft_export import ExportCounts, write_supervised
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Task
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.edits import part, prompts

TOOLS = [{"type": "function", "function": {"name": "look"}}]
ASKED = [{"role": "user", "content": "go"}]


def said(index: int, text: str) -> Candidate:
    return Candidate(index=index, text=text, message={"role": "assistant", "content": text})


def recorded(path: Path) -> SqliteStore:
    store = SqliteStore.open(path / "records.db")
    for name, team, status in (("good", 1.0, "ok"), ("bad", 0.0, "ok"), ("broken", 1.0, "error")):
        live = LiveEpisode(store, Task(id=name, input=None), workflow="w")
        body: dict[str, Any] = {"messages": ASKED}
        scored = live.start(CallerContext("scored", "test"), {**body, "tools": TOOLS})
        rewards: Any = ({"local": 0.0}, {"local": 2.0})
        scored.finish(Answer(candidates=(said(0, "no"), said(1, "yes")), chosen=1, rewards=rewards))
        live.start(CallerContext("plain", "test"), body).finish(Answer(candidates=(said(0, f"plain {name}"),)))
        live.start(CallerContext("plain", "test"), body).fail("timeout", "late")
        live.end("ok" if status == "ok" else "error", rewards={"team": team})
    store.flush()
    return store


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_answer_that_went_on_is_a_line(tmp_path: Path) -> None:
    with recorded(tmp_path) as store:
        made = write_supervised(store, tmp_path / "sft.jsonl")
    assert made == ExportCounts(lines=4, left_out={"failed_call": 2, "failed_episode": 3})
    assert lines(tmp_path / "sft.jsonl")[:2] == [
        {"messages": [*ASKED, {"role": "assistant", "content": "yes"}], "tools": TOOLS},
        {"messages": [*ASKED, {"role": "assistant", "content": "plain good"}]},
    ]


def test_an_answers_own_rewards_decide_else_the_episodes(tmp_path: Path) -> None:
    with recorded(tmp_path) as store:
        made = write_supervised(store, tmp_path / "sft.jsonl", min_reward=1.0)
        assert made.left_out == {"failed_call": 2, "failed_episode": 3, "below_reward": 1}
        assert [line["messages"][-1]["content"] for line in lines(tmp_path / "sft.jsonl")] == [
            "yes",
            "plain good",
            "yes",
        ]
        write_supervised(store, tmp_path / "sft.jsonl", min_reward=1.5)
        assert [line["messages"][-1]["content"] for line in lines(tmp_path / "sft.jsonl")] == ["yes", "yes"]


def tool(arguments: str | None, name: str = "look") -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*tools: dict[str, Any], content: Any = None, **fields: Any) -> Candidate:
    message = {"role": "assistant", "content": content, **({"tool_calls": list(tools)} if tools else {})}
    return Candidate(index=0, text=content if isinstance(content, str) else "", message=message, **fields)


def test_answers_that_are_nothing_to_learn_from_are_left_out(tmp_path: Path) -> None:
    answers = {
        None: [
            calling(content="fine"),
            calling(content=[{"type": "text", "text": "in parts"}]),
            calling(tool('{"q": 1}')),
            calling(tool("")),
            calling(tool(None)),
        ],
        "truncated": [
            calling(content="cut", finish_reason="length"),
            calling(content="half", finish_reason="interrupted"),
        ],
        "filtered": [calling(content="fil", finish_reason="content_filter")],
        "malformed": [
            calling(content="<tool_call>{", malformed=True),
            calling(tool('{"q": ')),
            calling(tool("[1]")),
            calling(tool('{"q": NaN}')),
            calling(tool("{}", name="")),
        ],
        "empty_answer": [
            calling(),
            calling(content=" \n"),
            calling(content=[{"type": "text", "text": ""}]),
        ],
    }
    with SqliteStore.open(tmp_path / "records.db") as store:
        live = LiveEpisode(store, Task(id="t", input=None), workflow="w")
        for given in answers.values():
            for candidate in given:
                live.start(CallerContext("r", "test"), {"messages": ASKED}).finish(Answer(candidates=(candidate,)))
        prefilled = [*ASKED, {"role": "assistant", "content": "Sure:"}]
        live.start(CallerContext("r", "test"), {"messages": prefilled}).finish(Answer(candidates=(said(0, "yes"),)))
        live.end("ok", rewards={"team": 1.0})
        store.flush()
        made = write_supervised(store, tmp_path / "sft.jsonl")
    expected = {str(reason): len(given) for reason, given in answers.items() if reason}
    assert made == ExportCounts(lines=5, left_out={**expected, "continued": 1})


def test_one_role_only(tmp_path: Path) -> None:
    with recorded(tmp_path) as store:
        made = write_supervised(store, tmp_path / "sft.jsonl", role="plain", min_reward=0.0)
    assert made == ExportCounts(lines=2, left_out={"other_role": 3, "failed_call": 2, "failed_episode": 2})


def test_nothing_to_write_is_said(tmp_path: Path, capsys: Any) -> None:
    recorded(tmp_path).close()
    assert main(["records", "sft", str(tmp_path), "--out", str(tmp_path / "sft.jsonl"), "--role", "nobody"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"wrote 0 lines to {tmp_path / 'sft.jsonl'}",
        "left out: 9 other_role",
    ]


def test_an_answer_that_a_replay_repeats_is_one_line(tmp_path: Path) -> None:
    """It is that of the first episode that is taken."""
    with SqliteStore.open(tmp_path / "records.db") as store:
        first = ""
        for team in (0.0, 1.0, 2.0):
            live = LiveEpisode(store, Task(id="t", input=None), workflow="w")
            call = live.start(CallerContext("plain", "test"), {"messages": ASKED})
            call.finish(Answer(candidates=(said(0, "yes"),), replayed=first or None))
            first = first or call.id
            live.end("ok", rewards={"team": team})
        store.flush()
        for least, replayed in ((None, {"replayed": 2}), (1.0, {"below_reward": 1, "replayed": 1})):
            made = write_supervised(store, tmp_path / "sft.jsonl", min_reward=least)
            assert made == ExportCounts(lines=1, left_out=replayed)


def test_with_edited_prompts_lines_have_what_went_out_or_what_was_asked(tmp_path: Path) -> None:
    given = prompts(part("go", "Go on, and be brief.", role="app", kind="user"))
    with SqliteStore.open(tmp_path / "records.db") as store:
        live = LiveEpisode(store, Task(id="t", input=None), workflow="w", prompts=given)
        call = live.start(CallerContext("app", "test"), {"messages": ASKED})
        call.finish(Answer(candidates=(said(0, "done"),)))
        live.end("ok")
    found = {}
    for which in ("sent", "asked"):
        file = tmp_path / f"{which}.jsonl"
        assert main(["records", "sft", str(tmp_path), "--out", str(file), "--messages", which]) == 0
        found[which] = lines(file)[0]["messages"][0]["content"]
    assert found == {"sent": "Go on, and be brief.", "asked": "go"}
