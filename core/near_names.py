"""Suggest known names that are similar to a mistyped one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches


def near_names(name: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.6) -> list[str]:
    """The known names that are similar to `name`, the most similar first."""
    return get_close_matches(name, list(known), n=most, cutoff=cutoff)


def did_you_mean(names: Sequence[str]) -> str:
    """A question that suggests these names, for the start of a remedy; empty without names."""
    return f"Did you mean {' or '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}?" if names else ""


def check_arguments(names: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for the name of a keyword argument that is not among the `known` ones."""
    for name in names:
        if name not in known:
            raise TypeError(f"Unknown argument {name!r}. {did_you_mean(near_names(name, known))}".rstrip())
