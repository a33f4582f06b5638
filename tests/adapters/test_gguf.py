"""An export as GGUF files, read back with the libraries that people load them with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from cotune.adapters.export import TrainedPolicy, export_run, write_export
from cotune.adapters.load import load_export
from cotune.cli.main import main
from cotune.errors import AdapterError, ConfigError
from cotune.integrations.models.folder.folder import locate_model
from cotune.records.policies import LoraSpec
from cotune.sampling.protocol import Weights
from tests.adapters.test_export import write_run
from tests.integrations import tiny_models

LORA = LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "k_proj", "down_proj"))
CHAT = [{"role": "user", "content": "It's 3 or 12345:\n\n  d'Été <think>?"}]
PADDED = 520
"""Rows of the embedding, of which the tokenizer has fewer."""


def build(folder: Path, kind: str, **changes: Any) -> Path:
    """A tiny model with a byte-level tokenizer; its heads are of 128, as transformers takes for granted in GGUF."""
    tokenizer = tiny_models.byte_tokenizer(512)
    if kind == "qwen2":
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config: Any = Qwen2Config(**shape, num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.15)
        config.eos_token_id, config.pad_token_id, config.bos_token_id = 2, 0, None
    else:
        config = tiny_models.config(kind, len(tokenizer))
        config.head_dim = 128
    for name, value in {"vocab_size": PADDED, **changes}.items():
        setattr(config, name, value)
    kinds = {"qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM, "llama": LlamaForCausalLM}
    torch.manual_seed(0)
    kinds[kind](config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def adapter(base: Path, seed: int = 0) -> Weights:
    """A LoRA with both halves random."""
    chance, model = np.random.default_rng(seed), AutoModelForCausalLM.from_pretrained(base)
    found = {}
    for name, module in model.named_modules():
        if name.endswith(LORA.targets):
            rows, columns = module.weight.shape
            for half, shape in (("lora_A", (LORA.rank, columns)), ("lora_B", (rows, LORA.rank))):
                found[f"base_model.model.{name}.{half}.weight"] = chance.normal(0, 0.2, shape).astype(np.float32)
    return found


def full(base: Path, name: str = "solo") -> TrainedPolicy:
    """The base itself as a trained policy."""
    parameters = AutoModelForCausalLM.from_pretrained(base).named_parameters()
    weights = {name: tensor.detach().numpy() for name, tensor in parameters}
    return TrainedPolicy(name=name, kind="full", version=1, roles=(name,), model=str(base), weights=weights)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    settings = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("gguf") / "llama", "llama")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_transformers_says_what_the_merged_model_says(tmp_path: Path, kind: str) -> None:
    base = build(tmp_path / "base", kind)
    write_run(tmp_path / "run", base, LORA, adapter(base))
    export_run(tmp_path / "run", tmp_path / "merged", merge=True)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--gguf", "f32"]) == 0
    folder = tmp_path / "out" / "planner"
    assert sorted(file.name for file in folder.iterdir()) == ["Modelfile", "planner.gguf"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "planner")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged" / "planner")
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="planner.gguf", dtype=torch.float32)
    again = AutoTokenizer.from_pretrained(folder, gguf_file="planner.gguf")
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert again.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"] == prompt
    said = greedy(merged, prompt)
    assert greedy(read, prompt) == said
    assert greedy(AutoModelForCausalLM.from_pretrained(base), prompt) != said


def test_metadata_and_what_the_export_says_of_it(
    tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", llama, LORA, adapter(llama))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--gguf"]) == 0
    assert "/README.md has the commands for llama.cpp and Ollama" in capsys.readouterr().out
    entry = json.loads((tmp_path / "out" / "roles.json").read_text())["policies"][0]
    assert (entry["kind"], entry["gguf"], entry["lora"]) == ("full", "f16", None)
    assert list(entry["files"]) == ["Modelfile", "planner.gguf"]
    assert (tmp_path / "out" / "planner" / "Modelfile").read_text() == "FROM ./planner.gguf\n"
    found = fields(tmp_path / "out" / "planner" / "planner.gguf")
    assert found["general.architecture"] == "llama"
    assert found["general.name"] == "planner of llama"
    assert found["general.base_model.0.name"] == str(llama)
    assert (found["general.file_type"], found["llama.rope.dimension_count"]) == (1, 128)
    assert (found["tokenizer.ggml.pre"], found["tokenizer.ggml.add_bos_token"]) == ("gpt-2", False)
    assert found["tokenizer.chat_template"] == tiny_models.TEMPLATE
    kinds, tokens = found["tokenizer.ggml.token_type"], found["tokenizer.ggml.tokens"]
    assert (tokens[2], kinds[2]) == ("<|im_end|>", gguf.TokenType.CONTROL)
    assert kinds[tokens.index("<think>")] == gguf.TokenType.USER_DEFINED
    assert (tokens[-1], kinds[-1]) == ("[PAD519]", gguf.TokenType.UNUSED)
    with pytest.raises(AdapterError, match=r"GGUF files.*Export without --gguf"):
        load_export(tmp_path / "out")


@pytest.mark.parametrize(("precision", "off"), [("f16", 5e-4), ("bf16", 4e-3), ("q8_0", 5e-3)])
def test_each_precision_keeps_its_digits(tmp_path: Path, llama: Path, precision: Any, off: float) -> None:
    policy = full(llama)
    write_export(tmp_path / "out", [policy], gguf=precision)
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "out" / "solo" / "solo.gguf").tensors}
    assert found["blk.1.ffn_down.weight"].tensor_type.name == precision.upper()
    assert found["blk.1.attn_norm.weight"].tensor_type.name == "F32"
    assert policy.weights is not None
    expected = policy.weights["model.layers.1.mlp.down_proj.weight"]
    stored = found["blk.1.ffn_down.weight"]
    difference = np.abs(gguf.dequantize(stored.data, stored.tensor_type) - expected).max()
    assert 0 < difference < off * np.abs(expected).max() * 2


def test_rows_that_are_no_whole_blocks_stay_in_16_bits(tmp_path: Path) -> None:
    write_export(tmp_path / "out", [full(build(tmp_path / "base", "qwen3", intermediate_size=80))], gguf="q8_0")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out" / "solo" / "solo.gguf").tensors}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")


def test_the_slowed_positions_of_llama_3_are_in_the_file(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    write_export(tmp_path / "out", [full(build(tmp_path / "base", "llama", rope_parameters=rope))], gguf="f32")
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "out" / "solo" / "solo.gguf").tensors}
    factors = tensors["rope_freqs.weight"]
    assert factors.shape == (64,)
    np.testing.assert_allclose(factors[[0, 6, 63]], [1.0, 1.0, 8.0], rtol=1e-5)
    # wavelength 2 pi 10000^(20/128) = 26.5, between 64/4 and 64/1: smooth (64/26.5 - 1) / 3, 1 / ((1 - s) / 8 + s)
    np.testing.assert_allclose(factors[10], 1.85928, rtol=1e-4)


def test_a_llama_3_in_gguf_form_is_read_with_its_slowed_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    base = build(tmp_path / "base", "llama", rope_parameters=rope)
    odd = build(tmp_path / "odd", "llama", rope_parameters={**rope, "original_max_position_embeddings": 64})
    for name, model in (("out", base), ("odd-out", odd)):
        write_export(tmp_path / name, [full(model)], gguf="f32")
    folder = locate_model(tmp_path / "out" / "solo" / "solo.gguf")
    ids = torch.arange(3, 203)[None]
    with torch.no_grad():
        found, expected = (AutoModelForCausalLM.from_pretrained(model)(ids).logits for model in (folder, base))
    assert torch.allclose(found, expected, atol=1e-4)
    with pytest.raises(ConfigError, match=r"rope_freqs.*Llama 3.*Use the model's own folder"):
        locate_model(tmp_path / "odd-out" / "solo" / "solo.gguf")


def resplit(folder: Path, split: Any, whole: bool) -> None:
    """Give a model's tokenizer another way to split text."""
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.pre_tokenizer = split
    settings = json.loads(inner.to_str())
    settings["model"]["ignore_merges"] = whole
    (folder / "tokenizer.json").write_text(json.dumps(settings))


