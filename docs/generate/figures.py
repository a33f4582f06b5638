"""The tables of measurements, from the lines in `benchmarks/figures`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks" / "figures"

Line = Mapping[str, Any]

LEARNING = {
    "team_untrained": "team, untrained",
    "team_lora": "trained together, a LoRA per role",
    "team_swapped": "the same, roles swapped",
    "team_full": "trained together, all weights, a model per role",
    "team_shared": "trained together, one shared LoRA",
    "navigator_only": "navigator trained in the team, driver frozen",
    "driver_only": "driver trained in the team, navigator frozen",
    "merged": "these two put together",
    "alone_untrained": "single agent that sees everything, untrained",
    "alone_navigator": "navigator trained and evaluated as a single agent (sees no table)",
    "alone_driver": "driver trained and evaluated as a single agent (sees no grid)",
    "alone_together": "these two put together in the team",
    "alone_everything": "single agent that sees everything, same budget",
    "alone_everything_3x": "single agent that sees everything, three times the budget",
}
WARM_START = {
    "base": "base",
    "rl": "reinforcement alone, 16 steps",
    "sft": "`sft` from 500 recordings, 48 supervised steps",
    "warm": "from there 8 steps of reinforcement",
}
PROMPTS_AND_WEIGHTS = {
    ("p, w", "base"): "untrained, prompts of the application",
    ("p, w", "p"): "prompts alone (`p`)",
    ("w, p", "w"): "weights alone (`w`)",
    ("p, w", "both"): "`p`, then `w`",
    ("w, p", "both"): "`w`, then `p`",
}
WORKLOADS = {
    "search": "search",
    "sokoban": "Sokoban 6 x 6",
    "sudoku": "Sudoku 4 x 4, four cells to fill",
    "maths": "sums with a calculator",
    "code": "code, eight families",
    "plan_path": "Plan-Path 5 x 5",
    "pictures": "pictures, 4 x 4",
    "noughts": "tic-tac-toe",
}
PUBLISHED = {
    "sokoban": ("Sokoban, published", "0%", "3%", "0%", "10%", "11.5%", "-"),
    "sudoku": ("Sudoku, published", "7%", "29%", "69%", "99%", "99%", "-"),
    "maths": (
        "AIME 2024, AIME 2025, OlympiadBench, published",
        "13.4%, 9.8%, 22.2%",
        "10%, 6.7%, 23.8%",
        "13.3%, 13%, 35.9%",
        "16.7%, 16.7%, 39.6%",
        "13.3%, 18.3%, 35.2%",
        "-",
    ),
    "code": (
        "LiveCodeBench, APPS, CodeContests, published",
        "11.6%, 16.2%, 3.6%",
        "18.8%, 17.0%, 3.0%",
        "19.0%, 16.6%, 3.6%",
        "20.9%, 17.6%, 4.8%",
        "24.0%, 18.6%, 7.8%",
        "-",
    ),
    "plan_path": ("Plan-Path 10 x 10, published", "5%", "11%", "10%", "96%", "97%", "6%"),
}
"""What the method's paper reports for Qwen3-1.7B, below the row it belongs to."""


def learning() -> str:
    """Success by who was trained with whom."""
    lines = _lines("learning")
    rows = []
    for name, title in LEARNING.items():
        found = sorted((line for line in lines if line["row"] == name), key=lambda line: line["seed"])
        by_seed = [line["reached"] / line["tasks"] for line in found]
        mean = sum(line["reached"] for line in found) / sum(line["tasks"] for line in found)
        rows.append((title, f"{mean:.1%}", *(f"{value:.1%}" for value in by_seed)))
    return _table(("", "mean", "seed 0", "seed 1", "seed 2"), rows)


def selection() -> str:
    """Success by the candidate that the application continues with."""
    lines = _lines("selection")
    rows = []
    for select in ("argmax", "sample", "first"):
        found = [line for line in lines if line["select"] == select]
        path = sum(line["last_step"]["path"] for line in found) / len(found)
        rows.append((f"`{select}`", *_success(found), _success(found, "greedy")[0], f"{path:.1%}"))
    return _table(("select", "success", "by seed", "greedy", "selected path, last step"), rows)


def teams() -> str:
    """Success by what each role has of its own."""
    rows = []
    for way in ("one_base", "two_bases", "two_rates", "alternate"):
        found = [line for line in _lines("teams") if line["way"] == way]
        if found:
            counts = (f"{sum(line[name] for line in found) / len(found):,.0f}" for name in ("steps", "tokens", "rows"))
            rows.append((f"`{way}`", *_success(found), _success(found, "base")[0], *counts))
    titles = ("way", "success", "by seed", "untrained", "steps", "sampled tokens", "rows trained on")
    return _table(titles, rows)


