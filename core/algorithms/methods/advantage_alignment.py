"""Advantage Alignment: one's own past times the other's present."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from cotune.algorithms.comparing import leave_one_out
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import Attribution
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class AdvantageAlignment(Method):
    """Advantage Alignment (arXiv 2406.14662) with the group-relative baseline for language models (arXiv 2511.19405).

        R_t = r_t + gamma R_(t+1)
        A_t = R_t - mean of the others' R_t, over the episodes of a task, by role and turn
        A*_t = A_t + beta * (sum over k < t of gamma^(t - k) A_k) * B_t

    B_t is the other player's advantage at turn t: its gain is encouraged if one's own past was good, and the
    reverse. beta = 2, gamma = 0.96, token clip, truncated importance sampling at 2. A missing turn counts 0.

    Difference: with more than two players, the others' advantages are added.
    """

    name = "advantage_alignment"
    group_by = ("task", "role", "turn")
    attribution = Attribution(outcome=True, seats=True)
    to_go = True
    needs_all_roles = True
    beta = 2.0
    gamma = 0.96

    def rewards(self, step: Step) -> Floats:
        return step.rewards_to_go(self.gamma)

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        """A*_t of each sample, [n]: A_t by leave-one-out in its group, then the product with the other players'
        advantages."""
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = leave_one_out(rewards[group])

        # The advantages of each player (a role in an episode) by turn, and for each turn their sum over all players.
        player_advantages: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        turn_sums: dict[tuple[str, int], float] = defaultdict(float)
        compared = [int(i) for group in step.groups for i in group]
        for i in compared:
            sample = step.samples[i]
            player_advantages[sample.rollout, sample.role][sample.turn] = float(advantages[i])
        for (rollout, _), advantage_of_turn in player_advantages.items():
            for turn, advantage in advantage_of_turn.items():
                turn_sums[rollout, turn] += advantage

        aligned = advantages.copy()
        for i in compared:
            sample = step.samples[i]
            advantage_of_turn = player_advantages[sample.rollout, sample.role]
            past = 0.0
            for turn, advantage in advantage_of_turn.items():
                if turn < sample.turn:
                    past += self.gamma ** (sample.turn - turn) * advantage
            # B_t: the sum over all players of the turn, without the sample's own player.
            present_of_others = turn_sums[sample.rollout, sample.turn] - advantage_of_turn[sample.turn]
            aligned[i] += self.beta * past * present_of_others
        return aligned
