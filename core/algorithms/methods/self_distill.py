"""Self-distillation: the policy that reads feedback teaches the one that does not."""

from __future__ import annotations

from cotune.algorithms.methods.distill import Distill
from cotune.algorithms.recipes import FEEDBACK, LossSpec


class SelfDistill(Distill):
    """Self-distillation from feedback: SDPO (arXiv 2601.20802), and SDFT (arXiv 2601.19897) with a demonstration in
    its place.

        A_t = log pi(y_t | x, f, y_<t) - log pi_old(y_t | x, y_<t)

    The policy that reads f, the text beside the reward (`teacher_sees`), teaches the policy that does not. Minus A_t is
    the one-sample estimate of token t of sum over t of KL(pi(. | x, y_<t) || pi(. | x, f, y_<t)), without a gradient
    through the second, which has the weights from before the update. Rewards do not count. An answer without such
    a text is left out.

    Difference: SDPO takes the KL over the vocabulary, and both papers a slowly moving teacher.
    """

    name = "self_distill"
    loss = LossSpec(kl=1.0, kl_in="reward", kl_to="self", teacher_sees=FEEDBACK)
