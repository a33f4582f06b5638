"""Methods of your own: the base class, what it is given, and the building blocks of the published ones.

A recipe is a class. Derive from `Method` or from a published method, and name your class with its file:
`recipe = "my_method.py:Ranked"`. See docs/reference/recipes.md, A method of your own.
"""

from __future__ import annotations

from cotune.algorithms.catalogue import (
    C3,
    AdvantageAlignment,
    AfmRl,
    AtGrpo,
    C3Branches,
    Cispo,
    CoMas,
    Cory,
    CpMobius,
    Dapo,
    Dart,
    Distill,
    DrGrpo,
    DrMas,
    GiGpo,
    Grpo,
    Gspo,
    MaGrpo,
    MaPoRl,
    Marshal,
    MGrpo,
    MMedAgentRl,
    ReinforcePp,
    ReinforcePpBaseline,
    Rloo,
    SelfDistill,
    SelfRedTeam,
    Spiral,
    SweetRl,
)
from cotune.algorithms.comparing import above, all_equal, centred, leave_one_out, standardized
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import Attribution, Filters, LossSpec
from cotune.algorithms.samples import Floats, Sample
from cotune.algorithms.step import Step

__all__ = [
    "C3", "AdvantageAlignment", "AfmRl", "AtGrpo", "Attribution", "C3Branches", "Cispo", "CoMas", "Cory", "CpMobius",
    "Dapo", "Dart", "Distill", "DrGrpo", "DrMas", "Filters", "Floats", "GiGpo", "Grpo", "Gspo", "LossSpec", "MGrpo",
    "MMedAgentRl", "MaGrpo", "MaPoRl", "Marshal", "Method", "ReinforcePp", "ReinforcePpBaseline", "Rloo", "Sample",
    "SelfDistill", "SelfRedTeam", "Spiral", "Step", "SweetRl", "above", "all_equal", "centred", "leave_one_out",
    "standardized",
]  # fmt: skip
