"""Does a search for prompts find better ones, on held-out tasks, and more than random edits do? SmolLM2, two roles.

    python -m benchmarks.prompts --model SmolLM2-135M-Instruct.Q4_1.gguf                # 3 seeds x 2 ways
    python -m benchmarks.prompts --model SmolLM2-135M-Instruct.Q4_1.gguf --seeds 0 --calls 200 --tasks 30

An application of two roles reads a customer's message: the finder says which order it is about, the clerk writes the
first line of the reply. The model answers greedily. Its answers depend on the wording far more than on how much sense
that makes to a person, and the texts from which the search starts are careful ones.

`reflect` proposes texts from a script that knows nothing of the answers: it rewrites the text of a role in one of a
dozen general ways (shorter, as a question, with an example of form, ...), the bolder the lower the scores that it is
shown. `random` is the control under the same budget: it deletes, swaps and repeats words. A script is no language
model: this shows that the search, its scores, its guards and the held-out comparison work on a real model, not
what a reflection model is worth. Results are appended to OUT/results.jsonl and not computed again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENAI_API_KEY", "none")

import asyncio
import contextlib
import json
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
from rich.console import Console

import cotune
from benchmarks.kept_results import KeptResults, run_parser
from cotune.config.rollouts import SamplingConfig
from cotune.episodes.workflows import workflow_of
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.ids import canonical
from cotune.records.structs import Candidate, Usage
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.open_store import open_store
from cotune.trainer.prompts.evaluations import answering_in_search
from cotune.trainer.prompts.improve import improve
from cotune.trainer.prompts.options import ImproveOptions

FINDER = "You are a careful assistant. Please read the message and help the customer with the order."
CLERK = "You are a polite clerk. Please write to the customer about the order in a friendly and helpful way."
NEW = 14
"""Tokens of an answer."""
MESSAGES = (
    "Hello, my order {order} from {day} May has not arrived at {house} Mill Road.",
    "I paid {price} euros on {day} March. Where is {order}?",
    "Please cancel {order}, the {price} euro lamp. My house number is {house}.",
    "On {day} June you sent me {price} screws too many with {order}.",
    "The invoice for {order} says {price} euros, but I live at {house} High Street.",
)
client = openai.AsyncOpenAI(base_url="http://localhost/v1")
console = Console(stderr=True)


def make_tasks(number: int, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    tasks = []
    for n in range(number):
        letters = "".join(chance.choice("ABCDEFGHKLMNPRSTUWXYZ") for _ in range(2))
        order = f"{letters}-{chance.randrange(1000, 9999)}"
        numbers = {"day": chance.randrange(1, 29), "house": chance.randrange(2, 99), "price": chance.randrange(12, 90)}
        message = MESSAGES[n % len(MESSAGES)].format(order=order, **numbers)
        tasks.append({"id": f"order-{n}", "message": message, "order": order})
    return tasks


async def ask(role: str, system: str, text: str) -> str:
    with cotune.role(role):
        messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        reply = await client.chat.completions.create(model="m", messages=messages, temperature=0, max_tokens=NEW)
    return reply.choices[0].message.content or ""


@cotune.workflow
async def desk(task: Any) -> dict[str, float]:
    found = await ask("finder", FINDER, task["message"])
    reply = await ask("clerk", CLERK, found)
    return {"found": 0.5 * (task["order"] in found), "told": 0.5 * (task["order"] in reply)}


@desk.scorer("finder")
def names_it(candidate: Any, call: Any, task: Any) -> float:
    return float(task["order"] in candidate.text)


@desk.scorer("clerk")
def passes_it_on(candidate: Any, call: Any, task: Any) -> float:
    return float(task["order"] in candidate.text)


class Remembering:
    """The model, in a separate thread for all searches; greedy answers are cached."""

    def __init__(self, model: str, file: Path) -> None:
        self.model, self.file = model, file
        self.said: dict[str, str] = {}
        if file.is_file():
            self.said = dict(json.loads(line) for line in file.read_text().splitlines())
        self.computed = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._stack = contextlib.AsyncExitStack()
        options = ImproveOptions(reflection="-", model=model, sampling=SamplingConfig(max_tokens=NEW))
        opening = self._stack.enter_async_context(answering_in_search(workflow_of(desk), options, console.print))
        self._policies: Any = asyncio.run_coroutine_threadsafe(opening, self._loop).result()

    async def respond(self, call: LiveCall) -> Answer | None:
        key = canonical((call.rewritten or call).messages).decode()
        if key not in self.said:
            asked = asyncio.run_coroutine_threadsafe(self._policies.respond(call), self._loop)
            answer = await asyncio.wrap_future(asked)
            self.computed += 1
            self.said[key] = answer.candidates[answer.chosen].text
            with self.file.open("a") as file:
                file.write(json.dumps([key, self.said[key]]) + "\n")
        return _answer(self.said[key])

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stack.aclose(), self._loop).result()


def _answer(text: str) -> Answer:
    candidate = Candidate(index=0, text=text, message={"role": "assistant", "content": text}, finish_reason="stop")
    return Answer(candidates=(candidate,), usage=Usage(prompt_tokens=1, completion_tokens=1))


Rewrite = Callable[[str, random.Random], str]


def _thing(text: str) -> str:
    """The subject of the text: the last noun after `the`."""
    return (re.findall(r"\bthe ([a-z]+)", text) or ["answer"])[-1]


BOLD: tuple[Rewrite, ...] = (
    lambda text, chance: f"What is the {_thing(text)} number?",
    lambda text, chance: f"Which {_thing(text)} is it?",
    lambda text, chance: f"Write the {_thing(text)} number and nothing else.",
    lambda text, chance: f"Find the {_thing(text)}.",
    lambda text, chance: f"Copy the {_thing(text)} code, which looks like XX-0000.",
    lambda text, chance: f"Tell the customer what happens with the {_thing(text)}.",
    lambda text, chance: "Repeat the most important word.",
)
SMALL: tuple[Rewrite, ...] = (
    lambda text, chance: chance.choice([one for one in re.split(r"(?<=[.?!]) ", text) if one]),
    lambda text, chance: f"{text} Answer with a few words.",
    lambda text, chance: f"{text} Name it.",
    lambda text, chance: re.sub(r"\b(please|careful|polite|friendly|helpful) ?", "", text, flags=re.I).strip(),
    lambda text, chance: f"{text} Do not explain.",
)


def random_edit(text: str, chance: random.Random) -> str:
    """Deletes, swaps or repeats words."""
    words = text.split()
    for _ in range(chance.randrange(1, 4)):
        place, other = chance.randrange(len(words)), chance.randrange(len(words))
        match chance.randrange(3):
            case 0 if len(words) > 3:
                del words[place]
            case 1:
                words[place], words[other] = words[other], words[place]
            case _:
                words.insert(place, words[other])
    return " ".join(words)


class Script:
    """Answers in place of a reflection model."""

    def __init__(self, way: str, seed: int) -> None:
        self.way, self.chance = way, random.Random(seed)

    async def respond(self, call: LiveCall) -> Answer:
        request = call.messages[-1]["content"]
        text = request.partition("<text>\n")[2].partition("\n</text>")[0]
        if self.way == "random":
            new = random_edit(text, self.chance)
        else:
            scores = [float(score) for score in re.findall(r"Scores of this answer: \w+ ([0-9.]+)", request)]
            low = sum(scores) < 0.5 * max(len(scores), 1)
            new = self.chance.choice(BOLD if low and self.chance.random() < 0.8 else SMALL)(text, self.chance)
        return _answer(f"<new-text>\n{new}\n</new-text>")


WAYS = ("reflect", "random")


def searched(way: str, seed: int, options: Any, model: Remembering) -> dict[str, Any]:
    """One search, from its beginning."""
    out = options.out / f"{way}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    computed, started = model.computed, time.perf_counter()
    settings = ImproveOptions(
        reflection=way, max_calls=options.calls, rounds=options.rounds, seed=seed, minibatch=4, blame="off"
    )
    tasks = make_tasks(options.tasks, seed=7)
    report = improve(desk, tasks, settings, out=out, responder=model, reflector=Script(way, seed))
    held = report.held_out
    return {
        "verdict": report.verdict,
        "held_out": None if held is None else held.to_json(),
        "validation": list(report.validation),
        "candidates": report.candidates,
        "refused": report.refused,
        "calls": sum(spent["calls"] for spent in report.spending.values()),
        "computed": model.computed - computed,
        "texts": {part.name: "".join(part.now.texts) for part in report.prompts.parts},
        "seconds": round(time.perf_counter() - started),
    }


def main() -> None:
    parser = run_parser(__doc__, "runs/prompts", WAYS)
    parser.add_argument("--model", required=True, help="folder, id or GGUF file of SmolLM2-135M-Instruct")
    parser.add_argument("--calls", type=int, default=340, help="of models, in each search (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="of each search (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=66, help="a third of them held out (default: %(default)s)")
    options = parser.parse_args()
    results = KeptResults(options, "model", "calls", "rounds", "tasks")
    model = Remembering(options.model, options.out / "said.jsonl")
    for seed in map(int, options.seeds.split(",")):
        for way in options.ways.split(","):
            results.once(lambda way=way, seed=seed: searched(way, seed, options, model), way=way, seed=seed)
    model.close()
    lines = results.lines()
    for line in lines:
        line["by_task"] = by_task(options.out / f"{line['way']}-{line['seed']}", line)
    pooled = {way: _pooled([line for line in lines if line["way"] == way]) for way in WAYS}
    for line in lines:
        print(json.dumps({name: line[name] for name in KEPT}))
    print(json.dumps({"benchmark": "prompts", "pooled": pooled}))


KEPT = ("way", "seed", "verdict", "held_out", "validation", "candidates", "refused", "calls", "texts", "by_task")


def by_task(out: Path, line: Mapping[str, Any]) -> list[float]:
    """Of each held-out task, the outcome with the best prompts less that with those before."""
    outcomes: dict[bool, dict[str, float]] = {False: {}, True: {}}
    with open_store(out, read_only=True) as store:
        for episode in store.episodes(EpisodeFilters(phase="prompts-held-out")):
            rewards = store.rewards([episode.id]).get(episode.id) or {}
            outcomes[bool(episode.prompts)][episode.task.id] = sum(rewards.values())
    before, after = outcomes[False], outcomes[True]
    return (
        [after[task] - before[task] for task in sorted(before)] if after else [0.0] * (line["settings"]["tasks"] // 3)
    )


def _pooled(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean difference over all searches of a way."""
    changes = [value for line in lines for value in line["by_task"]]
    return sum(changes) / len(changes) if changes else None


if __name__ == "__main__":
    main()
