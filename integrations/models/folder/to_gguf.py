"""Writes models as GGUF files for llama.cpp, Ollama and LM Studio, with llama.cpp's own package `gguf`.

Names, order and rows are the same as in llama.cpp's convert_hf_to_gguf.py (LlamaModel, Qwen2Model and Qwen3Model).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cotune.errors import ConfigError
from cotune.integrations.models.folder.folder import errors_of_model, loading_options
from cotune.integrations.models.folder.gguf import slowed_positions

Precision = Literal["f16", "bf16", "f32", "q8_0"]
"""Precision of the matrices of a GGUF file; vectors are always in fp32."""
_ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""`model_type` of a config.json -> `gguf.MODEL_ARCH`."""
_ROPE = ("default", "llama3")
_LETTERS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_LETTERS,),
    "smollm": (r"\p{N}", _LETTERS),
    "llama-bpe": (_WORDS + r"\p{N}{1,3}" + _TAIL,),
    "qwen2": (_WORDS + r"\p{N}" + _TAIL,),
}
"""Name of a byte-level tokenizer in llama.cpp -> the expressions that split its text (from llama-vocab.cpp)."""
_KEEPS_WHOLE = {"llama-bpe"}
"""Tokenizers that do not apply merges to a piece that is a token."""
_SAMPLE_TEXT = "It's 3 or 33, 12345x\n\n  We'LL see… d'Été 9ème, naïve? (no)\t\tif x:\n    y += 1 ✅ 东西 \r\n...!\n"
_REMEDY = "Use --merge and then convert_hf_to_gguf.py of llama.cpp, which knows more models."


def check_gguf(model: Path) -> None:
    """Raise ConfigError for a model folder that cannot be written as GGUF here, with the reason."""
    _check_model(model)


def _check_model(model: Path) -> tuple[Any, str]:
    """The configuration of a model, and llama.cpp's name for the way its tokenizer splits text."""
    from transformers import AutoConfig

    with errors_of_model(model):
        config = AutoConfig.from_pretrained(model, **loading_options())
    if config.model_type not in _ARCHITECTURES:
        raise _refusal(model, f"has the type {config.model_type}; supported are {', '.join(_ARCHITECTURES)}")
    rope = config.rope_parameters["rope_type"]
    if rope not in _ROPE:
        raise _refusal(model, f"has rope_type {rope}; supported are {' and '.join(_ROPE)}")
    layers = getattr(config, "layer_types", None) or ()
    if "sliding_attention" in layers or (config.model_type == "mistral" and config.sliding_window is not None):
        raise _refusal(model, "has sliding windows of attention, which are not supported")
    if config.hidden_act != "silu":
        raise _refusal(model, f"has hidden_act {config.hidden_act}; supported is silu")
    return config, _split_name(model)


