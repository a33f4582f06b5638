"""A pass over a tree of tokens gives the gradients and the metrics of one padded sequence per row."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.records.policies import policies_for
from cotune.trainer.learner import tree_attention
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.logprob_model import plain_states, tree_states
from cotune.trainer.learner.memory.pass_size import PassSize
from cotune.trainer.learner.pass_inputs import prepare_pass
from cotune.trainer.learner.tree_attention import attends_over_trees
from tests.integrations import tiny_models
from tests.trainer.learner.learner_rows import FAST, SMALL, VOCABULARY, change

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE),
}
LAYOUTS = {"qwen3": "shared", "llama": "full"}
TOKENS = st.integers(0, 5)


@st.composite
def episodes(draw):
    """Rows of a few conversations: turns that hold earlier ones or only begin as they did, roles with one beginning,
    candidates that may be equal or begin alike, temperatures, masks."""
    system = draw(st.lists(TOKENS, min_size=1, max_size=6))
    rows = []
    for number in range(draw(st.integers(1, 3))):
        prompt = [*system, number, *draw(st.lists(TOKENS, max_size=20))]
        for turn in range(draw(st.integers(1, 3))):
            answers = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=1, max_size=4))
            for index, answer in enumerate(answers):
                rows.append(
                    TrainRow(
                        id=f"{number}.{turn}.{index}",
                        role=draw(st.sampled_from(["a", "b"])),
                        prompt_ids=tuple(prompt),
                        response_ids=tuple(answer),
                        logprobs=(-3.0,) * len(answer),
                        advantage=draw(st.sampled_from([-1.0, 0.5, 2.0])),
                        temperature=draw(st.sampled_from([0.5, 1.0, 1.7])),
                        loss_mask=(True,) * (len(answer) - 1) + (draw(st.booleans()) or len(answer) == 1,),
                    )
                )
            kept = answers[0] if draw(st.booleans()) else []
            prompt = [*prompt, *kept, *draw(st.lists(TOKENS, min_size=1, max_size=5))]
    return rows


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    for parameter in network.parameters():
        parameter.data.mul_(3.0) if parameter.dim() > 1 else None
    path = tmp_path_factory.mktemp(request.param)
    network.save_pretrained(path)
    return request.param, str(path)


@pytest.fixture(scope="module")
def learner(folder):
    name, path = folder
    policies = policies_for(LAYOUTS[name], ["a", "b"], SMALL)
    learner = LocalLearner.open(path, policies, change(FAST, lr=1e-4, grad_clip=0.0), LossSpec(kl=0.1, entropy=0.05))
    model = next(iter(learner._policies.values()))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.parameters().items():
        if ".lora_B." in name:  # zero at first, and A would have no gradient
            parameter.data.normal_(0.0, 0.3, generator=generator)
    return learner


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=episodes(), budget=st.sampled_from([1, 25, 60, 8192]))
def test_gradients_and_metrics_are_those_of_one_sequence_per_row(learner, rows, budget):
    name, model = next(iter(learner._policies.items()))
    start = {key: p.detach().clone() for key, p in model.parameters().items()}
    found = []
    for shared in (False, True):
        model.logprob_model.shares = shared
        learner._passes._sizes[id(model.network)] = PassSize(budget if shared else 8192, alone=True)
        gradients = {}
        handles = [
            p.register_post_accumulate_grad_hook(lambda p, key=key, kept=gradients: kept.update({key: p.grad.clone()}))
            for key, p in model.parameters().items()
        ]
        metrics = learner.update(name, rows)
        for handle in handles:
            handle.remove()
        for key, parameter in model.parameters().items():
            parameter.data.copy_(start[key])
        found.append((gradients, metrics))
    (expected, plain), (gradients, packed) = found
    assert expected.keys() == gradients.keys() == start.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(
            gradients[key], gradient, atol=1e-5 * max(1.0, gradient.abs().max().item()), rtol=1e-5
        )
    assert packed["computed_tokens"] <= packed["total_tokens"] == plain["total_tokens"]
    other = {"seconds", "pass_tokens", "computed_tokens", "unshared_rows", "weight_norm"}
    compared = {key for key in plain if not key.startswith("lost")} - other
    assert compared <= packed.keys() and len(compared) > 12
    for key in compared:
        assert packed[key] == pytest.approx(plain[key], rel=1e-5, abs=1e-5), key


@pytest.mark.parametrize(
    ("architecture", "flex"), [("qwen3", False), ("llama", False), ("gpt2", False), ("qwen3", True)]
)
def test_known_architectures_attend_over_trees(architecture, flex):
    network = AutoModelForCausalLM.from_config(tiny_models.config(architecture, 64)).eval()
    assert attends_over_trees(network, flex=flex)
    rows = [
        TrainRow(id=str(n), role="a", prompt_ids=(1, 2, 3), response_ids=ids, logprobs=(), advantage=0.0)
        for n, ids in enumerate([(4, 5, 6), (4, 7), (8,), (4, 5, 6)])
    ]
    with torch.no_grad():
        states = tree_states(network, prepare_pass(rows, shared=True, flex=flex), flex=flex)
        torch.testing.assert_close(states, plain_states(network, rows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("difference", "same"), [(0.07, True), (0.25, False)])
def test_rounding_in_bfloat16_is_told_from_another_attention(monkeypatch, difference, same):
    network = AutoModelForCausalLM.from_config(tiny_models.config("qwen3", 64), dtype=torch.bfloat16).eval()
    states_over = tree_attention.states_over

    def inexact(*arguments):
        states = states_over(*arguments)
        noise = torch.randn_like(states)
        return states + difference * noise * states.norm() / noise.norm()

    monkeypatch.setattr(tree_attention, "states_over", inexact)
    assert attends_over_trees(network) is same


@pytest.mark.parametrize("fault", ["positions", "mask", "scale"])
def test_faults_are_told_from_rounding_in_bfloat16(monkeypatch, fault):
    class FaultyPass(tree_attention.TreePass):
        def __init__(self, tree, device, **options):
            super().__init__(tree, device, **options)
            attend = self.attend
            if fault == "positions":
                self.depths = torch.arange(len(tree.tokens))
            elif fault == "mask":
                self.attend = lambda *states: torch.nn.functional.scaled_dot_product_attention(
                    *states[:3], is_causal=True, enable_gqa=True
                )[0].transpose(0, 1)
            else:
                self.attend = lambda *states: attend(*states[:3], 2 * states[3])

    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(tiny_models.config("llama", 64), dtype=torch.bfloat16).eval()
    assert attends_over_trees(network)
    network.set_attn_implementation("sdpa")
    monkeypatch.setattr(tree_attention, "TreePass", FaultyPass)
    assert not attends_over_trees(network)


@pytest.mark.parametrize("architecture", ["bloom", "qwen3-sliding", "gemma3", "mamba"])
def test_models_with_other_attention_have_no_trees_in_bfloat16(architecture):
    network = AutoModelForCausalLM.from_config(tiny_models.config(architecture, 64), dtype=torch.bfloat16).eval()
    assert not attends_over_trees(network)


@pytest.mark.parametrize("architecture", ["bloom", "qwen3-sliding", "gemma3", "mamba"])
def test_models_with_other_attention_compute_each_row(architecture, tmp_path, caplog):
    network = AutoModelForCausalLM.from_config(tiny_models.config(architecture, 64))
    network.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="cotune"):
        learner = LocalLearner.open(str(tmp_path), policies_for("full", ["a", "b"], SMALL), FAST, LossSpec())
    said = [record.getMessage() for record in caplog.records if "are computed for each row" in record.getMessage()]
    assert len(said) == 1
    rows = [
        TrainRow(
            id=str(n), role="a", prompt_ids=(1, 2, 3), response_ids=ids, logprobs=(-1.0,) * len(ids), advantage=1.0
        )
        for n, ids in enumerate([(4, 5, 6), (4, 7)])
    ]
    metrics = learner.update("a", rows)
    assert (metrics["computed_tokens"], metrics["total_tokens"], metrics["unshared_rows"]) == (10, 9, 2)
