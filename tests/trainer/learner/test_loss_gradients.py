"""Gradients of every recipe against a plain autograd reference: one row at a time, one token at a time, no batching."""

import copy
import math
from statistics import fmean

import msgspec
import pytest
import torch
from transformers import Qwen3ForCausalLM

from cotune.algorithms.catalogue import GENERAL, recipe
from cotune.records.policies import policies_for
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows

MASKS = {
    "no mask": {},
    "tokens": {"mask": "token", "mask_range": (0.4, 1.6)},
    "responses": {"mask": "sequence", "mask_range": (0.5, 2.0)},
    "means of responses": {"mask": "geometric", "mask_range": (0.8, 1.2)},
}
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def network(base):
    return Qwen3ForCausalLM.from_pretrained(base).eval()


@pytest.fixture(scope="module")
def rows(network):
    """Rows whose sampler disagrees by up to a factor of 2.2, some of whose tokens do not count."""
    found = []
    generator = torch.Generator().manual_seed(4)
    for number, row in enumerate(make_rows(groups=2, k=4, response=(1, 7))):
        with torch.no_grad():
            true = response_logprobs(network, row)
        gap = (torch.rand(len(true), generator=generator) - 0.5) * 1.6
        mask = tuple(bool(place % 3 != 1) for place in range(len(true))) if number % 2 else ()
        mask = (False,) * len(true) if number == 3 else mask
        fields = {"logprobs": tuple((true - gap).tolist()), "loss_mask": mask, "temperature": 0.8}
        fields["trajectory"] = f"e{number // 3}"
        found.append(msgspec.structs.replace(row, advantage=(0.7, -1.3, 0.4)[number % 3], **fields))
    return found


def response_logprobs(network, row):
    logits = network(torch.tensor([row.prompt_ids + row.response_ids])).logits[0] / row.temperature
    logp = logits.log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
    return logp[torch.arange(len(row.response_ids)), torch.tensor(row.response_ids)]


def reference(network, loss, rows, old_of, start_of):
    """Loss of one optimizer step, written out; `old_of` and `start_of` are the log-probabilities before the update and
    of the untrained policy, by row id."""
    kept = {}
    for row in rows:
        counts = list(row.loss_mask or [True] * len(row.response_ids))
        gaps = {t: (old_of[row.id][t] - row.logprobs[t]).item() for t, yes in enumerate(counts) if yes}
        low, high = loss.mask_bounds
        if loss.mask == "token":
            gaps = {t: gap for t, gap in gaps.items() if low <= math.exp(gap) <= high}
        elif loss.mask != "none" and gaps:
            whole = sum(gaps.values()) if loss.mask == "sequence" else fmean(gaps.values())
            gaps = gaps if low <= math.exp(whole) <= high else {}
        if gaps:
            kept[row.id] = sorted(gaps)
    tokens = sum(map(len, kept.values()))
    episodes = {}
    for row in rows:
        episodes[row.trajectory] = episodes.get(row.trajectory, 0) + len(kept.get(row.id, ()))
    trained = sum(size > 0 for size in episodes.values())
    total = 0.0
    for row in rows:
        if row.id not in kept:
            continue
        new, places = response_logprobs(network, row), kept[row.id]
        share = {
            "token_mean": 1 / tokens,
            "sequence_mean": 1 / (len(kept) * len(places)),
            "trajectory_mean": 1 / (trained * episodes[row.trajectory]),
            "constant": 1 / (len(kept) * loss.constant_length),
        }[loss.aggregation]
        base = [old_of[row.id][t].item() for t in places]
        changes = [new[t] - b for t, b in zip(places, base, strict=True)]
        gaps = [b - row.logprobs[t] for t, b in zip(places, base, strict=True)]
        if loss.ratio == "sequence":
            changes, gaps = [sum(changes) / len(places)] * len(places), [fmean(gaps)] * len(places)
        for t, change_, gap in zip(places, changes, gaps, strict=True):
            if loss.ratio == "none":
                weight = min(math.exp(new[t].item() - row.logprobs[t]), loss.tis_cap)
                total = total - share * weight * row.advantage * new[t]
                continue
            ratio, low, high = change_.exp(), 1 - loss.clip_low, 1 + loss.clip_high
            advantage = row.advantage
            if loss.kl and loss.kl_in == "reward":
                advantage -= loss.kl * (old_of[row.id][t] - start_of[row.id][t]).item()
            weight = min(math.exp(gap), loss.tis_cap)
            if loss.style == "cispo":
                gain = ratio.detach().clamp(low, high) * advantage * new[t]
            else:
                gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
                if loss.dual_clip and advantage < 0:
                    gain = torch.maximum(gain, torch.tensor(loss.dual_clip * advantage))
            if loss.kl and loss.kl_in == "loss":
                away = start_of[row.id][t] - new[t]
                gain = gain - loss.kl * (away.exp() - away - 1)
            total = total - share * weight * gain
    return total


