"""What does a sampled token teach, by the way in which calls get their credit? On Plan-Path's team, in lockstep.

    python -m benchmarks.credit                                          # 3 seeds x 4 ways at the demo's token budget
    python -m benchmarks.credit --seeds 0 --tokens 100000 --ways replay  # a reduced form

`benchmarks.replay` asks this of whole runs, whose time goes into the application. Here the game is played without one,
all episodes of a step one call at a time, which takes a tenth of the time: base model, prompts, rules, choice of forks,
recipes, advantages and learner are the same. Every way samples as many tokens as any other in a step, and in all:
`tree` has scorers (AT-GRPO, K = 8); `dr_mas` (8 episodes a task), `replay` (4 forks an episode, K = 4) and
`replay_forks` (the same, trained on the candidates of the forks alone) know only the outcome. Evaluated on fresh tasks
with single samples at temperature 1. Results are appended to OUT/results.jsonl and not computed again. The last line is
JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.kept_results import KeptResults, mean_share, over_seeds, run_parser, success_cells
from benchmarks.selection import base_model
from cotune.algorithms.catalogue import recipe
from cotune.algorithms.prepare import prepare
from cotune.algorithms.samples import Sample, TrainRow
from cotune.records.plans import seed_of
from cotune.records.policies import LoraSpec, policies_for
from cotune.records.structs import CallRecord, PolicyRef
from cotune.replay.forks import choose_forks, fork_rule
from cotune.sampling.responder import choose
from cotune.trainer.learner.local import LocalLearner
from examples.ablation.plan_path import MAX_TOKENS, base, grid
from examples.plan_path import rewards
from tests.trainer.learner.forced import ForcedSettings

TRAIN_SEED, FRESH_SEED = 100, 900
ROLES = ("navigator", "driver")
WAYS = {"tree": "at_grpo", "dr_mas": "dr_mas", "replay": "c3_branches", "replay_forks": "c3"}
"""The recipe of each."""
K, FORK_K, FORKS = 8, 4, 4
console = Console(stderr=True)


@dataclass
class Said:
    """A call: who was asked what, the candidates (token ids, log-probabilities), their rewards, which one went on."""

    role: str
    prompt: tuple[int, ...]
    candidates: list[tuple[tuple[int, ...], tuple[float, ...]]]
    rewards: list[dict[str, float]] = field(default_factory=list)
    chosen: int = 0


@dataclass
class Walk:
    """An episode: where it is, what the navigator has said, if it is the driver's turn, and what was there before each
    of its calls. `name` tells it from others, `first` is the number of its first call in its trunk."""

    task: Mapping[str, Any]
    name: str
    at: grid.Cell
    rounds: int = 0
    message: str | None = None
    first: int = 0
    calls: list[Said] = field(default_factory=list)
    before: list[tuple[grid.Cell, int, str | None]] = field(default_factory=list)

    @property
    def board(self) -> grid.Grid:
        return grid.grid_of(self.task)

    @property
    def over(self) -> bool:
        return self.message is None and (self.at == self.board.goal or self.rounds >= grid.ROUNDS)

    @property
    def outcome(self) -> dict[str, float]:
        return {"team": rewards.team_reward(self.board, grid.cell_of(self.task["start"]), self.at)}

    def branch(self, number: int, name: str) -> Walk:
        """The same from before one of its calls on."""
        return Walk(self.task, name, *self.before[number], first=number)


class Team:
    """Both policies: what they say and what they learn."""

    def __init__(self, model: Path, method: str, seed: int) -> None:
        self.recipe = recipe(method, clip_high=0.28, entropy=0.03)
        settings = ForcedSettings(lr=3e-3, betas=(0.9, 0.95), threads=1)
        policies = policies_for("lora", ROLES, LoraSpec(rank=16, alpha=32.0))
        self.learner = LocalLearner.open(str(model), policies, settings, self.recipe.loss, seed=seed)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.tokens = 0
        torch.manual_seed(seed)

    def play(self, walks: Sequence[Walk], k: int = 1) -> None:
        """Carry walks to their ends, one call of each at a time; of more than one candidate the best goes on."""
        while live := [walk for walk in walks if not walk.over]:
            for role in ROLES:
                turn = [w for w in live if (w.message is None) == (role == "navigator") and not w.over]
                self._ask(role, turn, k)

    def _ask(self, role: str, walks: Sequence[Walk], k: int) -> None:
        if not walks:
            return
        prompts = [self._prompt(role, walk) for walk in walks]
        found = self._sample(role, [prompt for prompt in prompts for _ in range(k)])
        self.tokens += sum(len(ids) for ids, _ in found)
        for number, (walk, prompt) in enumerate(zip(walks, prompts, strict=True)):
            said = Said(role, prompt, found[number * k : (number + 1) * k])
            texts = self.tokenizer.batch_decode([ids for ids, _ in said.candidates], skip_special_tokens=True)
            if k > 1:
                score = rewards.navigator_reward if role == "navigator" else rewards.driver_reward
                said.rewards = [score(walk.board, walk.at, text) for text in texts]
                said.chosen = choose([sum(r.values()) for r in said.rewards], "argmax", 0)
            walk.before.append((walk.at, walk.rounds, walk.message))
            walk.calls.append(said)
            if role == "navigator":
                walk.message = texts[said.chosen]
            else:
                moves = grid.moves_of(walk.board, texts[said.chosen]) or []
                walk.at, walk.message = grid.carry_out(walk.board, walk.at, moves).at, None
                walk.rounds += 1

    def _prompt(self, role: str, walk: Walk) -> tuple[int, ...]:
        messages = (
            grid.navigator_messages(walk.board, walk.at)
            if role == "navigator"
            else grid.driver_messages(walk.board, walk.message or "")
        )
        return tuple(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    @torch.no_grad()
    def _sample(self, role: str, prompts: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """An answer to each prompt at temperature 1, with its log-probabilities."""
        policy, end = self.learner._policies[role], self.tokenizer.eos_token_id
        policy.activate()
        width = max(map(len, prompts))
        ids = torch.tensor([[end] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        place, cache = (mask.cumsum(1) - 1).clamp(min=0), None
        drawn, values = [], []
        for _ in range(MAX_TOKENS):
            out = policy.network(input_ids=ids, attention_mask=mask, position_ids=place, past_key_values=cache)
            cache, logprobs = out.past_key_values, out.logits[:, -1].log_softmax(-1)
            ids = torch.multinomial(logprobs.exp(), 1)
            drawn.append(ids[:, 0])
            values.append(logprobs.gather(1, ids)[:, 0])
            mask, place = torch.cat([mask, torch.ones_like(ids)], 1), place[:, -1:] + 1
        found = []
        for tokens, scores in zip(torch.stack(drawn, 1).tolist(), torch.stack(values, 1).tolist(), strict=True):
            length = tokens.index(end) + 1 if end in tokens else MAX_TOKENS
            found.append((tuple(tokens[:length]), tuple(scores[:length])))
        return found

    def learn(self, samples: Mapping[str, tuple[Sample, TrainRow]], lr_scale: float) -> int:
        """Train on what the recipe makes of the samples (by id, with their rows); returns how many rows that were."""
        prepared = prepare([sample for sample, _ in samples.values()], self.recipe)
        rows: dict[str, list[TrainRow]] = {}
        for sample, advantage in zip(prepared.samples, prepared.advantages.tolist(), strict=True):
            row = samples[sample.id][1]
            rows.setdefault(row.role, []).append(TrainRow(**{**_fields(row), "advantage": advantage}))
        for role in sorted(rows):
            self.learner.update(role, rows[role], lr_scale=lr_scale)
        return sum(map(len, rows.values()))


def _fields(row: TrainRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__struct_fields__}


def samples_of(
    walk: Walk, plan: str, numbers: Sequence[int], branch: str = "", *, continues: bool = False
) -> dict[str, tuple[Sample, TrainRow]]:
    """Candidates of some calls of a walk (by their places in it), with the rows that they would be."""
    found = {}
    for number in numbers:
        said = walk.calls[number]
        step = walk.first + number
        for index, (ids, logprobs) in enumerate(said.candidates):
            name = f"{walk.name}-{step}{'+' if branch else ''}{branch}.{index}"
            sample = Sample(
                id=name,
                task=walk.task["id"],
                rollout=walk.name,
                role=said.role,
                turn=step // 2,
                step=step,
                branch=branch or (walk.name if plan == "tree" else name),
                prompt=str(said.prompt),
                policy=PolicyRef(said.role, 0),
                tokens=len(ids),
                rewards=said.rewards[index] if said.rewards else {},
                outcome={} if plan == "tree" else walk.outcome,
                chosen=index == said.chosen,
                continues=continues,
            )
            row = TrainRow(
                id=name, role=said.role, prompt_ids=said.prompt, response_ids=ids, logprobs=logprobs, advantage=0.0,
                trajectory=walk.name,
            )  # fmt: skip
            found[name] = (sample, row)
    return found


def roll_out(
    team: Team, way: str, tasks: Sequence[Mapping[str, Any]], seed: int
) -> tuple[dict[str, tuple[Sample, TrainRow]], float]:
    """What a step can train on, and the share of its single samples (of `tree`: of its best) that reached the goal."""
    episodes = K if way == "dr_mas" else 1
    trunks = [Walk(task, f"{task['id']}/{i}", grid.cell_of(task["start"])) for task in tasks for i in range(episodes)]
    team.play(trunks, K if way == "tree" else 1)
    samples: dict[str, tuple[Sample, TrainRow]] = {}
    reached = sum(walk.at == walk.board.goal for walk in trunks) / len(trunks)
    if way in ("tree", "dr_mas"):
        for walk in trunks:
            samples |= samples_of(walk, "tree" if way == "tree" else "independent", range(len(walk.calls)))
        return samples, reached
    branches: list[tuple[Walk, str]] = []
    for walk in trunks:
        calls = [
            CallRecord(id=str(i), episode=walk.name, role=said.role, turn=i // 2, step=i)
            for i, said in enumerate(walk.calls)
        ]
        for fork in choose_forks(calls, fork_rule("all"), FORKS, seed_of(seed, walk.name)):
            name = f"{walk.name}@{fork.step}"
            branches += [(walk.branch(fork.step, f"{name}/{i}"), name) for i in range(FORK_K)]
    team.play([walk for walk, _ in branches])
    for walk, name in branches:
        samples |= samples_of(walk, "replay", [0], name)
        if way == "replay":
            samples |= samples_of(walk, "replay", range(1, len(walk.calls)), continues=True)
    return samples, reached


def result(way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train with the tokens that there are, and evaluate before and after."""
    model, started = base_model(options.out, seed, base.STEPS), time.perf_counter()
    team = Team(model, WAYS[way], seed)
    fresh = list(grid.make_tasks(options.tasks, FRESH_SEED))
    reached = {"base": evaluated(team, fresh)}
    team.tokens, rows, curve, cost = 0, 0, [], 0.0
    tasks = grid.make_tasks(options.tokens, TRAIN_SEED + seed)
    while team.tokens < options.tokens:
        before = team.tokens
        count = round(options.tokens_per_step / cost) if cost else 16
        step = [next(tasks) for _ in range(max(1, count))]
        samples, success = roll_out(team, way, step, seed)
        rows += team.learn(samples, 1 - before / options.tokens)
        cost = (team.tokens - before) / len(step)
        curve.append([team.tokens, round(success, 3)])
    tokens = team.tokens
    return {
        "tokens": tokens,
        "rows": rows,
        "reached": {**reached, "trained": evaluated(team, fresh)},
        "curve": curve,
        "seconds": round(time.perf_counter() - started),
    }


