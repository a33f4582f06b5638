"""Families of small problems: a question, a right program and wrong ones, each a text with `$a` in it, and inputs."""

from __future__ import annotations

import dataclasses
import random
import string
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """`a` is drawn from `values`. The wrong programs stop on every input that `draw(rng, a)` makes."""

    name: str
    question: str
    values: range
    right: str
    wrong: tuple[str, ...]
    draw: Callable[[random.Random, int], str]


def numbers(low: int, high: int, least: int = 3, most: int = 9) -> Callable[[random.Random, int], str]:
    """A line of whole numbers."""

    def draw(rng: random.Random, a: int) -> str:
        return " ".join(str(rng.randint(low, high)) for _ in range(rng.randint(least, most)))

    return draw


def near(rng: random.Random, a: int) -> str:
    """Numbers about `a`, itself among them."""
    made = [rng.randint(a - 3, a + 3) for _ in range(rng.randint(2, 7))]
    return " ".join(map(str, [*made, a]))


def words(rng: random.Random, a: int) -> str:
    """A line of words of 1 to 9 letters, one of which has `a`."""
    lengths = [rng.randint(1, 9) for _ in range(rng.randint(2, 6))] + [a]
    rng.shuffle(lengths)
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=length)) for length in lengths)


def letters(rng: random.Random, a: int) -> str:
    """Letters in runs."""
    return "".join(rng.choice("abc") * rng.randint(1, a + 2) for _ in range(rng.randint(3, 7)))


def brackets(rng: random.Random, a: int) -> str:
    """Brackets, balanced or nearly so, about `a` deep."""
    depths = [rng.randint(1, a + (rng.random() < 0.3)) for _ in range(rng.randint(2, 4))] + [a]
    rng.shuffle(depths)
    made = "".join("(" * depth + ")" * depth for depth in depths)
    cut = rng.choice([0, 0, 1])
    return made[cut:] if rng.random() < 0.5 else made[: len(made) - cut]


def one(low: int, high: int) -> Callable[[random.Random, int], str]:
    """One whole number."""
    return lambda rng, a: str(rng.randint(low, high))


