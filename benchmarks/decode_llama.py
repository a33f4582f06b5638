"""Decoding by llama.cpp, to compare with `benchmarks.decode_controls`: the same model, prompts and lengths.

    python -m benchmarks.decode_llama write model.gguf           # SmolLM2-135M in f32
    LLAMA_PYTHON benchmarks/decode_llama.py run model.gguf [--sequences 1,8,64] [--k 1] [--threads 2]

`run` needs numpy and llama-cpp-python alone, which may be in an environment of their own. Candidates share the keys and
values of their prompt. Tokens are drawn at temperature 1 by llama.cpp's own sampler, without log-probabilities. The
last line is JSON: tokens per second by number of sequences.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from typing import Any

import numpy as np

PROMPT = 64


def write(file: str) -> None:
    from pathlib import Path

    from cotune.integrations.models.folder.folder import locate_model
    from cotune.integrations.models.folder.to_gguf import write_gguf
    from examples.word_problems.demo import pretrained

    write_gguf(Path(str(locate_model(pretrained()))), Path(file), "f32", name="SmolLM2-135M", base="SmolLM2-135M")


class Decoder:
    """A context for so many sequences, and a sampler for each."""

    def __init__(self, file: str, sequences: int, length: int, threads: int) -> None:
        import llama_cpp

        self.of = llama_cpp
        ignored = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(ignored, ctypes.c_void_p(0))
        self.quiet = ignored  # must live as long as the library logs
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = sequences * length, 4096, 512
        params.n_seq_max, params.n_threads, params.n_threads_batch = sequences, threads, threads
        params.kv_unified = True
        params.type_k = params.type_v = 0  # f32, as elsewhere
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.samplers = []
        for number in range(sequences):
            chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(number))
            self.samplers.append(chain)
        self.batch = llama_cpp.llama_batch_init(4096, 0, sequences)

    def step(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Compute (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if failed := self.of.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {failed}")

    def decode(self, prompts: list[list[int]], k: int, new: int) -> int:
        memory = self.of.llama_get_memory(self.context)
        self.of.llama_memory_clear(memory, True)
        first: list[int] = []
        for number, prompt in enumerate(prompts):  # all candidates of a prompt begin with its last token's logits
            self.step([(token, at, number * k, at == len(prompt) - 1) for at, token in enumerate(prompt)])
            first += [self.draw(number * k + i, -1) for i in range(k)]
            for i in range(1, k):
                self.of.llama_memory_seq_cp(memory, number * k, number * k + i, -1, -1)
        tokens = first
        for position in range(PROMPT, PROMPT + new - 1):
            self.step([(token, position, i, True) for i, token in enumerate(tokens)])
            tokens = [self.draw(i, i) for i in range(len(tokens))]
        return len(prompts) * k * new

    def draw(self, sequence: int, output: int) -> int:
        return int(self.of.llama_sampler_sample(self.samplers[sequence], self.context, output))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["write", "run"])
    parser.add_argument("file")
    parser.add_argument("--sequences", default="1,8,64", help="(default: %(default)s)")
    parser.add_argument("--k", type=int, default=1, help="candidates of a prompt (default: %(default)s)")
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.do == "write":
        return write(args.file)
    rates: dict[str, Any] = {}
    for count in (int(number) for number in args.sequences.split(",")):
        decoder = Decoder(args.file, count, PROMPT + args.new, args.threads)
        drawn = np.random.default_rng(0).integers(16, decoder.vocabulary, (count // args.k, PROMPT)).tolist()
        decoder.decode(drawn, args.k, 4)
        began = time.perf_counter()
        rates[str(count)] = round(decoder.decode(drawn, args.k, args.new) / (time.perf_counter() - began), 1)
        print(f"{count} sequences of {args.k} candidates a prompt: {rates[str(count)]} tokens/s", flush=True)
    print(json.dumps({"threads": args.threads, "k": args.k, "tokens_per_second": rates}))


if __name__ == "__main__":
    main()
