"""Two players divide items that each values in its own way, which the other does not see.

They alternate. The last line of a message is its move, what stands before it is talk: `offer me 2 book you 1 hat`
divides all items, `accept` takes the offer that the other has just made. Another answer to an offer declines it.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

from examples.workloads.self_play.turns import Messages, Said, Task

SEATS = ("first", "second")
TURNS = 4
"""Messages that each has; after them there is no deal."""
MAX_TOKENS = 512
TOTAL = 10
"""What all items together are worth to each."""

Share = Counter[str]
Division = dict[str, Share]
"""What each gets."""

RULES = (
    "You and another player divide {items}. To you they are worth: {worth}. The other values them in another way. "
    "You get what your share is worth, and without a deal both get nothing. You have {turns} messages each. The last "
    "line of a message is your move: 'offer me ... you ...', with a number before each item, divides all items, such "
    "as '{example}'; 'accept' takes the offer that the other has just made."
)


def turn(task: Task, said: Said) -> str | None:
    """The two alternate until there is a deal, or their messages are over."""
    return None if len(said) == 2 * TURNS or deal(task, said) else SEATS[len(said) % 2]


def messages(task: Task, said: Said, role: str) -> Messages:
    """The rules with its own values, and what has been said."""
    begin = [{"role": "user", "content": "You begin."}] if role == SEATS[0] else []
    talk = [{"role": "assistant" if who == role else "user", "content": text or "..."} for who, text in said]
    return [{"role": "system", "content": rules(task, role)}, *begin, *talk]


def rules(task: Task, role: str) -> str:
    """The game in words, as one player sees it."""
    items, worth = task["items"], task["values"][role]
    listed = ", ".join(f"{count} {item}" for item, count in items.items())
    each = ", ".join(f"{value} for each {item}" for item, value in worth.items())
    first, *others = items
    example = " ".join([f"offer me {items[first]} {first} you", *(f"{items[item]} {item}" for item in others)])
    return RULES.format(items=listed, worth=each, turns=TURNS, example=example)


def deal(task: Task, said: Said) -> Division | None:
    """What an accepted offer gives to each; None without one."""
    for (by, offered), (_, answer) in pairwise(said):
        if move_of(answer) == "accept" and (division := offer_in(task, by, offered)):
            return division
    return None


def move_of(text: str) -> str:
    """The move of a message: its last line, in small letters."""
    return text.strip().rpartition("\n")[2].strip().rstrip(".!").lower()


def offer_in(task: Task, by: str, text: str) -> Division | None:
    """How the offer of a message divides the items; None where its move is no offer, or one that does not add up."""
    words = move_of(text).replace(",", " ").split()
    if words[:2] != ["offer", "me"] or words.count("you") != 1:
        return None
    middle = words.index("you")
    mine, yours = _share(task, words[2:middle]), _share(task, words[middle + 1 :])
    if mine is None or yours is None or mine + yours != Counter(task["items"]):
        return None
    return {by: mine, next(seat for seat in SEATS if seat != by): yours}


def worth(task: Task, role: str, share: Share) -> int:
    """What a share is worth to a player."""
    return sum(task["values"][role][item] * count for item, count in share.items())


def divisions(task: Task) -> list[Division]:
    """Every way to divide the items."""
    items = task["items"]
    found = []
    for counts in product(*(range(count + 1) for count in items.values())):
        first = Counter(dict(zip(items, counts, strict=True)))
        found.append(dict(zip(SEATS, (first, Counter(items) - first), strict=True)))
    return found


def _share(task: Task, words: list[str]) -> Share | None:
    """Numbers and items, an item at most once; None for anything else."""
    counts, items = words[::2], [_item(task, word) for word in words[1::2]]
    if len(counts) != len(items) or None in items or len(set(items)) < len(items):
        return None
    if not all(count.isascii() and count.isdigit() and len(count) < 3 for count in counts):
        return None
    return Counter({item: int(count) for item, count in zip(items, counts, strict=True) if item})


def _item(task: Task, word: str) -> str | None:
    return next((item for item in task["items"] if word in (item, f"{item}s")), None)