def found_gradients(learner):
    """Of each optimizer step of the next update."""
    steps = []
    parameters = learner._policies["a"].parameters()
    learner._optimizers["a"].step = lambda: steps.append({n: p.grad.clone() for n, p in parameters.items()})
    learner._gradient_checks["a"].pending.clear()
    return steps


def nudge(model):
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(dict(model.named_parameters()).items())):
            parameter += 0.02 * torch.sin(torch.arange(parameter.numel()) + number).view_as(parameter)


def losses():
    for name in (*(method.name for method in GENERAL), "spiral"):
        for mask, fields in MASKS.items():
            # One recipe by tokens and one by sequences have every mask.
            marks = pytest.mark.long if fields and name not in ("at_grpo", "gspo") else ()
            yield pytest.param(name, fields, id=f"{name}, {mask}", marks=marks)
    yield pytest.param("at_grpo", {"dual_clip": 1.2}, id="dual clip")
    yield pytest.param("grpo", {"aggregation": "sequence_mean"}, id="each call alike")
    for kl_in in ("loss", "reward"):
        yield pytest.param("grpo", {"kl": 0.2, "kl_in": kl_in, "mask": "token"}, id=f"KL in the {kl_in}")


@pytest.mark.parametrize(("name", "fields"), losses())
def test_gradients_are_those_of_plain_autograd(base, network, rows, monkeypatch, name, fields):
    """Of a second optimizer step too, whose weights are no longer those before the update."""
    loss = msgspec.structs.replace(recipe(name).loss, **fields, constant_length=7)
    settings = change(FAST, grad_clip=0.0, micro_batch_tokens=60)
    learner = LocalLearner.open(base, policies_for("full", ["a"], SMALL), settings, loss)
    steps = found_gradients(learner)
    moved = copy.deepcopy(network)
    start = {row.id: response_logprobs(network, row).detach() for row in rows}
    if loss.kl:  # the policy has gone from the untrained one before the update
        nudge(learner._policies["a"].network)
        nudge(moved)
    old = {row.id: response_logprobs(moved, row).detach() for row in rows}

    first = learner._optimizers["a"].step

    def step():
        first()
        nudge(learner._policies["a"].network)

    learner._optimizers["a"].step = step
    copies = [msgspec.structs.replace(row, id=f"{row.id} again", trajectory=f"{row.trajectory} again") for row in rows]
    halves = [range(len(rows)), range(len(rows), 2 * len(rows))]
    monkeypatch.setattr("cotune.trainer.learner.local.mini_batches", lambda *arguments: halves)
    metrics = learner.update("a", [*rows, *copies])
    assert len(steps) == metrics["steps"] == 2
    assert (metrics["masked_share"] > 0) == bool(fields.get("mask"))
    for number, found in enumerate(steps):
        moved.zero_grad()
        reference(moved, loss, rows, old, start).backward()
        expected = {n: p.grad for n, p in moved.named_parameters()}
        scale = max(g.abs().max().item() for g in expected.values())
        assert scale > 1e-3
        apart = max((found[n] - g).abs().max().item() for n, g in expected.items())
        assert apart <= TOLERANCE * max(scale, 1.0), number
        nudge(moved)
