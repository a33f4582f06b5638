"""C3: the candidates at a fork, each with the outcome that it led to."""

from __future__ import annotations

from cotune.algorithms.methods.c3_branches import C3Branches


class C3(C3Branches):
    """C3, contextual counterfactual credit assignment (arXiv 2603.06859): compare the siblings of one call, each by
    the outcome R of the episode that was finished from it.

        A_j = R_j - 1 / (K - 1) * sum of R_i over i != j

    There is no division by a deviation. VinePPO (arXiv 2410.01679) takes V(s') - V(s) (equation 6, before the last
    step) with V the mean outcome of K continuations that are used only for that (equation 5). Here the siblings
    themselves are the estimate of V(s), and one continuation stands for V(s'), so each continuation begins with an
    answer that is trained on.
    """

    name = "c3"
    trains_branches = False
