"""The process that tries grammars. It is run as a script, so that it imports nothing except llguidance.

It reads lines of JSON: first the tokenizer, or null; then grammars. It answers each grammar with a line: empty if the
grammar can be used, otherwise the reason. Each grammar is compiled in a separate fork: a crash affects no other one.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

SECONDS = 1.0
"""Most processor time that compiling a grammar and its first mask may take."""
PATIENCE = 60.0
"""Most seconds that this may take on a machine that is busy with other work."""
BYTES = 64 << 20
"""Most memory that this may take."""
_REASON_OF_SIGNAL = {
    signal.SIGPROF: f"it takes more than {SECONDS:g} s to prepare",
    signal.SIGALRM: f"it takes more than {SECONDS:g} s to prepare",
}


def open_tokenizer(description: dict[str, Any], encode: Callable[[str], list[int]] | None = None) -> Any:
    """llguidance's tokenizer, from a description. Raises ValueError.

    `encode` tokenizes a text; it is only used for a description without the tokenizer's JSON.
    """
    import llguidance

    vocabulary = description["vocabulary"]
    if "json" in description:
        return llguidance.LLTokenizer(description["json"], n_vocab=vocabulary, eos_token=description["eos"])
    tokenizer = llguidance.TokenizerWrapper(_ConcatenatedTokens(description, encode))
    return llguidance.LLTokenizer(tokenizer, n_vocab=vocabulary)


class _ConcatenatedTokens:
    """A tokenizer in llguidance's interface, for texts that are the concatenation of their tokens' texts."""

    def __init__(self, description: dict[str, Any], encode: Callable[[str], list[int]] | None) -> None:
        """A tokenizer for llguidance from a description in plain data, as the worker process does not load the model's.

        Without `encode`, texts are encoded by the longest matching tokens.
        """
        self.tokens = [text.encode() for text in description["tokens"]]
        self.eos_token_id = description["eos"]
        self.bos_token_id = description["bos"]
        self.special_token_ids = description["special"]
        self._ids = {text: id for id, text in enumerate(description["tokens"]) if id not in self.special_token_ids}
        self._longest = max(map(len, self._ids), default=1)
        self._encode = encode or self._greedy

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)

    def _greedy(self, text: str) -> list[int]:
        """Encode a text by the longest token at each position. Characters that begin no token are left out."""
        if not isinstance(text, str):
            raise TypeError(text)  # this tells llguidance that it must not pass bytes
        ids = []
        start = 0
        while start < len(text):
            ends = range(min(start + self._longest, len(text)), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                start += 1
            else:
                ids.append(self._ids[text[start:end]])
                start = end
        return ids


def grammar_fault(grammar: str, tokenizer: Any) -> str:
    """The reason why a grammar cannot be compiled, or why its first mask cannot be computed; empty if both can."""
    from llguidance import LLMatcher

    lark = LLMatcher.grammar_from_lark(grammar)
    if tokenizer is None:
        failed, messages = LLMatcher.validate_grammar_with_warnings(lark)
        return str(messages[0]) if failed else ""
    matcher = LLMatcher(tokenizer, lark, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error()) if matcher.is_error() else ""


def try_in_fork(grammar: str, tokenizer: Any) -> str:
    """Compute `grammar_fault` in a fork, within the limits of time and memory. A passed limit is a fault, too."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _try_within_limits(grammar, tokenizer, write_end)  # ends the fork
    os.close(write_end)  # so that reading ends when the fork does
    with os.fdopen(read_end, encoding="utf-8") as answer:
        fault_text = answer.read()
    _, status = os.waitpid(child, 0)
    # Beyond the limit of memory, the library ends the process by any signal or status.
    out_of_memory = f"it takes more than {BYTES >> 20} MiB to prepare"
    if os.WIFSIGNALED(status):
        return _REASON_OF_SIGNAL.get(signal.Signals(os.WTERMSIG(status)), out_of_memory)
    return fault_text if os.waitstatus_to_exitcode(status) == 0 else out_of_memory


def _try_within_limits(grammar: str, tokenizer: Any, write_end: int) -> NoReturn:
    """The code of the fork: set the limits, and write the fault to the pipe."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library prints why it ends the process
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Some systems have no /proc, or do not support this limit.
        with contextlib.suppress(OSError, ValueError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            size = pages * os.sysconf("SC_PAGE_SIZE") + BYTES
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        os.write(write_end, grammar_fault(grammar, tokenizer).encode()[:4096])
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    """Answer grammars until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    description = json.loads(sys.stdin.readline() or "null")
    tokenizer = None if description is None else open_tokenizer(description)
    for line in sys.stdin:
        print(json.dumps(try_in_fork(json.loads(line), tokenizer)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