def expression(text: str) -> Any:
    parts = [pre_tokenizers.Split(Regex(text), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])


@pytest.mark.parametrize(
    ("split", "whole", "name"),
    [
        (expression(WORDS + r"\p{N}" + TAIL), False, "qwen2"),
        (expression(WORDS + r"\p{N}{1,3}" + TAIL), True, "llama-bpe"),
        (DIGITS, False, "smollm"),
    ],
)
def test_how_the_tokenizer_splits_is_told_by_llama_cpps_name(
    tmp_path: Path, split: Any, whole: bool, name: str
) -> None:
    base = build(tmp_path / "base", "llama")
    resplit(base, split, whole)
    write_export(tmp_path / "out", [full(base)], gguf="f16")
    assert fields(tmp_path / "out" / "solo" / "solo.gguf")["tokenizer.ggml.pre"] == name


def _gpt2(folder: Path) -> None:
    tiny_models.build("gpt2", folder)


def _characters(folder: Path) -> None:
    tiny_models.build("llama", folder)


def _window(folder: Path) -> None:
    tiny_models.build("qwen3-sliding", folder)


def _yarn(folder: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    build(folder, "qwen3", rope_parameters=rope)


def _odd_split(folder: Path) -> None:
    resplit(build(folder, "llama"), expression(r"\p{L}+|\s+|[^\s\p{L}]"), False)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (_gpt2, "the type gpt2; supported are llama, mistral, qwen2, qwen3"),
        (_characters, "tokenizer of type WordLevel; supported is byte-level BPE"),
        (_window, "sliding windows of attention, which are not supported"),
        (_yarn, "rope_type yarn; supported are default and llama3"),
        (_odd_split, "splits text in another way than gpt-2, smollm, llama-bpe, qwen2"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, make: Callable[[Path], None], cause: str
) -> None:
    make(tmp_path / "base")
    with pytest.raises(ConfigError, match=rf"gguf.*{cause}.*--merge and then convert_hf_to_gguf\.py"):
        write_export(tmp_path / "out", [full(tmp_path / "base")], gguf="f16")
    assert [entry.name for entry in tmp_path.iterdir()] == ["base"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_llama_cpp_says_what_the_merged_model_says(tmp_path: Path, kind: str) -> None:
    from llama_cpp import Llama  # type: ignore[import-not-found] # built from source: `make test-long` installs it

    base = build(tmp_path / "base", kind)
    write_export(tmp_path / "out", [full(base)], gguf="f32")
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(base)
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text)["input_ids"]
    engine = Llama(str(tmp_path / "out" / "solo" / "solo.gguf"), n_ctx=256, n_threads=2, verbose=False)
    assert engine.tokenize(text.encode(), add_bos=True, special=True) == prompt
    said = greedy(AutoModelForCausalLM.from_pretrained(base), prompt)
    found = [token for token, _ in zip(engine.generate(prompt, temp=0.0, repeat_penalty=1.0), said, strict=False)]
    assert found == said
