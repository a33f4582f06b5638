"""Builds the base model and the tasks of the tutorials: a support desk that sends a ticket to a team and answers it.

Pretrained weights would do as well; this takes some seconds and needs no download. The model knows the format and errs
often: it sends about half of the tickets to the right team, and greets in the right language about half of the time.

    python -m examples.support_desk.base --out base
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from examples.tiny_model import Demonstration, build_base

TOPICS = {
    "billing": ["invoice", "payment", "refund", "price", "receipt"],
    "shipping": ["parcel", "courier", "address", "delayed", "tracking"],
    "repairs": ["broken", "screen", "battery", "noise", "button"],
}
"""Words of a ticket that tell which team it is for."""
GREETINGS = {"english": "hello", "italian": "ciao", "german": "hallo"}
FILLERS = ["my", "the", "with", "problem", "again", "please", "still", "about"]
PROMPTS = {"triage": "which team", "writer": "greet and name the team"}
"""The prompt of each role."""
ERRING = 0.5
DEMONSTRATIONS, STEPS = 3000, 120


def ticket(rng: random.Random, number: int) -> dict[str, str]:
    """A task: a customer's ticket, its language, and the right team."""
    team = rng.choice(list(TOPICS))
    words = [*rng.sample(FILLERS, 3), rng.choice(TOPICS[team])]
    rng.shuffle(words)
    language = rng.choice(list(GREETINGS))
    return {"id": f"t{number}", "ticket": " ".join(words), "language": language, "team": team}


def demonstration(rng: random.Random, role: str) -> Demonstration:
    """A request to a role, and an answer that is often wrong."""
    task = ticket(rng, 0)
    greeting = GREETINGS[task["language"]]
    if rng.random() < ERRING:
        greeting = rng.choice(list(GREETINGS.values()))
    team = rng.choice(list(TOPICS)) if rng.random() < ERRING else task["team"]
    request = task["ticket"] if role == "triage" else f"{task['language']} {team}"
    messages = [{"role": "system", "content": PROMPTS[role]}, {"role": "user", "content": request}]
    return messages, team if role == "triage" else f"{greeting} {team}"


def write_tasks(path: Path, count: int, seed: int) -> None:
    """A tasks file: one ticket a line."""
    rng = random.Random(seed)
    path.write_text("".join(json.dumps(ticket(rng, number)) + "\n" for number in range(count)))


def build(folder: Path, *, steps: int = STEPS) -> None:
    """Build, warm up and save the base model in a folder."""
    rng = random.Random(0)
    shown = [demonstration(rng, role) for _ in range(DEMONSTRATIONS // 2) for role in PROMPTS]
    texts = [text for messages, answer in shown for text in (*(m["content"] for m in messages), answer)]
    words = ["system", "user", "assistant", *sorted({word for text in texts for word in text.split()})]
    build_base(folder, words, shown, rng, seed=0, steps=steps)


def main() -> None:
    """Build the model in the folder `--out`, and write tasks.jsonl and held_out.jsonl next to it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    build(options.out)
    write_tasks(options.out.parent / "tasks.jsonl", 400, seed=1)
    write_tasks(options.out.parent / "held_out.jsonl", 100, seed=2)
    print(f"wrote a model to {options.out}, and tasks.jsonl and held_out.jsonl beside it")


if __name__ == "__main__":
    main()