def balance() -> str:
    """Rewards of two roles that share a policy, plainly and balanced, or have one each."""
    lines_of_way: dict[str, list[Line]] = {"shared": [], "equal": [], "isolated": []}
    for line in sorted(_lines("balance"), key=lambda line: line["seed"]):
        lines_of_way[line["way"]].append(line)
    # Means of different seeds cannot be compared, so only seeds that every way has are shown.
    shared_seeds = set.intersection(*({line["seed"] for line in lines} for lines in lines_of_way.values()))
    rows = []
    for way, lines in lines_of_way.items():
        found = [line for line in lines if line["seed"] in shared_seeds]
        cells = [f"`{way}`"]
        for role in ("worker", "chief"):
            cells += [_mean_of([line[role] for line in found], when) for when in ("first", "middle", "last")]
        cells.append(", ".join(f"{line['chief']['last']:.2f}" for line in found))
        shares = [share for line in found for share in line["shares"]]
        if shares:
            true, shown = (sum(column) / len(shares) for column in zip(*shares, strict=True))
            error = sum(abs(one - other) for one, other in shares) / len(shares)
            cells += [f"{true:.2f}", f"{shown:.2f}", f"{error:.3f}"]
        else:
            cells += ["-"] * 3
        rows.append(cells)
    times = [f"{role}, {when} steps" for role in ("worker", "chief") for when in ("first", "middle", "last")]
    shares_titles = ("worker's share of the gradient", "as shown", "mean difference")
    return _table(("way", *times, "chief, last, by seed", *shares_titles), rows)


def _mean_of(lines: Sequence[Line], name: str) -> str:
    return f"{sum(line[name] for line in lines) / len(lines):.2f}"


def refill(**settings: str) -> str:
    """Tokens until the success of plain training, by seed and way, of the runs with these settings."""
    lines = [line for line in _lines("refill") if settings.items() <= line["settings"].items()]
    rows = []
    for plain in (line for line in lines if line["way"] == "plain"):
        for line in (line for line in lines if line["seed"] == plain["seed"]):
            most, wanted = plain["tokens"], round(plain["success"], 4)
            within = [success for tokens, success in line["curve"] if tokens <= most]
            at = next((tokens for tokens, success in line["curve"] if success >= wanted and tokens <= most), None)
            share = f"{at:,} ({at / most:.2f})" if at else "not reached"
            cells = (share, f"{within[-1]:.1%}", str(line["steps"]), f"{line['flat']:.0%}")
            rows.append((str(plain["seed"]), f"`{line['way']}`", *cells))
    until = "tokens until plain's last success (share of plain's)"
    titles = ("seed", "way", until, "success by then", "steps", "flat groups")
    return _table(titles, rows)


