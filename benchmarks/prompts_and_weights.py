"""Prompts, weights, or both? In either order, on a small model that obeys its prompt, two roles.

    python -m benchmarks.prompts_and_weights                          # 3 seeds
    python -m benchmarks.prompts_and_weights --seeds 0 --steps 2 --fresh 50

The picker reads a list of colours and names one of them; the namer says a word for it. Right is the third colour, and
the fruit of this colour. The application's prompts do not say so. The base model is a Qwen3 of 0.3M parameters that was
warmed up to obey: told "Name the third one." it does so in two of three cases, told nothing of the kind it guesses.

A script writes new texts in place of a reflection model. It knows nothing of the task: it draws one of seven
instructions for either role. So this shows the gain of prompts and weights together on a model that obeys, and in which
order. It does not show the value of a reflection model, nor how well a large model obeys.

`p` is `cotune prompts improve` and `w` is `cotune train --prompts`, called as functions. Each seed has a base model of
its own. `p` alone is the first half of "p, w", and `w` alone the first half of "w, p". Prompts are used if the held-out
tasks show that they are better. The figures are of fresh tasks, single samples at temperature 1. Results are added to
OUT/results.jsonl and not computed again; runs are resumed. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENAI_API_KEY", "none")

import argparse
import asyncio
import itertools
import json
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.table import Table

import cotune
from benchmarks.kept_results import KeptResults, over_seeds, run_parser, success_cells
from cotune.config.rollouts import SamplingConfig
from cotune.config.train import EvaluationConfig
from cotune.episodes.workflows import workflow_of
from cotune.prompts.edits import Prompts
from cotune.prompts.file import read_prompts
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Task, Usage
from cotune.records.tasks import as_tasks
from cotune.storage.open_store import open_store
from cotune.storage.run_layout import is_run
from cotune.trainer.prompts.evaluations import HELD_OUT, Evaluations, answering_in_search
from cotune.trainer.prompts.improve import improve
from cotune.trainer.prompts.options import ImproveOptions, PromptRun
from cotune.trainer.prompts.spending import Spending
from examples.tiny_model import Demonstration, base_builder

COLOURS = ("red", "blue", "green", "pink", "white", "black", "brown", "gold")
ORDINALS = ("first", "second", "third", "fourth")
KINDS = {
    "fruit": ("cherry", "plum", "pear", "peach", "coconut", "fig", "date", "lemon"),
    "animal": ("fox", "whale", "frog", "pig", "swan", "crow", "bear", "bee"),
    "metal": ("copper", "cobalt", "nickel", "tin", "zinc", "iron", "bronze", "brass"),
}
PICKER = "You read lists with great care. Please answer as well as you can."
NAMER = "You know many words. Please answer as well as you can."
PICKS = tuple(f"Name the {ordinal} one." for ordinal in ORDINALS)
NAMES = tuple(f"Say the {kind}." for kind in KINDS)
MANNERS = ("Be brief.", "Take your time.", "Think of the reader.", "Use one word.")
OBEYS = 0.65
"""Share of demonstrations that follow the prompt; the others do not."""
client = openai.AsyncOpenAI(base_url="http://localhost/v1")
console = Console(stderr=True)


def make_tasks(seed: int) -> list[dict[str, Any]]:
    """All lists of four colours, in an order of the seed."""
    lists = [" ".join(some) for some in itertools.permutations(COLOURS, 4)]
    random.Random(f"lists {seed}").shuffle(lists)
    return [{"id": f"list-{n}", "list": some} for n, some in enumerate(lists)]


def fruit(colour: str) -> str:
    return KINDS["fruit"][COLOURS.index(colour)] if colour in COLOURS else ""


async def ask(role: str, system: str, text: str) -> str:
    with cotune.role(role):
        messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        reply = await client.chat.completions.create(model="m", messages=messages, max_tokens=3)
    return reply.choices[0].message.content or ""


@cotune.workflow
async def words(task: Any) -> float:
    colour = await ask("picker", PICKER, task["list"])
    return float(await ask("namer", NAMER, colour) == fruit(task["list"].split()[2]))


@words.scorer("picker")
def picks_the_third(candidate: Any, call: Any, task: Any) -> float:
    return float(candidate.text == task["list"].split()[2])


@words.scorer("namer")
def says_its_fruit(candidate: Any, call: Any, task: Any) -> float:
    return float(candidate.text == fruit(call.messages[-1]["content"]))


def _system(chance: random.Random, told: str, usual: str) -> str:
    """A prompt with an instruction, or without one: the application's own, or manners alone."""
    manners = chance.sample(MANNERS, chance.randrange(3))
    if not told:
        return usual if chance.random() < 0.5 else " ".join(manners or MANNERS[:1])
    parts = [*manners, told] if chance.random() < 0.5 else [told, *manners]
    return " ".join([usual, *parts] if chance.random() < 0.3 else parts)


