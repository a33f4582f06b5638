"""FSDP on Ray actors: equal to the local learner, checkpoints for any number of workers, and lost workers."""

import asyncio
import os
import signal
import socket
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import ray
import torch

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.from_records import FROM_RECORDS
from cotune.algorithms.recipes import LossSpec
from cotune.errors import ConfigError, LearnerError, LearnerLost, RunError
from cotune.integrations.cluster import worker_group
from cotune.integrations.cluster.weight_transfer import LearnerWeights, Receiver
from cotune.records.policies import LoraSpec, Policies, PolicySpec, policies_for
from cotune.sampling.protocol import fingerprint, weights_norm
from cotune.trainer.learner.batching import passes_of_rank, rank_parts
from cotune.trainer.learner.fsdp.worker import pack_rows
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.records.objectives import PreferenceLearner
from tests.integrations.cluster.group_worker import alive
from tests.trainer.learner.fsdp_ranks import TIMEOUT, open_learner, with_eps
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows, on_policy, same, snapshot

pytestmark = pytest.mark.slow

BOTH = Policies(
    {"lora": PolicySpec(name="lora", lora=SMALL), "full": PolicySpec(name="full", kind="full")},
    {"a": "lora", "b": "full"},
)
FINE = change(FAST, lr=1e-3)
"""With the epsilon of `with_eps`: steps that do not blow rounding up where a gradient is nearly zero."""

AS_GRADIENT = change(FAST, lr=1.0, grad_clip=0.0)
"""With an epsilon of 1 the first step is -g / (|g| + 1), from which g is read."""


def apart(one, other):
    assert one.keys() == other.keys()
    return max(np.abs(one[name] - other[name]).max() for name in one)


def gradients(learner, policy, rows):
    start = snapshot(learner, policy)
    metrics = learner.update(policy, rows)
    steps = {name: start[name] - array for name, array in learner.weights(policy).items()}
    return {name: step / (1 - np.abs(step)) for name, step in steps.items()}, metrics


# -- who computes which rows


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("shared", [True, False])
def test_every_row_is_computed_once_and_ranks_pass_equally_often(size, shared):
    rows = make_rows(groups=5, k=3)
    indices = [0, 2, 3, 4, 7, 8, 9, 10, 12, 13, 14]
    found = [passes_of_rank(rows, indices, 40, shared=shared, rank=rank, size=size) for rank in range(size)]
    assert len({len(micros) for micros in found}) == 1
    assert sorted(i for micros in found for micro in micros for i in micro) == indices


def test_parts_are_of_like_size_and_keep_prompts_together_where_they_can():
    rows = make_rows(groups=4, k=4, prompt=(8, 8), response=(2, 3))
    parts = rank_parts(rows, range(16), 2, shared=True)
    assert sorted(map(len, parts)) == [8, 8]
    assert all(len({rows[i].prompt_ids for i in part}) == 2 for part in parts)
    alone = make_rows(groups=1, k=9, prompt=(2, 2), response=(6, 6))
    assert [len(part) for part in rank_parts(alone, range(9), 3, shared=True)] == [3, 3, 3]
    assert sorted(map(len, rank_parts(alone, range(1), 3, shared=True))) == [0, 0, 1]


# -- full weights for engines


def test_full_weights_are_read_and_sent_from_rank_0_also_after_an_update(base, two_ranks):
    learner = two_ranks.learner(base, policies_for("full", ["a"], SMALL), FAST, LossSpec())
    start = snapshot(LocalLearner.open(base, policies_for("full", ["a"], SMALL), FAST, LossSpec()), "a")
    weights = learner.weights("a")
    assert isinstance(weights, LearnerWeights)
    assert (fingerprint(weights), weights_norm(weights)) == (fingerprint(start), weights_norm(start))
    learner.update("a", make_rows())
    assert fingerprint(learner.weights("a")) != weights.fingerprint

    # The rank sends and Ray returns the old version, as an engine needs it that restarts meanwhile.
    assert same(dict(weights), start)
    ticket = weights.ticket(1, "cpu")
    sending = weights.send(ticket)
    receiver = Receiver(ticket, 1, torch.device("cpu"))
    assert same({name: tensor.numpy() for name, tensor in receiver.tensors()}, start)
    assert receiver.fingerprint() == weights.fingerprint
    assert ray.get(sending) is None


# -- equal to the local learner

