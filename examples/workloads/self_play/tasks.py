"""Games by seed: items to divide, questions to debate, tic-tac-toe, matrix games.

python -m examples.workloads.self_play.tasks --tasks 512 --seed 0 --game debate > tasks.jsonl
python -m examples.workloads.self_play.tasks --tasks 300 --seed 1 --game debate > held_out.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

from examples.workloads.self_play import duel, negotiation, noughts

ITEMS = ("book", "hat", "ball", "pen", "lamp", "cup")
MANY = (5, 7)
"""Fewest and most items to divide."""
NAMES = ("Ada", "Bram", "Cleo", "Dora", "Emil", "Finn", "Gwen", "Hugo", "Iris", "Jack")
COMPARED = ("taller", "older", "faster", "richer")
CHAIN = 5
"""Names in a text."""

Made = dict[str, Any]


def make_tasks(
    count: int, seed: int = 0, *, game: str | None = None, told: bool = True, chance: bool = False
) -> Iterator[Made]:
    """`count` games with ids, the same for the same seed; other seeds give others. Without `game` each in its turn.
    `told`: the rules, where the task tells them. `chance`: of tic-tac-toe, a seat is left to chance, o and x in turn.

    Raises ValueError for a game that there is not.
    """
    if game is not None and game not in MAKERS:
        raise ValueError(f"there is no game {game!r}: there are {', '.join(MAKERS)}")
    rng, names = random.Random(f"self-play {seed} {game}"), [game] if game else list(MAKERS)
    for number in range(count):
        name = names[number % len(names)]
        made = {"id": f"{name}-{seed}-{number}", "game": name, **MAKERS[name](rng)}
        if not told:
            made.pop("rules", None)
        if chance and name == "noughts":
            made["random"] = noughts.SEATS[(number + 1) % 2]
        yield made


def negotiated(rng: random.Random) -> Made:
    """Three kinds of items, all together worth 10 to each; each kind is worth something to one of the two, and one to
    both (as in Lewis et al., 2017, arXiv 1706.05125); the two do not value all alike."""
    while True:
        items = {item: rng.randint(1, 4) for item in rng.sample(ITEMS, 3)}
        if not MANY[0] <= sum(items.values()) <= MANY[1]:
            continue
        ranges = [range(negotiation.TOTAL // count + 1) for count in items.values()]
        worth = [v for v in product(*ranges) if sum(map(int.__mul__, v, items.values())) == negotiation.TOTAL]
        values = {seat: rng.choice(worth) for seat in negotiation.SEATS}
        pairs = list(zip(*values.values(), strict=True))
        if all(map(any, pairs)) and any(map(all, pairs)) and any(a != b for a, b in pairs):
            return {"items": items, "values": {s: dict(zip(items, v, strict=True)) for s, v in values.items()}}


def debated(rng: random.Random) -> Made:
    """Five in an order, the text compares each with the next; the question two between whom another stands."""
    more, order = rng.choice(COMPARED), rng.sample(NAMES, CHAIN)
    facts = [f"{one} is {more} than {other}" for one, other in pairwise(order)]
    low = rng.randrange(CHAIN - 2)
    asked = [order[low], order[rng.randrange(low + 2, CHAIN)]]
    truth = rng.choice(("yes", "no"))
    one, other = asked if truth == "yes" else reversed(asked)
    rng.shuffle(facts)
    return {"question": f"Is {one} {more} than {other}?", "facts": facts, "truth": truth}


def board(rng: random.Random) -> Made:
    """The empty board; there is but one."""
    return {"rules": noughts.RULES}


def matrix(rng: random.Random) -> Made:
    """What row wins of column, four different whole numbers from -3 to 3."""
    numbers = rng.sample(range(-3, 4), 4)
    payoff = [numbers[:2], numbers[2:]]
    return {"payoff": payoff, "rules": duel.rules(payoff)}


MAKERS: dict[str, Callable[[random.Random], Made]] = {
    "negotiation": negotiated,
    "debate": debated,
    "noughts": board,
    "duel": matrix,
}


def main() -> None:
    """Print games, one line of JSON each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--game", choices=sorted(MAKERS), required=True)
    options = parser.parse_args()
    for task in make_tasks(options.tasks, options.seed, game=options.game):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
