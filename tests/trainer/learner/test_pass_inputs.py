"""What the host prepares of a pass, ahead of it and in a thread of its own."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from cotune.trainer.learner.batching import pass_tokens
from cotune.trainer.learner.pass_inputs import prepare_pass, prepared_ahead
from tests.trainer.learner.learner_rows import make_rows


@pytest.mark.parametrize("shared", [False, True])
def test_a_pass_has_its_tokens_and_counts_them(shared):
    rows = make_rows()
    inputs = prepare_pass(rows, shared=shared, flex=False)
    assert inputs.targets.tolist() == [token for row in rows for token in row.response_ids]
    assert len(inputs.temperatures) == len(inputs.targets)
    assert inputs.computed == pass_tokens(rows, shared)
    if shared:
        sequence = np.concatenate([[*row.prompt_ids, *row.response_ids][len(row.prompt_ids) - 1 : -1] for row in rows])
        assert inputs.tree.tokens[inputs.places].tolist() == sequence.tolist()


def test_the_next_item_is_prepared_while_the_current_one_is_used():
    begun = [threading.Event() for _ in range(3)]

    def prepare(number):
        begun[number].set()
        return number, threading.current_thread().name

    for place, (number, thread) in enumerate(prepared_ahead(prepare, range(3))):
        assert number == place
        assert thread != threading.current_thread().name
        assert begun[min(place + 1, 2)].wait(10)
    assert list(prepared_ahead(prepare, [])) == []


def test_an_error_of_the_thread_is_raised_at_its_item():
    def prepare(number):
        return 1 / number

    items = prepared_ahead(prepare, [1, 2, 0])
    assert [next(items), next(items)] == [1, 0.5]
    with pytest.raises(ZeroDivisionError):
        next(items)
