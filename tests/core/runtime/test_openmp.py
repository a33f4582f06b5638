"""How long threads spin is set where nobody has."""

from __future__ import annotations

import pytest

from cotune.runtime.openmp import SPINS, spin_briefly


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": str(SPINS)}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_what_is_set_stays(before: dict[str, str], after: dict[str, str]) -> None:
    spin_briefly(before)
    assert before == after
