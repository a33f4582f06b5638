"""FSDP on pretrained weights: what two workers learn is what one process learns."""

import numpy as np
import pytest

from cotune.algorithms.recipes import LossSpec
from cotune.records.policies import policies_for
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.fsdp_ranks import with_eps
from tests.trainer.learner.learner_rows import FAST, SMALL, make_rows, snapshot


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_workers_learn_what_one_process_does(smollm2, two_ranks):
    policies = policies_for("lora", ("a", "b"), SMALL)
    # With this epsilon steps follow the gradient, however small it is.
    local = with_eps(LocalLearner.open(str(smollm2), policies, FAST, LossSpec(ratio="none")), 1e-2)
    fsdp = with_eps(two_ranks.learner(str(smollm2), policies, FAST, LossSpec(ratio="none")), 1e-2)
    rows = make_rows(groups=2, k=2, response=(2, 4))
    start = snapshot(local, "a")
    metrics, divided = local.update("a", rows), fsdp.update("a", rows)
    assert metrics["steps"] == divided["steps"] == 1
    assert divided["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-3)
    found, expected = fsdp.weights("a"), local.weights("a")
    assert len(found) == 30 * 7 * 2
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-5, err_msg=name)
    assert max(np.abs(expected[name] - start[name]).max() for name in start) > 1e-4
