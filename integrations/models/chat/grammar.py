"""Grammars over token ids, by llguidance. They give sampler and learner the allowed next tokens, as packed bits."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cotune.errors import RequestRefused, SamplerError, install_extra
from cotune.integrations.models.chat.grammar_trial import NOT_ENFORCEABLE, REMEDY, Trials, first_error_line
from cotune.integrations.models.chat.grammar_worker import BYTES, open_tokenizer
from cotune.integrations.models.memory import process_memory
from cotune.runtime.bounded_cache import BoundedCache

Bits = npt.NDArray[np.int32]
"""Allowed tokens of one position: bit i % 32 of word i // 32 is token i."""

COMPILED = 128
COMPILED_BYTES = 512 << 20
"""Limits of the cache of compiled grammars: their number, and the bytes of all of them."""
PRINTED = "".join(filter(str.isprintable, map(chr, range(256))))
"""Latin-1 without control characters, some of which SmolLM2 cannot write."""


class Matcher:
    """Follows one reply through its grammar. `words` is the length of the bits of a position."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self.words = words

    def allowed(self, into: Bits) -> None:
        """Write the tokens that may come next; only the end token once the grammar is complete."""
        self._matcher.unsafe_compute_mask_ptr(into.ctypes.data, into.nbytes)

    def consume(self, token: int) -> bool:
        """Move forward by a token; False if the grammar does not allow it. After the grammar's end nothing changes."""
        return self._matcher.is_stopped() or self._matcher.consume_token(token)


