"""The local learner on a real (tiny, untrained) Qwen3: every layout, every promise of the protocol."""

import random

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from cotune.errors import ConfigError, GroupError, LearnerError, RunError
from cotune.policies import LoraSpec, Policies, PolicySpec, policies_for
from cotune.recipes import LossSpec, recipe
from cotune.samples import TrainRow
from cotune.trainer.forward import plain_states
from cotune.trainer.learner_settings import LearnerSettings
from cotune.trainer.local_learner import LocalLearner
from cotune.trainer.movement import Movement, check_optimizers

SMALL = LoraSpec(rank=4, alpha=8.0)
FAST = LearnerSettings(lr=1e-2, device="cpu")
VOCABULARY = 48


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folder of an untrained Qwen3 with tied embeddings."""
    folder = tmp_path_factory.mktemp("base")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    network = Qwen3ForCausalLM(config)
    for parameter in network.parameters():  # sharper than the usual start, so that gradients are not tiny
        parameter.data.mul_(3.0) if parameter.dim() > 1 else None
    network.save_pretrained(folder)
    return str(folder)


def make_rows(groups=3, k=4, role="a", seed=0, prompt=(3, 9), response=(1, 6), temperature=1.0):
    """Groups of k rows with one prompt each, of uneven lengths, advantages that sum to zero in each group."""
    rng = random.Random(seed)
    found = []
    for group in range(groups):
        prompt_ids = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(*prompt)))
        for member in range(k):
            ids = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(*response)))
            found.append(
                TrainRow(
                    id=f"{group}.{member}",
                    role=role,
                    prompt_ids=prompt_ids,
                    response_ids=ids,
                    logprobs=(-3.9,) * len(ids),
                    advantage=1.0 if member % 2 else -1.0,
                    temperature=temperature,
                )
            )
    return found


def opened(base, layout="lora", settings=FAST, loss=None, roles=("a", "b")):
    return LocalLearner.open(base, policies_for(layout, roles, SMALL), settings, loss or LossSpec())


def on_policy(learner, policy, rows):
    """The rows with the trainer's own log-probabilities as the sampler's."""
    found = learner.logprobs(policy, rows)
    return [msgspec.structs.replace(r, logprobs=tuple(p.tolist())) for r, p in zip(rows, found, strict=True)]


def snapshot(learner, policy):
    return {name: array.copy() for name, array in learner.weights(policy).items()}


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def change(settings, **fields):
    return msgspec.structs.replace(settings, **fields)


# -- log-probabilities


def test_logprobs_are_those_of_the_model_at_the_rows_temperature(base):
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


@pytest.mark.parametrize("layout", ["lora", "full"])
@pytest.mark.parametrize("budget", [30, 10_000])
def test_shared_prompts_give_the_gradients_of_the_plain_path(base, layout, budget):
    rows = make_rows(groups=3)
    loss = LossSpec(entropy=0.1, kl=0.05)
    learner = opened(base, layout, change(FAST, micro_batch_tokens=budget, grad_clip=0.0), loss)
    learner.update("a", rows)  # so that no LoRA matrix is zero
    gradients = {}
    for shared in (True, False):
        model = learner._policies["a"]
        model.settings = change(model.settings, shared_prompts=shared)
        assert model.shares_prompts is shared
        total = 0.0
        for parameter in model.parameters().values():
            parameter.grad = None
        for micro in learner._micro_batches(model, rows, range(len(rows))):
            logp, entropy = model.token_logprobs([rows[i] for i in micro])
            pieces = logp.split([len(rows[i].response_ids) for i in micro])
            part = sum((i + 1) * piece.sum() for i, piece in zip(micro, pieces, strict=True))
            (part + 0.3 * entropy.sum()).backward()
            total += part.item()
        gradients[shared] = {name: p.grad.clone() for name, p in model.parameters().items()}, total
    assert gradients[True][1] == pytest.approx(gradients[False][1], rel=1e-5)
    for name, expected in gradients[False][0].items():
        scale = expected.abs().max().item()
        assert scale > 0
        torch.testing.assert_close(gradients[True][0][name], expected, atol=1e-5 * scale, rtol=1e-5)


def test_gradients_do_not_depend_on_the_micro_batches(base):
    rows = make_rows(groups=2)
    found = []
    for budget in (1, 40, 10_000):
        learner = opened(base, "shared", change(FAST, micro_batch_tokens=budget), LossSpec(aggregation="sequence_mean"))
        metrics = learner.update("shared", rows)
        found.append((metrics["loss"], metrics["grad_norm"], metrics["entropy"]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_activation_checkpointing_changes_nothing_but_memory(base):
    rows = make_rows()
    plain = opened(base, "full", change(FAST, shared_prompts=False))
    checkpointed = opened(base, "full", change(FAST, activation_checkpointing=True))
    first, second = plain.update("a", rows), checkpointed.update("a", rows)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-6)
    assert checkpointed._policies["a"].shares_prompts is False


def test_activation_checkpointing_recomputes_layers(base):
    learner = opened(base, "full", change(FAST, activation_checkpointing=True))
    network = learner._policies["a"].network
    calls = []
    network.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    states = plain_states(network, make_rows())
    assert len(calls) == 1
    states.sum().backward()
    assert len(calls) == 2


# -- updates


@pytest.mark.parametrize("layout", ["shared", "lora", "full"])
def test_an_update_raises_good_answers_and_lowers_bad_ones(base, layout):
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


def test_loss_of_the_first_step_is_worked_out_by_hand(base):
    # ratio 1 everywhere, so the loss is minus the token mean of the advantages
    learner = opened(base)
    rows = on_policy(learner, "a", make_rows())
    lengths = [len(row.response_ids) for row in rows]
    expected = -sum(n * row.advantage for n, row in zip(lengths, rows, strict=True)) / sum(lengths)
    assert learner.update("a", rows)["loss"] == pytest.approx(expected, abs=1e-4)


def test_mini_batches_and_epochs_are_optimizer_steps(base):
    learner = opened(base, settings=change(FAST, mini_batch=4, epochs=2))
    metrics = learner.update("a", on_policy(learner, "a", make_rows(groups=3, k=4)))
    assert metrics["steps"] == 6
    assert metrics["ratio_max"] > 1.0


def test_learning_rate_scale_and_defaults(base):
    rows = make_rows()
    learner = opened(base, settings=LearnerSettings(device="cpu"))
    before = snapshot(learner, "a")
    assert learner.update("a", rows, lr_scale=0.0)["lr"] == 0.0
    assert same(before, snapshot(learner, "a"))
    assert learner.update("a", rows, lr_scale=0.5)["lr"] == pytest.approx(2.5e-6)
    assert not same(before, snapshot(learner, "a"))
    assert opened(base, "full", LearnerSettings(device="cpu")).update("a", rows)["lr"] == pytest.approx(1e-6)


def test_gradient_clipping_bounds_the_step(base):
    rows = make_rows()
    loose, tight = (opened(base, "full", change(FAST, grad_clip=c, eps=0.1)) for c in (0.0, 1e-2))
    start = snapshot(loose, "a")
    assert loose.update("a", rows)["grad_norm"] == pytest.approx(tight.update("a", rows)["grad_norm"])

    def moved(learner):
        return sum(np.abs(learner.weights("a")[n] - start[n]).sum() for n in start)

    assert moved(tight) < 0.1 * moved(loose)


def test_metrics_per_role_where_a_policy_plays_several(base):
    learner = opened(base, "shared")
    metrics = learner.update("shared", make_rows(role="a") + make_rows(role="b", seed=5, response=(2, 2)))
    assert metrics["b/tokens"] == 24
    assert metrics["a/tokens"] + metrics["b/tokens"] == metrics["tokens"]
    mean = metrics["a/entropy"] * metrics["a/tokens"] + metrics["b/entropy"] * metrics["b/tokens"]
    assert mean / metrics["tokens"] == pytest.approx(metrics["entropy"])
    assert "a/entropy" not in opened(base).update("a", make_rows())


@pytest.mark.parametrize("layout", ["lora", "full"])
def test_kl_holds_the_policy_at_the_reference(base, layout):
    rows = make_rows()
    learner = opened(base, layout, loss=LossSpec(kl=1.0))
    assert learner.update("a", rows)["kl"] == pytest.approx(0.0, abs=1e-6)
    drifted = learner.update("a", rows)["kl"]
    assert drifted > 1e-4
    pull = [msgspec.structs.replace(row, advantage=0.0) for row in rows]
    for _ in range(5):
        learner.update("a", pull, lr_scale=0.3)
    assert learner.update("a", pull)["kl"] < 0.5 * drifted


def test_entropy_bonus_raises_entropy(base):
    rows = [msgspec.structs.replace(row, advantage=0.0) for row in make_rows()]
    learner = opened(base, loss=LossSpec(entropy=0.1))
    first = learner.update("a", rows)["entropy"]
    assert learner.update("a", rows)["entropy"] > first


@pytest.mark.parametrize("name", ["at_grpo", "grpo", "dr_grpo", "rloo", "dr_mas", "gspo", "dapo", "cispo"])
def test_every_recipe_trains(base, name):
    loss = recipe(name).loss
    if loss.aggregation == "constant":
        loss = msgspec.structs.replace(loss, constant_length=16)
    learner = opened(base, loss=loss)
    rows = on_policy(learner, "a", make_rows(groups=1))
    assert learner.update("a", rows)["grad_norm"] > 0


# -- the sampler's log-probabilities


def test_sampler_log_probabilities_are_used(base):
    rows = make_rows()
    learner = opened(base)
    true = on_policy(learner, "a", rows)
    shifted = [msgspec.structs.replace(row, logprobs=tuple(v - 0.5 for v in row.logprobs)) for row in true]
    fair, unfair = opened(base).update("a", true), opened(base).update("a", shifted)
    assert fair["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert unfair["ratio_mean"] == pytest.approx(np.exp(0.5), rel=1e-4)
    assert unfair["sampler_gap_mean"] == pytest.approx(0.5, abs=1e-4)
    assert unfair["sampler_gap_max"] == pytest.approx(0.5, abs=1e-3)
    assert unfair["clip_share"] > 0.3  # tokens of good answers are already past 1 + clip_high
    assert fair["clip_share"] == 0.0


@pytest.mark.parametrize("anchor", ["sampler", "trainer"])
def test_a_large_gap_is_truncated_and_counted(base, anchor):
    learner = opened(base, settings=change(FAST, anchor=anchor))
    rows = [
        msgspec.structs.replace(row, advantage=-1.0, logprobs=tuple(v - 1.0 for v in row.logprobs))
        for row in on_policy(learner, "a", make_rows())
    ]
    metrics = learner.update("a", rows)  # pi_train / pi_sampler = e > 2
    assert metrics["tis_clipped_share"] == 1.0
    assert metrics["loss"] == pytest.approx(2.0, abs=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(np.e if anchor == "sampler" else 1.0, rel=1e-3)


def test_the_trainers_anchor_is_taken_before_the_first_step(base):
    learner = opened(base, settings=change(FAST, anchor="trainer", mini_batch=4, epochs=2))
    metrics = learner.update("a", [msgspec.structs.replace(r, logprobs=(-3.0,) * len(r.logprobs)) for r in make_rows()])
    rows = make_rows()
    before = opened(base).logprobs("a", rows)
    gap = np.abs(np.concatenate(before) + 3.0)
    assert metrics["sampler_gap_mean"] == pytest.approx(gap.mean(), rel=1e-4)  # of all rows, in both epochs
    assert metrics["ratio_max"] > 1.0


# -- several policies


def test_per_role_lora_the_other_roles_adapter_is_bit_identical_after_an_update(base):
    learner = opened(base, "lora")
    learner.update("b", make_rows(role="b"))
    a, b = snapshot(learner, "a"), snapshot(learner, "b")
    learner.update("a", make_rows(role="a"))
    assert same(b, snapshot(learner, "b"))
    assert not same(a, snapshot(learner, "a"))


def test_per_role_lora_each_role_computes_with_its_own_adapter(base):
    learner = opened(base, "lora")
    rows = make_rows()
    start = np.concatenate(learner.logprobs("b", rows))
    learner.update("a", rows)
    assert np.array_equal(np.concatenate(learner.logprobs("b", rows)), start)
    assert not np.allclose(np.concatenate(learner.logprobs("a", rows)), start, atol=1e-3)


def test_two_policies_with_one_base_model_do_not_collapse_into_one(base):
    learner = opened(base, "full")
    start = snapshot(learner, "b")
    learner.update("a", make_rows())
    assert same(start, snapshot(learner, "b"))
    moved = snapshot(learner, "a")
    assert all(not np.array_equal(moved[name], start[name]) for name in start)
    owned = [p.data_ptr() for policy in learner._policies.values() for p in policy.parameters().values()]
    assert len(set(owned)) == len(owned)


def test_layouts_mix_and_untrained_policies_are_left_alone(base):
    specs = {
        "one": PolicySpec(name="one", lora=SMALL),
        "two.b": PolicySpec(name="two.b", lora=LoraSpec(rank=2, targets=("q_proj",))),
        "three": PolicySpec(name="three", kind="full"),
        "idle": PolicySpec(name="idle", kind="frozen"),
        "away": PolicySpec(name="away", kind="provider"),
    }
    policies = Policies(specs, {name: name for name in specs})
    learner = LocalLearner.open(base, policies, FAST, LossSpec())
    for name in ("one", "two.b", "three"):
        others = {n: snapshot(learner, n) for n in ("one", "two.b", "three") if n != name}
        learner.update(name, make_rows())
        assert all(same(weights, snapshot(learner, n)) for n, weights in others.items())
    with pytest.raises(ConfigError, match="idle"):
        learner.update("idle", make_rows())


def test_a_shared_policy_has_one_set_of_weights_for_all_roles(base):
    learner = opened(base, "shared", roles=("a", "b", "c"))
    assert list(learner._policies) == ["shared"]


# -- every tensor is trained


def test_an_optimizer_built_before_the_adapter_never_trains_it(base):
    network = Qwen3ForCausalLM.from_pretrained(base)
    early = torch.optim.AdamW(network.parameters(), lr=1e-2)
    model = opened(base)._policies["a"]
    with pytest.raises(LearnerError, match="in the optimizers of no policy"):
        check_optimizers({"a": model.parameters()}, {"a": early})


def test_a_tensor_in_two_optimizers_is_refused(base):
    learner = opened(base, "full")
    parameters = {name: model.parameters() for name, model in learner._policies.items()}
    both = torch.optim.AdamW([*parameters["a"].values(), *parameters["b"].values()])
    with pytest.raises(LearnerError, match=r"\['a', 'b'\]"):
        check_optimizers(parameters, {"a": both, "b": learner._optimizers["b"]})


def test_an_adapter_that_is_not_active_gets_no_gradient_and_is_noticed(base):
    learner = opened(base)
    learner._policies["a"].activate = lambda: learner._policies["b"].peft.set_adapter(learner._policies["b"].adapter)
    with pytest.raises(LearnerError, match="policy 'a' got no gradient"):
        learner.update("a", make_rows())


def test_a_step_that_rounding_swallows_is_noticed():
    parameter = torch.nn.Parameter(torch.ones(3))
    watch = Movement({"w": parameter})
    parameter.grad = torch.tensor([0.0, 2.0, 1.0])
    watch.before_step()
    with pytest.raises(LearnerError, match="w has a gradient but did not move"):
        watch.after_step()


def test_all_tensors_have_moved_after_two_steps(base):
    learner = opened(base)
    start = snapshot(learner, "a")
    learner.update("a", make_rows())
    assert len(learner._movement["a"].pending) == 14
    assert all(".lora_A." in name for name in learner._movement["a"].pending)
    learner.update("a", make_rows(seed=3))
    assert not learner._movement["a"].pending
    assert all(not np.array_equal(start[name], array) for name, array in learner.weights("a").items())


# -- weights, save, load


def test_lora_weights_are_a_peft_state_dict(base, tmp_path):
    learner = opened(base)
    learner.update("a", make_rows())
    weights = learner.weights("a")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in weights
    assert len(weights) == 2 * 7 * 2
    assert all(array.dtype == np.float32 for array in weights.values())
    learner._policies["a"].peft.save_pretrained(tmp_path)
    save_file(
        {name: torch.from_numpy(array) for name, array in weights.items()},
        tmp_path / learner._policies["a"].adapter / "adapter_model.safetensors",
    )
    fresh = PeftModel.from_pretrained(
        Qwen3ForCausalLM.from_pretrained(base), tmp_path / learner._policies["a"].adapter
    ).eval()
    row = make_rows()[0]
    with torch.no_grad():
        logits = fresh(torch.tensor([row.prompt_ids + row.response_ids])).logits[0].log_softmax(-1)
    found = logits[len(row.prompt_ids) - 1 : -1].gather(1, torch.tensor(row.response_ids)[:, None]).squeeze(1)
    np.testing.assert_allclose(learner.logprobs("a", [row])[0], found.numpy(), atol=1e-5)


def test_full_weights_are_named_like_the_models_parameters_and_are_copies(base):
    learner = opened(base, "full")
    names = dict(Qwen3ForCausalLM.from_pretrained(base).named_parameters())
    weights = learner.weights("a")
    assert weights.keys() == names.keys()
    held = {name: array.copy() for name, array in weights.items()}
    learner.update("a", make_rows())
    assert same(weights, held)


@pytest.mark.parametrize("layout", ["lora", "full"])
def test_a_resumed_run_is_bit_exact(base, tmp_path, layout):
    settings = change(FAST, mini_batch=4, epochs=2)
    steps = [make_rows(groups=2, seed=seed) for seed in range(3)]
    straight = opened(base, layout, settings)
    straight.update("a", steps[0])
    straight.update("b", steps[0])
    straight.save(tmp_path)
    for rows in steps[1:]:
        straight.update("a", rows)
    resumed = opened(base, layout, change(settings, seed=99))  # another start and order, overwritten by load
    resumed.load(tmp_path)
    for rows in steps[1:]:
        resumed.update("a", rows)
    assert same(straight.weights("a"), resumed.weights("a"))
    assert same(straight.weights("b"), resumed.weights("b"))


def test_saved_weights_are_readable_files(base, tmp_path):
    learner = opened(base)
    learner.update("b", make_rows())
    learner.save(tmp_path)
    assert same({n: t.numpy() for n, t in load_file(tmp_path / "1.safetensors").items()}, learner.weights("b"))


def test_what_does_not_fit_is_not_loaded(base, tmp_path):
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


# -- bad input


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
def test_rows_that_cannot_be_trained_are_refused_before_anything_moves(base, fields, text):
    learner = opened(base)
    before = snapshot(learner, "a")
    rows = make_rows()
    with pytest.raises(GroupError, match=text):
        learner.update("a", [*rows, msgspec.structs.replace(rows[0], **fields)])
    assert same(before, snapshot(learner, "a"))


def test_no_rows_and_unknown_policies_are_refused(base):
    learner = opened(base)
    with pytest.raises(GroupError, match="no rows"):
        learner.update("a", [])
    with pytest.raises(ConfigError, match=r"\['a', 'b'\]"):
        learner.weights("c")


def test_bad_settings_name_the_field(base, tmp_path):
    for fields in ({"mini_batch": 0}, {"epochs": 0}, {"lr": 0.0}, {"grad_clip": -1.0}, {"threads": 0}):
        with pytest.raises(ConfigError, match=rf"learner\.{next(iter(fields))}"):
            change(FAST, **fields)
    with pytest.raises(ConfigError, match=r"learner\.device"):
        opened(base, settings=change(FAST, device="abacus"))
    with pytest.raises(ConfigError, match="model"):
        opened(str(tmp_path))
    with pytest.raises(ConfigError, match="constant_length"):
        opened(base, loss=LossSpec(aggregation="constant"))
    with pytest.raises(ConfigError, match=r"lora\.targets"):
        spec = policies_for("lora", ["a"], LoraSpec(targets=("nowhere",)))
        LocalLearner.open(base, spec, FAST, LossSpec())


def test_a_gradient_that_is_not_finite_is_not_applied(base):
    learner = opened(base)
    before = snapshot(learner, "a")
    rows = [msgspec.structs.replace(row, advantage=1e38) for row in make_rows()]
    with pytest.raises(LearnerError, match="No gradient of this update"):
        learner.update("a", rows)
    assert same(before, snapshot(learner, "a"))


def test_opening_leaves_the_global_random_state_alone(base):
    torch.manual_seed(7)
    expected = torch.rand(1).item()
    torch.manual_seed(7)
    opened(base)
    assert torch.rand(1).item() == expected
