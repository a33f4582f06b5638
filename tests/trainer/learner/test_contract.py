"""What every learner promises, on a real (tiny, untrained) Qwen3: in this process, and divided over two workers.

The workers hold one learner at a time, so a test that opens another is done with the one before.
"""

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError, GroupError, LearnerError, RunError
from cotune.records.policies import LoraSpec, Policies, PolicySpec, policies_for
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.update_tokens import UpdateTokens
from tests.integrations import tiny_models
from tests.trainer.learner.forced import ForcedSettings
from tests.trainer.learner.fsdp_ranks import with_eps
from tests.trainer.learner.learner_rows import FAST, SMALL, VOCABULARY, change, make_rows, on_policy, same, snapshot

pytestmark = pytest.mark.slow


class Opener:
    """Opens learners of one kind."""

    def __init__(self, open_policies):
        self.policies = open_policies

    def __call__(self, base, layout="lora", settings=FAST, loss=None, roles=("a", "b"), seed=0):
        return self.policies(base, policies_for(layout, roles, SMALL), settings, loss or LossSpec(), seed=seed)


@pytest.fixture(params=["local", "fsdp"])
def opened(request):
    if request.param == "local":
        return Opener(LocalLearner.open)
    return Opener(request.getfixturevalue("two_ranks").learner)


maths = pytest.mark.parametrize("opened", ["local"], indirect=True)
"""What a loss is worth is checked in one process; `test_fsdp` compares losses and gradients of two workers with it."""

long_on_workers = pytest.mark.parametrize(
    "opened", ["local", pytest.param("fsdp", marks=pytest.mark.long)], indirect=True
)
"""For settings and checks that workers apply with the local learner's own code."""

full_is_long_on_workers = pytest.mark.parametrize(
    ("opened", "layout"),
    [("local", "lora"), ("local", "full"), ("fsdp", "lora"), pytest.param("fsdp", "full", marks=pytest.mark.long)],
    indirect=["opened"],
)
"""`test_fsdp.py` saves and restores full weights on workers."""


def test_logprobs_are_those_of_the_model_at_the_rows_temperature(opened, base):
    rows = make_rows(temperature=0.7) + make_rows(seed=1, temperature=1.3)
    network = Qwen3ForCausalLM.from_pretrained(base).eval()
    found = opened(base).logprobs("a", rows)
    for row, values in zip(rows, found, strict=True):
        with torch.no_grad():
            logits = network(torch.tensor([row.prompt_ids + row.response_ids])).logits[0] / row.temperature
        logp = logits.log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
        expected = logp.gather(1, torch.tensor(row.response_ids)[:, None]).squeeze(1)
        np.testing.assert_allclose(values, expected.numpy(), atol=2e-5)
        assert values.dtype == np.float32


def test_logprobs_are_those_of_the_grammar_and_the_biases_that_a_row_was_drawn_under(opened, tmp_path):
    network = tiny_models.build("qwen3", tmp_path / "base")
    tokenizer = tiny_models.tokenizer()
    grammar, bias = 'start: /[a-f]{2}/ "." /[0-9]/', ((tokenizer.convert_tokens_to_ids("c"), 2.5), (9, -100.0))
    ids = [tuple(tokenizer.encode(text)) for text in ("ab.7<|im_end|>", "cc.0<|im_end|>", "free text")]
    rows = [
        TrainRow(
            id=str(i), role="a", prompt_ids=(8, 9), response_ids=reply, logprobs=(0.0,) * len(reply), advantage=1.0 - i,
            temperature=0.8, grammar=grammar if i < 2 else "", logit_bias=bias if i else (),
        )
        for i, reply in enumerate(ids)
    ]  # fmt: skip
    letters, point, digits, end = (
        [*map(tokenizer.convert_tokens_to_ids, some)] for some in ("abcdef", ".", "0123456789", ["<|im_end|>"])
    )
    allowed = [letters, letters, point, digits, end]
    found = opened(str(tmp_path / "base")).logprobs("a", rows)
    for row, values in zip(rows, found, strict=True):
        with torch.no_grad():
            logits = network(torch.tensor([row.prompt_ids + row.response_ids])).logits[0, 1:-1]
        for token, value in row.logit_bias:
            logits[:, token] += value
        for at, tokens in enumerate(allowed if row.grammar else ()):
            kept = logits[at, tokens].clone()
            logits[at] = -torch.inf
            logits[at, tokens] = kept
        expected = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(row.response_ids)[:, None]).squeeze(1)
        np.testing.assert_allclose(values, expected.numpy(), atol=2e-5)


