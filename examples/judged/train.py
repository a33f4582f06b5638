"""The name maker as a cotune workflow without any reward: a judge compares the names of one request.

cotune train examples/judged/train.py:solve --model BASE --tasks FILE
"""

from __future__ import annotations

import os
from typing import TypedDict

import cotune
from examples.judged.app import name_for

RUBRIC = "Prefer the name that is easier to say."


class Product(TypedDict):
    product: str


@cotune.workflow
async def solve(task: Product) -> None:
    """Invent one name."""
    with cotune.role("namer"):
        await name_for(task["product"])


judge = cotune.Judge(
    model="judge",
    rubric=RUBRIC,
    base_url=os.environ.get("JUDGE_URL"),
    api_key="none",
    price=(0.15, 0.60),
    max_cost=1.0,
)
solve.scorer("namer", group=True)(judge)
