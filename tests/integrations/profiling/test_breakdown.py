"""The seconds of a step, added up by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotune.integrations.profiling.spans import PARTS, ProfileRow, Span, breakdown


def test_each_moment_counts_once():
    whole = Span("step 1", 0.0, 20.0)
    phases = [Span("rollout", 1.0, 11.0), Span("update", 11.0, 16.0), Span("checkpoint", 16.0, 17.0)]
    parts = [
        Span("application", 1.0, 6.0),
        Span("application", 2.0, 10.0),
        Span("answering", 2.0, 6.0),
        Span("prefill", 2.5, 3.5),
        Span("decode", 3.5, 5.0),
        Span("scorers", 4.5, 5.5),
        Span("backward", 9.0, 9.5),  # of another update
        Span("forward", 10.0, 12.0),
        Span("backward", 12.0, 15.5),
    ]
    assert breakdown(whole, phases, parts) == (
        ProfileRow("rollout", "prefill", 1.0, 1.0),
        ProfileRow("rollout", "decode", 1.5, 1.5),
        ProfileRow("rollout", "scorers", 0.5, 1.0),
        ProfileRow("rollout", "answering", 1.0, 4.0),
        ProfileRow("rollout", "application", 5.0, 9.0),
        ProfileRow("rollout", "other", 1.0, 1.0),
        ProfileRow("update", "forward", 1.0, 1.0),
        ProfileRow("update", "backward", 3.5, 3.5),
        ProfileRow("update", "other", 0.5, 0.5),
        ProfileRow("checkpoint", "", 1.0, 1.0),
        ProfileRow("other", "", 4.0, 4.0),
    )


_TIMES = st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted)


@given(st.lists(st.tuples(st.sampled_from(sorted({p for parts in PARTS.values() for p in parts})), _TIMES)))
def test_rows_add_up_to_the_step(spans):
    whole = Span("step 1", 0.0, 100.0)
    phases = [Span("rollout", 5.0, 40.0), Span("update", 40.0, 70.0), Span("publish", 70.0, 90.0)]
    rows = breakdown(whole, phases, [Span(name, float(a), float(b)) for name, (a, b) in spans])
    assert sum(row.seconds for row in rows) == 100.0
    assert all(0.0 <= row.seconds <= row.busy for row in rows)
