"""The plain SDK: loops that read text, tools by hand, a history of the module, a person who is asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sqlite3
import zlib
from datetime import date
from typing import Any

import httpx
import openai

import cotune
from cotune.types import CheckLimits
from tests.trainer.before.check.apps.table import NOT, UNDECIDED, Row, chat, client


def reacts() -> Any:
    """A loop over text in a form that its prompt shows; it raises at its limit."""
    form = "Answer in this form:\nThought: <what you think>\nFinal Answer: <the answer, a whole number>"

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("solver"):
            for _ in range(5):
                found = re.search(r"Final Answer: *(\d+)", (await chat(one["question"], form)).content or "")
                if found:
                    return float(found[1])
        raise RuntimeError("no final answer in five turns")

    return solve


def writes_code() -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("coder"):
            reply = await chat(one["question"], "Answer with one block of code, ```python ... ```")
        found = re.search(r"```python\n(.*?)```", reply.content, re.S)
        compile(found.group(1), "made", "exec")  # type: ignore[union-attr]
        return 1.0

    return solve


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add_event",
            "description": "Add an event to the calendar",
            "parameters": {
                "type": "object",
                "properties": {
                    "when": {"type": "string", "description": "ISO day, for example 2024-05-01"},
                    "minutes": {"type": "string"},
                },
                "required": ["when", "minutes"],
            },
        },
    }
]


def keeps_a_calendar() -> Any:
    """Runs tools itself, by arguments that must be a day and a number."""

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("assistant"):
            reply = await chat(one["question"], tools=TOOLS)
        days = 0
        for asked in reply.tool_calls or ():
            given = json.loads(asked.function.arguments)
            days += date.fromisoformat(given["when"]).day + int(given["minutes"])
        return float(days)

    return solve


def asks_for_yes() -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        for _ in range(4):
            with cotune.role("writer"):
                draft = await chat(one["question"])
            with cotune.role("judge"):
                if (await chat(f"Is it right? {draft.content}")).content.lower().startswith("yes"):
                    return 1.0
        raise ValueError("never right")

    return solve


HISTORY: list[Any] = []


def history_of_the_module() -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        HISTORY.append({"role": "user", "content": one["question"]})
        with cotune.role("bot"):
            reply = await client().chat.completions.create(model="m", messages=list(HISTORY))
        HISTORY.append({"role": "assistant", "content": reply.choices[0].message.content})
        return 1.0

    return solve


def asks_a_person() -> Any:
    @cotune.workflow
    def solve(one: Any) -> float:
        with openai.OpenAI(api_key="none") as client, cotune.role("bot"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": input("You: ")}])
        return 1.0

    return solve


def returns_nothing() -> Any:
    @cotune.workflow
    async def solve(one: Any) -> Any:
        with cotune.role("bot"):
            await chat(one["question"])

    return solve


def wants_the_unguessable() -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("bot"):
            text = (await chat("Say the secret of the house.")).content
        if zlib.crc32(text.encode()) != 7:
            raise ValueError(f"wrong secret: {text}")
        return 1.0

    return solve


def never_ends() -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("bot"):
            while len((await chat("go on")).content) < 1000:
                pass
        return 1.0

    return solve


def ends_by_a_word() -> Any:
    """A word that stands in the code alone."""

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("bot"):
            while "plugh" not in (await chat("go on")).content:
                pass
        return 1.0

    return solve


def labels() -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("classifier"):
            label = (await chat(one["question"], "What is it?")).content.strip()
        found = re.match(r"^(bug|feature|question)$", label)
        assert found, label
        return 1.0

    return solve


def triages() -> Any:
    """Reads JSON of which its prompt shows an example with places to be filled in."""
    form = 'Answer in JSON: {"urgency": "low|high", "summary": "...", "tags": [{"name": "..."}]}'

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("triage"):
            found = json.loads((await chat(one["question"], form)).content)
        with cotune.role({"low": "responder", "high": "escalator"}[found["urgency"]]):
            await chat(found["summary"] + found["tags"][0]["name"])
        return 1.0

    return solve


def evaluates() -> Any:
    form = "Evaluate in this form: <evaluation>PASS, NEEDS_IMPROVEMENT, or FAIL</evaluation>"

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("evaluator"):
            reply = (await chat(one["question"], form)).content
        verdict = re.search(r"<evaluation>(.*?)</evaluation>", reply).group(1)  # type: ignore[union-attr]
        return {"PASS": 1.0, "NEEDS_IMPROVEMENT": 0.5, "FAIL": 0.0}[verdict.strip()]

    return solve


def extracts() -> Any:
    """Repeats by itself, and gives up; a sentence lists the keys."""

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("extractor"):
            for _ in range(3):
                reply = await chat("Extract the invoice as JSON with the fields number, total and due.")
                with contextlib.suppress(ValueError):
                    return float(json.loads(reply.content)["total"])
        raise RuntimeError("could not extract")

    return solve


def reads_a_table() -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("tabulator"):
            reply = await chat("Give a table of two columns.")
        rows = [line for line in reply.content.splitlines() if line.startswith("|")]
        return float(len(rows[2].split("|")) == 4)

    return solve


def reads_an_earlier_answer() -> Any:
    """It fails on the plan after the writer has answered too."""

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("planner"):
            plan = await chat('Plan. Answer in JSON: {"title": string}')
        with cotune.role("writer"):
            await chat(one["question"])
        if len(title := json.loads(plan.content)["title"]) < 1000:
            raise ValueError(f"too short: {title!r}")
        return 1.0

    return solve


def embeds() -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        nowhere = client().with_options(base_url="http://127.0.0.1:9/v1", max_retries=0)
        found = await nowhere.embeddings.create(model="e", input=[one["question"], "other"], dimensions=8)
        assert [len(one.embedding) for one in found.data] == [8, 8]
        with cotune.role("bot"):
            await chat(one["question"])
        return 1.0

    return solve


def embeds_through_the_gateway() -> Any:
    """As an application of another process does: nothing of the SDK is hooked."""

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.gateway() as gate:
            async with httpx.AsyncClient() as plain:
                asked = {"model": "e", "input": [one["question"], "other"], "dimensions": 8}
                found = (await plain.post(f"{gate.role_url('bot')}/embeddings", json=asked)).json()
                assert [len(each["embedding"]) for each in found["data"]] == [8, 8]
                wrong = await plain.post(f"{gate.role_url('bot')}/embeddings", json=["no object"])
                assert wrong.status_code == 400 and "not a JSON object" in wrong.text
                body = {"model": "m", "messages": [{"role": "user", "content": one["question"]}]}
                reply = await plain.post(f"{gate.role_url('bot')}/chat/completions", json=body)
                assert reply.status_code == 200
        return 1.0

    return solve


BUSY: list[int] = []


def alone_only() -> Any:
    """Something of the module that one episode at a time can use."""

    @cotune.workflow
    async def solve(one: Any) -> float:
        if BUSY:
            raise RuntimeError("the session is in use")
        BUSY.append(1)
        try:
            with cotune.role("bot"):
                await chat(one["question"])
                await chat(one["question"])
        finally:
            BUSY.clear()
        return 1.0

    return solve


def grades_by_a_label() -> Any:
    """It reads a form that its prompt shows in quotes, without a guard."""

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("grader"):
            text = (await chat(one["question"], "Grade from 1 to 10. Answer as 'Score: N'.")).content
        return float(re.search(r"Score:\s*(\d+)", text).group(1)) / 10  # type: ignore[union-attr]

    return solve


def grades_by_a_quoted_label() -> Any:
    """Its prompt quotes how an answer begins, and says what follows."""
    form = "Start with 'Score: ' followed by the numeric score, then explain."

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("grader"):
            text = (await chat(one["question"], form)).content
        return float(re.search(r"Score:\s*(\d+)", text).group(1))  # type: ignore[union-attr]

    return solve


def plays_by_an_example() -> Any:
    """Its prompt shows a form with a placeholder, and then an example in tags."""
    form = "Respond with this format: <move>{your move}</move>. For example, <move>e2e4</move>."

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("player"):
            text = (await chat(one["question"], form)).content
        return {"e2e4": 1.0, "d2d4": 0.0}[text[text.find("<move>") + 6 : text.find("</move>")]]

    return solve


def hands_over() -> Any:
    """A second agent begins with what the first has called, under an id that each run draws anew."""
    tools: Any = [{"type": "function", "function": {"name": "transfer", "parameters": {"type": "object"}}}]

    @cotune.workflow
    async def solve(one: Any) -> float:
        messages: Any = [{"role": "user", "content": one["question"]}]
        with cotune.role("triage"):
            reply = await client().chat.completions.create(model="m", messages=messages, tools=tools)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        for asked in reply.choices[0].message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": asked.id, "content": "done"})
        with cotune.role("expert"):
            await client().chat.completions.create(model="m", messages=messages)
        return 1.0

    return solve


def maps_and_grades() -> Any:
    """Parts that are asked for in any order, and a grade in JSON whose prompt shows the range."""

    @cotune.workflow
    async def solve(one: Any) -> float:
        async def part(number: int) -> str:
            await asyncio.sleep(random.random() / 100)
            with cotune.role("mapper"):
                return str((await chat(f"Part {number}: {one['question']}")).content)

        text = "".join(await asyncio.gather(*map(part, range(5))))
        with cotune.role("grader"):
            reply = await chat(
                text, 'Grade it. JSON: {"grade": 1-5, "why": "..."}', response_format={"type": "json_object"}
            )
        return {1: 0.0, 2: 0.25, 3: 0.5, 4: 0.75, 5: 1.0}[json.loads(reply.content)["grade"]]

    return solve


def reads_a_number_of_json() -> Any:
    """Only an error of the code says which key its answer must hold."""

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("counter"):
            reply = await chat(one["question"], "Answer in JSON.", response_format={"type": "json_object"})
        return float(int(json.loads(reply.content)["faith"]) > 0)

    return solve


_GRADE = re.compile(r"Grade=(\d+)/5")


def reads_by_regular_expressions() -> Any:
    """Two roles, each with a form of its own, which their prompts do not show."""

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("answerer"):
            found = re.findall(r"####\s*(\w+)", (await chat(one["question"])).content)
        answer = found[-1]
        with cotune.role("grader"):
            return float(_GRADE.search((await chat(answer)).content).group(1))  # type: ignore[union-attr]

    return solve


def outlines() -> Any:
    """Lines that begin with a mark, then a list in JSON."""

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("outliner"):
            text = (await chat(one["question"], "An outline in Markdown, please.")).content
        titles = [line for line in text.splitlines() if line.startswith("## ")]
        if not titles:
            raise ValueError("no sections")
        with cotune.role("interviewer"):
            text = (await chat(titles[0], 'Reply with a JSON array of strings, e.g. ["Why?", "How?"].')).content
        return float(len(json.loads(text)))

    return solve


def writes_sql() -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("analyst"):
            text = (await chat(one["question"], "Write SQL in a ```sql block.")).content
        with contextlib.closing(sqlite3.connect(":memory:")) as base:
            return float(base.execute(text.replace("```sql", "").replace("```", "")).fetchone()[0])

    return solve


def acts_by_json() -> Any:
    """A sketch of JSON with texts to choose from, and a remark."""
    form = """Answer with JSON: {"action": "look" | "finish",  // what to do
    "why": "<text>",}"""

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("operator"):
            for _ in range(5):
                reply = await chat(one["question"], form, response_format={"type": "json_object"})
                if {"look": 0, "finish": 1}[json.loads(reply.content)["action"]]:
                    return 1.0
        return 0.0

    return solve


def takes_an_object_for_a_dict() -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        messages: Any = [{"role": "user", "content": one["question"]}]
        with cotune.role("bot"):
            reply: Any = await client().chat.completions.create(model="m", messages=messages)
        return float(len(reply["choices"]))

    return solve


def mistaken_before_its_first_call() -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("bot"):
            await chat(one["qestion"])
        return 1.0

    return solve


def reads_alternatives() -> Any:
    """The pattern that reads its answer is all that says which words there are."""

    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("sorter"):
            found = re.search(r"\b(billing|refund)\b", (await chat("Which department?")).content)
        return float(found.group(1) == "billing")  # type: ignore[union-attr]

    return solve


def swallows_its_mistake() -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        with cotune.role("bot"), contextlib.suppress(Exception):
            await chat(one["question"], mesages=[])
        return 1.0

    return solve


ROWS = {
    "reads_by_regular_expressions": Row(
        reads_by_regular_expressions, {"answerer"}, UNDECIDED, [("undecided", "IndexError")]
    ),
    "outlines": Row(outlines, {"outliner", "interviewer"}),
    "writes_sql": Row(writes_sql, {"analyst"}),
    "acts_by_json": Row(acts_by_json, {"operator"}, never=["failed"]),
    "takes_an_object_for_a_dict": Row(
        takes_an_object_for_a_dict, {"bot"}, UNDECIDED, [("undecided", "not subscriptable")]
    ),
    "hands_over": Row(hands_over, {"triage", "expert"}, never=["first prompt"]),
    "maps_and_grades": Row(maps_and_grades, {"mapper", "grader"}, never=["mapper: its first prompt"]),
    "reads_a_number_of_json": Row(reads_a_number_of_json, {"counter"}, UNDECIDED, [("undecided", "KeyError: 'faith'")]),
    "mistaken_before_its_first_call": Row(
        mistaken_before_its_first_call, set(), NOT, [("blocks", "KeyError: 'qestion'")], ["OpenAI SDK", "gateway"]
    ),
    "reads_alternatives": Row(
        reads_alternatives,
        {"sorter"},
        UNDECIDED,
        [("undecided", "no attribute 'group'")],
    ),
    "swallows_its_mistake": Row(swallows_its_mistake, set(), NOT, [("blocks", "application swallows")]),
    "grades_by_a_quoted_label": Row(grades_by_a_quoted_label, {"grader"}),
    "plays_by_an_example": Row(plays_by_an_example, {"player"}),
    "grades_by_a_label": Row(grades_by_a_label, {"grader"}, never=["--no-tools"]),
    "reacts": Row(reacts, {"solver"}),
    "writes_code": Row(writes_code, {"coder"}),
    "keeps_a_calendar": Row(keeps_a_calendar, {"assistant"}, never=["fromisoformat"]),
    "asks_for_yes": Row(asks_for_yes, {"writer", "judge"}),
    "history_of_the_module": Row(history_of_the_module, {"bot"}, says=[("warns", "outlives an episode")]),
    "asks_a_person": Row(asks_a_person, set(), NOT, [("blocks", "waits for a person")]),
    "returns_nothing": Row(
        returns_nothing, {"bot"}, UNDECIDED, [("undecided", "returned None")], ["learns from nothing"]
    ),
    "wants_the_unguessable": Row(
        wants_the_unguessable, {"bot"}, UNDECIDED, [("undecided", "--answers MODEL")], ["learns from nothing"]
    ),
    "never_ends": Row(
        never_ends,
        {"bot"},
        UNDECIDED,
        [("undecided", "made 8 calls on one task and did not stop; the last one by 'bot'"), ("undecided", "--calls")],
        ["are not trained on"],
        {"limits": CheckLimits(calls=8)},
    ),
    "ends_by_a_word": Row(ends_by_a_word, {"bot"}, UNDECIDED, [("undecided", "did not stop")]),
    "labels": Row(labels, {"classifier"}, UNDECIDED, [("undecided", "AssertionError")]),
    "triages": Row(triages, {"triage", "responder", "escalator"}),
    "evaluates": Row(evaluates, {"evaluator"}),
    "extracts": Row(extracts, {"extractor"}),
    "reads_a_table": Row(reads_a_table, {"tabulator"}, UNDECIDED, [("undecided", "IndexError")]),
    "reads_an_earlier_answer": Row(
        reads_an_earlier_answer, {"planner", "writer"}, UNDECIDED, [("undecided", "too short: ")]
    ),
    "embeds_through_the_gateway": Row(
        embeds_through_the_gateway,
        {"bot"},
        says=[("note", "the gateway: "), ("note", "requests for embeddings got fixed vectors")],
        never=["a model that cotune does not see"],
    ),
    "embeds": Row(embeds, {"bot"}, says=[("note", "got fixed vectors")], never=["a model that cotune does not see"]),
    "alone_only": Row(alone_only, {"bot"}, NOT, [("blocks", "two episodes")]),
}
