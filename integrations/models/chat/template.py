"""Translates chat requests to token ids, and sampled ids to assistant messages, by the tokenizer of a model folder."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import ConfigError, PromptTooLong, RequestRefused, SamplerError, error_line
from cotune.integrations.models.chat.content import MARKED, OPEN, SEEING, ControlTokens, for_template
from cotune.integrations.models.chat.grammar import Grammars
from cotune.integrations.models.chat.grammar_trial import NOT_ENFORCEABLE, REMEDY
from cotune.integrations.models.chat.replies import Replies
from cotune.integrations.models.chat.reply_grammar import Syntax, refused_place, reply_grammar
from cotune.integrations.models.chat.time_limit import TookTooLong, time_limit
from cotune.integrations.models.chat.token_reuse import EarlierIds, Messages, PathTexts
from cotune.integrations.models.chat.tool_formats import (
    AUTO,
    HERMES,
    REASONING,
    ToolFormat,
    Tools,
    format_that_reads,
    shown_by,
    tool_format,
    write_sample_call,
)
from cotune.integrations.models.folder.folder import TRANSFORMERS_LOCK, errors_of_model, loading_options
from cotune.integrations.models.folder.kinds import end_ids, sees_images
from cotune.integrations.models.folder.vision import ImageInputs
from cotune.records.ids import address, pack_ids, unpack_ids
from cotune.records.images import holds_images, images_of
from cotune.runtime.bounded_cache import BoundedCache
from cotune.sampling.protocol import TokenBytes
from cotune.sampling.request_params import CONTINUE

log = logging.getLogger("cotune")

Options = Mapping[str, Any]
"""Variables for a chat template, by name."""


class _Rendered(msgspec.Struct):
    """A rendered prompt, and its packed ids if they were needed."""

    key: bytes
    text: str
    packed: bytes | None = None

    @property
    def bytes(self) -> int:
        """About its bytes in memory."""
        return 4 * len(self.text) + len(self.packed or b"") + _OVERHEAD


class ChatTemplate:
    """The chat template, tokenizer and reply parser of one model: a `ChatFormat` for every sampler.

    Replies are parsed by the tokenizer's own `response_template` if it has one. Otherwise `<think>` becomes
    `reasoning_content`, and tool calls are read in the format `tools`: one of `tool_formats`, or "auto" for the format
    that the chat template writes. `images` is for a model that sees images. Safe to use from several threads.
    """

    def __init__(
        self, tokenizer: Any, end_token_ids: Sequence[int], *, tools: str = AUTO, images: ImageInputs | None = None
    ) -> None:
        """The chat format of a model: its template renders prompts, and its replies are read as messages.

        Args:
            end_token_ids: token ids that end a reply.
            tools: format of tool calls, or AUTO to recognise it from the template.
            images: prepares images, for a model that sees them.
        """
        self.tokenizer = tokenizer
        self._images = images
        added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
        added_special = [str(token) for token in added_tokens if token.special]
        self._control_tokens = ControlTokens([*tokenizer.all_special_tokens, *added_special])
        self._only_parts = False
        """Whether the template leaves a content out if it is a text instead of a list of parts."""
        # Templates of models that see images may do so. Try it with a message.
        if images is not None:
            with contextlib.suppress(SamplerError):
                prompt = self._template([{"role": "user", "content": _PROBE}], None, {})
                self._only_parts = _PROBE not in prompt
        self.end_token_ids = tuple(end_token_ids)
        self.counts: Counter[str] = Counter()
        """Counts of prompts, replies and special tokens.

        Prompts: "rendered"; "cached"; "extended", with reused earlier ids; "respelled", extended prompts in which the
        template would write a reply differently; "diverged", which do not continue the earlier ids; "unshown_tools",
        whose tools the template leaves out. Replies: "unparsed", which the tokenizer's response template refuses, so
        that they stay text. Special tokens in messages that stay text: "plain_control_tokens".
        """
        self._rendered: BoundedCache[_Rendered] = BoundedCache(PROMPTS, PROMPT_BYTES)
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder()
        self.sample_call: str | None = None
        """A tool call as the chat template writes it; None if the template writes none."""
        self.tool_format = self._recognise_format() if tools == AUTO else tool_format(tools, tokenizer)
        """The format of tool calls; None if the template writes them in an unknown format."""
        self._replies = Replies(tokenizer, self.end_token_ids, self.tool_format, lambda: self._count("unparsed"))
        self._texts = PathTexts(self._replies.decode)
        self._grammars = Grammars(tokenizer, len(tokenizer))
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, model: str | Path, tools: str = AUTO) -> ChatTemplate:
        """Load from a model folder or hub id.

        Raises ConfigError if there is no model, if it has no chat template or one that does not end, and for an unknown
        format of tool calls.
        """
        with TRANSFORMERS_LOCK:
            from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        path = Path(model)
        if path.exists() and not (path / "config.json").exists():
            raise ConfigError("model", str(model), "is not a folder with config.json, tokenizer and weights", _REMEDY)
        with errors_of_model(model):
            tokenizer = AutoTokenizer.from_pretrained(str(model), **loading_options())
            config = AutoConfig.from_pretrained(str(model), **loading_options())
            generation_ends = None
            with contextlib.suppress(OSError):  # a folder without generation_config.json
                generation_ends = GenerationConfig.from_pretrained(str(model)).eos_token_id
            ends = end_ids(generation_ends, config.get_text_config().eos_token_id, tokenizer.eos_token_id)
        if not tokenizer.chat_template:
            raise ConfigError(
                "model",
                str(model),
                "has a tokenizer without a chat template",
                "Use an instruct model, or put a chat_template.jinja into the folder.",
            )
        chat = cls(tokenizer, ends, tools=tools, images=ImageInputs(str(model)) if sees_images(config) else None)
        try:
            chat._template([{"role": "user", "content": "hi"}], tools=None, options={})
        except SamplerError as error:
            # With any other cause the template may still render other messages.
            if isinstance(error.__cause__, TookTooLong):
                fault = f"has a chat template that does not render a message within {PATIENCE:g} s"
                raise ConfigError("model", str(model), fault, _CORRECT_TEMPLATE) from None
        if chat.tool_format is None and not chat._replies.template:
            log.warning("%s Calls with tools are refused. %s", chat._unknown(), _NAME_IT)
        return chat

    def render(
        self,
        messages: Messages,
        tools: Tools | None,
        *,
        earlier: Sequence[bytes] = (),
        most: int | None = None,
        options: Options | None = None,
    ) -> list[int]:
        """Token ids of the prompt, including the generation prompt. Raises SamplerError if it cannot be rendered.

        A prompt of more than `most` tokens is refused (PromptTooLong) and not cached. If its text is far too long, it
        is refused before it is tokenized.

        `earlier` are packed token paths (prompt, or prompt and reply) of the same role. If the new prompt continues
        some of them, the ids of the longest one are reused, and only the remaining text is tokenized. If a message
        repeats an earlier reply, the prompt contains the reply's own tokens, even if the template would write the text
        differently. `options` are variables for the template.
        """
        if tools and self.tool_format is None and not self._replies.template:
            raise SamplerError(self._unknown(), _NAME_IT)
        if tools and not self.shows_tools:
            self._count("unshown_tools")
            if self.counts["unshown_tools"] == 1:
                log.warning("%s %s", UNSHOWN_TOOLS, SHOW_TOOLS)
        variables = options or {}
        rendered = self._render(messages, tools, variables, most)
        extended = None
        if earlier:
            extended = self._extend_earlier(rendered.text, messages, tools, variables, earlier)
        if extended is not None:
            packed_ids, text = extended
        else:
            if rendered.packed is None:
                rendered.packed = pack_ids(self._encode(rendered.text))
            packed_ids = rendered.packed
            text = rendered.text
        ids = list(unpack_ids(packed_ids))
        if most is not None and len(ids) > most:
            raise _too_long(f"{len(ids)} tokens", most)
        self._texts.keep(packed_ids, text)
        self._rendered.put(rendered.key, rendered, rendered.bytes)
        return ids

    def _extend_earlier(
        self, text: str, messages: Messages, tools: Tools | None, options: Options, earlier: Sequence[bytes]
    ) -> tuple[bytes, str] | None:
        """The packed ids of a prompt that continues one of the `earlier` paths, and its text; None without such a path.

        A path is an earlier prompt, or one with its reply. `text` is the new prompt as the template writes it. If the
        model has written an earlier reply differently, the returned text has the reply as the model wrote it.
        """
        # The last request of a conversation may offer no tools, although earlier replies called some.
        reply_tools = tools
        if not reply_tools and any(message.get("tool_calls") for message in messages):
            reply_tools = ANY_TOOLS

        def parse(prompt: Sequence[int], reply: Sequence[int]) -> Mapping[str, Any]:
            _, message, _ = self.parse(reply, prompt=prompt, tools=reply_tools)
            return message

        tools_name = address(self._encoder.encode(reply_tools)) if reply_tools else ""
        earlier_ids = EarlierIds(earlier, self._texts, parse, self.end_token_ids, tools_name)
        prompt_text = text
        path, remaining = earlier_ids.longest(text)
        longest_earlier = earlier_ids.paths[0]
        if len(path) < len(longest_earlier):
            # A longer path may fit if the text has the replies as the model wrote them.
            own_text = None
            # A template may refuse a call without its mark; messages may have another form than OpenAI's.
            with contextlib.suppress(SamplerError, TypeError, AttributeError):
                own_text = earlier_ids.text_with_own_replies(
                    messages, lambda chat: self._template(chat, tools, options), text, path
                )
            if own_text is not None:
                longer_path, longer_remaining = earlier_ids.longest(own_text)
                if len(longer_path) > len(path):
                    self._count("respelled")
                    path = longer_path
                    remaining = longer_remaining
                    prompt_text = own_text
        if not path:
            self._count("diverged")
            return None
        self._count("extended")
        return path + pack_ids(self._encode(remaining)), prompt_text

    def transcript(
        self, messages: Messages, tools: Tools | None, *, options: Options | None = None, generation: bool = False
    ) -> str:
        """The rendered text of a conversation; with `generation`, it ends ready for a reply. Raises SamplerError."""
        return self._template(messages, tools, options or {}, generation=generation)

    def open_grammars(self) -> None:
        """Read the tokenizer for grammars now. Otherwise the first request that needs it would delay all others."""
        with contextlib.suppress(SamplerError):  # the first request that needs it reports the error
            self._grammars.open()

    def token_bytes(self, token_ids: Sequence[int]) -> list[TokenBytes]:
        """The bytes of each token. Several tokens may form one character."""
        grammars = self._grammars
        try:
            return [TokenBytes(grammars.raw(id), grammars.special(id)) for id in token_ids]
        except SamplerError:
            # llguidance cannot read this tokenizer.
            marks = {*self.tokenizer.all_special_ids, *self.end_token_ids}
            return [TokenBytes(self._replies.decode([id]).encode(), id in marks) for id in token_ids]

    def parse(
        self,
        token_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        prompt: Sequence[int] = (),
        tools: Tools | None = None,
    ) -> tuple[str, dict[str, Any], str]:
        """Return (text, assistant message in OpenAI form, finish reason: "stop", "tool_calls" or "malformed").

        `prompt` are the ids before the reply, because some templates open the reasoning there. `tools` are the tools of
        the request; without tools, a call is text. End tokens, and everything from the first stop string on, are not
        part of the text. A call that cannot be read stays in the text, and the reason is "malformed", even if other
        calls can be read. A reply that ends within its reasoning has no content.
        """
        return self._replies.parse(token_ids, stop, prompt, tools or ())

    def stopped_by(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """The stop string that ended a reply; empty if none did."""
        return self._replies.stopped_by(token_ids, stop)

    def _unknown(self) -> str:
        return f"The model's chat template writes tool calls in an unknown form: {self.sample_call!r}."

    def _recognise_format(self) -> ToolFormat | None:
        """The format of the tool calls that the chat template writes; Hermes if it writes none."""

        def template(messages: list[dict[str, Any]], generation: bool) -> str:
            return self._template(messages, None, {}, generation=generation)

        try:
            end_texts = [self.tokenizer.decode([end]) for end in self.end_token_ids]
            self.sample_call = write_sample_call(template, end_texts)
        except SamplerError:  # the template refuses calls
            return HERMES
        return HERMES if self.sample_call is None else format_that_reads(self.sample_call)

    @functools.cached_property
    def shows_tools(self) -> bool:
        """Whether a prompt contains the tools of its request."""
        try:
            return shown_by(lambda chat, tools: self._template(chat, tools, {}))
        except SamplerError:  # the template refuses tools: each request with tools gets its error
            return True

    @functools.cached_property
    def reads_parts(self) -> bool:
        """Whether the template accepts a content in parts. `vllm serve` then passes it the parts, too."""
        as_text = {"role": "user", "content": _PROBE}
        as_parts = {"role": "user", "content": [{"type": "text", "text": text} for text in (_PROBE, _SECOND)]}
        try:
            self.tokenizer.apply_chat_template([as_text], tokenize=False)
            rendered: str = self.tokenizer.apply_chat_template([as_parts], tokenize=False)
        except Exception:  # noqa: BLE001, a template that reads texts alone fails in any way
            return False
        shows_both_texts = rendered.count(_PROBE) == 1 and _SECOND in rendered
        # A template that reads texts alone may also write the list of parts as Python does, with 'text' in quotes.
        shows_list = "'text'" in rendered
        return shows_both_texts and not shows_list

    def images(self, messages: Messages) -> tuple[bytes, ...]:
        """The encoded images of messages, in order.

        Raises RequestRefused for images if the model sees none, and for an image without its bytes.
        """
        if self._images is not None:
            return images_of(messages)
        if holds_images(messages):
            raise RequestRefused("The policy's model sees no images.", SEEING)
        return ()

    @property
    def image_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that stand for images in a prompt."""
        return self._images.token_ids if self._images is not None else ()

    def reads(self, option: str) -> bool:
        """Whether the template knows a variable of this name."""
        return option in str(self.tokenizer.chat_template)

    def grammar(self, asked: Mapping[str, Any], tools: Tools | None, prompt: Sequence[int]) -> str:
        """The grammar of the replies that a request allows. `asked` is the body of the request in OpenAI form, and
        `prompt` are the ids of its rendered messages. Raises RequestRefused for a grammar that cannot be enforced.
        """
        grammar = reply_grammar(asked, tools, self._syntax(prompt))
        trials = self._grammars.trials
        if trials.fault(grammar):
            # If the part of a schema that is refused can be found, the error names it.
            refused_part = refused_place(asked, tools, trials.fault)
            if refused_part:
                raise RequestRefused(f"{NOT_ENFORCEABLE}: {refused_part}.", REMEDY)
        trials.check(grammar)
        return grammar

    def _syntax(self, prompt: Sequence[int]) -> Syntax:
        """The syntax of the replies to a prompt, for a grammar: marks of tool calls and of reasoning, and end tokens.

        At its end, a prompt may have opened the reasoning of the reply, or closed it.
        """
        opening, closing = REASONING
        tail = self._replies.tail(prompt)
        format = self.tool_format or HERMES
        model_reasons = opening in str(self.tokenizer.chat_template)
        may_reason = model_reasons and not tail.endswith(closing)
        return Syntax(
            all_ends=self.end_token_ids,
            vocabulary=len(self.tokenizer),
            call_mark=format.marks[0] if format.marks else _NO_MARK,
            call=lambda name, arguments: format.call(name, arguments, self._token),
            token=self._token,
            supports=lambda grammar: not self._grammars.trials.fault(grammar),
            think=REASONING if may_reason else None,
            thinking=tail.endswith(opening),
            ends=[token for token in self.end_token_ids if token != self.tokenizer.eos_token_id],
            spells=self._grammars.spells,
        )

    def _token(self, mark: str) -> int | None:
        ids = self._encode(mark)
        return ids[0] if len(ids) == 1 and self._grammars.special(ids[0]) else None

    def _render(self, messages: Messages, tools: Tools | None, options: Options, most: int | None) -> _Rendered:
        """Render a prompt, or take it from the cache. Raises SamplerError if it must have more than `most` tokens.

        The tokens are bounded by the number of characters, because to count them takes far longer.
        """
        try:
            key = hashlib.blake2b(self._encoder.encode((messages, tools, options)), digest_size=16).digest()
        except (TypeError, ValueError) as error:
            raise SamplerError(f"The messages are not JSON: {error}.", "Pass plain OpenAI messages.") from error
        if (cached := self._rendered.get(key)) is not None:
            self._count("cached")
            return cached
        text = self._template(messages, tools, options)
        if most is not None:
            most_characters = most * self._longest_token
            if len(text) > most_characters:
                raise _too_long(f"{len(text)} characters", most)
        self._count("rendered")
        n_plain_tokens = len(MARKED.findall(text))
        if n_plain_tokens:
            with self._lock:
                self.counts["plain_control_tokens"] += n_plain_tokens
            is_first_time = self.counts["plain_control_tokens"] == n_plain_tokens
            if is_first_time:
                log.warning("A message holds special tokens of the model as text, such as <|im_end|>: they stay text.")
        return _Rendered(key, text)

    def _count(self, how: str) -> None:
        with self._lock:
            self.counts[how] += 1

    def _template(self, messages: Messages, tools: Tools | None, options: Options, *, generation: bool = True) -> str:
        """Apply the model's chat template. Special tokens in messages are marked first, so that they stay text. Raises
        SamplerError if the template fails or does not end.
        """
        from jinja2 import TemplateError

        try:
            images = self.images(messages)
            all_in_parts = bool(images) or self._only_parts
            chat = []
            for message in messages:
                marked = self._control_tokens.marked(message)
                in_parts = all_in_parts or (isinstance(marked.get("content"), list) and self.reads_parts)
                chat.append(for_template(marked, parts=in_parts))
            # A prompt that continues the last message begins no new reply.
            begins_reply = generation and not options.get(CONTINUE)
            with time_limit(PATIENCE):
                text: str = self.tokenizer.apply_chat_template(
                    chat,
                    tools=list(tools) if tools else None,
                    add_generation_prompt=begins_reply,
                    tokenize=False,
                    **options,
                )
            return self._images.expanded(text, images) if images and self._images else text
        except TookTooLong as error:
            raise SamplerError(f"The chat template did not end within {PATIENCE:g} s.", _CORRECT_TEMPLATE) from error
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SamplerError(
                f"The chat template cannot render these messages: {error_line(error)}.",
                "Check roles and their order against the model's chat template.",
            ) from error

    def _encode(self, text: str) -> list[int]:
        if OPEN not in text:
            return self.tokenizer.encode(text, add_special_tokens=False) if text else []
        ids: list[int] = []
        for piece, is_plain in self._control_tokens.pieces(text):
            ids += self._encode_plain(piece) if is_plain else self.tokenizer.encode(piece, add_special_tokens=False)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """The ids of a special token's text as plain letters."""
        if self._plain_tokenizer is None:  # a slow tokenizer
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            return ids
        return list(self._plain_tokenizer.encode(text, add_special_tokens=False).ids)

    @functools.cached_property
    def _plain_tokenizer(self) -> Any:
        """A copy of the tokenizer that treats special tokens as text; None for a slow tokenizer."""
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        if fast is None:
            return None
        with self._lock:
            plain = copy.deepcopy(fast)
        plain.no_padding()
        plain.no_truncation()
        plain.encode_special_tokens = True
        return plain