def write_gguf(model: Path, file: Path, precision: Precision, *, name: str, base: str) -> None:
    """Write a model folder as one GGUF file, with tokenizer, chat template and metadata.

    `name` is the name of the model, `base` the name of the model that it was trained from. With q8_0, a matrix whose
    rows are not whole blocks of 32 is stored in f16. Only one tensor at a time is in memory. Raises the same errors as
    `check_gguf`.
    """
    import gguf

    config, split = _check_model(model)
    arch = gguf.MODEL_ARCH[_ARCHITECTURES[config.model_type]]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    try:
        _add_settings(writer, config, precision, name, base)
        _add_tokenizer(writer, model, config.vocab_size, split)
        # The file lists the names and shapes of all tensors before their values.
        for name_in_folder, shape, _ in _tensors_in_order(model, config):
            name_in_file = names.get_name(name_in_folder, try_suffixes=(".weight", ".bias")) or name_in_folder
            kind = _tensor_type(shape, precision)
            stored_shape = shape
            dtype: np.dtype[Any]
            if kind.name == "F32":
                dtype = np.dtype(np.float32)
            elif kind.name == "F16":
                dtype = np.dtype(np.float16)
            else:  # BF16 or Q8_0, for which numpy has no type: it is stored as bytes
                dtype = np.dtype(np.uint8)
                stored_shape = gguf.quant_shape_to_byte_shape(shape, kind)
            size = int(np.prod(stored_shape)) * dtype.itemsize
            writer.add_tensor_info(name_in_file, stored_shape, dtype, size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, shape, read_array in _tensors_in_order(model, config):
            writer.write_tensor_data(gguf.quantize(read_array(), _tensor_type(shape, precision)))
    finally:
        writer.close()


def _refusal(model: Path, fault: str) -> ConfigError:
    return ConfigError("gguf", str(model), fault, _REMEDY)


def _split_name(model: Path) -> str:
    """llama.cpp's name for the way in which the tokenizer splits a text before it merges bytes.

    It is found by a sample text, which each of the known ways splits differently.
    """
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    file = model / "tokenizer.json"
    if not file.is_file():
        raise _refusal(model, "has no tokenizer.json")
    settings = json.loads(file.read_bytes())
    merges = settings["model"]
    normalizer = settings["normalizer"]
    splitter = Tokenizer.from_file(str(file)).pre_tokenizer
    is_byte_level_bpe = merges["type"] == "BPE" and merges["merges"] and splitter is not None
    changes_text = normalizer and normalizer["type"] != "NFC"
    if not is_byte_level_bpe or changes_text:
        raise _refusal(model, f"has a tokenizer of type {merges['type']}; supported is byte-level BPE")

    pieces = [piece for piece, _ in splitter.pre_tokenize_str(_SAMPLE_TEXT)]
    # Such a tokenizer does not apply merges to a piece that is a token.
    ignores_merges = bool(merges.get("ignore_merges"))
    for name, expressions in _SPLITS.items():
        steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        known_splitter = pre_tokenizers.Sequence([*steps, to_bytes])
        expected_pieces = [piece for piece, _ in known_splitter.pre_tokenize_str(_SAMPLE_TEXT)]
        expected_to_ignore_merges = name in _KEEPS_WHOLE
        if pieces == expected_pieces and ignores_merges == expected_to_ignore_merges:
            return name
    raise _refusal(
        model,
        f"has a tokenizer that splits text in another way than {', '.join(_SPLITS)} (names of llama.cpp)",
    )


def _add_settings(writer: Any, config: Any, precision: Precision, name: str, base: str) -> None:
    """Add the model's architecture to the file. The numbers of the file types are llama.cpp's."""
    import gguf

    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, base)
    writer.add_file_type({"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}[precision])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_rope_dimension_count(_head_size(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_tokenizer(writer: Any, model: Path, size: int, split: str) -> None:
    """Add the tokens and merges of the tokenizer to the file.

    The model has `size` token ids; those that the tokenizer lacks become padding. `split` is llama.cpp's name for the
    way in which the tokenizer splits text.
    """
    import gguf
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, **loading_options())
    text_of_id = {id: text for text, id in tokenizer.get_vocab().items()}
    added_tokens = tokenizer.added_tokens_decoder
    texts = []
    types = []
    for id in range(size):
        texts.append(text_of_id.get(id, f"[PAD{id}]"))
        if id not in text_of_id:
            types.append(gguf.TokenType.UNUSED)
        elif id not in added_tokens:
            types.append(gguf.TokenType.NORMAL)
        elif added_tokens[id].special:
            types.append(gguf.TokenType.CONTROL)
        else:
            types.append(gguf.TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(texts)
    writer.add_token_types(types)

    class SpecialTokens(gguf.SpecialVocab):
        def _set_special_token(self, typ: str, tid: Any) -> None:
            # Some configurations have -1 for a missing token.
            if not isinstance(tid, int) or tid >= 0:
                super()._set_special_token(typ, tid)

    special = SpecialTokens(model, load_merges=True, n_vocab=size)
    # Its files may contradict each other on added tokens, so ask the tokenizer itself.
    ids = tokenizer("a")["input_ids"]
    special.add_special_token = {"bos": ids[0] == tokenizer.bos_token_id, "eos": ids[-1] == tokenizer.eos_token_id}
    special.add_to_gguf(writer, quiet=True)


def _tensor_type(shape: Sequence[int], precision: Precision) -> Any:
    import gguf

    kind = gguf.GGMLQuantizationType[precision.upper()]
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType.F16 if precision == "q8_0" and shape[-1] % 32 else kind


def _tensors_in_order(model: Path, config: Any) -> Iterator[tuple[str, Sequence[int], Callable[[], np.ndarray]]]:
    """Name, shape and reader of each tensor of a model folder, with rows in llama.cpp's order; then the tensors that
    only GGUF files have."""
    from safetensors import safe_open

    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue
                yield (
                    name,
                    file.get_slice(name).get_shape(),
                    partial(_reorder_rotary, file, name, config),
                )
    if config.rope_parameters["rope_type"] == "llama3":
        factors = slowed_positions(config)
        yield "rope_freqs.weight", factors.shape, lambda: factors


def _reorder_rotary(file: Any, name: str, config: Any) -> np.ndarray:
    """A tensor in fp32, with the rows of queries and keys in llama.cpp's order.

    Rotary positions turn pairs of rows. transformers takes a row from the first and one from the second half of a head,
    llama.cpp's LLAMA two rows that follow each other.
    """
    array = np.ascontiguousarray(file.get_tensor(name), np.float32)
    module = name.split(".")[-2]  # of "model.layers.0.self_attn.q_proj.weight"
    heads_of_module = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if module not in heads_of_module or _ARCHITECTURES[config.model_type] != "LLAMA":
        return array
    heads = heads_of_module[module]
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])  # [heads, 2, half of a head, ...]
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
