"""One running batch on one model: sequences join after their prefill and leave when they end, between decode steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from cotune.integrations.models.chat.grammar import Grammars
from cotune.integrations.models.device_copies import to_device
from cotune.integrations.models.folder.folder import count_token_ids
from cotune.integrations.models.folder.kinds import cached_numbers
from cotune.integrations.models.folder.vision import ImageInputs
from cotune.integrations.models.transformers.attention import (
    SharedColumns,
    find_shared_columns,
    runs,
    use_rows_attention,
)
from cotune.integrations.models.transformers.cache import RowCache, buffer_tokens
from cotune.integrations.models.transformers.decode import DecodeStep, is_usual
from cotune.integrations.models.transformers.draw import RowParams, change_logits, draw, likeliest, uniforms
from cotune.integrations.models.transformers.lora import LoraRows
from cotune.integrations.models.transformers.prefill import (
    cache_argument,
    find_shared_stems,
    group_by_length,
    image_shift,
    prefill,
    states_of,
)
from cotune.integrations.models.transformers.prefixes import NOTHING, Prefix, PrefixCache
from cotune.integrations.models.transformers.rows import Job, Rows, Source, arrange_rows
from cotune.integrations.models.transformers.wire import DRAW_ELEMENTS, GPU_PART
from cotune.sampling.protocol import Completion

BASE = -1
"""Adapter id of rows that use no adapter."""
_NO_CHANGES = np.array(None, object)
"""Stands for the `LogitChanges` of rows that have ended, in arrays of objects."""

COLDEST = np.float32(1e-30)
"""Lowest temperature that logits are divided by. A lower one would overflow, and this one already
draws only the likeliest token."""

UNIFORM_STEPS = 16
"""Decode steps whose random numbers are copied to the device together."""


class _PrefillPass(NamedTuple):
    """The result of a pass over some prompts."""

    members: npt.NDArray[np.int64]
    """The numbers of its prompts among all that were prefilled together."""
    cache: DynamicCache
    """Their keys and values, padded on the left."""
    logits: Tensor
    """The next logits, [members, vocabulary]."""
    shift: Tensor | None = None
    """A number to add to later positions, [members]; None for models whose positions count tokens."""


def _all_layers_see_all_tokens(model: Any, config: Any) -> bool:
    """Whether every layer attends to all tokens of a row, and the model accepts one mask for all layers."""
    layer_kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = bool(getattr(config, "sliding_window", None))
    takes_mask = getattr(model, "_supports_attention_backend", False)
    return takes_mask and layer_kinds == {"full_attention"} and not has_window


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
        """An empty batch on a model. `prefixes` are known beginnings of prompts, and `images` reads images for a model
        that sees them. Several batches may share both.
        """
        self.model = model
        self.images = images
        self.prefixes = prefixes or PrefixCache(0)
        uses_rows_attention = use_rows_attention(model)
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
        self._token_bytes = cached_numbers(config) * parameter.element_size()

        # The model library decodes every model. `DecodeStep` is faster, for models of the usual form.
        self._one_mask = _all_layers_see_all_tokens(model, config)
        """Whether one attention mask fits all layers."""
        self._can_share_columns = uses_rows_attention and self._one_mask
        self._cache_argument = cache_argument(model)
        self._step: Callable[[Tensor, RowCache, SharedColumns | None], Tensor] = self._library_step
        if self._can_share_columns and is_usual(model):
            self._step = DecodeStep(model, self.lora)

        self._groups: list[tuple[int, int]] = []
        """The first row of each job, and the row after its last."""
        self._uniforms: Tensor | None = None
        """Random numbers of the next steps, [rows, UNIFORM_STEPS], of which `_uniforms_used` are used."""
        self._uniforms_used = 0
        self._admitted = 0
        """The most tokens that the rows may reach together, as of the last admission."""
        self._token_limit = math.inf
        """The most tokens that may be admitted. It is lower only after the engine has run out of memory."""
        self._is_end_token = np.zeros(max(config.vocab_size, *end_token_ids, 0) + 1, bool)
        """By token id, [ids]: whether the token ends a candidate."""
        self._is_end_token[list(end_token_ids)] = True
        self._last_tokens = torch.zeros((0, 1), dtype=torch.long, device=parameter.device)
        """The token that each row has drawn last, [rows, 1], which the next step reads."""
        self._params = self._row_params(slice(0, 0))

    @property
    def alive(self) -> int:
        return int(self.state["alive"][: self.rows].sum())

    @property
    def span(self) -> int:
        """Length that the longest live row can reach."""
        return int((self.state["span"][: self.rows] * self.state["alive"][: self.rows]).max(initial=0))

    def room(self) -> float:
        """The number of tokens that all rows together may have.

        On a GPU, their keys and values must fit into a part of its free memory. On a CPU, they are not limited. After
        the engine has run out of memory, `_token_limit` is a further limit, until the buffers are given back.
        """
        if self.device.type != "cuda":
            return self._token_limit
        tokens_in_memory = GPU_PART * self.cache.gpu_memory() / self._token_bytes
        return min(self._token_limit, tokens_in_memory)

    def halve(self) -> None:
        """Drop all rows and free their memory. Later rows may have half as many tokens as were admitted."""
        self._token_limit = self._admitted / 2
        self.state["alive"][:] = False
        self.rows = 0
        self._free()

    @torch.inference_mode()
    def admit(self, jobs: Sequence[Job], max_tokens: float = math.inf) -> list[Job]:
        """Prefill each distinct prompt once, and draw the first token of all candidates. Returns the jobs that have
        ended with it.

        The buffers hold at most `max_tokens` tokens, or as many as these jobs and the live rows can need.
        """
        rows = self.alive + sum(job.n for job in jobs)
        self._admitted = buffer_tokens(rows, max(self.span, *(job.span for job in jobs)))
        self.cache.limit = max(max_tokens, self._admitted)
        logits, new_rows = self._start(jobs)
        return self._draw_tokens(logits, new_rows)

    @torch.inference_mode()
    def step(self) -> list[Job]:
        """Decode one token for every row; return the jobs that ended with it."""
        # A step computes rows that have ended too. Removing them copies the rows behind them, so it takes place only
        # once more than an eighth of all rows have ended.
        n_ended = self.rows - self.alive
        if n_ended > self.rows // 8:
            no_new_rows = np.empty(0, np.int64)
            self._arrange(no_new_rows, width=0, span=0)
            self._refresh_derived()
        if self.cache.full:
            # Make space for more columns. All rows stay where they are.
            same_rows = np.arange(self.rows)
            longest = self._longest_row()
            self.cache.rearrange(same_rows, same_rows, rows=self.rows, longest=longest, width=0, span=self.span)
        logits = self._step(self._last_tokens[: self.rows, 0], self.cache, self._prompt_columns())
        self.cache.advance()
        return self._draw_tokens(logits, chosen_rows=None)

    def cancel(self, job: Job) -> None:
        """Free the rows of a job."""
        self.state["alive"][: self.rows] &= self.state["job"][: self.rows] != job
        if not self.state["alive"][: self.rows].any():
            self.rows = self.cache.window.rows = 0

    def release(self) -> None:
        """Give the memory of keys and values back while nothing is decoded."""
        self._token_limit = math.inf
        if not self.rows and self.cache.nbytes:
            self._free()

    @torch.inference_mode()
    def _free(self) -> None:
        self.cache.release()
        self._last_tokens = self._last_tokens[:0].clone()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for other processes on this GPU

    def _start(self, jobs: Sequence[Job]) -> tuple[Tensor, npt.NDArray[np.int64]]:
        """Prefill each distinct prompt of the jobs once, and copy its states to a row for each candidate.

        A `Source` is a prompt with its adapter and images. Returns the logits of the candidates' first tokens,
        [candidates, vocabulary], and the rows of the candidates, [candidates].
        """
        sources = list(dict.fromkeys(job.source for job in jobs))
        passes = self._prefill(sources)
        number_of_source = {source: i for i, source in enumerate(sources)}
        longest_prompt = max(len(source.prompt) for source in sources)
        # For each candidate, [candidates]: the number of its job and of its prompt, and its row. The candidates of one
        # job follow each other.
        job_numbers = np.repeat(np.arange(len(jobs)), [job.n for job in jobs])
        source_numbers = np.array([number_of_source[jobs[i].source] for i in job_numbers])
        adapter_ids = np.array([jobs[i].adapter_id for i in job_numbers])
        new_rows = self._arrange(adapter_ids, longest_prompt, max(job.span for job in jobs))

        # Collect the logits of all passes, [prompts, vocabulary], and copy the states to the rows.
        prompt_lengths = np.array([len(source.prompt) for source in sources], np.int64)
        first_logits = passes[0].logits
        logits = torch.empty((len(sources), first_logits.shape[1]), dtype=first_logits.dtype, device=self.device)
        for prefill_pass in passes:
            self._fill_rows(prefill_pass, prompt_lengths, source_numbers, new_rows)
            logits[to_device(prefill_pass.members, self.device)] = prefill_pass.logits
        for i, job in enumerate(jobs):
            rows_of_job = new_rows[job_numbers == i]
            self.state.put(rows_of_job, job, self.grammars)
        self._refresh_derived()
        return logits[to_device(source_numbers, self.device)], new_rows

    def _fill_rows(
        self,
        prefill_pass: _PrefillPass,
        prompt_lengths: npt.NDArray[np.int64],
        source_numbers: npt.NDArray[np.int64],
        new_rows: npt.NDArray[np.int64],
    ) -> None:
        """Copy the states of the prompts in a pass to the rows of their candidates.

        `prompt_lengths` are the lengths of the prompts of all passes, [prompts]. `source_numbers` and `new_rows` are
        the number of the prompt and the row of each candidate of all passes, [candidates].
        """
        # By number of a prompt, [prompts]: its row in this pass; -1 for a prompt of another pass.
        pass_row_of_prompt = np.full(len(prompt_lengths), -1)
        pass_row_of_prompt[prefill_pass.members] = np.arange(len(prefill_pass.members))
        pass_rows = pass_row_of_prompt[source_numbers]  # [candidates]
        in_pass = pass_rows >= 0
        source_rows = to_device(pass_rows[in_pass], self.device)
        target_rows = to_device(new_rows[in_pass], self.device)
        lengths = to_device(prompt_lengths[source_numbers[in_pass]], self.device)
        self.cache.fill(target_rows, prefill_pass.cache, source_rows, lengths)
        if prefill_pass.shift is not None:
            self.cache.shift(target_rows, prefill_pass.shift[source_rows])

    def _prefill(self, sources: Sequence[Source]) -> list[_PrefillPass]:
        """Compute the states of these prompts and the next logits, in one or several passes."""
        # Sorted by adapter, because an adapter is applied to one range of the rows of a pass.
        numbers = sorted(range(len(sources)), key=lambda i: sources[i].adapter_id)
        texts = [i for i in numbers if not sources[i].images]
        with_images = [i for i in numbers if sources[i].images]
        return [*self._prefill_texts(sources, texts), *self._prefill_with_images(sources, with_images)]

    def _prefill_texts(self, sources: Sequence[Source], numbers: Sequence[int]) -> list[_PrefillPass]:
        """Prefill the prompts without images. `numbers` are their positions in `sources`.

        The states of the longest known beginning of a prompt are reused, and only the tokens after it are computed.
        Prompts with about as many tokens to compute share a pass.
        """
        self._compute_stems([sources[i] for i in numbers])
        known_prefixes: dict[int, Prefix] = {}  # by position in `sources`
        n_new_tokens = []  # in the order of `numbers`
        for i in numbers:
            adapter_id, prompt, _ = sources[i]
            prefix = self.prefixes.match((self, adapter_id), prompt)
            self.prefixes.reused += prefix.length
            known_prefixes[i] = prefix
            n_new_tokens.append(len(prompt) - prefix.length)
        passes = []
        for group in group_by_length(n_new_tokens):
            members = np.array([numbers[k] for k in sorted(group)])
            cache, logits = self._prefill_pass([sources[i] for i in members], [known_prefixes[i] for i in members])
            passes.append(_PrefillPass(members, cache, logits))
        return passes

    def _prefill_with_images(self, sources: Sequence[Source], numbers: Sequence[int]) -> list[_PrefillPass]:
        """Prefill the prompts with these `numbers`, which have images.

        They are computed from their first token, because other images can have the same token ids.
        """
        if not numbers:
            return []
        assert self.images is not None
        passes = []
        sequences = [(sources[i].prompt, sources[i].images) for i in numbers]
        for group, image_inputs in self.images.together(self.model, sequences):
            members = np.array([numbers[i] for i in group])
            self._route_adapters(np.array([sources[i].adapter_id for i in members]))
            prompts = [sources[i].prompt for i in members]
            cache, logits = prefill(self.model, prompts, [NOTHING] * len(members), image_inputs)
            passes.append(_PrefillPass(members, cache, logits, image_shift(self.model)))
        return passes

    def _compute_stems(self, sources: Sequence[Source]) -> None:
        """Compute the beginnings (stems) that several of these prompts share, so that each is computed once.

        The states of a stem are stored in `prefixes`, from where the prompts continue. `sources` are sorted by adapter,
        because only prompts of one adapter have equal states. A stem may begin with another stem, so the shortest ones
        are computed first, and the others in further rounds.
        """
        if not self.prefixes.limit:
            return  # nothing is stored
        computed_stems: set[Source] = set()
        while True:
            stems: list[Source] = []
            for adapter_id, sources_of_adapter in groupby(sources, key=lambda source: source.adapter_id):
                prompts = [source.prompt for source in sources_of_adapter]
                known_lengths = [self.prefixes.length((self, adapter_id), prompt) for prompt in prompts]
                stems += [Source(adapter_id, stem, ()) for stem in find_shared_stems(prompts, known_lengths)]
            # No new stem: all are computed, or some were dropped again because the cache is full.
            if not set(stems) - computed_stems:
                return
            computed_stems |= set(stems)
            prefixes = [self.prefixes.match((self, adapter_id), stem) for adapter_id, stem, _ in stems]
            new_tokens = [len(stem.prompt) - prefix.length for stem, prefix in zip(stems, prefixes, strict=True)]
            for group in group_by_length(new_tokens):
                members = sorted(group)
                self._prefill_pass([stems[i] for i in members], [prefixes[i] for i in members])

    def _prefill_pass(self, sources: Sequence[Source], known: Sequence[Prefix]) -> tuple[DynamicCache, Tensor]:
        """Prefill prompts in one pass, and keep their states for later prompts. `sources` are sorted by adapter."""
        self.prefixes.computed += sum(len(s.prompt) - prefix.length for s, prefix in zip(sources, known, strict=True))
        self._route_adapters(np.array([source.adapter_id for source in sources]))
        cache, logits = prefill(self.model, [source.prompt for source in sources], known)
        for row, (adapter_id, prompt, _) in enumerate(sources):
            self.prefixes.insert((self, adapter_id), prompt, partial(states_of, cache, row, len(prompt)))
        return cache, logits

    def _library_step(self, tokens: Tensor, cache: RowCache, shared_columns: SharedColumns | None) -> Tensor:
        """Decode one token by the model library's own forward pass, for models that `DecodeStep` does not know.

        Takes the latest tokens [rows], and returns the next logits [rows, vocabulary].
        """
        mask = cache.mask()
        if not self._one_mask:
            # The layers differ, so the model builds one mask per kind of layer from the visible columns.
            mask = mask[:, 0, 0] == 0
        # Only `rows_attention` knows this option.
        options = {} if shared_columns is None else {"shared_columns": shared_columns}
        out = self.model(
            input_ids=tokens.unsqueeze(1),
            attention_mask=mask,
            position_ids=cache.positions(),
            **{self._cache_argument: cache},
            use_cache=True,
            **options,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def _prompt_columns(self) -> SharedColumns | None:
        """The columns in which candidates of one prompt have equal keys and values: up to the end of their prompt."""
        if not self._can_share_columns:
            return None
        rows = slice(0, self.rows)
        window = self.cache.window
        # All rows end in the same column, so the prompt of the row with the most drawn tokens ends first.
        most_drawn = int((self.state["count"][rows] * self.state["alive"][rows]).max())
        drawn_columns = most_drawn - 1  # the token that was drawn last has no column yet
        columns = window.end - window.first - drawn_columns
        return find_shared_columns(columns, self._groups, self.cache.token_bytes())

    def _longest_row(self) -> int:
        """Tokens of the longest live row in the cache: all but the one that was drawn last."""
        rows = slice(0, self.rows)
        prompt_tokens = self.state["span"][rows] - self.state["limit"][rows]
        tokens = prompt_tokens + self.state["count"][rows] - 1
        return int((tokens * self.state["alive"][rows]).max(initial=0))

    def _arrange(self, new_adapter_ids: npt.NDArray[np.int64], width: int, span: int) -> npt.NDArray[np.int64]:
        """Close the gaps that ended rows have left, and make space for new rows. Rows stay sorted by adapter.

        `new_adapter_ids` has the adapter of each new row. The new rows have prompts of up to `width` tokens and reach
        `span` tokens at most. Returns the numbers of the new rows.
        """
        live = np.flatnonzero(self.state["alive"][: self.rows])
        rows = len(live) + len(new_adapter_ids)
        longest = self._longest_row()
        positions, new_rows = arrange_rows(live, self.state["adapter_id"][live], new_adapter_ids)
        self.cache.rearrange(live, positions, rows, longest, width, span=max(span, self.span))

        # The same moves in the arrays and in the tensor that have one entry per row.
        moved = positions != live
        self.state.reserve(rows, tokens=0)
        self.state.move(positions[moved], live[moved])
        capacity = self.cache.window.row_capacity
        if capacity > len(self._last_tokens):
            smaller = self._last_tokens
            self._last_tokens = smaller.new_zeros((capacity, 1))
            self._last_tokens[: len(smaller)] = smaller
        if moved.any():
            # One copy to the device for both.
            to_rows, from_rows = to_device(np.stack([positions[moved], live[moved]]), self.device)
            self._last_tokens[to_rows] = self._last_tokens[from_rows]
        self.rows = rows
        return new_rows

    def _refresh_derived(self) -> None:
        """Recompute everything that depends on the set of rows: their parameters, adapters and groups."""
        rows = slice(0, self.rows)
        self._params = self._row_params(rows)
        self._route_adapters(self.state["adapter_id"][rows])
        self._groups = runs(self.state["job"][rows])
        self._uniforms = None

    def _row_params(self, rows: Any) -> RowParams:
        """The sampling parameters of these rows as tensors. A parameter that no row uses is None, so its work is
        skipped.
        """
        names = ("temperature", "top_k", "top_p", "min_p", "top")
        temperature, top_k, top_p, min_p, top = (self.state[name][rows] for name in names)
        greedy = temperature == 0

        def tensor(values: npt.NDArray[Any]) -> Tensor:
            return to_device(values, self.device).unsqueeze(1)

        return RowParams(
            temperature=tensor(np.where(greedy, np.float32(1), np.maximum(temperature, COLDEST))),
            greedy=tensor(greedy) if greedy.any() else None,
            all_greedy=bool(greedy.all()),
            top_k=tensor(top_k) if (top_k > 0).any() else None,
            top_p=tensor(top_p) if (top_p < 1).any() else None,
            min_p=tensor(min_p) if (min_p > 0).any() else None,
            top=top.copy() if (top > 0).any() else None,
        )

    def _route_adapters(self, adapter_ids: npt.NDArray[np.int64]) -> None:
        """Tell the LoRA layers which rows use which adapter. `adapter_ids` is sorted, so each adapter has one range of
        rows.
        """
        present, starts = np.unique(adapter_ids, return_index=True)
        ends = [*starts[1:], len(adapter_ids)]
        segments = []
        for adapter_id, low, high in zip(present.tolist(), starts, ends, strict=True):
            if adapter_id != BASE:
                segments.append((adapter_id, int(low), int(high)))
        self.lora.route(segments)

    def _draw_tokens(self, logits: Tensor, chosen_rows: npt.NDArray[np.int64] | None) -> list[Job]:
        """Draw the next token of the chosen rows (None: all rows), and record it.

        `logits` are [rows, vocabulary]. Returns the jobs whose last candidate has ended.
        """
        if chosen_rows is None:
            rows = np.arange(self.rows)
            params = self._params
        else:
            rows = chosen_rows
            params = self._row_params(chosen_rows)
        if self.vocabulary < logits.shape[1]:
            logits[:, self.vocabulary :] = -torch.inf
        state = self.state
        logit_changes = np.where(state["alive"][rows], state["logit_changes"][rows], _NO_CHANGES)
        if logit_changes.any():
            change_logits(logits, logit_changes.tolist())

        uniform = self._next_uniforms(chosen_rows)
        chunk_rows = max(1, DRAW_ELEMENTS // logits.shape[1])
        token_chunks = []
        logprob_chunks = []
        for start in range(0, len(logits), chunk_rows):
            chunk = slice(start, start + chunk_rows)
            chunk_tokens, chunk_logprobs = draw(logits[chunk], uniform[chunk], params.rows(chunk))
            token_chunks.append(chunk_tokens)
            logprob_chunks.append(chunk_logprobs)
        tokens = torch.cat(token_chunks) if len(token_chunks) > 1 else token_chunks[0]
        logprobs = torch.cat(logprob_chunks) if len(logprob_chunks) > 1 else logprob_chunks[0]

        if chosen_rows is None:
            self._last_tokens[: self.rows, 0] = tokens
        else:
            self._last_tokens[to_device(chosen_rows, self.device), 0] = tokens
        # One copy to the host for everything, because the host waits for the device at each copy.
        asking_rows = self._rows_with_likeliest(rows, params, chunk_rows)
        likeliest_on_device = [self._likeliest_tokens(logits, params, chunk_of_rows) for chunk_of_rows in asking_rows]
        drawn, *likeliest_of_chunks = _copy_to_host([(tokens, logprobs), *likeliest_on_device])
        for chunk_of_rows, (top_ids, top_logprobs) in zip(asking_rows, likeliest_of_chunks, strict=True):
            self._record_likeliest(rows[chunk_of_rows], top_ids, top_logprobs)
        drawn_ids, drawn_logprobs = drawn
        return self._record(rows, drawn_ids, drawn_logprobs)

    def _next_uniforms(self, chosen_rows: npt.NDArray[np.int64] | None) -> Tensor:
        """Random numbers in [0, 1) to draw the next token of the chosen rows (None: all rows), [rows, 1].

        Each row has a stream of random numbers, one for each of its tokens. For all rows, the numbers of UNIFORM_STEPS
        steps are copied to the device at once.
        """
        streams = self.state["stream"]
        counts = self.state["count"]
        if chosen_rows is not None:
            numbers = uniforms(streams[chosen_rows], counts[chosen_rows])
            return to_device(numbers, self.device).unsqueeze(1)
        if self._uniforms is None or self._uniforms_used == UNIFORM_STEPS:
            positions = counts[: self.rows, None] + np.arange(UNIFORM_STEPS)  # [rows, UNIFORM_STEPS]
            numbers = uniforms(streams[: self.rows, None], positions)
            self._uniforms = to_device(numbers, self.device)
            self._uniforms_used = 0
        column = self._uniforms_used
        self._uniforms_used += 1
        return self._uniforms[:, column : column + 1]

    def _rows_with_likeliest(
        self, rows: npt.NDArray[np.int64], params: RowParams, chunk_rows: int
    ) -> list[npt.NDArray[np.int64]]:
        """The live rows whose likeliest tokens were requested, as indices into `rows`, in chunks of `chunk_rows`."""
        if params.top is None:
            return []
        asking = np.flatnonzero((params.top > 0) & self.state["alive"][rows])
        return [asking[start : start + chunk_rows] for start in range(0, len(asking), chunk_rows)]

    def _likeliest_tokens(
        self, logits: Tensor, params: RowParams, chosen: npt.NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """The likeliest next tokens of the `chosen` rows of `logits` [rows, vocabulary], and their log-probabilities,
        both [chosen, most requested tokens]."""
        assert params.top is not None
        index = to_device(chosen, self.device)
        return likeliest(logits[index], params.rows(index), int(params.top[chosen].max()))

    def _record_likeliest(
        self, rows: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> None:
        """Append the likeliest next tokens of the rows, with log-probabilities, to their jobs. `ids` and `logprobs` are
        [rows, most requested tokens]."""
        state = self.state
        for row, ids_of_row, logprobs_of_row in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            requested = state["top"][row]
            top = []
            for id, logprob in zip(ids_of_row[:requested], logprobs_of_row, strict=False):
                if logprob > -np.inf:  # the token can be drawn
                    top.append((id, logprob))
            state["job"][row].top[state["candidate"][row]].append(tuple(top))

    def _record(
        self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> list[Job]:
        """Store the token that each of the `rows` has drawn, and end the rows whose candidate is complete.

        All arrays are [rows]. Returns the jobs whose last row has ended.
        """
        state = self.state
        counts = state["count"][rows]  # drawn tokens before this one
        state.reserve(0, int(counts.max()) + 1)
        state["token"][rows, counts] = tokens
        state["logprob"][rows, counts] = logprobs
        alive = state["alive"][rows]
        state["count"][rows] = counts + alive

        # A row ends with an end token, a stop string, a token that its grammar does not take, or at its limit.
        stopped = self._is_end_token[tokens]
        for i in np.flatnonzero(np.where(alive, state["logit_changes"][rows], _NO_CHANGES)):
            row = rows[i]
            if not state["logit_changes"][row].consume(int(tokens[i])):
                stopped[i] = True
                state["job"][row].refused = int(tokens[i]), int(counts[i])
        if state["has_stops"][rows].any():
            stopped |= self._stopped_rows(rows)
        row_ends = alive & (stopped | (counts + 1 >= state["limit"][rows]))
        if not row_ends.any():
            return []

        ended_jobs = []
        for i in np.flatnonzero(row_ends):
            job = self._end_row(int(rows[i]), bool(stopped[i]))
            if job is not None:
                ended_jobs.append(job)
        if not state["alive"][: self.rows].any():
            self.rows = self.cache.window.rows = 0
        return ended_jobs

    def _end_row(self, row: int, stopped: bool) -> Job | None:
        """Store the completion of a row that ends. Returns its job if this was the job's last row."""
        state = self.state
        job: Job = state["job"][row]
        count = int(state["count"][row])
        candidate = int(state["candidate"][row])
        drawn: tuple[int, ...] = tuple(state["token"][row, :count].tolist())
        state["alive"][row] = False
        job.done[candidate] = Completion(
            drawn,
            tuple(state["logprob"][row, :count].tolist()),
            finish_reason="stop" if stopped else "length",
            top=tuple(job.top[candidate]) if job.top else (),
        )
        # Keep the states for later prompts. Prompts with different images can have the same token ids.
        if not job.params.images:
            tokens = job.prompt + drawn[:-1]  # the model has never read the last token
            self.prefixes.insert((self, job.adapter_id), tokens, partial(self.cache.read, row, len(tokens)))
        job.open -= 1
        return None if job.open else job

    def _stopped_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether each of the rows has just written one of its stop strings or stop tokens, [rows]."""
        state = self.state
        stopped = np.zeros(len(rows), bool)
        for i in np.flatnonzero(state["has_stops"][rows] & state["alive"][rows]):
            row = rows[i]
            params = state["job"][row].params
            count = int(state["count"][row])
            last_token = int(state["token"][row, count - 1])
            if last_token in params.stop_token_ids:
                stopped[i] = True
            elif params.stop:
                # A stop string that is new ends in the last token, so decoding the end of the reply is enough. One
                # character takes at most four tokens. Eight more, because the first of them may begin inside a
                # character, which is then decoded wrongly.
                longest_stop = max(map(len, params.stop))
                first = max(0, count - 4 * longest_stop - 8)
                end_of_reply = self.tokenizer.decode(state["token"][row, first:count].tolist())
                stopped[i] = any(stop_string in end_of_reply for stop_string in params.stop)
        return stopped


def _copy_to_host(
    pairs: Sequence[tuple[Tensor, Tensor]],
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """Copy pairs of token ids and their float32 log-probabilities, which have the same shape, in one copy."""
    ids = torch.cat([ids_of_pair.flatten() for ids_of_pair, _ in pairs])
    logprobs = torch.cat([logprobs_of_pair.flatten() for _, logprobs_of_pair in pairs])
    # Log-probabilities travel as the integers with the same bits.
    copied = torch.stack((ids.int(), logprobs.view(torch.int32))).cpu().numpy()
    copied_ids = copied[0].astype(np.int64)
    copied_logprobs = copied[1].view(np.float32)

    copied_pairs = []
    start = 0
    for ids_of_pair, _ in pairs:
        part = slice(start, start + ids_of_pair.numel())
        shape = tuple(ids_of_pair.shape)
        copied_pairs.append((copied_ids[part].reshape(shape), copied_logprobs[part].reshape(shape)))
        start = part.stop
    return copied_pairs
