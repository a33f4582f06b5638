"""All recipes as one table: each published method is a value of `Recipe`. To add one, add an entry here.

`about` is the paper with the formulas that the entry stands for; the reference pages are made from it.
"""

from __future__ import annotations

import msgspec

from tests.core.algorithms.oracle.recipes import FEEDBACK, Attribution, Filters, LossSpec, Recipe, Shaping, Term

_TERMINAL = Attribution(horizon="terminal")
_BY_SEAT = Attribution(horizon="terminal", seats=True)
_OWN_AND_SEAT = Attribution(outcome=True, seats=True)
_ROLLOUT = Term(key=("task",), attribution=_TERMINAL, unit="trajectory")
_KL_IN_REWARD = LossSpec(kl=0.01, kl_in="reward")
_CRITIC = LossSpec(critic=True, kl=0.01, kl_in="reward")
_SIBLINGS = Term(attribution=_TERMINAL, baseline="leave_one_out", scale="none")
_EQUAL_LEFT_OUT = Filters(zero_variance=True)
_REPLACE = msgspec.structs.replace


def _reward_alone(attribution: Attribution) -> Term:
    """A term for recipes whose advantages come from elsewhere: the reward as it is."""
    return Term(key=("task", "role"), attribution=attribution, baseline="none", scale="none")


METHODS = (
    Recipe(
        name="at_grpo",
        about="""AT-GRPO (arXiv 2510.11062): siblings of one call (equation 1), r = alpha * team + local of the own turn
        (equation 3), clip 0.2, no KL.""",
        plan="tree",
        terms=(Term(),),
        filters=_EQUAL_LEFT_OUT,
    ),
    Recipe(
        name="dr_mas",
        about="""Dr. MAS (arXiv 2602.08847): mean and std per role over its active steps (equation 5), population
        formula.""",
        terms=(Term(key=("task", "role"), attribution=_TERMINAL, ddof=0),),
    ),
    Recipe(
        name="grpo",
        about="""GRPO (arXiv 2402.03300): equation 3, without its KL of 0.04 (set kl). It leaves ddof open; this is
        torch.std's.""",
        terms=(_ROLLOUT,),
        loss=LossSpec(aggregation="trajectory_mean"),
    ),
    Recipe(
        name="dr_grpo",
        about="Dr. GRPO (arXiv 2503.20783): section 3.2, no std, and no length under the token sum.",
        terms=(_REPLACE(_ROLLOUT, scale="none"),),
        loss=LossSpec(aggregation="constant"),
    ),
    Recipe(
        name="rloo",
        about="""RLOO (arXiv 2402.14740): section 2.3, a response is one action, so its token log-probabilities are
        summed.""",
        terms=(_REPLACE(_ROLLOUT, baseline="leave_one_out", scale="none"),),
        loss=LossSpec(aggregation="constant"),
    ),
    Recipe(
        name="gspo",
        about="""GSPO (arXiv 2507.18071): one ratio per response (equations 5 to 7), clipped far tighter
        (section 5.1).""",
        terms=(_ROLLOUT,),
        loss=LossSpec(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="trajectory_mean"),
    ),
    Recipe(
        name="dapo",
        about="DAPO (arXiv 2503.14476): clip-higher, dynamic sampling (equation 11), token mean (equation 12).",
        terms=(_ROLLOUT,),
        filters=_EQUAL_LEFT_OUT,
        loss=LossSpec(clip_high=0.28),
    ),
    Recipe(
        name="cispo",
        about="""CISPO (arXiv 2506.13585): the weight is clipped, not the update, without a lower bound (equations 4
        and 5); dynamic sampling, token mean.""",
        terms=(_ROLLOUT,),
        filters=_EQUAL_LEFT_OUT,
        loss=LossSpec(style="cispo", clip_low=1.0, clip_high=4.0),
    ),
)
"""Methods for any application."""

