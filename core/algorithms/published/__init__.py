"""Published systems, one file each: the formula in its docstring, and the recipe that it is here."""

from __future__ import annotations

from cotune.algorithms.published import (
    advantage_alignment,
    afm_rl,
    c3,
    comas,
    cory,
    cpmobius,
    dart,
    distill,
    gigpo,
    m_grpo,
    magrpo,
    maporl,
    marshal,
    mmedagent_rl,
    reinforce_pp,
    self_redteam,
    spiral,
    sweet_rl,
)

PUBLISHED = (
    c3.RECIPE,
    magrpo.RECIPE,
    m_grpo.RECIPE,
    marshal.RECIPE,
    spiral.RECIPE,
    gigpo.RECIPE,
    reinforce_pp.RECIPE,
    reinforce_pp.WITH_BASELINE,
    comas.RECIPE,
    advantage_alignment.RECIPE,
    self_redteam.RECIPE,
    cpmobius.RECIPE,
    mmedagent_rl.RECIPE,
    afm_rl.RECIPE,
    dart.RECIPE,
    distill.RECIPE,
    cory.RECIPE,
    maporl.RECIPE,
    sweet_rl.RECIPE,
)
