"""How the orchestrator's own CPU grows with the size of the work: calls of a long conversation, and a step's batches.

    python -m benchmarks.growth [--phases append,strip,...] [--limit 1.2] [--repeats 5]

Each phase is tried at sizes that double. `work` is what it must look at: turns of a conversation, tokens of rows. The
exponent is that of the last doubling: 1 is linear. `append` and `strip` are one call at the end of a conversation of so
many turns, K = 4, recorded and rendered: the tokenizer is SmolLM2's, the template keeps earlier thoughts or strips
them, and a sampler answers at once. `candidates` is one call with so many candidates. The others are of rows for the
learner, in conversations of 16 turns. Times are CPU, the fastest of some repeats. The last line is JSON; the status
is 1 where an exponent is above the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer

from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.folder.folder import locate_model
from cotune.integrations.models.folder.kinds import end_ids
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode, Nowhere
from cotune.records.plans import Plan
from cotune.records.structs import PolicyRef, Task
from cotune.sampling.protocol import Completion
from cotune.sampling.responder import PolicyResponder
from cotune.trainer.learner.batching import micro_batches, mini_batches, tokens_of
from cotune.trainer.learner.token_tree import token_tree
from examples.word_problems.demo import pretrained

APPEND = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIP = APPEND.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}")
REPLY = "<think>\nThe question asks for a number, so I add both.\n</think>\n\nThe sum of {} and {} is {}."
TURNS = 16
"""Of the conversations of the learner's rows."""


class AtOnce:
    """A sampler that answers with what it was given, at once."""

    def __init__(self, replies: Sequence[tuple[int, ...]]) -> None:
        self.replies = replies
        self.calls = 0

    async def sample(self, prompt: Sequence[int], n: int, params: Any, policy: PolicyRef) -> list[Completion]:
        self.calls += 1
        drawn = [self.replies[(self.calls * n + i) % len(self.replies)] for i in range(n)]
        return [Completion(ids, (-1.0,) * len(ids), "stop") for ids in drawn]


def seconds(do: Callable[[], object], repeats: int) -> float:
    """The least CPU that it takes."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        do()
        found.append(time.process_time() - began)
    return min(found)


class Conversations:
    """Calls of one role that says all it said before, with SmolLM2's tokenizer."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(locate_model(pretrained())))
        self.ends = end_ids(None, None, self.tokenizer.eos_token_id)
        self.replies = []
        for i in range(40):
            text = REPLY.format(i, i + 3, 2 * i + 3)
            self.replies.append((*self.tokenizer.encode(text, add_special_tokens=False), *self.ends[:1]))

    def run(self, template: str, turns: int, k: int, last: int) -> float:
        """CPU seconds of one of the `last` calls of a conversation."""
        self.tokenizer.chat_template = template
        chat = ChatTemplate(self.tokenizer, self.ends)
        sampler = AtOnce(self.replies)
        scorers = {"a": _one}
        responder = PolicyResponder(
            sampler, chat, {"a": PolicyRef("a")}, plan=Plan(k=k), scorers=scorers, max_model_len=1 << 20
        )
        episode = LiveEpisode(Nowhere(), Task(id="t", input={}), workflow="w", responder=responder)
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You add numbers. " * 10}]

        async def converse() -> float:
            spent = []
            for turn in range(turns):
                messages.append({"role": "user", "content": f"Number {turn}: what is {turn} plus {turn + 3}? Think."})
                began = time.process_time()
                call = episode.start(CallerContext("a", "benchmark"), {"messages": list(messages), "model": "m"})
                answer = await responder.respond(call)
                call.finish(answer)
                spent.append(time.process_time() - began)
                messages.append(answer.candidates[answer.chosen].message)
            return min(spent[-last:])

        return asyncio.run(converse())


def _one(candidate: Any, call: Any, task: Any) -> float:
    return float(len(candidate.text) % 7)


def rows_of(count: int) -> list[TrainRow]:
    """Rows of conversations of 16 turns with four candidates each."""
    chance = random.Random(0)
    rows: list[TrainRow] = []

    def ids(length: int) -> tuple[int, ...]:
        return tuple(chance.randrange(1000) for _ in range(length))

    while len(rows) < count:
        prompt = ids(40)
        for turn in range(TURNS):
            replies = [ids(12) for _ in range(4)]
            for i, reply in enumerate(replies):
                rows.append(
                    TrainRow(
                        id=f"{len(rows)}", role="a", prompt_ids=prompt, response_ids=reply, logprobs=(-1.0,) * 12,
                        advantage=float(i - 1.5),
                    )
                )  # fmt: skip
            prompt = (*prompt, *replies[turn % 4], *ids(10))
    return rows[:count]


@dataclass(frozen=True)
class Phase:
    """What is tried: `measure` gives work and seconds of a size, in units of `unit`."""

    unit: str
    sizes: Sequence[int]
    measure: Callable[[int], tuple[float, float]]


def phases(repeats: int) -> dict[str, Phase]:
    talk = Conversations()
    made: dict[int, list[TrainRow]] = {}

    def rows(count: int) -> list[TrainRow]:
        if count not in made:
            made[count] = rows_of(count)
        return made[count]

    def of_rows(do: Callable[[list[TrainRow]], object]) -> Callable[[int], tuple[float, float]]:
        def measure(count: int) -> tuple[float, float]:
            some = rows(count)
            return sum(len(tokens_of(row)) for row in some), seconds(lambda: do(some), min(repeats, 3))

        return measure

    turns, many = (12, 24, 48, 96), (1024, 4096, 8192, 16384)
    every = torch.Generator().manual_seed(0)
    return {
        "append": Phase("turns", turns, lambda n: (n, talk.run(APPEND, n, 4, repeats))),
        "strip": Phase("turns", turns, lambda n: (n, talk.run(STRIP, n, 4, repeats))),
        "candidates": Phase("K", (4, 8, 16, 32), lambda k: (k, talk.run(APPEND, 8, k, repeats))),
        "token_tree": Phase("rows", many, of_rows(lambda some: token_tree([tokens_of(row) for row in some]))),
        "mini_batches": Phase("rows", many, of_rows(lambda some: mini_batches(some, 64, every))),
        "micro_batches": Phase("rows", many, of_rows(lambda some: micro_batches(some, range(len(some)), 2048, True))),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", default="")
    parser.add_argument("--limit", type=float, default=1.2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    print(f"{'phase':14} {'size':>14} {'work':>12} {'CPU, ms':>10} {'exponent':>9}")
    every = phases(args.repeats)
    asked = args.phases.split(",") if args.phases else list(every)
    if unknown := [name for name in asked if name not in every]:
        parser.error(f"--phases {unknown[0]} is none of {', '.join(every)}")
    for name in asked:
        phase = every[name]
        earlier: tuple[float, float] | None = None
        exponent = math.nan
        for size in phase.sizes:
            work, spent = phase.measure(size)
            if earlier is not None:
                exponent = math.log(spent / earlier[1]) / math.log(work / earlier[0])
            print(f"{name:14} {size:8} {phase.unit:5} {work:12,.0f} {1000 * spent:10.2f} {exponent:9.2f}", flush=True)
            earlier = work, spent
        found[name] = {"ms": round(1000 * spent, 2), "exponent": round(exponent, 2)}
    print(json.dumps(found))
    return int(any(one["exponent"] > args.limit for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