def evaluated(team: Team, tasks: Sequence[Mapping[str, Any]]) -> int:
    """How many tasks are reached with single samples."""
    walks = [Walk(task, task["id"], grid.cell_of(task["start"])) for task in tasks]
    team.play(walks)
    return sum(walk.at == walk.board.goal for walk in walks)


def main() -> None:
    """Do what is not recorded yet, and print all that is."""
    parser = run_parser(__doc__, "runs/credit", WAYS)
    parser.add_argument("--tokens", type=int, default=320_000, help="sampled in training (default: the demo's)")
    parser.add_argument("--tokens-per-step", type=int, default=6_400, help="(default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=1000, help="fresh tasks (default: %(default)s)")
    options = parser.parse_args()
    kept = KeptResults(options, "tokens", "tokens_per_step", "tasks")
    for seed in map(int, options.seeds.split(",")):
        for way in options.ways.split(","):
            if line := kept.once(partial(result, way, seed, options), way=way, seed=seed):
                console.print(f"seed {seed}: {way} reached {line['reached']} in {line['seconds']} s")
    table = Table(title="Plan-Path: share of fresh tasks whose goal was reached, single samples at temperature 1")
    for title in ("way", "success", "by seed", "base", "rows trained on"):
        table.add_column(title)
    found = {}
    for way in WAYS:
        if lines := kept.lines(way=way):
            rows = round(sum(line["rows"] for line in lines) / len(lines))
            untrained = mean_share(lines, options.tasks, "base")
            found[way] = row = {**over_seeds(lines, options.tasks), "base": untrained, "rows": rows}
            table.add_row(way, *success_cells(row), f"{untrained:.1%}", f"{rows:,}")
    Console(width=130).print(table)
    print(json.dumps({"settings": kept.settings, "ways": found}))


if __name__ == "__main__":
    main()