def _demonstration(chance: random.Random) -> Demonstration:
    has_instruction = chance.random() < 0.7
    if chance.random() < 0.5:
        colours, place = chance.sample(COLOURS, 4), chance.randrange(4)
        system = _system(chance, PICKS[place] if has_instruction else "", PICKER)
        text, answer = " ".join(colours), colours[place] if chance.random() < OBEYS else chance.choice(colours)
    else:
        text, kind = chance.choice(COLOURS), chance.choice(list(KINDS))
        system = _system(chance, f"Say the {kind}." if has_instruction else "", NAMER)
        kind = kind if chance.random() < OBEYS else chance.choice(list(KINDS))
        answer = KINDS[kind][COLOURS.index(text)]
    return [{"role": "system", "content": system}, {"role": "user", "content": text}], answer


def _vocabulary() -> list[str]:
    texts = (PICKER, NAMER, *PICKS, *NAMES, *MANNERS, *COLOURS, *(word for kind in KINDS.values() for word in kind))
    return [*dict.fromkeys(word for text in texts for word in text.split()), "system", "user", "assistant"]


build = base_builder(
    _vocabulary,
    lambda chance, seed, count: [_demonstration(chance) for _ in range(count)],
    name="words",
    steps=500,
    count=12000,
)


class Script:
    """Answers in place of a reflection model: any instruction, for any role."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    async def respond(self, call: LiveCall) -> Answer:
        parts = [self.chance.choice((*PICKS, *NAMES)), *self.chance.sample(MANNERS, self.chance.randrange(2))]
        text = f"<new-text>\n{' '.join(parts)}\n</new-text>"
        candidate = Candidate(index=0, text=text, message={"role": "assistant", "content": text}, finish_reason="stop")
        return Answer(candidates=(candidate,), usage=Usage(prompt_tokens=1, completion_tokens=1))


def settings(model: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Settings of a training."""
    return {
        "model": str(model),
        "steps": options.steps,
        "tasks_per_step": 16,
        "seed": seed,
        "plan": {"kind": "tree", "k": 8},
        "lora": {"rank": 16},
        "learner": {"lr": options.lr, "betas": [0.9, 0.95]},
        "sampling": {"max_tokens": 3},
        "evaluation": {"tasks": "none"},
        "checkpoint_every": 100,
    }


