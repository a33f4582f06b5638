"""cotune: train the agents you already have."""

from cotune.context import role
from cotune.errors import CotuneError

__all__ = ["CotuneError", "role"]
