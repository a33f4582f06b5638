"""Which policy plays a role, where it changes over the steps of training."""

from __future__ import annotations

from cotune.errors import ConfigError, check_bounds
from cotune.storage.run_config import RunRouting


class RoutingConfig(RunRouting, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[routing] Roles that change their policies during training. Evaluation and the export do not change them."""

    def __post_init__(self) -> None:
        check_bounds(self, "swap_every", least=1, table="routing.")
        if len(self.swap) == 1 or len(set(self.swap)) < len(self.swap):
            raise ConfigError("routing.swap", list(self.swap), "is not two or more different roles")