class Grammars:
    """The grammars of one tokenizer, each compiled once. Safe to use from several threads.

    A grammar is a Lark text in llguidance's dialect (`reply_grammar` writes it). `vocabulary` is the number of logits.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        """Grammars for replies of a model with this tokenizer. `vocabulary` is the number of its logits, which may be
        more than its tokens.
        """
        self._model_tokenizer = tokenizer
        self._vocabulary = max(vocabulary, len(tokenizer))
        self._tokenizer: Any = None
        """The same tokenizer in llguidance; None until it is needed for the first time."""
        self._trials: Trials | None = None
        self._can_write_all = False
        """See `spells`; False until the tokenizer is opened."""
        self._compiled: BoundedCache[Any] = BoundedCache(COMPILED, COMPILED_BYTES)
        self._lock = threading.Lock()
        self.words = -(-self._vocabulary // 32)
        """Number of int32 words for the bits of all tokens."""

    def start(self, grammar: str) -> Matcher:
        """A matcher at the beginning of a reply. Raises RequestRefused for a grammar that cannot be compiled.

        Try a grammar before (`trials`): an untried one may end the process.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                compiled, size = self._compile_measured(grammar)
                self._compiled.put(grammar, compiled, size)
            return Matcher(compiled.deep_copy(), self.words)

    @property
    def trials(self) -> Trials:
        """The trials of grammars with this tokenizer. Raises SamplerError for one that llguidance cannot read."""
        with self._lock:
            self._open_library()
            assert self._trials is not None
            return self._trials

    def open(self) -> None:
        """Read the tokenizer now. It takes seconds, and no other Python code of the process runs meanwhile.

        Raises SamplerError for one that llguidance cannot read.
        """
        self.trials.open()

    @property
    def spells(self) -> bool:
        """Whether the tokenizer can write any text: its tokens are bytes, and it writes all of `PRINTED`."""
        with self._lock:
            self._open_library()
            return self._can_write_all

    def special(self, token: int) -> bool:
        """Whether a token is special, outside of text, so that a grammar names it by its id."""
        with self._lock:
            return self._open_library().is_special_token(token)

    def raw(self, token: int) -> bytes:
        """The bytes of a token, which may be a part of a character; the name of a special token."""
        with self._lock:
            token_bytes: bytes = self._open_library().decode_bytes([token])
        return token_bytes

    def replay(self, grammar: str, token_ids: Sequence[int]) -> Bits:
        """Bits [tokens, words] of the tokens that were allowed at each position of a reply.

        Raises SamplerError if the grammar does not allow the reply.
        """
        matcher = self.start(grammar)
        bits = np.empty((len(token_ids), self.words), np.int32)
        for position, token in enumerate(token_ids):
            matcher.allowed(bits[position])
            word = bits[position, token // 32]
            is_allowed = bool(word >> (token % 32) & 1)
            if not is_allowed or not matcher.consume(token):
                raise SamplerError(
                    f"Token {token} at position {position} of a reply is not allowed by its grammar.",
                    "Sampler and learner need the same tokenizer and the same version of llguidance.",
                )
        return bits

    def _compile_measured(self, grammar: str) -> tuple[Any, int]:
        """A compiled grammar, and about its bytes: the growth of the process' memory, at most the limit of a trial.

        Memory that the process takes for other work meanwhile counts too, so the cache may hold fewer grammars.
        """
        before = process_memory()
        compiled = self._compile(grammar)
        return compiled, min(max(process_memory() - before, len(grammar)), BYTES)

    def _compile(self, grammar: str) -> Any:
        """A matcher for a grammar. Raises RequestRefused if llguidance cannot enforce it."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._open_library(), LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            raise RequestRefused(f"{NOT_ENFORCEABLE}: {first_error_line(matcher.get_error())}.", REMEDY)
        return matcher

    def _open_library(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer, description = _open(self._model_tokenizer, self._vocabulary)
            self._trials = Trials(description)
            has_json = "json" in description
            self._can_write_all = has_json and all(_can_write(self._tokenizer, text) for text in PRINTED)
        return self._tokenizer


def _can_write(tokenizer: Any, text: str) -> bool:
    written: bytes = tokenizer.decode_bytes(tokenizer.tokenize_str(text))
    return written == text.encode()


def _open(tokenizer: Any, vocabulary: int) -> tuple[Any, dict[str, Any]]:
    """llguidance's tokenizer, and its description for other processes. Raises SamplerError for an unreadable one.

    A fast tokenizer is described by its own JSON. If there is none, or llguidance cannot read it, the description is
    the text of each token.
    """
    base: dict[str, Any] = {"vocabulary": vocabulary, "eos": tokenizer.eos_token_id}
    fast_tokenizer = getattr(tokenizer, "backend_tokenizer", None)
    fault_of_json = "it is not a fast one"
    try:
        if fast_tokenizer is not None:
            try:
                plain = copy.copy(fast_tokenizer)
                plain.no_padding()
                plain.no_truncation()
                with_json = {**base, "json": plain.to_str()}
                return open_tokenizer(with_json), with_json
            except ValueError as error:
                fault_of_json = str(error).splitlines()[0]
        with_texts = {**base, **_tokenizer_texts(tokenizer)}
        return open_tokenizer(with_texts, lambda text: tokenizer.encode(text, add_special_tokens=False)), with_texts
    except ImportError as error:
        raise SamplerError(
            "Structured output needs llguidance, which is not installed.", install_extra("train")
        ) from error
    except ValueError as error:
        raise SamplerError(
            f"Structured output does not know this tokenizer: {fault_of_json}; {error}.",
            "Use a model with a fast tokenizer.",
        ) from error


def _tokenizer_texts(tokenizer: Any) -> dict[str, Any]:
    """The description of a tokenizer by the texts of its tokens.

    Raises ValueError if the text of several tokens is not the concatenation of their texts.
    """

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    special = sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
    texts = [decode([i]) for i in range(len(tokenizer))]
    plain = [i for i in range(len(tokenizer)) if i not in special]
    if decode(plain) != "".join(texts[i] for i in plain):
        raise ValueError("the text of several tokens is not the tokens' texts one after the other")
    return {"tokens": texts, "special": special, "bos": tokenizer.bos_token_id}
