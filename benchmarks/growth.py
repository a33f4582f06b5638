"""How the orchestrator's own CPU grows with the size of the work: calls of a long conversation, and a step's batches.

    python -m benchmarks.growth [--phases append,strip,...] [--limit 1.2] [--repeats 5]

Each phase is tried at sizes that double. `work` is the size of its input: turns of a conversation, tokens of rows. The
exponent is for the last two doublings: 1 is linear. `append` and `strip` are one call at the end of a conversation
of so many turns, K = 4, recorded and rendered: the tokenizer is SmolLM2's, the template keeps earlier thoughts or
strips them, and a sampler answers at once. `candidates` is one call with so many candidates, `roles` an episode of four
calls of each of so many roles, `concurrency` so many such episodes of one role at once. `store` reads the calls of a
middle step, of 48 episodes, from a store with so many. The others are of rows for the learner, in conversations of 16
turns. Times are CPU, the fastest of some rounds; each round tries every size. The machine's speed is measured
before and after each, and times are at the mean speed. The last line is JSON; the status is 1 if an exponent
is above the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.stored import fill
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
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.learner.batching import micro_batches, mini_batches, tokens_of
from cotune.trainer.learner.token_tree import attention_blocks, token_tree
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
EPISODES = 48
"""Of a step in a store."""


class AtOnce:
    """A sampler that returns its input at once."""

    def __init__(self, replies: Sequence[tuple[int, ...]]) -> None:
        self.replies = replies
        self.calls = 0

    async def sample(self, prompt: Sequence[int], n: int, params: Any, policy: PolicyRef) -> list[Completion]:
        self.calls += 1
        drawn = [self.replies[(self.calls * n + i) % len(self.replies)] for i in range(n)]
        return [Completion(ids, (-1.0,) * len(ids), "stop") for ids in drawn]


def slowness() -> float:
    """CPU seconds of work that is always the same."""
    began, total = time.process_time(), 0
    for number in range(500_000):
        total += number * number
    return time.process_time() - began


def seconds(do: Callable[[], object]) -> float:
    """The CPU that it takes."""
    began = time.process_time()
    do()
    return time.process_time() - began


class Conversations:
    """Calls of one role that says all it said before, with SmolLM2's tokenizer."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(locate_model(pretrained())))
        self.ends = end_ids(None, None, self.tokenizer.eos_token_id)
        self.replies = []
        for i in range(40):
            text = REPLY.format(i, i + 3, 2 * i + 3)
            self.replies.append((*self.tokenizer.encode(text, add_special_tokens=False), *self.ends[:1]))

    def _responder(self, template: str, k: int, roles: Sequence[str]) -> PolicyResponder:
        self.tokenizer.chat_template = template
        return PolicyResponder(
            AtOnce(self.replies),
            ChatTemplate(self.tokenizer, self.ends),
            {role: PolicyRef(role) for role in roles},
            plan=Plan(k=k),
            scorers=dict.fromkeys(roles, _one),
            max_model_len=1 << 20,
        )

    async def _converse(self, responder: PolicyResponder, turns: int, roles: Sequence[str]) -> list[float]:
        """CPU seconds of each call; roles take turns, each in a conversation of its own."""
        episode = LiveEpisode(Nowhere(), Task(id="t", input={}), workflow="w", responder=responder)
        start = {"role": "system", "content": "You add numbers. " * 10}
        conversations: dict[str, list[dict[str, Any]]] = {role: [start] for role in roles}
        spent = []
        for turn in range(turns):
            for role, messages in conversations.items():
                messages.append({"role": "user", "content": f"Number {turn}: what is {turn} plus {turn + 3}? Think."})
                began = time.process_time()
                call = episode.start(CallerContext(role, "benchmark"), {"messages": list(messages), "model": "m"})
                answer = await responder.respond(call)
                assert answer is not None
                call.finish(answer)
                spent.append(time.process_time() - began)
                messages.append(answer.candidates[answer.chosen].message)
        return spent

    def run(self, template: str, turns: int, k: int) -> float:
        """CPU seconds of one of the last calls of a conversation."""
        return min(asyncio.run(self._converse(self._responder(template, k, "a"), turns, "a"))[-5:])

    def team(self, count: int) -> float:
        """CPU seconds of all calls of an episode with so many roles."""
        roles = [f"role{i}" for i in range(count)]
        return sum(asyncio.run(self._converse(self._responder(APPEND, 4, roles), 4, roles)))

    def at_once(self, count: int) -> float:
        """CPU seconds of so many episodes at once."""
        responder = self._responder(APPEND, 4, "a")

        async def all_of_them() -> None:
            await asyncio.gather(*(self._converse(responder, 4, "a") for _ in range(count)))

        return seconds(lambda: asyncio.run(all_of_them()))