def precision() -> str:
    """Success of plain training on the word problems in each precision, by seed."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        found = [line for line in _lines("refill") if line["settings"]["task"] == "word_problems"]
        found = [line for line in found if line["way"] == "plain" and line["settings"]["dtype"] == dtype]
        found.sort(key=lambda line: line["seed"])
        cells = (f"{line['success']:.1%} ({line['tokens']:,})" for line in found)
        rows.append((dtype, f"{sum(line['success'] for line in found) / len(found):.1%}", ", ".join(cells)))
    return _table(("products in", "success, mean", "by seed (sampled tokens)"), rows)


def replay() -> str:
    """Success by the way of training."""
    lines = [line for line in _lines("replay") if line["settings"]["steps"] == 20]
    rows = []
    for way in ("tree", "replay", "dr_mas"):
        found = [line for line in lines if line["way"] == way]
        if found:
            counts = (f"{sum(line[name] for line in found) / len(found):,.0f}" for name in ("tokens", "rows"))
            rows.append((f"`{way}`", *_success(found), *counts))
    return _table(("way", "success", "by seed", "sampled tokens", "rows trained on"), rows)


def warm_start() -> str:
    """Success from recordings, from reinforcement, and from both."""
    lines = _lines("warm_start")
    rows = [(title, *_success(lines, name)) for name, title in WARM_START.items()]
    return _table(("policies", "success", "by seed"), rows)


def prompts() -> str:
    """Outcomes on held-out tasks before and after a search for prompts, by way and seed, and pooled."""
    rows: list[Sequence[str]] = []
    for way, title in {"reflect": "scripted reflection", "random": "random edits"}.items():
        lines = [line for line in _lines("prompts") if line["way"] == way]
        for line in lines:
            if (held := line["held_out"]) is None:
                rows.append((title, str(line["seed"]), "", "", "nothing better found", ""))
                continue
            low, middle, high = held["difference"]
            outcomes = (f"{held['base']:.3f}", f"{held['best']:.3f}", f"{middle:+.3f}")
            rows.append((title, str(line["seed"]), *outcomes, f"{low:+.3f} to {high:+.3f}"))
        changes = [value for line in lines for value in line["by_task"]]
        rows.append((title, "all", "", "", f"{sum(changes) / len(changes):+.3f}", ""))
    return _table(("way", "seed", "before", "after", "difference", "95% interval"), rows)


def prompts_and_weights() -> str:
    """Success with better prompts, with trained weights, and with both in either order."""
    rows: list[Sequence[str]] = []
    for (strategy, name), title in PROMPTS_AND_WEIGHTS.items():
        lines = [line for line in _lines("prompts_and_weights") if line["strategy"] == strategy]
        lines = [{**line, "settings": {"tasks": line["settings"]["fresh"]}} for line in lines]
        rows += [(title, *_success(lines, name))] if lines else []
    return _table(("", "success", "by seed"), rows)


def frameworks() -> str:
    """One team in three frameworks."""
    rows = [
        (
            line["framework"],
            f"{line['base']:.1%}",
            f"{line['trained']:.1%}",
            f"{line['low']:.1%} to {line['high']:.1%}",
            f"{line['calls']:,}",
            f"{line['seconds']} s",
            f"{line['calls_per_s']:.0f}",
        )
        for line in _lines("frameworks")
    ]
    return _table(("", "base", "trained", "95% interval", "calls", "training", "calls/s in rollout"), rows)


def workloads() -> str:
    """Success by workload: single agents and teams, untrained and trained."""
    columns = (("alone", "base"), ("alone", "trained"), ("by_role", "base"), ("shared", "trained"))
    columns = (*columns, ("by_role", "trained"), ("by_role", "swapped"))
    rows: list[Sequence[str]] = []
    for name, title in WORKLOADS.items():
        rows.append((title, *(_workload(name, *column) for column in columns)))
        rows += [PUBLISHED[name]] if name in PUBLISHED else []
    titles = ("single agent, untrained", "single agent, trained", "team, untrained", "team, one shared policy")
    return _table(("workload", *titles, "team, a policy per role", "the same, swapped"), rows)


def without_tool() -> str:
    """Single agents that lack the team's tool, as published."""
    titles = {
        "maths": "sums: the reasoner alone, which answers once",
        "sudoku": "Sudoku 4 x 4: fills cells by hand, in as many turns as the team has",
    }
    measured = ("base", "trained")
    rows = [(title, *(_workload(name, "without_tool", which) for which in measured)) for name, title in titles.items()]
    return _table(("single agent without the tool", "untrained", "trained"), rows)


def measured(line: Line) -> str:
    """A table that a script printed, as it was taken down."""
    return _table(line["columns"], line["rows"])


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines() if line]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def _success(lines: Sequence[Line], which: str = "trained") -> tuple[str, str]:
    """Mean success over the seeds, and by seed. An interval over the tasks of all seeds would say nothing of the spread
    over seeds, which is larger."""
    ordered = sorted(lines, key=lambda line: line["seed"])
    shares = ", ".join(f"{line['reached'][which] / line['settings']['tasks']:.1%}" for line in ordered)
    tasks = sum(line["settings"]["tasks"] for line in lines)
    return f"{sum(line['reached'][which] for line in lines) / tasks:.1%}", shares


def _workload(name: str, training: str, which: str) -> str:
    lines = [line for line in _lines("workloads") if (line["workload"], line["training"]) == (name, training)]
    mean, by_seed = _success(lines, which)
    return f"{mean} ({by_seed})" if len(lines) > 1 else mean


TABLES: Mapping[str, Callable[[], str]] = {
    "learning": learning,
    "selection": selection,
    "teams": teams,
    "balance": balance,
    "refill": partial(refill, task="plan_path"),
    "refill, precision": precision,
    "refill, word problems": partial(refill, task="word_problems", dtype="float32"),
    "replay": replay,
    "warm_start": warm_start,
    "prompts": prompts,
    "prompts_and_weights": prompts_and_weights,
    "frameworks": frameworks,
    "workloads": workloads,
    "without_tool": without_tool,
    **{line["table"]: partial(measured, line) for line in _lines("measured")},
}
"""By the name that a page uses in `<!-- generated: figures NAME -->`."""
