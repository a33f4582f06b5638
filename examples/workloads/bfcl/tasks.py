"""Requests of the Berkeley Function Calling Leaderboard with the calls that do them (package bfcl-eval).

python -m examples.workloads.bfcl.tasks turns > tasks.jsonl
python -m examples.workloads.bfcl.tasks turns --held-out > held_out.jsonl
python -m examples.workloads.bfcl.tasks whole --held-out > whole.jsonl
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import json
import random
from pathlib import Path
from typing import Any, Literal, TypedDict

from examples.workloads.bfcl.desk import Desk

TOOLS = {"GorillaFileSystem", "TradingBot", "TicketAPI", "MathAPI", "MessageAPI", "TwitterAPI"}
"""Objects of the tasks that are taken: files, trading, tickets, and what those tasks use beside them."""
HELD_OUT = 30
"""Tasks that are not trained on, whole or in parts."""
NAME = "BFCL_v4_multi_turn_base.json"
Kind = Literal["turns", "whole"]


class Request(TypedDict):
    """A task: objects and how they are at first, calls that were made before, requests, and the calls that do each."""

    id: str
    classes: list[str]
    without: list[str]
    config: dict[str, Any]
    earlier: list[str]
    requests: list[str]
    truth: list[list[str]]


def make_tasks(kind: Kind, *, held_out: bool = False) -> list[Request]:
    """Whole conversations, or each of their turns as a task that begins after the right calls of those before."""
    found = importlib.util.find_spec("bfcl_eval")
    if found is None or found.origin is None:
        raise SystemExit("the tasks are not installed: pip install --no-deps bfcl-eval==2026.3.23")
    data = Path(found.origin).parent / "data"
    truths = {entry["id"]: entry["ground_truth"] for entry in _read(data / "possible_answer" / NAME)}
    entries = [entry for entry in _read(data / NAME) if set(entry["involved_classes"]) <= TOOLS]
    random.Random(0).shuffle(entries)
    chosen = entries[:HELD_OUT] if held_out else entries[HELD_OUT:]
    wholes = [_whole(entry, truths[entry["id"]]) for entry in chosen]
    return wholes if kind == "whole" else [part for whole in wholes for part in _turns(whole)]


def open_desk(task: Request) -> Desk:
    """The objects of a task as its first request finds them."""
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING, STATELESS_CLASSES

    objects = []
    for name in task["classes"]:
        made = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)()
        if name not in STATELESS_CLASSES:
            made._load_scenario(copy.deepcopy(task["config"].get(name, {})))
        objects.append(made)
    desk = Desk(objects, task["without"])
    for call in task["earlier"]:
        desk.execute(call)
    return desk


def _whole(entry: dict[str, Any], truth: list[list[str]]) -> Request:
    return {
        "id": entry["id"],
        "classes": entry["involved_classes"],
        "without": entry.get("excluded_function", []),
        "config": entry["initial_config"],
        "earlier": [],
        "requests": [" ".join(message["content"].split()) for turn in entry["question"] for message in turn],
        "truth": truth,
    }


def _turns(whole: Request) -> list[Request]:
    return [
        {
            **whole,
            "id": f"{whole['id']}.{turn}",
            "earlier": [call for calls in whole["truth"][:turn] for call in calls],
            "requests": [whole["requests"][turn]],
            "truth": [whole["truth"][turn]],
        }
        for turn in range(len(whole["truth"]))
        if whole["truth"][turn]
    ]


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    """Print tasks, one line of JSON each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("kind", choices=("turns", "whole"))
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    for task in make_tasks(options.kind, held_out=options.held_out):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
