"""What is inside the local learner; what it promises to the outside is in test_contract.py."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, Qwen3ForCausalLM

from cotune.algorithms.recipes import LossSpec
from cotune.errors import ConfigError, LearnerError
from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.learner import local
from cotune.trainer.learner.gradient_checks import GradientChecks, check_optimizers
from cotune.trainer.learner.load import load_frozen
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows, same, snapshot

SHAPE = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def opened(base, layout="lora", settings=FAST, loss=None, roles=("a", "b")):
    return LocalLearner.open(base, policies_for(layout, roles, SMALL), settings, loss or LossSpec())


def test_a_large_model_has_all_threads_also_after_a_small_one(base, monkeypatch):
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(local, "CPU_THREADS", 7)
    opened(base)
    monkeypatch.setattr(local, "LARGE", 10)
    opened(base)
    assert counts == [1, 7]


# -- log-probabilities


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
        model.logprob_model.shares = shared
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


# -- updates


@pytest.mark.parametrize("mask", ["none", "token"])
def test_what_the_first_steps_passes_tell_is_not_computed_before_them(base, monkeypatch, mask):
    rows = make_rows(groups=4)
    loss = LossSpec(mask=mask)
    settings = change(FAST, mini_batch=4)
    computed = []

    def before(learner, model, tokens, split, passed):  # of all rows, as a mask would ask
        return learner._logprobs(model, tokens.rows, split)

    def counted(learner, model, rows, batches):
        computed.append(sum(map(len, batches)))
        return plain(learner, model, rows, batches)

    plain = LocalLearner._logprobs
    weights = {}
    for way, patched in (("all", ("_logprobs_before", before)), ("needed", ("_logprobs", counted))):
        with monkeypatch.context() as patch:
            patch.setattr(LocalLearner, *patched)
            learner = opened(base, settings=settings, loss=loss)
            figures = learner.update("a", rows)
        weights[way] = snapshot(learner, "a"), figures
    assert computed == [len(rows) if mask == "token" else len(rows) - 4]
    for name, expected in weights["all"][0].items():
        np.testing.assert_allclose(weights["needed"][0][name], expected, atol=1e-6)
    for name in ("loss", "ratio_mean", "ratio_max", "sampler_gap_mean", "sampler_gap_max", "clip_share", "grad_norm"):
        assert weights["needed"][1][name] == pytest.approx(weights["all"][1][name], rel=1e-4, abs=1e-5)


# -- the sampler's log-probabilities


# -- several policies


def test_two_policies_with_one_base_model_do_not_collapse_into_one(base):
    learner = opened(base, "full")
    start = snapshot(learner, "b")
    learner.update("a", make_rows())
    assert same(start, snapshot(learner, "b"))
    moved = snapshot(learner, "a")
    assert all(not np.array_equal(moved[name], start[name]) for name in start)
    owned = [p.data_ptr() for policy in learner._policies.values() for p in policy.parameters().values()]
    assert len(set(owned)) == len(owned)


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


def test_a_tensor_that_is_not_trained_in_float32_is_told(base):
    learner = opened(base, "lora")
    model = learner._policies["b"]
    name, parameter = next(iter(model.parameters().items()))
    parameter.data = parameter.data.bfloat16()
    with pytest.raises(LearnerError, match=f"{name} of policy 'b' is trained in bfloat16 instead of float32"):
        check_optimizers({"b": model.parameters()}, learner._optimizers)


def test_an_adapter_that_is_not_active_gets_no_gradient_and_is_noticed(base):
    learner = opened(base)
    learner._policies["a"].activate = lambda: learner._policies["b"].peft.set_adapter(learner._policies["b"].adapter)
    with pytest.raises(LearnerError, match="policy 'a' got no gradient"):
        learner.update("a", make_rows())


def test_a_tensor_that_stands_though_its_step_does_not_round_away_is_an_error():
    parameter = torch.nn.Parameter(torch.ones(3))
    watch = GradientChecks({"w": parameter}, torch.optim.AdamW([parameter], lr=1e-6, weight_decay=0.0))
    parameter.grad = torch.tensor([0.0, 2.0, 1.0])
    watch.before_step()
    with pytest.raises(LearnerError, match=r"w has a gradient but did not move .* reaches 16.8 times half a unit"):
        watch.after_step()  # 1e-6 / 2 ** -24


def test_a_step_that_rounding_swallows_is_told_and_watched_on():
    """float32 is spaced 2 ** -23 above 1 and 2 ** -18 above 40; the first step of Adam is lr for every entry."""
    small, large = torch.nn.Parameter(torch.tensor([1.0, 1.0, 2**-10])), torch.nn.Parameter(torch.full((2,), 40.0))
    optimizer = torch.optim.AdamW([small, large], lr=5e-8, weight_decay=0.0)
    watch = GradientChecks({"small": small, "large": large}, optimizer, dtype="bfloat16")

    def step():
        small.grad, large.grad = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([0.0, 3.0])
        watch.before_step()
        optimizer.step()
        watch.after_step()
        return watch.after_update("p")

    found = step()  # of 1 upwards 2 ** -24 is half a unit: 5e-8 is lost; downwards the spacing is half as wide
    assert large.tolist() == [40.0, 40.0]
    assert found["lost/large"] == pytest.approx(5e-8 / 2**-19, rel=1e-3)
    assert found["lost_bfloat16/large"] == pytest.approx(5e-8 / 2**-19 / 2**16, rel=1e-3)
    assert found["lost_share"] == found["lost_share_bfloat16"] == 1.0
    assert found["lost_tensors"] == len(watch.lost) >= 1
    optimizer.param_groups[0]["lr"] = 1e-5
    found = step()
    assert found == {"lost_tensors": 0.0, "lost_share": 0.0, "lost_share_bfloat16": 1.0}  # each is told of once
    assert not watch.pending


def test_all_tensors_have_moved_after_two_steps(base):
    learner = opened(base)
    start = snapshot(learner, "a")
    learner.update("a", make_rows())
    assert len(learner._gradient_checks["a"].pending) == 14
    assert all(".lora_A." in name for name in learner._gradient_checks["a"].pending)
    learner.update("a", make_rows(seed=3))
    assert not learner._gradient_checks["a"].pending
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


# -- bad input


def test_bad_settings_name_the_field(base, tmp_path):
    for fields in ({"mini_batch": 0}, {"lr": 0.0}):
        with pytest.raises(ConfigError, match=rf"learner\.{next(iter(fields))}"):
            change(FAST, **fields)
    with pytest.raises(ConfigError, match="device = 'abacus' is not a torch device"):
        opened(base, settings=change(FAST, device="abacus"))
    with pytest.raises(ConfigError, match="model"):
        opened(str(tmp_path))
    with pytest.raises(ConfigError, match="constant_length"):
        opened(base, loss=LossSpec(aggregation="constant"))
    with pytest.raises(ConfigError, match=r"lora\.targets"):
        spec = policies_for("lora", ["a"], LoraSpec(targets=("nowhere",)))
        LocalLearner.open(base, spec, FAST, LossSpec())
    with pytest.raises(ConfigError, match=r"lora\.targets .* names the input embedding"):
        spec = policies_for("lora", ["a"], LoraSpec(targets=("q_proj", "embed_tokens")))
        LocalLearner.open(base, spec, FAST, LossSpec())
    for alpha in (0.0, -1.0):
        with pytest.raises(ConfigError, match=r"lora\.alpha = .* must be a number above 0"):
            LoraSpec(alpha=alpha)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Gemma2Config, {"final_logit_softcapping": 30.0, "query_pre_attn_scalar": 32}),
        (CohereConfig, {"logit_scale": 0.0625}),
        (GraniteConfig, {"logits_scaling": 8.0}),
    ],
)
@pytest.mark.parametrize("size", [1e-4, 1.0])
def test_a_model_that_changes_its_logits_is_refused_however_small_they_are(kind, fields, size, tmp_path):
    config = kind(**SHAPE, **fields)
    network = AutoModelForCausalLM.from_config(config)
    network.get_output_embeddings().weight.data.mul_(size)
    network.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="other logits than its output embedding times the last hidden state"):
        opened(str(tmp_path))
    with pytest.raises(ConfigError, match="has other logits than"):
        load_frozen(str(tmp_path), FAST)  # a teacher


def test_opening_leaves_the_global_random_state_alone(base):
    torch.manual_seed(7)
    expected = torch.rand(1).item()
    torch.manual_seed(7)
    opened(base)
    assert torch.rand(1).item() == expected