CASES = {
    "an odd number of rows, token mean": (make_rows()[:-1], FAST, LossSpec()),
    "sequence mean": (make_rows(groups=2, k=3), FAST, LossSpec(aggregation="sequence_mean")),
    "constant": (make_rows(seed=2), FAST, LossSpec(aggregation="constant", constant_length=9)),
    "fewer rows than workers": (make_rows(groups=1, k=1), FAST, LossSpec(ratio="none")),
    "all responses of one token on one worker": (
        [*make_rows(groups=1, response=(1, 1), prompt=(9, 9)), *make_rows(groups=1, seed=5)],
        FAST,
        LossSpec(),
    ),
    "many passes, all terms, no shared prompts": (
        make_rows(groups=4, seed=3),
        change(FAST, micro_batch_tokens=20, shared_prompts=False),
        LossSpec(kl=0.1, entropy=0.05),
    ),
    "many passes, all terms": (
        make_rows(groups=4, seed=3),
        change(FAST, micro_batch_tokens=30),
        msgspec.structs.replace(recipe("gspo").loss, kl=0.1, entropy=0.05),
    ),
    "activation checkpointing": (make_rows(), change(FAST, activation_checkpointing=True), LossSpec()),
}


LONG = ("sequence mean", "constant", "many passes, all terms, no shared prompts")
"""Workers aggregate with the local learner's own code, and pass several times with shared prompts in another case."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case in LONG else case for case in CASES]
)
def test_gradients_and_metrics_of_two_workers_are_the_local_ones(base, two_ranks, case):
    rows, settings, loss = CASES[case]
    settings = change(settings, lr=AS_GRADIENT.lr, grad_clip=0.0)
    local = with_eps(LocalLearner.open(base, BOTH, settings, loss), 1.0)
    fsdp = with_eps(two_ranks.learner(base, BOTH, settings, loss), 1.0)
    for policy in ("lora", "full"):
        for _ in range(2 if policy == "lora" else 1):  # A of a LoRA has no gradient before the second step
            assert apart(local.weights(policy), fsdp.weights(policy)) < 1e-5
            expected, metrics = gradients(local, policy, rows)
            found, divided = gradients(fsdp, policy, rows)
            assert max(np.abs(g).max() for g in expected.values()) > 1e-2
            assert apart(expected, found) < 1e-5
            assert metrics.keys() == divided.keys()
            assert divided["computed_tokens"] >= metrics["computed_tokens"]  # each worker computes what its rows share
            for name in metrics.keys() - {"seconds", "computed_tokens"}:
                assert divided[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("layout", ["lora", pytest.param("full", marks=pytest.mark.long)])
def test_weights_stay_equal_over_many_steps(base, two_ranks, layout):
    settings = change(FINE, mini_batch=2, micro_batch_tokens=60)
    policies = policies_for(layout, ("a", "b"), SMALL)
    local = with_eps(LocalLearner.open(base, policies, settings, LossSpec()))
    fsdp = with_eps(two_ranks.learner(base, policies, settings, LossSpec()))
    rows = on_policy(local, "a", make_rows())[1:]
    for policy in ("a", "b"):
        metrics, divided = local.update(policy, rows, lr_scale=0.5), fsdp.update(policy, rows, lr_scale=0.5)
        assert metrics["steps"] == divided["steps"] > 4
        assert divided["ratio_max"] == pytest.approx(metrics["ratio_max"], abs=1e-5)
        assert apart(local.weights(policy), fsdp.weights(policy)) < 1e-5
        for one, other in zip(local.logprobs(policy, rows), fsdp.logprobs(policy, rows), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_pairs_of_answers_move_the_weights_as_in_one_process(base, two_ranks, tmp_path):
    rows, loss = make_rows(groups=6, k=2), FROM_RECORDS["dpo"]
    learners = [with_eps(make(base, BOTH, FINE, loss)) for make in (LocalLearner.open, two_ranks.learner)]
    figures = []
    for number, learner in enumerate(learners):
        preferring = PreferenceLearner(learner, pairs=3)
        preferring.start(lambda: {"lora": rows}, tmp_path / f"{number}.json")
        figures.append([preferring.update("lora", rows) for _ in range(2)])
    for one, other in zip(*figures, strict=True):
        for name in ("loss", "margin", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5)
    assert figures[0][1]["loss"] < figures[0][0]["loss"]
    assert apart(learners[0].weights("lora"), learners[1].weights("lora")) < 1e-5


def test_mixed_precision_is_near_single_precision(base, two_ranks):
    rows = make_rows()
    norms = {}
    for dtype in ("float32", "bfloat16"):
        learner = with_eps(two_ranks.learner(base, BOTH, change(FINE, dtype=dtype), LossSpec()))
        norms[dtype] = [learner.update(policy, rows)["grad_norm"] for policy in ("lora", "full")]
        assert all(array.dtype == np.float32 for array in learner.weights("full").values())
    assert norms["bfloat16"] == pytest.approx(norms["float32"], rel=0.05)
    assert norms["bfloat16"] != norms["float32"]


def test_each_worker_holds_a_part_of_the_weights(base, two_ranks):
    two_ranks.learner(base, BOTH, FAST, LossSpec())
    for policy in ("lora", "full"):
        assert two_ranks.group.call("share", policy, timeout=TIMEOUT) == pytest.approx(0.5, abs=0.02)


def test_gradients_are_exchanged_in_the_last_pass_only(base, two_ranks):
    exchanged = {}
    for budget in (10_000, 1):
        settings = change(FAST, micro_batch_tokens=budget, shared_prompts=False)
        two_ranks.learner(base, BOTH, settings, LossSpec())
        rows = pack_rows(make_rows())
        exchanged[budget] = two_ranks.group.call("update_counted", "full", rows, timeout=TIMEOUT)
    assert exchanged == {10_000: 3, 1: 3}  # two layers, and all that is outside of them


# -- checkpoints


def trained(learner, folder):
    """Save after an update of both policies; returns what the weights are then, and after one update more."""
    for policy in ("lora", "full"):
        learner.update(policy, make_rows())
    learner.save(folder)
    at_save = {policy: snapshot(learner, policy) for policy in ("lora", "full")}
    return at_save, updated(learner)


def updated(learner):
    for policy in ("lora", "full"):
        learner.update(policy, make_rows(seed=8))
    return {policy: snapshot(learner, policy) for policy in ("lora", "full")}


@pytest.mark.usefixtures("ray_runtime")
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("local", "two"),
        ("two", "local"),
        pytest.param("two", "one", marks=pytest.mark.long),
        pytest.param("one", "two", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_goes_on_with_another_number_of_workers(base, request, tmp_path, writer, reader):
    def opened(kind, seed):
        ranks = {"one": "one_rank", "two": "two_ranks"}
        open_one = LocalLearner.open if kind == "local" else request.getfixturevalue(ranks[kind]).learner
        return with_eps(open_one(base, BOTH, change(FINE, mini_batch=6), LossSpec(), seed=seed))

    at_save, then = trained(opened(writer, seed=0), tmp_path)
    learner = opened(reader, seed=99)  # other start and order, overwritten by load
    learner.load(tmp_path)
    assert all(same(at_save[policy], learner.weights(policy)) for policy in at_save)
    found = updated(learner)
    assert all(apart(then[policy], found[policy]) < 1e-5 for policy in then)


def test_optimizer_states_are_written_in_parts_and_a_missing_part_is_noticed(base, two_ranks, tmp_path):
    learner = two_ranks.learner(base, BOTH, FAST, LossSpec())
    trained(learner, tmp_path)
    parts = sorted((tmp_path / "1.optimizer").glob("*.safetensors"))
    assert len(parts) == 2
    assert parts[0].stat().st_size == pytest.approx(parts[1].stat().st_size, rel=0.1)
    parts[1].unlink()
    with pytest.raises(RunError, match="Use another checkpoint"):
        learner.load(tmp_path)
    learner.update("full", make_rows())  # the workers are well


# -- errors


def test_errors_of_all_workers_arrive_as_themselves(base, two_ranks):
    learner = two_ranks.learner(base, BOTH, FAST, LossSpec())
    before = snapshot(learner, "full")
    with pytest.raises(LearnerError, match="No gradient of this update"):
        learner.update("full", [msgspec.structs.replace(row, advantage=1e38) for row in make_rows()])
    assert same(before, learner.weights("full"))
    with pytest.raises(ConfigError, match=r"lora\.targets") as caught:
        two_ranks.learner(base, policies_for("lora", ["a"], LoraSpec(targets=("nowhere",))), FAST, LossSpec())
    assert caught.value.field == "lora.targets"
    two_ranks.learner(base, BOTH, FAST, LossSpec()).update("full", make_rows())


@pytest.mark.usefixtures("ray_runtime")
def test_what_the_cluster_has_no_room_for_is_said_at_once(base):
    started = time.monotonic()
    for extra in ({"learners": 1000}, {"gpus_per_learner": 1}):
        with pytest.raises(ConfigError, match=r"cluster\.learners"):
            open_learner(base, BOTH, FAST, LossSpec(), **extra)
    assert time.monotonic() - started < 60
    assert "CPU" in ray.available_resources()


# -- lost workers


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    """A checkpoint after one update of both policies."""
    folder = tmp_path_factory.mktemp("saved")
    trained(with_eps(LocalLearner.open(base, BOTH, FINE, LossSpec())), folder)
    return folder


@pytest.fixture(scope="module")
def opened(base, ray_runtime):
    """Opens learners on workers of their own, and closes them in the end."""
    learners = []

    def open_one(**cluster):
        learners.append(with_eps(open_learner(base, BOTH, FINE, LossSpec(), **cluster)))
        return learners[-1]

    yield open_one
    for learner in learners:
        asyncio.run(learner.aclose())


def goes_on_as_a_local_one(learner, base, saved):
    """Both are loaded from the checkpoint and updated; returns the local one."""
    learner.load(saved)
    local = with_eps(LocalLearner.open(base, BOTH, FINE, LossSpec()))
    local.load(saved)
    one, other = updated(local), updated(learner)
    assert all(apart(one[policy], other[policy]) < 1e-5 for policy in one)
    return local


def slow_update(learner):
    """Runs an update of some minutes in a thread; returns its error and when it came."""
    found = []

    def work():
        try:
            learner.update("lora", make_rows(groups=400, k=4))
        except LearnerError as error:
            found.append((error, time.monotonic()))

    thread = threading.Thread(target=work)
    thread.start()
    return thread, found


@pytest.mark.long  # `test_worker_group.py` kills a rank, `test_cluster.py` of the runs those of a learner
def test_a_worker_that_is_killed_is_named_and_the_others_do_not_hang(opened, base):
    learner = opened(learners=2)
    learner._ranks.call("open", base, BOTH, change(FINE, micro_batch_tokens=1), LossSpec())
    first, second = learner._ranks.workers.processes
    thread, found = slow_update(learner)
    time.sleep(2.0)
    assert thread.is_alive()
    killed = time.monotonic()
    os.kill(second, signal.SIGKILL)
    thread.join(60)
    (error, when), *_ = found
    assert isinstance(error, LearnerLost)
    assert f"Rank 1 of the learners (process {second} " in str(error)
    assert "died" in str(error) and "'update'" in str(error)
    assert when - killed < 50
    assert not alive(first)
    with pytest.raises(LearnerLost):  # it stays lost; a new one goes on
        learner.weights("lora")
    asyncio.run(learner.aclose())


@pytest.mark.long  # a rank that hangs is named in the same way
def test_a_worker_that_is_stopped_is_named_and_the_others_do_not_hang(opened, saved, base, monkeypatch):
    learner = opened(learners=2)
    goes_on_as_a_local_one(learner, base, saved)
    monkeypatch.setattr(worker_group, "PROBE_SECONDS", 2.0)
    processes = learner._ranks.workers.processes
    learner._ranks._timeout = 5.0
    os.kill(processes[1], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(LearnerLost, match=rf"within 5 s: Rank 1 .*process {processes[1]} .*does not answer; Rank 0 .*"):
        learner.update("full", make_rows())
    assert time.monotonic() - started < 45
    assert not any(alive(pid) for pid in processes)


def test_a_rank_that_hangs_is_named_with_its_place_and_closing_leaves_nothing(opened, saved, base):
    before = ray.available_resources().get("CPU", 0)
    learner = opened(learners=1)
    goes_on_as_a_local_one(learner, base, saved)
    kept = learner._ranks.workers.processes
    ports = [port for pid in kept for port in listening(pid) - listening(parent(pid))]
    assert ports
    learner._ranks._timeout = 10.0
    with pytest.raises(LearnerLost, match=r"Rank 0 of the learners .* is in hang \(fsdp_ranks\.py:\d+\)"):
        learner._ranks.call("hang", 0)
    asyncio.run(learner.aclose())
    asyncio.run(learner.aclose())
    assert not any(alive(pid) for pid in kept)
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] >= before  # another learner's may be told of only now
    with pytest.raises(LearnerError):
        learner.weights("full")


def parent(pid):
    """The process that started it, whose sockets it may have inherited."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def listening(pid):
    """Ports that a process listens on."""
    sockets = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found
