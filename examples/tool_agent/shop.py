"""The shop: its price list, its two tools, and questions with their answers.

python -m examples.tool_agent.shop --tasks 512 --seed 0 > tasks.jsonl
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

PRICES = Path(__file__).parent / "prices.jsonl"
SYSTEM = "Search the price, then calculate."
_QUESTION = re.compile(r"How much for (\d+) x (\w+)\?")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class Question(TypedDict):
    """A task: a customer's question, and the right answer."""

    id: str
    question: str
    answer: str


def load_prices() -> dict[str, int]:
    """Price by item."""
    rows = (json.loads(line) for line in PRICES.read_text().splitlines())
    return {row["item"]: row["price"] for row in rows}


PRICE_OF = load_prices()


def find(query: str) -> str:
    """Return the entry of an item in the price list."""
    price = PRICE_OF.get(query.strip().lower())
    return "nothing found" if price is None else f"{query.strip().lower()} costs {price}"


def calculate(expression: str) -> str:
    """The value of a sum of whole numbers."""
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "nothing found"


def question(count: int, item: str) -> str:
    """Return a customer's question."""
    return f"How much for {count} x {item}?"


def asked_for(text: str) -> tuple[int, str]:
    """Count and item of a question."""
    match = _QUESTION.fullmatch(text)
    if match is None:
        raise ValueError(f"not a question of the shop: {text!r}")
    return int(match[1]), match[2]


def make_tasks(count: int, seed: int) -> Iterator[Question]:
    """Questions with their answers; the same for the same seed."""
    rng = random.Random(f"shop {seed}")
    for number in range(count):
        item, many = rng.choice(sorted(PRICE_OF)), rng.randint(2, 9)
        yield {"id": f"{seed}-{number}", "question": question(many, item), "answer": str(many * PRICE_OF[item])}


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**6:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not a sum of whole numbers")


def main() -> None:
    """Print tasks as JSON lines."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for task in make_tasks(options.tasks, options.seed):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
