"""C3, contextual counterfactual credit assignment (arXiv 2603.06859): the siblings of one call, each with the outcome R
of the finished episode that goes on from it.

A_j = R_j - 1 / (K - 1) sum of R_i over i != j (leave-one-out), and no division by a deviation. VinePPO
(arXiv 2410.01679) takes V(s') - V(s) (equation 6, before the last step) with V the mean outcome of K continuations that
are used for that alone (equation 5). Here the siblings themselves are the estimate of V(s), and one continuation stands
for V(s'), so that each continuation begins with an answer that is trained on. Beyond both, what a branch goes on to say
has the A_j of the answer that it goes on from (`replay.continuations`): the outcomes of the siblings are a baseline for
whatever follows the fork.
"""

from __future__ import annotations

from cotune.algorithms.recipes import Attribution, Filters, Recipe, Term

RECIPE = Recipe(
    name="c3",
    plan="replay",
    terms=(Term(attribution=Attribution(horizon="terminal"), baseline="leave_one_out", scale="none"),),
    filters=Filters(zero_variance=True),
)
