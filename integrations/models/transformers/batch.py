"""One running batch on one model: sequences join after their prefill and leave when they end, between decode steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from cotune.integrations.models.chat.grammar import Grammars
from cotune.integrations.models.folder.folder import count_token_ids
from cotune.integrations.models.folder.vision import ImageInputs
from cotune.integrations.models.transformers.attention import Alike, alike_rows, runs, use_rows_attention
from cotune.integrations.models.transformers.cache import RowCache, buffer_tokens
from cotune.integrations.models.transformers.decode import DecodeStep, is_usual
from cotune.integrations.models.transformers.draw import RowParams, draw, likeliest, shape, uniforms
from cotune.integrations.models.transformers.lora import LoraRows
from cotune.integrations.models.transformers.prefill import image_shift, like_lengths, prefill, states_of, stems
from cotune.integrations.models.transformers.prefixes import NOTHING, Prefix, PrefixCache
from cotune.integrations.models.transformers.rows import Job, Rows, Source, arrange
from cotune.integrations.models.transformers.wire import DRAW_ELEMENTS, GPU_PART
from cotune.sampling.protocol import Completion

BASE = -1
"""Kind of rows that use no adapter."""
_NOBODY = np.array(None, object)

COLDEST = np.float32(1e-30)
"""Least temperature, at which only the likeliest token is drawn: over a lower one logits are no numbers any more."""

AHEAD = 16
"""Decode steps whose random numbers go to the device together."""


class Batch:
    """Decodes rows of one model. Not thread-safe: belongs to the engine's thread."""

    def __init__(
        self,
        model: Any,
        end_token_ids: Iterable[int],
        tokenizer: Any = None,
        prefixes: PrefixCache | None = None,
        images: ImageInputs | None = None,
    ) -> None:
        """`prefixes` and `images` (of a model that sees them) may be of several batches."""
        self.model = model
        self.images = images
        self.prefixes = prefixes or PrefixCache(0)
        own_attention = use_rows_attention(model)
        self.lora = LoraRows(model)
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        self.vocabulary = count_token_ids(tokenizer, config.vocab_size)
        """How many token ids may be drawn. The model can have more logits."""
        self.grammars = None if tokenizer is None else Grammars(tokenizer, self.vocabulary)
        self.rows = 0
        self.state = Rows()
        parameter = next(model.parameters())
        self.device = parameter.device
        self.cache = RowCache(config.num_hidden_layers, parameter.dtype, parameter.device)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._token_bytes = 2 * config.num_hidden_layers * heads * width * parameter.element_size()
        self._one_mask = (
            getattr(model, "_supports_attention_backend", False)
            and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
            and not getattr(config, "sliding_window", None)
        )
        self._reads_once = own_attention and self._one_mask
        self._step = DecodeStep(model, self.lora) if self._reads_once and is_usual(model) else self._library_step
        self._groups: list[tuple[int, int]] = []
        self._ahead: Tensor | None = None
        """Random numbers of the next steps, [rows, AHEAD], of which `_ahead_used` are used."""
        self._ahead_used = 0
        self._admitted = 0
        """Tokens that the live rows can need, as of the last admission."""
        self._bound = math.inf
        """Tokens that may be admitted, once there was too little memory."""
        self._ends = np.zeros(max(config.vocab_size, *end_token_ids, 0) + 1, bool)
        self._ends[list(end_token_ids)] = True
        self._input = torch.zeros((0, 1), dtype=torch.long, device=parameter.device)
        self._params = self._row_params(slice(0, 0))

    @property
    def alive(self) -> int:
        return int(self.state["alive"][: self.rows].sum())

    @property
    def span(self) -> int:
        """Length that the longest live row can reach."""
        return int((self.state["span"][: self.rows] * self.state["alive"][: self.rows]).max(initial=0))

    def room(self) -> float:
        """How many tokens all rows together may have: as many as have room for their keys and values in a part of the
        GPU's free memory. On a CPU there is no limit.

        After the engine has run out of memory, `_bound` limits the tokens until the buffers are given back.
        """
        if self.device.type != "cuda":
            return self._bound
        return min(self._bound, GPU_PART * self.cache.gpu_memory() / self._token_bytes)

    def halve(self) -> None:
        """Drop all rows, give their memory back, and have room for half as many tokens as were admitted."""
        self._bound = self._admitted / 2
        self.state["alive"][:] = False
        self.rows = 0
        self._free()

    @torch.inference_mode()
    def admit(self, jobs: Sequence[Job], most: float = math.inf) -> list[Job]:
        """Prefill each distinct prompt once and start all candidates; return jobs that ended with one token.

        The buffers hold at most `most` tokens, or as many as these jobs and the live rows can need.
        """
        rows = self.alive + sum(job.n for job in jobs)
        self._admitted = buffer_tokens(rows, max(self.span, *(job.span for job in jobs)))
        self.cache.limit = max(most, self._admitted)
        logits, at = self._start(jobs)
        return self._draw(logits, at)

    @torch.inference_mode()
    def step(self) -> list[Job]:
        """Decode one token for every row; return the jobs that ended with it."""
        if self.alive < self.rows - self.rows // 8:
            self._arrange(np.empty(0, np.int64), 0, 0)
            self._compose()
        if self.cache.full:
            rows = np.arange(self.rows)
            self.cache.rearrange(rows, rows, self.rows, self._longest(), 0, self.span)
        logits = self._step(self._input[: self.rows, 0], self.cache, self._alike())
        self.cache.advance()
        return self._draw(logits, None)

    def cancel(self, job: Job) -> None:
        """Free the rows of a job."""
        self.state["alive"][: self.rows] &= self.state["job"][: self.rows] != job
        if not self.state["alive"][: self.rows].any():
            self.rows = self.cache.window.rows = 0

    def release(self) -> None:
        """Give the memory of keys and values back while nothing is decoded."""
        self._bound = math.inf
        if not self.rows and self.cache.nbytes:
            self._free()

    @torch.inference_mode()
    def _free(self) -> None:
        self.cache.release()
        self._input = self._input[:0].clone()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for other processes on this GPU

    def _start(self, jobs: Sequence[Job]) -> tuple[Tensor, npt.NDArray[np.int64]]:
        """Give all candidates of the jobs their rows, with each distinct prompt prefilled once; the logits that follow,
        and where the rows are."""
        sources = list(dict.fromkeys(job.source for job in jobs))
        prefilled = self._prefill(sources)
        index = {source: i for i, source in enumerate(sources)}
        width = max(len(source.prompt) for source in sources)
        fresh = np.repeat(np.arange(len(jobs)), [job.n for job in jobs])
        at = self._arrange(np.array([jobs[i].kind for i in fresh]), width, max(job.span for job in jobs))
        source = np.array([index[jobs[i].source] for i in fresh])
        logits = torch.empty((len(sources), prefilled[0][2].shape[1]), dtype=prefilled[0][2].dtype, device=self.device)
        for members, cache, out, shift in prefilled:
            place = np.full(len(sources), -1)
            place[members] = np.arange(len(members))
            theirs = place[source] >= 0
            rows, local, lengths = (
                torch.as_tensor(values, device=self.device)
                for values in (
                    at[theirs],
                    place[source[theirs]],
                    np.array([len(sources[i].prompt) for i in source[theirs]], np.int64),
                )
            )
            self.cache.fill(rows, cache, local, lengths)
            if shift is not None:
                self.cache.shift(rows, shift[local])
            logits[torch.as_tensor(members, device=self.device)] = out
        for i, job in enumerate(jobs):
            self.state.put(at[fresh == i], job, self.grammars)
        self._compose()
        return logits[torch.as_tensor(source, device=self.device)], at

    def _prefill(
        self, sources: Sequence[Source]
    ) -> list[tuple[npt.NDArray[np.int64], DynamicCache, Tensor, Tensor | None]]:
        """Prefill what is not known of these prompts, like lengths together; for each pass the numbers of its sources,
        their cache padded on the left, the logits that follow, and the shifts of the positions after them, if any."""
        texts = sorted((i for i, source in enumerate(sources) if not source.images), key=lambda i: sources[i].kind)
        self._compute_stems([sources[i] for i in texts])
        known = {i: self.prefixes.match((self, sources[i].kind), sources[i].prompt) for i in texts}
        self.prefixes.reused += sum(prefix.length for prefix in known.values())
        passes = []
        for group in like_lengths([len(sources[i].prompt) - known[i].length for i in texts]):
            members = np.array([texts[i] for i in sorted(group)])
            passes.append((members, *self._pass([sources[i] for i in members], [known[i] for i in members]), None))
        seeing = sorted(set(range(len(sources))) - set(texts), key=lambda i: sources[i].kind)
        if seeing:
            assert self.images is not None
            asked = [(sources[i].prompt, sources[i].images) for i in seeing]
            for alike, given in self.images.together(self.model, asked):
                members = np.array([seeing[i] for i in alike])
                self._route(np.array([sources[i].kind for i in members]))
                done = prefill(self.model, [sources[i].prompt for i in members], [NOTHING] * len(members), given)
                passes.append((members, *done, image_shift(self.model)))
        return passes

    def _compute_stems(self, sources: Sequence[Source]) -> None:
        """Compute the beginnings (stems) that several of these prompts share, so that each is computed once.

        `sources` are sorted by kind, because only prompts of one kind can share a cache. A stem may begin with another
        stem, so the shortest ones are computed first, and the rest in further rounds.
        """
        done: set[Source] = set()
        while self.prefixes.limit:
            shared: list[Source] = []
            for kind, alike in groupby(sources, key=lambda source: source.kind):
                prompts = [source.prompt for source in alike]
                known = [self.prefixes.length((self, kind), prompt) for prompt in prompts]
                shared += [Source(kind, stem, ()) for stem in stems(prompts, known)]
            # No new stem: all are computed, or some were dropped again because the cache is full.
            if not set(shared) - done:
                return
            done |= set(shared)
            prefixes = [self.prefixes.match((self, kind), stem) for kind, stem, _ in shared]
            new_tokens = [len(stem.prompt) - prefix.length for stem, prefix in zip(shared, prefixes, strict=True)]
            for group in like_lengths(new_tokens):
                members = sorted(group)
                self._pass([shared[i] for i in members], [prefixes[i] for i in members])

    def _pass(self, sources: Sequence[Source], known: Sequence[Prefix]) -> tuple[DynamicCache, Tensor]:
        """Prefill of prompts that are sorted by kind, which are known from then on."""
        self.prefixes.computed += sum(len(s.prompt) - prefix.length for s, prefix in zip(sources, known, strict=True))
        self._route(np.array([source.kind for source in sources]))
        cache, logits = prefill(self.model, [source.prompt for source in sources], known)
        for row, (kind, prompt, _) in enumerate(sources):
            self.prefixes.insert((self, kind), prompt, partial(states_of, cache, row, len(prompt)))
        return cache, logits

    def _library_step(self, tokens: Tensor, cache: RowCache, alike: Alike | None) -> Tensor:
        """As a `DecodeStep`, of any model."""
        out = self.model(
            input_ids=tokens.unsqueeze(1),
            # where layers differ, the model builds one mask per kind of layer
            attention_mask=cache.mask() if self._one_mask else cache.mask()[:, 0, 0] == 0,
            position_ids=cache.positions(),
            past_key_values=cache,
            use_cache=True,
            **({} if alike is None else {"alike": alike}),
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def _alike(self) -> Alike | None:
        """What the attention is told of candidates of one prompt: up to the end of their prompt they are the same."""
        if not self._reads_once:
            return None
        rows, window = slice(0, self.rows), self.cache.window
        longest = int((self.state["count"][rows] * self.state["alive"][rows]).max())
        columns = window.end - window.first - (longest - 1)
        return alike_rows(columns, self._groups, self.cache.token_bytes())

    def _longest(self) -> int:
        """Tokens of the longest live row in the cache: all but the one that was drawn last."""
        rows = slice(0, self.rows)
        tokens = self.state["span"][rows] - self.state["limit"][rows] + self.state["count"][rows] - 1
        return int((tokens * self.state["alive"][rows]).max(initial=0))

    def _arrange(self, new_kinds: npt.NDArray[np.int64], width: int, span: int) -> npt.NDArray[np.int64]:
        """Close the gaps of ended rows, keep rows sorted by kind; return where the new rows go.

        The new rows have prompts of up to `width` tokens and reach `span` tokens at most.
        """
        live = np.flatnonzero(self.state["alive"][: self.rows])
        rows, longest, span = len(live) + len(new_kinds), self._longest(), max(span, self.span)
        to, at = arrange(live, self.state["kind"][live], new_kinds)
        moved = to != live
        self.state.reserve(rows, 0)
        self.state.move(to[moved], live[moved])
        self.cache.rearrange(live, to, rows, longest, width, span)
        if (capacity := self.cache.window.row_capacity) > len(self._input):
            smaller, self._input = self._input, self._input.new_zeros((capacity, 1))
            self._input[: len(smaller)] = smaller
        if moved.any():
            indices = torch.as_tensor(np.stack([to[moved], live[moved]]), device=self.device)
            self._input[indices[0]] = self._input[indices[1]]
        self.rows = rows
        return at

    def _compose(self) -> None:
        """Recompute what depends on which rows there are."""
        s, rows = self.state, slice(0, self.rows)
        self._params = self._row_params(rows)
        self._route(s["kind"][rows])
        self._groups = runs(s["job"][rows])
        self._ahead = None

    def _row_params(self, rows: Any) -> RowParams:
        """The sampling parameters of these rows as tensors. A parameter that no row uses is None, so its work is
        skipped.
        """
        names = ("temperature", "top_k", "top_p", "min_p", "top")
        temperature, top_k, top_p, min_p, top = (self.state[name][rows] for name in names)
        greedy = temperature == 0

        def tensor(values: npt.NDArray[Any]) -> Tensor:
            return torch.as_tensor(values, device=self.device).unsqueeze(1)

        return RowParams(
            tensor(np.where(greedy, np.float32(1), np.maximum(temperature, COLDEST))),
            tensor(greedy) if greedy.any() else None,
            bool(greedy.all()),
            tensor(top_k) if (top_k > 0).any() else None,
            tensor(top_p) if (top_p < 1).any() else None,
            tensor(min_p) if (min_p > 0).any() else None,
            top.copy() if (top > 0).any() else None,
        )

    def _route(self, kinds: npt.NDArray[np.int64]) -> None:
        """Tell the LoRA layers which rows use which adapter. `kinds` is sorted, so each adapter has one range of
        rows.
        """
        present, starts = np.unique(kinds, return_index=True)
        ends = [*starts[1:], len(kinds)]
        self.lora.route(
            [
                (kind, int(low), int(high))
                for kind, low, high in zip(present.tolist(), starts, ends, strict=True)
                if kind != BASE
            ]
        )

    def _draw(self, logits: Tensor, at: npt.NDArray[np.int64] | None) -> list[Job]:
        """Draw a token for rows `at` (None: all) and record it; return the jobs whose last candidate ended."""
        s = self.state
        if self.vocabulary < logits.shape[1]:
            logits[:, self.vocabulary :] = -torch.inf
        rows = slice(0, self.rows) if at is None else at
        uniform = self._next_uniforms(at)
        params = self._params if at is None else self._row_params(rows)
        shaped = np.where(s["alive"][rows], s["shaped"][rows], _NOBODY)
        if shaped.any():
            shape(logits, shaped.tolist())
        chunk = max(1, DRAW_ELEMENTS // logits.shape[1])
        parts = [
            draw(logits[i : i + chunk], uniform[i : i + chunk], params.rows(slice(i, i + chunk)))
            for i in range(0, len(logits), chunk)
        ]
        if params.top is not None:
            self._note_likeliest(logits, np.arange(self.rows) if at is None else at, params, chunk)
        token, logprob = (torch.cat(column) if len(parts) > 1 else column[0] for column in zip(*parts, strict=True))
        if at is None:
            self._input[: self.rows, 0] = token
        else:
            self._input[torch.as_tensor(at, device=self.device), 0] = token
        # One copy for both: the host waits for the device at every copy from it.
        both = torch.stack((token.int(), logprob.view(torch.int32))).cpu().numpy()
        at = np.arange(self.rows) if at is None else at
        return self._record(at, both[0].astype(np.int64), both[1].view(np.float32))

    def _next_uniforms(self, at: npt.NDArray[np.int64] | None) -> Tensor:
        """The number that the next token of each of the rows `at` (None: all) is drawn by, [rows, 1].

        For all rows the numbers of several steps go to the device at once.
        """
        s = self.state
        if at is not None:
            return torch.as_tensor(uniforms(s["stream"][at], s["count"][at]), device=self.device).unsqueeze(1)
        if self._ahead is None or self._ahead_used == AHEAD:
            rows = slice(0, self.rows)
            positions = s["count"][rows, None] + np.arange(AHEAD)
            self._ahead = torch.as_tensor(uniforms(s["stream"][rows, None], positions), device=self.device)
            self._ahead_used = 0
        self._ahead_used += 1
        return self._ahead[:, self._ahead_used - 1 : self._ahead_used]

    def _note_likeliest(self, logits: Tensor, at: npt.NDArray[np.int64], params: RowParams, chunk: int) -> None:
        """Keep the likeliest tokens of the place that is drawn, for the rows `at` that ask for them."""
        s, counts = self.state, params.top
        assert counts is not None
        asking = np.flatnonzero((counts > 0) & s["alive"][at])
        for part in (asking[i : i + chunk] for i in range(0, len(asking), chunk)):
            index = torch.as_tensor(part, device=self.device)
            best = likeliest(logits[index], params.rows(index), int(counts[part].max()))
            for i, ids, logprobs in zip(part, *(values.tolist() for values in best), strict=True):
                pairs = zip(ids[: counts[i]], logprobs, strict=False)
                row = at[i]
                tokens = tuple((id, logprob) for id, logprob in pairs if logprob > -np.inf)
                s["job"][row].top[s["candidate"][row]].append(tokens)

    def _record(
        self, at: npt.NDArray[np.int64], token: npt.NDArray[np.int64], logprob: npt.NDArray[np.float32]
    ) -> list[Job]:
        """Store the token that each row has drawn, and end the rows that stop. Returns the jobs whose last row has
        ended.

        `at` has the rows; `token` and `logprob` have one value for each of them.
        """
        s = self.state
        count = s["count"][at]
        s.reserve(0, int(count.max()) + 1)
        s["token"][at, count] = token
        s["logprob"][at, count] = logprob
        alive = s["alive"][at]
        s["count"][at] = count + alive
        stopped = self._ends[token]
        for i in np.flatnonzero(np.where(alive, s["shaped"][at], _NOBODY)):
            if not s["shaped"][at[i]].consume(int(token[i])):
                stopped[i] = True
                s["job"][at[i]].refused = int(token[i]), int(count[i])
        if s["watched"][at].any():
            stopped |= self._stopped(at)
        over = alive & (stopped | (count + 1 >= s["limit"][at]))
        if not over.any():
            return []
        ended = [self._end(int(at[i]), bool(stopped[i])) for i in np.flatnonzero(over)]
        if not s["alive"][: self.rows].any():
            self.rows = self.cache.window.rows = 0
        return [job for job in ended if job is not None]

    def _end(self, row: int, stopped: bool) -> Job | None:
        """Keep the completion of a row; return its job if that was the last one."""
        s = self.state
        job: Job = s["job"][row]
        count = int(s["count"][row])
        s["alive"][row] = False
        job.done[int(s["candidate"][row])] = Completion(
            tuple(s["token"][row, :count].tolist()),
            tuple(s["logprob"][row, :count].tolist()),
            "stop" if stopped else "length",
            tuple(job.top[int(s["candidate"][row])]) if job.top else (),
        )
        if not job.params.images:  # of which the same ids tell nothing
            tokens = job.prompt + tuple(s["token"][row, : count - 1].tolist())  # the last one was never read
            self.prefixes.insert((self, job.kind), tokens, partial(self.cache.read, row))
        job.open -= 1
        return None if job.open else job

    def _stopped(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which rows have just written one of their stop strings or stop tokens."""
        s = self.state
        stopped = np.zeros(len(at), bool)
        for i in np.flatnonzero(s["watched"][at] & s["alive"][at]):
            row = at[i]
            stop = s["job"][row].params.stop
            if int(s["token"][row, int(s["count"][row]) - 1]) in s["job"][row].params.stop_token_ids:
                stopped[i] = True
            if stopped[i] or not stop:
                continue
            tail = 4 * max(map(len, stop)) + 8  # a character is at most four tokens
            count = int(s["count"][row])
            text = self.tokenizer.decode(s["token"][row, max(0, count - tail) : count].tolist())
            stopped[i] = any(mark in text for mark in stop)
        return stopped