def test_ids_of_a_padded_vocabulary_have_no_probability(opened, tmp_path):
    network = tiny_models.build("qwen3", tmp_path / "base", padding=60)
    tokens = len(tiny_models.tokenizer())
    rows = [change(row, temperature=0.8) for row in make_rows(groups=1)]
    rows[1] = change(rows[1], logit_bias=((9, 3.0),))
    learner = opened(str(tmp_path / "base"))
    for row, values in zip(rows, learner.logprobs("a", rows), strict=True):
        with torch.no_grad():
            logits = network(torch.tensor([row.prompt_ids + row.response_ids])).logits[0, len(row.prompt_ids) - 1 : -1]
        for token, value in row.logit_bias:
            logits[:, token] += value
        expected = (logits[:, :tokens] / 0.8).log_softmax(-1).gather(1, torch.tensor(row.response_ids)[:, None])
        np.testing.assert_allclose(values, expected.squeeze(1).numpy(), atol=2e-5)
    with pytest.raises(LearnerError, match=f"has the token {tokens}, which the tokenizer"):
        learner.logprobs("a", [change(rows[0], response_ids=(5, tokens), logprobs=(-1.0, -1.0))])


@long_on_workers
def test_gradients_do_not_depend_on_the_micro_batches(opened, base):
    rows = make_rows(groups=2)
    found = []
    for budget in (1, 40, 10_000):
        learner = opened(base, "shared", change(FAST, micro_batch_tokens=budget), LossSpec(aggregation="sequence_mean"))
        metrics = learner.update("shared", rows)
        found.append((metrics["loss"], metrics["grad_norm"], metrics["entropy"]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


@long_on_workers
@pytest.mark.parametrize("layout", ["shared", "lora", "full"])
def test_an_update_raises_good_answers_and_lowers_bad_ones(opened, base, layout):
    learner = opened(base, layout)
    policy = "shared" if layout == "shared" else "a"
    rows = on_policy(learner, policy, make_rows())
    before = learner.logprobs(policy, rows)
    metrics = learner.update(policy, rows)
    gain = [float((n - o).mean()) for n, o in zip(learner.logprobs(policy, rows), before, strict=True)]
    assert np.mean([g for g, row in zip(gain, rows, strict=True) if row.advantage > 0]) > 0
    assert np.mean([g for g, row in zip(gain, rows, strict=True) if row.advantage < 0]) < 0
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["sampler_gap_max"] < 1e-4
    assert metrics["clip_share"] == metrics["tis_clipped_share"] == 0.0
    assert metrics["tokens"] == sum(len(row.response_ids) for row in rows)
    assert (metrics["rows"], metrics["steps"], metrics["skipped_steps"]) == (12, 1, 0)
    assert metrics["grad_norm"] > 0
    assert metrics["seconds"] > 0
    assert 0 < metrics["entropy"] < np.log(VOCABULARY)


@maths
def test_loss_of_the_first_step_is_worked_out_by_hand(opened, base):
    # ratio 1 everywhere, so the loss is minus the token mean of the advantages
    learner = opened(base)
    rows = on_policy(learner, "a", make_rows())
    lengths = [len(row.response_ids) for row in rows]
    expected = -sum(n * row.advantage for n, row in zip(lengths, rows, strict=True)) / sum(lengths)
    assert learner.update("a", rows)["loss"] == pytest.approx(expected, abs=1e-4)


@long_on_workers
def test_mini_batches_are_optimizer_steps(opened, base):
    learner = opened(base, settings=change(FAST, mini_batch=4))
    metrics = learner.update("a", on_policy(learner, "a", make_rows(groups=3, k=4)))
    assert metrics["steps"] == 3
    assert metrics["ratio_max"] > 1.0


@long_on_workers
def test_rows_without_an_advantage_move_nothing_also_by_momentum(opened, base):
    learner = opened(base, settings=change(FAST, mini_batch=4))
    rows = on_policy(learner, "a", make_rows(groups=2, k=4))
    assert learner.update("a", rows)["idle_steps"] == 0.0
    before = snapshot(learner, "a")
    metrics = learner.update("a", [msgspec.structs.replace(row, advantage=0.0) for row in rows])
    assert (metrics["steps"], metrics["idle_steps"], metrics["grad_norm"]) == (2.0, 2.0, 0.0)
    assert same(before, snapshot(learner, "a"))


@long_on_workers
def test_mini_batches_without_an_advantage_do_not_lower_the_gradient_norm(opened, base):
    still = change(FAST, mini_batch=1, lr=1e-6)  # no ratio leaves its bounds, which would end its gradient
    learner = opened(base, settings=still)
    rows = on_policy(learner, "a", make_rows(groups=3, k=4))
    silent = [msgspec.structs.replace(row, id=f"silent {row.id}", advantage=0.0) for row in rows]
    alone = learner.update("a", rows)
    both = opened(base, settings=still).update("a", [*rows, *silent])
    assert both["idle_steps"] == len(silent)
    assert both["grad_norm"] == pytest.approx(alone["grad_norm"], rel=0.3)


def test_what_the_first_pass_saw_of_each_token_is_told(opened, base):
    learner = opened(base, settings=change(FAST, mini_batch=1, micro_batch_tokens=64))
    rows = on_policy(learner, "a", make_rows(temperature=0.7))
    rows[0] = msgspec.structs.replace(rows[0], advantage=0.0)
    shifted = [msgspec.structs.replace(row, logprobs=tuple(p - 0.25 for p in row.logprobs)) for row in rows]
    network = Qwen3ForCausalLM.from_pretrained(base).eval()
    learner.update("a", shifted, lr_scale=1e-6)  # so small a step that later passes see the same
    seen = learner.seen("a")
    assert seen.keys() == {row.id for row in rows[1:]}
    for row in rows[1:]:
        with torch.no_grad():
            logits = network(torch.tensor([row.prompt_ids + row.response_ids])).logits[0] / row.temperature
        p = logits[len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        np.testing.assert_allclose(seen[row.id].gaps, 0.25, atol=2e-3)
        np.testing.assert_allclose(seen[row.id].entropies, -(p.exp() * p).sum(-1), atol=5e-3)
    assert learner.seen("b") == {}


@maths
def test_the_figures_of_a_row_are_added_once(opened, base, monkeypatch):
    noted = []
    monkeypatch.setattr(UpdateTokens, "add_figures", lambda tokens, rows, own: noted.extend(rows))
    opened(base, settings=change(FAST, mini_batch=4)).update("a", make_rows())
    assert sorted(noted) == list(range(12))


@long_on_workers
def test_learning_rate_scale_and_defaults(opened, base):
    rows = make_rows()
    learner = opened(base, settings=ForcedSettings(device="cpu"))
    before = snapshot(learner, "a")
    assert learner.update("a", rows, lr_scale=0.0)["lr"] == 0.0
    assert same(before, snapshot(learner, "a"))
    assert learner.update("a", rows, lr_scale=0.5)["lr"] == pytest.approx(2.5e-6)
    assert not same(before, snapshot(learner, "a"))
    assert opened(base, "full", ForcedSettings(device="cpu")).update("a", rows)["lr"] == pytest.approx(1e-6)


@long_on_workers
def test_gradient_clipping_bounds_the_step(opened, base):
    norms, moved = [], []
    for clip in (0.0, 1e-2):
        learner = with_eps(opened(base, "full", change(FAST, grad_clip=clip)), 0.1)
        start = snapshot(learner, "a")
        norms.append(learner.update("a", make_rows())["grad_norm"])
        moved.append(sum(np.abs(array - start[name]).sum() for name, array in learner.weights("a").items()))
    assert norms[0] == pytest.approx(norms[1])
    assert moved[1] < 0.1 * moved[0]


@long_on_workers
def test_metrics_per_role_where_a_policy_plays_several(opened, base):
    learner = opened(base, "shared")
    metrics = learner.update("shared", make_rows(role="a") + make_rows(role="b", seed=5, response=(2, 2)))
    assert metrics["b/tokens"] == 24
    assert metrics["a/tokens"] + metrics["b/tokens"] == metrics["tokens"]
    mean = metrics["a/entropy"] * metrics["a/tokens"] + metrics["b/entropy"] * metrics["b/tokens"]
    assert mean / metrics["tokens"] == pytest.approx(metrics["entropy"])
    assert metrics["a/gradient_share"] + metrics["b/gradient_share"] == pytest.approx(1.0)
    assert metrics["a/gradient_share"] > 0.55, "its answers are longer"
    assert "a/entropy" not in opened(base).update("a", make_rows())


@long_on_workers
def test_a_balanced_loss_gives_both_roles_the_same_share(opened, base):
    learner = opened(base, "shared", loss=LossSpec(balance="equal"))
    rows = make_rows(role="a") + make_rows(groups=1, role="b", seed=5, response=(2, 2))
    metrics = learner.update("shared", on_policy(learner, "shared", rows))
    assert metrics["a/gradient_share"] == pytest.approx(0.5, abs=0.01)


@long_on_workers
@pytest.mark.parametrize("layout", ["lora", "full"])
def test_kl_holds_the_policy_at_the_reference(opened, base, layout):
    rows = make_rows()
    learner = opened(base, layout, loss=LossSpec(kl=1.0))
    assert learner.update("a", rows)["kl"] == pytest.approx(0.0, abs=1e-6)
    assert learner.update("a", rows)["kl"] > 1e-4
    pull = [msgspec.structs.replace(row, advantage=0.0) for row in rows]
    drifted = learner.update("a", pull, lr_scale=0.3)["kl"]
    for _ in range(7):
        learner.update("a", pull, lr_scale=0.3)
    assert learner.update("a", pull)["kl"] < 0.5 * drifted


@maths
def test_entropy_bonus_raises_entropy(opened, base):
    rows = [msgspec.structs.replace(row, advantage=0.0) for row in make_rows()]
    learner = opened(base, loss=LossSpec(entropy=0.1))
    first = learner.update("a", rows)["entropy"]
    assert learner.update("a", rows)["entropy"] > first


@maths
@pytest.mark.parametrize("name", ["at_grpo", "grpo", "dr_grpo", "rloo", "dr_mas", "gspo", "dapo", "cispo"])
def test_every_recipe_trains(opened, base, name):
    loss = recipe(name).loss
    if loss.aggregation == "constant":
        loss = msgspec.structs.replace(loss, constant_length=16)
    learner = opened(base, loss=loss)
    rows = on_policy(learner, "a", make_rows(groups=1))
    assert learner.update("a", rows)["grad_norm"] > 0


@maths
def test_sampler_log_probabilities_are_used(opened, base):
    rows = make_rows()
    learner = opened(base)
    true = on_policy(learner, "a", rows)
    shifted = [msgspec.structs.replace(row, logprobs=tuple(v - 0.5 for v in row.logprobs)) for row in true]
    fair, unfair = opened(base).update("a", true), opened(base).update("a", shifted)
    assert fair["ratio_mean"] == unfair["ratio_mean"] == 1.0
    assert unfair["sampler_gap_mean"] == pytest.approx(0.5, abs=1e-4)
    assert unfair["sampler_gap_max"] == pytest.approx(0.5, abs=1e-3)
    assert fair["clip_share"] == unfair["clip_share"] == 0.0
    assert unfair["loss"] == pytest.approx(np.exp(0.5) * fair["loss"], rel=1e-4)  # the weight of each


@maths
def test_a_large_gap_is_truncated_and_counted(opened, base):
    learner = opened(base)
    rows = [
        msgspec.structs.replace(row, advantage=-1.0, logprobs=tuple(v - 1.0 for v in row.logprobs))
        for row in on_policy(learner, "a", make_rows())
    ]
    metrics = learner.update("a", rows)  # pi_train / pi_sampler = e > 2
    assert metrics["tis_clipped_share"] == 1.0
    assert metrics["loss"] == pytest.approx(2.0, abs=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(1.0, rel=1e-3)


@long_on_workers
def test_the_policy_before_the_update_is_taken_before_the_first_step(opened, base):
    learner = opened(base, settings=change(FAST, mini_batch=4))
    metrics = learner.update("a", [msgspec.structs.replace(r, logprobs=(-3.0,) * len(r.logprobs)) for r in make_rows()])
    rows = make_rows()
    before = opened(base).logprobs("a", rows)
    gap = np.abs(np.concatenate(before) + 3.0)
    assert metrics["sampler_gap_mean"] == pytest.approx(gap.mean(), rel=1e-4)  # of all rows, in all steps
    assert metrics["ratio_max"] > 1.0


@long_on_workers
def test_per_role_lora_the_other_roles_adapter_is_bit_identical_after_an_update(opened, base):
    learner = opened(base, "lora")
    learner.update("b", make_rows(role="b"))
    a, b = snapshot(learner, "a"), snapshot(learner, "b")
    learner.update("a", make_rows(role="a"))
    assert same(b, snapshot(learner, "b"))
    assert not same(a, snapshot(learner, "a"))


@long_on_workers
def test_per_role_lora_each_role_computes_with_its_own_adapter(opened, base):
    learner = opened(base, "lora")
    rows = make_rows()
    start = np.concatenate(learner.logprobs("b", rows))
    learner.update("a", rows)
    assert np.array_equal(np.concatenate(learner.logprobs("b", rows)), start)
    assert not np.allclose(np.concatenate(learner.logprobs("a", rows)), start, atol=1e-3)


def test_layouts_mix_and_untrained_policies_are_left_alone(opened, base):
    specs = {
        "one": PolicySpec(name="one", lora=SMALL),
        "two.b": PolicySpec(name="two.b", lora=LoraSpec(rank=2, targets=("q_proj",))),
        "three": PolicySpec(name="three", kind="full"),
        "idle": PolicySpec(name="idle", kind="frozen"),
        "away": PolicySpec(name="away", kind="provider"),
    }
    policies = Policies(specs, {name: name for name in specs})
    learner = opened.policies(base, policies, FAST, LossSpec())
    for name in ("one", "two.b", "three"):
        others = {n: snapshot(learner, n) for n in ("one", "two.b", "three") if n != name}
        learner.update(name, make_rows())
        assert all(same(weights, snapshot(learner, n)) for n, weights in others.items())
    with pytest.raises(ConfigError, match="idle"):
        learner.update("idle", make_rows())


def test_full_weights_are_named_like_the_models_parameters_and_are_copies(opened, base):
    learner = opened(base, "full")
    names = dict(Qwen3ForCausalLM.from_pretrained(base).named_parameters())
    weights = learner.weights("a")
    assert weights.keys() == names.keys()
    held = {name: array.copy() for name, array in weights.items()}
    learner.update("a", make_rows())
    assert same(weights, held)


@full_is_long_on_workers
def test_a_resumed_run_is_bit_exact(opened, base, tmp_path, layout):
    settings = change(FAST, mini_batch=4)
    steps = [make_rows(groups=2, seed=seed) for seed in range(3)]
    straight = opened(base, layout, settings)
    straight.update("a", steps[0])
    straight.update("b", steps[0])
    straight.save(tmp_path)
    for rows in steps[1:]:
        straight.update("a", rows)
    expected = {name: snapshot(straight, name) for name in ("a", "b")}
    resumed = opened(base, layout, settings, seed=99)  # another start and order, overwritten by load
    resumed.load(tmp_path)
    for rows in steps[1:]:
        resumed.update("a", rows)
    assert all(same(resumed.weights(name), weights) for name, weights in expected.items())


@full_is_long_on_workers
def test_adopted_weights_are_trained_on(opened, base, layout):
    learner = opened(base, layout)
    learner.update("a", make_rows())
    taken, others = snapshot(learner, "a"), snapshot(learner, "b")
    learner = opened(base, layout)
    learner.adopt("a", taken)
    assert same(snapshot(learner, "a"), taken) and same(snapshot(learner, "b"), others)
    learner.update("a", make_rows(seed=1))
    assert not same(snapshot(learner, "a"), taken)
    name = next(iter(taken))
    with pytest.raises(RunError, match="other names or shapes than the weights of policy 'b'"):
        learner.adopt("b", {**taken, name: taken[name][:1]})


def test_saved_weights_are_readable_files(opened, base, tmp_path):
    learner = opened(base)
    learner.update("b", make_rows())
    learner.save(tmp_path)
    assert same({n: t.numpy() for n, t in load_file(tmp_path / "1.safetensors").items()}, learner.weights("b"))


@long_on_workers
def test_what_does_not_fit_is_not_loaded(opened, base, tmp_path):
    opened(base).save(tmp_path)
    with pytest.raises(RunError, match="holds the policies"):
        opened(base, "full").load(tmp_path)
    with pytest.raises(RunError, match="holds the policies"):
        opened(base, roles=("a", "c")).load(tmp_path)
    (tmp_path / "0.safetensors").write_bytes(b"broken")
    with pytest.raises(RunError, match="Cannot restore"):
        opened(base).load(tmp_path)
    with pytest.raises(RunError, match="Cannot restore"):
        opened(base).load(tmp_path / "nowhere")


@long_on_workers
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"response_ids": (), "logprobs": ()}, "empty prompt or response"),
        ({"prompt_ids": ()}, "empty prompt or response"),
        ({"response_ids": (1, 2), "logprobs": (-1.0,)}, "1 sampler log-probabilities for 2"),
        ({"temperature": 0.0}, "temperature 0"),
        ({"advantage": float("nan")}, "non-finite"),
        ({"response_ids": (1,), "logprobs": (float("-inf"),)}, "non-finite"),
    ],
)
def test_rows_that_cannot_be_trained_are_refused_before_anything_moves(opened, base, fields, text):
    learner = opened(base)
    before = snapshot(learner, "a")
    rows = make_rows()
    with pytest.raises(GroupError, match=text):
        learner.update("a", [*rows, msgspec.structs.replace(rows[0], **fields)])
    assert same(before, snapshot(learner, "a"))


@long_on_workers
def test_no_rows_and_unknown_policies_are_refused(opened, base):
    learner = opened(base)
    with pytest.raises(GroupError, match="no rows"):
        learner.update("a", [])
    with pytest.raises(ConfigError, match=r"\['a', 'b'\]"):
        learner.weights("c")


def test_a_gradient_that_is_not_finite_is_not_applied(opened, base):
    learner = opened(base)
    before = snapshot(learner, "a")
    rows = [msgspec.structs.replace(row, advantage=1e38) for row in make_rows()]
    with pytest.raises(LearnerError, match="No gradient of this update"):
        learner.update("a", rows)
    assert same(before, snapshot(learner, "a"))