def result(order: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Success before the first step of an order ("p, w" or "w, p") and after each step."""
    folder = options.out / f"seed{seed}"
    model, held_out = folder / "base", folder / "held_out.jsonl"
    listed = make_tasks(seed)
    tasks, fresh = listed[: options.tasks], as_tasks(listed[-options.fresh :])
    if not (model / "tokenizer_config.json").is_file():
        console.print(f"seed {seed}: warming up a base model")
        build(model, seed=seed)
    held_out_tasks = listed[options.tasks :][: options.held_out]
    held_out.write_text("".join(json.dumps(task) + "\n" for task in held_out_tasks))

    prompts: Prompts | None = None
    prompts_dir, weights, held = "", "", None
    reached = {"base": _reached(model, None, "", fresh)}
    for number, letter in enumerate(order.split(", "), 1):
        out = folder / order.replace(", ", "-") / f"{number}-{letter}"
        step_seed = seed + number - 1
        if letter == "p":
            search = ImproveOptions(
                model=None if weights else str(model),
                run=weights or None,
                evaluation=EvaluationConfig(tasks=str(held_out)),
                max_calls=options.calls,
                rounds=options.rounds,
                seed=step_seed,
                minibatch=8,
                blame="off",
                sampling=SamplingConfig(max_tokens=3),
            )
            begun = PromptRun(out).described.is_file()
            report = improve(words, tasks, search, out=out, resume=begun, reflector=Script(seed))
            held = report.held_out and report.held_out.to_json()
            if report.verdict == "better":
                prompts, prompts_dir = read_prompts(out), str(out)
        else:
            _train(tasks, out, {**settings(model, step_seed, options), "prompts_file": prompts_dir})
            weights = str(out)
        reached[letter if number == 1 else "both"] = _reached(model, prompts, weights, fresh)
    texts = {} if prompts is None else {part.name: "".join(part.now.texts) for part in prompts.parts if part.edited}
    return {"reached": reached, "held_out": held, "texts": texts}


def _train(tasks: list[dict[str, Any]], out: Path, table: dict[str, Any]) -> None:
    """Train in the folder `out`, or continue the run that is there."""
    if is_run(out):
        summary = cotune.resume(out, workflow=words, tasks=tasks)
    else:
        summary = cotune.train(words, tasks, table, out=out)
    if not summary.finished:
        raise SystemExit(f"{out}: stopped. Run the same command to continue.")


def _reached(model: Path, prompts: Prompts | None, weights: str, tasks: Sequence[Task]) -> int:
    """Tasks that are solved with these prompts by these weights."""
    chosen = ImproveOptions(
        run=weights or None,
        model=None if weights else str(model),
        sampling=SamplingConfig(max_tokens=3),
        concurrency=64,
    )
    return sum(asyncio.run(_played(prompts or Prompts(parts=()), chosen, tasks)))


async def _played(prompts: Prompts, chosen: ImproveOptions, tasks: Sequence[Task]) -> list[int]:
    flow = workflow_of(words)
    # Recorded runs are not repeated, and records distinguish runs by their prompts, not by their weights.
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "records.db") as store:
        async with answering_in_search(flow, chosen, console.print) as responder:
            evaluations = Evaluations(flow, store, responder, chosen, Spending(1 << 60, None, {}))
            return [int(one.outcome or 0) for one in await evaluations.run(prompts, tasks, phase=HELD_OUT)]


ROWS = {
    ("p, w", "base"): "untrained, prompts of the application",
    ("p, w", "p"): "prompts alone (p)",
    ("w, p", "w"): "weights alone (w)",
    ("p, w", "both"): "p, then w",
    ("w, p", "both"): "w, then p",
}


def main() -> None:
    """Do the runs that are not recorded yet, and print all results."""
    parser = run_parser(__doc__, "runs/prompts_and_weights")
    parser.add_argument("--steps", type=int, default=10, help="of each training (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="(default: %(default)s)")
    parser.add_argument("--calls", type=int, default=4000, help="of models, in each search (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=60, help="of each search (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=160, help="to train and to search on (default: %(default)s)")
    parser.add_argument(
        "--held-out", type=int, default=150, help="tasks that decide on the prompts (default: %(default)s)"
    )
    parser.add_argument("--fresh", type=int, default=300, help="tasks of the figures (default: %(default)s)")
    options = parser.parse_args()
    results = KeptResults(options, "steps", "lr", "calls", "rounds", "tasks", "held_out", "fresh")
    for seed in map(int, options.seeds.split(",")):
        for order in ("p, w", "w, p"):
            if line := results.once(partial(result, order, seed, options), strategy=order, seed=seed):
                console.print(f"seed {seed}: {order}: {line['reached']} of {options.fresh}")
    table = Table(title="Two roles, Qwen3 of 0.3M parameters: share of fresh tasks solved, temperature 1")
    for title in ("", "success", "by seed"):
        table.add_column(title)
    rows = {}
    for (order, name), title in ROWS.items():
        lines = results.lines(strategy=order)
        if lines:
            rows[title] = over_seeds(lines, options.fresh, name)
            table.add_row(title, *success_cells(rows[title]))
    Console(width=120).print(table)
    print(json.dumps({"settings": results.settings, "rows": rows}))


if __name__ == "__main__":
    main()
