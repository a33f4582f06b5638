"""The process in which grammars are tried: run as a script, so that it imports nothing but llguidance.

Reads lines of JSON: first the tokenizer, or null; then grammars. Answers each grammar with a line: "" where it can be
used, else why not. Each is compiled in a fork of its own, whose end costs that grammar alone.
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
"""Most time of a processor that a grammar and its first mask may take."""
PATIENCE = 60.0
"""Most seconds that the same may take on a machine that is busy with other work."""
BYTES = 64 << 20
"""Most memory that the same may take."""
_ENDED = {
    signal.SIGPROF: f"it takes more than {SECONDS:g} s to prepare",
    signal.SIGALRM: f"it takes more than {SECONDS:g} s to prepare",
}


def opened(described: dict[str, Any], encode: Callable[[str], list[int]] | None = None) -> Any:
    """The tokenizer as llguidance knows it, from a description; `encode` is what writes a text as tokens, where the
    tokens' texts do not say it. Raises ValueError."""
    import llguidance

    if "json" in described:
        return llguidance.LLTokenizer(described["json"], n_vocab=described["vocabulary"], eos_token=described["eos"])
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Plain(described, encode)), n_vocab=described["vocabulary"]
    )


class _Plain:
    """A tokenizer whose text is its tokens' texts one after the other, in the form that llguidance asks for."""

    def __init__(self, described: dict[str, Any], encode: Callable[[str], list[int]] | None) -> None:
        self.tokens = [text.encode() for text in described["tokens"]]
        self.eos_token_id = described["eos"]
        self.bos_token_id = described["bos"]
        self.special_token_ids = described["special"]
        self._ids = {text: id for id, text in enumerate(described["tokens"]) if id not in self.special_token_ids}
        self._longest = max(map(len, self._ids), default=1)
        self._encode = encode or self._greedy

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)

    def _greedy(self, text: str) -> list[int]:
        """The longest token at each place; what none begins with is left out."""
        if not isinstance(text, str):
            raise TypeError(text)  # llguidance asks whether it may give bytes
        ids, at = [], 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), at + 1)
            ids += [self._ids[text[at:end]]] if text[at:end] in self._ids else []
            at = end
        return ids


def fault(grammar: str, tokenizer: Any) -> str:
    """Why a grammar cannot be compiled; "" where it can, and the tokens that may come first are known."""
    from llguidance import LLMatcher

    lark = LLMatcher.grammar_from_lark(grammar)
    if tokenizer is None:
        failed, messages = LLMatcher.validate_grammar_with_warnings(lark)
        return str(messages[0]) if failed else ""
    matcher = LLMatcher(tokenizer, lark, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error()) if matcher.is_error() else ""


def tried(grammar: str, tokenizer: Any) -> str:
    """`fault`, within the bounds."""
    told, telling = os.pipe()
    if (child := os.fork()) == 0:
        _bounded(grammar, tokenizer, telling)
    os.close(telling)
    with os.fdopen(told, encoding="utf-8") as answer:
        fault_text = answer.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return _ENDED.get(signal.Signals(os.WTERMSIG(status)), f"it takes more than {BYTES >> 20} MiB to prepare")
    return fault_text if os.waitstatus_to_exitcode(status) == 0 else f"it takes more than {BYTES >> 20} MiB to prepare"


def _bounded(grammar: str, tokenizer: Any, telling: int) -> NoReturn:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library says what it dies of
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # a system that does not tell, or sets no such limit
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            size = pages * os.sysconf("SC_PAGE_SIZE") + BYTES
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        os.write(telling, fault(grammar, tokenizer).encode()[:4096])
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    """Answer until there is nothing more to read."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that asks
    described = json.loads(sys.stdin.readline() or "null")
    tokenizer = None if described is None else opened(described)
    for line in sys.stdin:
        print(json.dumps(tried(json.loads(line), tokenizer)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
