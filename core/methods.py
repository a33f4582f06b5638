"""Write your own method: the base class, its inputs, and the building blocks of the published methods.

A recipe is a class. Derive from `Method` or from a published method, and name your class with its file:
`recipe = "my_method.py:Ranked"`. See docs/reference/recipes.md, A method of your own.
"""

from __future__ import annotations

from cotune.algorithms.comparing import above, all_equal, centred, leave_one_out, standardized
from cotune.algorithms.method import Method
from cotune.algorithms.methods.advantage_alignment import AdvantageAlignment
from cotune.algorithms.methods.afm_rl import AfmRl
from cotune.algorithms.methods.at_grpo import AtGrpo
from cotune.algorithms.methods.c3 import C3
from cotune.algorithms.methods.c3_branches import C3Branches
from cotune.algorithms.methods.cispo import Cispo
from cotune.algorithms.methods.comas import CoMas
from cotune.algorithms.methods.cory import Cory
from cotune.algorithms.methods.cpmobius import CpMobius
from cotune.algorithms.methods.dapo import Dapo
from cotune.algorithms.methods.dart import Dart
from cotune.algorithms.methods.distill import Distill
from cotune.algorithms.methods.dr_grpo import DrGrpo
from cotune.algorithms.methods.dr_mas import DrMas
from cotune.algorithms.methods.gigpo import GiGpo
from cotune.algorithms.methods.grpo import Grpo
from cotune.algorithms.methods.gspo import Gspo
from cotune.algorithms.methods.m_grpo import MGrpo
from cotune.algorithms.methods.magrpo import MaGrpo
from cotune.algorithms.methods.maporl import MaPoRl
from cotune.algorithms.methods.marshal import Marshal
from cotune.algorithms.methods.mmedagent_rl import MMedAgentRl
from cotune.algorithms.methods.reinforce_pp import ReinforcePp
from cotune.algorithms.methods.reinforce_pp_baseline import ReinforcePpBaseline
from cotune.algorithms.methods.rloo import Rloo
from cotune.algorithms.methods.self_distill import SelfDistill
from cotune.algorithms.methods.self_redteam import SelfRedTeam
from cotune.algorithms.methods.spiral import Spiral
from cotune.algorithms.recipes import Attribution, Filters, LossSpec
from cotune.algorithms.samples import Floats, Sample
from cotune.algorithms.step import Step

__all__ = [
    "C3", "AdvantageAlignment", "AfmRl", "AtGrpo", "Attribution", "C3Branches", "Cispo", "CoMas", "Cory", "CpMobius",
    "Dapo", "Dart", "Distill", "DrGrpo", "DrMas", "Filters", "Floats", "GiGpo", "Grpo", "Gspo", "LossSpec", "MGrpo",
    "MMedAgentRl", "MaGrpo", "MaPoRl", "Marshal", "Method", "ReinforcePp", "ReinforcePpBaseline", "Rloo", "Sample",
    "SelfDistill", "SelfRedTeam", "Spiral", "Step", "above", "all_equal", "centred", "leave_one_out",
    "standardized",
]  # fmt: skip