READ = "numbers = [int(word) for word in input().split()]\n"
LINE = "The input is a line of whole numbers. "
FAMILIES: tuple[Family, ...] = (
    Family(
        "multiples",
        LINE + "Print the sum of those that $a divides.",
        range(2, 8),
        READ + "print(sum(n for n in numbers if n % $a == 0))",
        (READ + "print(sum(n for n in numbers if n % $a))", READ + "print(sum(n % $a == 0 for n in numbers))"),
        numbers(-30, 60, 6, 12),
    ),
    Family(
        "above",
        LINE + "Print how many of them are greater than $a.",
        range(-4, 12),
        READ + "print(sum(n > $a for n in numbers))",
        (READ + "print(sum(n >= $a for n in numbers))", READ + "print(sum(n for n in numbers if n > $a))"),
        near,
    ),
    Family(
        "every",
        LINE + "Print every $a-th of them, beginning with the last and going to the left, separated by spaces.",
        range(2, 5),
        READ + "print(*numbers[::-1][::$a])",
        (READ + "print(*numbers[::$a])", READ + "print(*numbers[::$a][::-1])"),
        numbers(-50, 50, 5, 12),
    ),
    Family(
        "largest",
        LINE + "Print the $a-th largest of the different values among them, or none if there are fewer.",
        range(2, 5),
        READ + "kinds = sorted(set(numbers), reverse=True)\nprint(kinds[$a - 1] if len(kinds) >= $a else 'none')",
        (
            READ + "kinds = sorted(numbers, reverse=True)\nprint(kinds[$a - 1] if len(kinds) >= $a else 'none')",
            READ + "kinds = sorted(set(numbers))\nprint(kinds[$a - 1] if len(kinds) >= $a else 'none')",
        ),
        numbers(0, 5, 2, 7),
    ),
    Family(
        "window",
        LINE + "Print the largest sum of $a of them that stand next to each other, or 0 if there are fewer.",
        range(2, 5),
        READ + "print(max((sum(numbers[i:i + $a]) for i in range(len(numbers) - $a + 1)), default=0))",
        (
            READ + "print(max((sum(numbers[i:i + $a]) for i in range(len(numbers))), default=0))",
            READ + "print(sum(sorted(numbers)[-$a:]) if len(numbers) >= $a else 0)",
        ),
        numbers(-20, 20, 1, 9),
    ),
    Family(
        "rotate",
        LINE + "Move the first $a of them to the end, as often as there are numbers if $a is more, and print them.",
        range(1, 6),
        READ + "k = min($a, len(numbers))\nprint(*numbers[k:], *numbers[:k])",
        (READ + "print(*numbers[-$a:], *numbers[:-$a])", READ + "k = $a + 1\nprint(*numbers[k:], *numbers[:k])"),
        numbers(0, 99, 2, 8),
    ),
    Family(
        "remainders",
        LINE + "For each remainder from 0 to $a - 1, print how many of them have it when divided by $a, in one line.",
        range(2, 6),
        READ + "print(*[sum(n % $a == r for n in numbers) for r in range($a)])",
        (
            READ + "print(*[sum(abs(n) % $a == r for n in numbers) for r in range($a)])",
            READ + "print(*[sum(n % $a == r for n in numbers) for r in range(1, $a + 1)])",
        ),
        numbers(-40, 40, 4, 10),
    ),
    Family(
        "steps",
        LINE + "Print how often a number differs by at least $a from the one before it.",
        range(2, 6),
        READ + "print(sum(abs(m - n) >= $a for n, m in zip(numbers, numbers[1:])))",
        (
            READ + "print(sum(m - n >= $a for n, m in zip(numbers, numbers[1:])))",
            READ + "print(sum(abs(m - n) > $a for n, m in zip(numbers, numbers[1:])))",
        ),
        numbers(0, 9, 4, 12),
    ),
    Family(
        "digits",
        "The input is a whole number that is not negative. Print the sum of its digits in base $a.",
        range(2, 10),
        "n, total = int(input()), 0\nwhile n:\n    total, n = total + n % $a, n // $a\nprint(total)",
        (
            "print(sum(map(int, input())))",
            "n, total = int(input()), 0\nwhile n >= $a:\n    total, n = total + n % $a, n // $a\nprint(total)",
        ),
        one(0, 5000),
    ),
    Family(
        "sequence",
        "A sequence begins with x, $a, and goes on with the sum of the last two. The input is a line with x and n. "
        "Print its n-th number, from n = 1.",
        range(2, 9),
        "x, n = map(int, input().split())\ny = $a\nfor _ in range(n - 1):\n    x, y = y, x + y\nprint(x)",
        (
            "x, n = map(int, input().split())\ny = $a\nfor _ in range(n):\n    x, y = y, x + y\nprint(x)",
            "x, n = map(int, input().split())\ny = $a\nfor _ in range(n - 1):\n    x, y = y, x + $a\nprint(x)",
        ),
        lambda rng, a: f"{rng.randint(-9, 99)} {rng.randint(1, 20)}",
    ),
    Family(
        "cipher",
        "The input is a line of small letters and spaces. Replace each letter by the one $a places later in the "
        "alphabet, with a after z, and print the line.",
        range(1, 13),
        "print(''.join(c if c == ' ' else chr((ord(c) - 97 + $a) % 26 + 97) for c in input()))",
        (
            "print(''.join(c if c == ' ' else chr(ord(c) + $a) for c in input()))",
            "print(''.join(c if c == ' ' else chr((ord(c) - 97 - $a) % 26 + 97) for c in input()))",
        ),
        words,
    ),
    Family(
        "long",
        "The input is a line of words. Print those of more than $a letters, the last one first, or nothing.",
        range(2, 7),
        "print(*[word for word in input().split()[::-1] if len(word) > $a])",
        (
            "print(*[word for word in input().split()[::-1] if len(word) >= $a])",
            "print(*[word for word in input().split() if len(word) > $a])",
        ),
        words,
    ),
    Family(
        "runs",
        "The input is a line of letters. Write each run of at least $a equal letters as the letter and its length, the "
        "others as they are, and print the line.",
        range(2, 5),
        "import itertools\nruns = [(c, len(list(g))) for c, g in itertools.groupby(input())]\n"
        "print(''.join(c + str(n) if n >= $a else c * n for c, n in runs))",
        (
            "import itertools\nruns = [(c, len(list(g))) for c, g in itertools.groupby(input())]\n"
            "print(''.join(c + str(n) if n > $a else c * n for c, n in runs))",
            "import itertools\nprint(''.join(c + str(len(list(g))) for c, g in itertools.groupby(input())))",
        ),
        letters,
    ),
    Family(
        "brackets",
        "The input is a line of ( and ). Print yes if they are balanced and never more than $a deep, else no.",
        range(2, 6),
        "depth, good = 0, True\nfor c in input():\n    depth += 1 if c == '(' else -1\n"
        "    good = good and 0 <= depth <= $a\nprint('yes' if good and depth == 0 else 'no')",
        (
            "line = input()\nprint('yes' if line.count('(') == line.count(')') else 'no')",
            "depth, good = 0, True\nfor c in input():\n    depth += 1 if c == '(' else -1\n"
            "    good = good and 0 <= depth < $a\nprint('yes' if good and depth == 0 else 'no')",
        ),
        brackets,
    ),
)
_SHORT = numbers(-9, 9, 2, 7)
_SMALL: dict[str, tuple[range, Callable[[random.Random, int], str]]] = {
    "multiples": (range(2, 5), _SHORT),
    "above": (range(3), near),
    "every": (range(2, 5), _SHORT),
    "largest": (range(2, 5), numbers(0, 5, 2, 7)),
    "window": (range(2, 5), _SHORT),
    "rotate": (range(1, 4), _SHORT),
    "remainders": (range(2, 5), _SHORT),
    "steps": (range(2, 5), numbers(0, 9, 4, 8)),
}
SMALL_FAMILIES: tuple[Family, ...] = tuple(
    dataclasses.replace(family, values=_SMALL[family.name][0], draw=_SMALL[family.name][1])
    for family in FAMILIES
    if family.name in _SMALL
)
"""For a model of 0.3M parameters: those of whole numbers, with three values of `a` each and small numbers."""