PATIENCE = 10.0
"""Seconds that a chat template may take for one prompt."""
_PROBE = "hello"
_SECOND = "goodbye"
_NAME_IT = "Set tool_format to the format; vllm:NAME is any tool parser of vLLM."
ANY_TOOLS = [{"type": "function", "function": {"name": "any"}}]
"""Tools for a reading of calls that does not depend on the names of tools."""
_NO_MARK = "\0"
"""The mark of calls for a format without marks: a text that no reply contains."""
PROMPTS = 2048
PROMPT_BYTES = 32 << 20
"""Limits of the cache of rendered prompts: their number, and bytes of all of them."""
_OVERHEAD = 400
"""About the bytes of a cached prompt without its text and ids."""
UNSHOWN_TOOLS = "The model's chat template shows no tools, so the model does not know the tools of a request."
SHOW_TOOLS = (
    'Give the role a policy of kind = "provider", use a model whose template shows tools, or describe them in the '
    'prompt, with calls as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'
)
_CORRECT_TEMPLATE = "Correct the chat template in the model's folder, or use a model whose template works."
_REMEDY = "Check the path or id given as --model."


def _too_long(size: str, most: int) -> PromptTooLong:
    return PromptTooLong(
        f"The prompt has {size}; the model takes {most + 1} tokens with the reply.", "Send a shorter conversation."
    )
