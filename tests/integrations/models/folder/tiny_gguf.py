"""A tiny model written as a GGUF file, as converters write it."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tests.integrations.tiny_models import byte_tokenizer, config

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def write_gguf(file: Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Write a random Qwen3 with a byte-level tokenizer; return what was written."""
    tokenizer = byte_tokenizer(512)
    settings = config("qwen3", len(tokenizer))
    settings.head_dim = 128  # transformers takes that of a Qwen3 in GGUF for granted
    settings.tie_word_embeddings = True
    model = Qwen3ForCausalLM(settings).eval()
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    writer.add_key_length(settings.head_dim)
    writer.add_value_length(settings.head_dim)
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    writer.add_rope_freq_base(settings.rope_parameters["rope_theta"])
    _add_tokenizer(writer, tokenizer)
    for name, tensor in model.named_parameters():  # without tied ones
        for long, short in NAMES.items():
            name = name.replace(long, short)
        writer.add_tensor(name, tensor.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, tokenizer


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.get_added_vocab())
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_pad_token_id(vocabulary["<|pad|>"])
    writer.add_chat_template(tokenizer.chat_template)