PUBLISHED = (
    Recipe(
        name="advantage_alignment",
        about="""Advantage Alignment (arXiv 2406.14662) with the group-relative baseline for language models (arXiv
        2511.19405).

        A_t = R_t - mean of the others' R_t, over the episodes of one task by role and turn, with
        R_t = r_t + 0.96 R_(t+1). Then A*_t = A_t + 2 (sum over k < t of 0.96^(t - k) A_k) B_t, B_t the other player's
        advantage at turn t (`shaping`). Token clip, truncated importance sampling at 2.
        """,
        terms=(
            Term(
                key=("task", "role", "turn"),
                attribution=Attribution(horizon="reward_to_go", gamma=0.96, seats=True),
                baseline="leave_one_out",
                scale="none",
            ),
        ),
        shaping=Shaping(opponent=2.0, opponent_gamma=0.96),
    ),
    Recipe(
        name="afm_rl",
        about="""Chain-of-Agents, stage 2 (AFM-RL, arXiv 2508.13167): DAPO on the rollouts of one policy that plays all
        roles.

        r = answer x format, both 0 or 1: an answer of the wrong format earns nothing (equation 11, of agents that write
        code; for web agents equation 10 has the answer alone). A = (r - mean) / std over the episodes of a task, tasks
        without variance are left out, clip 0.2 / 0.28, token mean. Use it with `policies = "shared"`.
        """,
        terms=(_REPLACE(_ROLLOUT, attribution=Attribution(horizon="terminal", gates=("format",))),),
        filters=_EQUAL_LEFT_OUT,
        loss=LossSpec(clip_high=0.28),
    ),
    Recipe(
        name="c3",
        about="""C3, contextual counterfactual credit assignment (arXiv 2603.06859): the siblings of one call, each with
        the outcome R of the episode that was finished from it.

        A_j = R_j - 1 / (K - 1) sum of R_i over i != j (leave-one-out), without a division by a deviation. VinePPO
        (arXiv 2410.01679) takes V(s') - V(s) (equation 6, before the last step) with V the mean outcome of K
        continuations that are used for that alone (equation 5). Here the siblings themselves are the estimate of V(s),
        and one continuation stands for V(s'), so each continuation begins with an answer that is trained on.
        """,
        plan="replay",
        terms=(_SIBLINGS,),
        filters=_EQUAL_LEFT_OUT,
        trains_branches=False,
    ),
    Recipe(
        name="c3_branches",
        about="""`c3` with whole branches (arXiv 2603.06859): the default under a replay plan, not a published method.

        Later calls of a branch are trained on too. They are in no group and have the A_j of the answer at their fork:
        the outcomes of its siblings are a baseline for everything that follows the fork.
        """,
        plan="replay",
        terms=(_SIBLINGS,),
        filters=_EQUAL_LEFT_OUT,
    ),
    Recipe(
        name="comas",
        about="""CoMAS (arXiv 2510.08529): agents that propose, evaluate and score each other, and reward each other by
        it.

        The score of a solution rewards its solver, one minus it the evaluator (equation 7): the workflow returns both
        by role. A = (r - mean) / std over all tokens of the policy's batch (equation 10), KL in the reward
        (equation 9): REINFORCE++.
        """,
        terms=(Term(key=("policy",), attribution=_OWN_AND_SEAT, unit="token", ddof=0),),
        loss=_KL_IN_REWARD,
    ),
    Recipe(
        name="cory",
        about="""CORY (arXiv 2410.06101): a pioneer answers, an observer answers after it, and both earn what both have
        earned.

        r = sum over the two roles of their own rewards (equation 4). PPO with a critic: GAE with gamma 1, lambda 0.95,
        clip 0.2, KL in the reward (equation 2). The roles exchange their models every few steps (equation 5):
        `[routing] swap`.
        """,
        terms=(_reward_alone(Attribution(outcome=True, seats=True, scope="sum")),),
        loss=_CRITIC,
    ),
    Recipe(
        name="cpmobius",
        about="""CPMobius (arXiv 2602.02979): a coach sets problems, a player solves them, and each has its own reward.

        Player: GRPO over its answers to one problem, A = (r - mean) / std, for problems that it solves with a rate of
        0.2 to 0.8. Coach: A = (r - mean) / std over the problems that it has set from one prompt. The roles are named
        `coach` and `player`.
        """,
        terms=(Term(key=("task", "role", "branch"), attribution=_OWN_AND_SEAT),),
        filters=Filters(mean_range=(0.2, 0.8), mean_range_roles=("player",)),
        loss=LossSpec(aggregation="sequence_mean"),
    ),
    Recipe(
        name="dart",
        about="""DART (arXiv 2509.23866): step-wise GRPO on the steps that were decided with the most entropy.

        A = (R - mean) / std over all steps of a task's episodes, R the outcome of the step's own. The 80% of them with
        the highest mean token entropy are trained on. Each token weighs min(pi_old / pi_sampler, 1).
        """,
        terms=(Term(key=("task",), attribution=_TERMINAL),),
        filters=Filters(top_entropy=0.8),
        loss=LossSpec(clip_high=0.28, tis_cap=1.0),
    ),
    Recipe(
        name="distill",
        about="""On-policy distillation (arXiv 2306.13649, with reverse KL): the policy samples, a teacher scores each
        sampled token.

        A_t = log pi_teacher(y_t) - log pi_old(y_t): minus the one-sample estimate of the reverse KL of token t, whose
        policy gradient is that of KL(pi || pi_teacher) at the states that the policy visits. Rewards count for nothing.
        """,
        terms=(Term(key=("task",), attribution=_TERMINAL, baseline="none", scale="none", weight=0.0),),
        loss=LossSpec(kl=1.0, kl_in="reward", kl_to="teacher"),
    ),
    Recipe(
        name="gigpo",
        about="""GiGPO (arXiv 2505.10978): groups of episodes, and within them groups of steps from one state.

        A = A_E + omega A_S (equation 8), omega = 1. A_E = (R - mean) / std of the outcomes of a task's episodes
        (equation 3). A_S = (G_t - mean) / std (equation 7) of the discounted returns G_t = sum over k >= t of
        0.95^(k - t) r_k (equation 5) of all steps that saw the same anchor state (equation 6), here the last message of
        the prompt, in the same role. A step whose state nobody else saw has A_S = 0.
        """,
        terms=(
            _ROLLOUT,
            Term(key=("task", "role", "observation"), attribution=Attribution(horizon="reward_to_go", gamma=0.95)),
        ),
        loss=LossSpec(aggregation="sequence_mean"),
    ),
    Recipe(
        name="m_grpo",
        about="""M-GRPO (arXiv 2511.13288): a main agent and its sub-agents, each compared within its role.

        Main agent: r = 0.1 format + 0.9 correct (equation 4). Sub-agent: r = 0.1 format + 0.4 correct (of the main
        agent's answer) + 0.5 judge (of its own work; equation 5). A reply of the wrong format earns nothing.
        A = (r - mean) / std over the role's calls of a task (equations 10 and 13), one ratio per response (equations 14
        and 16, as GSPO), and every episode gives a sub-agent the same number of calls, at most 8 (equation 11).
        """,
        terms=(
            Term(
                key=("task", "role"),
                attribution=Attribution(
                    weights={"format": 0.1, "correct": 0.4, "judge": 0.5, "main/correct": 0.9},
                    other=0.0,
                    gates=("format",),
                    outcome=True,
                ),
            ),
        ),
        filters=Filters(align_to=8),
        loss=LossSpec(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean"),
    ),
    Recipe(
        name="magrpo",
        about="""MAGRPO (arXiv 2508.04652): roles that answer for one joint reward, compared turn by turn.

        R_t = r_t + gamma R_(t+1), r_t the joint reward of turn t; A_t = R_t - mean of R_t over the group's episodes, by
        role; the loss is -A_t log pi(a_t | h_t), without ratio, standard deviation or KL. gamma 0.9 is that of the
        authors' code.
        """,
        terms=(
            Term(
                key=("task", "role", "turn"),
                attribution=Attribution(horizon="reward_to_go", gamma=0.9, scope="mean"),
                scale="none",
            ),
        ),
        loss=LossSpec(ratio="none", aggregation="constant"),
    ),
    Recipe(
        name="maporl",
        about="""MAPoRL (arXiv 2502.18439): agents that debate, paid for the verifier's scores of their turn and of
        those after it.

        R_t = (sum over t' >= t of gamma^(t' - t) r_t') / (sum over t' >= t of gamma^(t' - t)), then the mean over the
        agents of the turn; r_t is the verifier's score with its bonuses, as the scorers return them. PPO with a critic.
        """,
        terms=(_reward_alone(Attribution(horizon="mean_to_go", gamma=0.9, scope="mean")),),
        loss=_CRITIC,
    ),
    Recipe(
        name="marshal",
        about="""MARSHAL (arXiv 2510.15414): self-play with an advantage for every turn of every seat.

        R_t = sum of the seat's rewards from turn t on (gamma 1), then A_t = R_t - mean of R over all turns of the seat
        in the games of a group: first the sum, then the normalisation, by role. PPO with dual clip and KL 0.2. The dual
        clip at 1 + 2 x 0.2 = 1.4 is that of ROLL, the framework of the authors' code.
        """,
        terms=(Term(key=("task", "role"), attribution=Attribution(horizon="reward_to_go", seats=True), scale="none"),),
        loss=LossSpec(dual_clip=1.4, kl=0.2, aggregation="trajectory_mean"),
    ),
    Recipe(
        name="mmedagent_rl",
        about="""MMedAgent-RL (arXiv 2506.00555): GRPO by role on a curriculum, with an entropy bonus that differs by
        sample.

        r = format + accuracy, A = (r - mean) / std over the role's calls of a task. The weight of the entropy is 0.01
        times the component `exploration` of the episode's outcome: low where the specialists agree and are right, high
        where they contradict each other or are wrong. The curriculum, easy to hard, is `[curriculum] by`.
        """,
        terms=(Term(key=("task", "role"), attribution=Attribution(weights={"exploration": 0.0}, outcome=True)),),
        loss=LossSpec(entropy=0.01, entropy_by="exploration", aggregation="sequence_mean"),
    ),
    Recipe(
        name="reinforce_pp",
        about="""REINFORCE++ (arXiv 2501.03262): advantages normalised over the whole batch.

        A = (r - mean) / std over all tokens of the batch (equation 5 of its version 9), less beta
        (log pi_old - log pi_ref) per token (equation 4), beta 0.01. PPO's token clip 0.2. A batch is all that a policy
        does in a step.
        """,
        terms=(Term(key=("policy",), attribution=_TERMINAL, unit="token", ddof=0),),
        loss=_KL_IN_REWARD,
    ),
    Recipe(
        name="reinforce_pp_baseline",
        about="""REINFORCE++ with a baseline by task (arXiv 2501.03262, section 3.2).

        A' = r - mean over the episodes of a task, then A = A' / std of A' over the batch; its mean there is 0 already,
        as it is within each task. PPO's token clip 0.2.
        """,
        terms=(_REPLACE(_ROLLOUT, scale_key=("policy",), ddof=0),),
    ),
    Recipe(
        name="self_distill",
        about="""Self-distillation from feedback: SDPO (arXiv 2601.20802), and SDFT (arXiv 2601.19897) with a
        demonstration in its place.

        The policy that reads what was said of its answer teaches the one that does not:
        A_t = log pi(y_t | x, f, y_<t) - log pi_old(y_t | x, y_<t), f the text beside the reward (`teacher_sees`). Minus
        A_t is the one-sample estimate of token t of sum over t of KL(pi(. | x, y_<t) || pi(. | x, f, y_<t)), without a
        gradient through the second, which has the weights from before the update. SDPO takes the KL over the
        vocabulary, and both papers a slowly moving teacher. Rewards count for nothing, and an answer of which nothing
        is said is left out.
        """,
        terms=(Term(key=("task",), attribution=_TERMINAL, baseline="none", scale="none", weight=0.0),),
        loss=LossSpec(kl=1.0, kl_in="reward", kl_to="self", teacher_sees=FEEDBACK),
    ),
    Recipe(
        name="self_redteam",
        about="""Self-RedTeam (arXiv 2506.07468): attacker and defender of one policy play each other.

        Each role has its own outcome. Ties are left out. A = (r - mean) / std over all tokens of the role in the batch,
        KL in the reward (REINFORCE++ by role).
        """,
        terms=(Term(key=("role",), attribution=_BY_SEAT, unit="token", ddof=0),),
        filters=Filters(ties=True),
        loss=_KL_IN_REWARD,
    ),
    Recipe(
        name="spiral",
        about="""SPIRAL (arXiv 2506.24119): self-play on zero-sum games with role-conditioned advantages (RAE).

        b <- 0.95 b + 0.05 R for each game and role, then A = R - b (equation 2), R the outcome of the role's own seat.
        The loss is -A log pi summed over tokens (equation 3), without ratio, standard deviation or division by the
        length.
        """,
        terms=(Term(key=("role",), attribution=_BY_SEAT, baseline="ema", scale="none"),),
        filters=Filters(zero_advantage=True),
        loss=LossSpec(ratio="none", aggregation="constant"),
    ),
)
"""Published systems: a method with the application it was made for."""