def read_step(folder: Path, calls: int) -> float:
    """CPU seconds to read one step's calls from a store with so many, which is created if it does not exist."""
    file = folder / f"{calls}.db"
    with SqliteStore.open(file) as store:
        if not store.figures().counts()[1]:
            fill(store, calls, lambda _: None, lambda number: number // EPISODES)
            store.flush()
        step = calls // 3 // EPISODES // 2
        return seconds(
            lambda: [list(store.calls(episode.id)) for episode in store.episodes(EpisodeFilters(training_step=step))]
        )


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
    """A phase to measure: `measure` gives work and seconds of a size, in units of `unit`."""

    unit: str
    sizes: Sequence[int]
    measure: Callable[[int], tuple[float, float]]


def phases(stores: Path) -> dict[str, Phase]:
    """`stores`: a folder for the stores of the phase `store`."""
    talk = Conversations()
    rows_by_count: dict[int, list[TrainRow]] = {}

    def rows(count: int) -> list[TrainRow]:
        if count not in rows_by_count:
            rows_by_count[count] = rows_of(count)
            gc.freeze()  # objects from before a phase are not searched for garbage within it
        return rows_by_count[count]

    def of_rows(do: Callable[[list[TrainRow]], object]) -> Callable[[int], tuple[float, float]]:
        def measure(count: int) -> tuple[float, float]:
            some = rows(count)
            return sum(len(tokens_of(row)) for row in some), seconds(lambda: do(some))

        return measure

    turns, many = (2, 4, 8, 16, 32, 64, 96, 128), (1024, 8192, 32768, 65536, 131072)
    every = torch.Generator().manual_seed(0)
    return {
        "append": Phase("turns", turns, lambda n: (n, talk.run(APPEND, n, 4))),
        "strip": Phase("turns", turns, lambda n: (n, talk.run(STRIP, n, 4))),
        "candidates": Phase("K", (2, 4, 8, 16, 32), lambda k: (k, talk.run(APPEND, 8, k))),
        "roles": Phase("roles", (2, 4, 8, 16, 32), lambda n: (n, talk.team(n))),
        "concurrency": Phase("episodes", (8, 16, 32, 64, 128, 256, 512), lambda n: (n, talk.at_once(n))),
        "store": Phase("calls", (10_000, 100_000, 1_000_000), lambda n: (n, read_step(stores, n))),
        "token_tree": Phase("rows", many, of_rows(lambda some: token_tree([tokens_of(row) for row in some]))),
        "blocks": Phase("tokens", (4096, 8192, 16384, 32768), blocks_of_one_row),
        "mini_batches": Phase("rows", many, of_rows(lambda some: mini_batches(some, 64, every))),
        "micro_batches": Phase("rows", many, of_rows(lambda some: micro_batches(some, range(len(some)), 2048, True))),
    }


def blocks_of_one_row(tokens: int) -> tuple[float, float]:
    """The blocks in which a single row of so many tokens attends."""
    tree = token_tree([range(tokens)])
    return tokens, seconds(lambda: attention_blocks(tree))


def fastest(phase: Phase, rounds: int) -> list[tuple[float, float]]:
    """Work and the least seconds of each size, as if the machine had been equally fast all the time."""
    measured: list[list[tuple[float, float, float]]] = [[] for _ in phase.sizes]
    for _ in range(rounds):
        for size, of_size in zip(phase.sizes, measured, strict=True):
            before = slowness()
            work, spent = phase.measure(size)
            of_size.append((work, spent, (before + slowness()) / 2))
    mean = statistics.mean(slow for of_size in measured for _, _, slow in of_size)
    return [(of_size[0][0], min(spent / slow for _, spent, slow in of_size) * mean) for of_size in measured]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", default="")
    parser.add_argument("--limit", type=float, default=1.2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    print(f"{'phase':14} {'size':>17} {'work':>12} {'CPU, ms':>10} {'exponent':>9}")
    stack = contextlib.ExitStack()
    every = phases(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    chosen = args.phases.split(",") if args.phases else list(every)
    if unknown := [name for name in chosen if name not in every]:
        parser.error(f"--phases {unknown[0]} is none of {', '.join(every)}")
    for name in chosen:
        phase = every[name]
        points: list[tuple[float, float]] = []
        exponent, sizes = math.nan, dict[str, float]()
        for size, (work, spent) in zip(phase.sizes, fastest(phase, args.repeats), strict=True):
            points.append((work, spent))
            if len(points) > 2:
                (less, before), (more, after) = points[-3], points[-1]
                exponent = math.log(after / before) / math.log(more / less)
            print(f"{name:14} {size:8} {phase.unit:8} {work:12,.0f} {1000 * spent:10.2f} {exponent:9.2f}", flush=True)
            sizes[str(size)] = round(1000 * spent, 2)
        figures[name] = {"ms": sizes, "exponent": round(exponent, 2)}
    stack.close()
    print(json.dumps(figures))
    return int(any(figure["exponent"] > args.limit for figure in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
