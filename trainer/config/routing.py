"""Which policy, at which version, plays a role: where it changes over the steps of training."""

from __future__ import annotations

from cotune.errors import ConfigError, check_bounds
from cotune.storage.run_config import RunRouting


class RoutingConfig(RunRouting, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[routing] Roles that change their policies during training. Evaluation and the export do not change them."""

    pool: int = 4
    """Earlier versions that are kept of each policy; one of them is drawn for each step."""
    pool_every: int = 1
    """Every so many versions one is kept."""

    def __post_init__(self) -> None:
        check_bounds(self, "swap_every", "pool", "pool_every", least=1, table="routing.")
        if len(self.swap) == 1 or len(set(self.swap)) < len(self.swap):
            raise ConfigError("routing.swap", list(self.swap), "is not two or more different roles")
        if both := sorted(set(self.swap) & set(self.past)):
            raise ConfigError("routing.past", both[0], "is in routing.swap too")
