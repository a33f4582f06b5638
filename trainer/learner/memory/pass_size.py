"""How many tokens go through a model at once: as many as fit into the memory that a pass may take."""

from __future__ import annotations

import ctypes
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from cotune.algorithms.samples import TrainRow
from cotune.config.learner import LearnerSettings
from cotune.config.sizes import parse_size
from cotune.errors import ConfigError, LearnerError
from cotune.integrations.models.memory import machine_memory, process_memory
from cotune.trainer.learner.batching import pass_tokens, tokens_of
from cotune.trainer.learner.dist import ProcessGroup, local_shard
from cotune.trainer.learner.logprobs import chunk_tokens

if TYPE_CHECKING:
    from cotune.trainer.learner.policy_model import PolicyModel

log = logging.getLogger("cotune")
T = TypeVar("T")

MOST = {"cpu": 8192, "cuda": 65536}
LEAST = 16
"""The bounds within which "auto" chooses, in tokens. On a CPU larger passes are not faster. On a GPU they save kernel
launches, but above 65,536 tokens the tensors of a layer come near the 2^31 entries that some kernels can number."""
CPU_SHARE, GPU_SHARE = 1 / 16, 0.8
"""The share of the machine's memory, and of a GPU's free memory, that the activations of a pass may take. On a CPU
larger passes are hardly faster, and the application and the sampler need memory too."""
MARGIN = 1.25
"""The planned memory of a pass, as a multiple of the memory of its tensors: allocators leave gaps."""
_OUT_OF_MEMORY = ("allocate memory", "not enough memory", "out of memory", "STATUS_ALLOC_FAILED")
"""Parts of torch's errors when memory runs out: on the CPU, on the GPU outside of torch's allocator, and in CUDA's
libraries (cuBLAS, cuDNN)."""
GRADIENT_BYTES, MOMENT_BYTES = 4, {"adamw": 8, "adamw8bit": 2}
"""Bytes of a trained parameter: its gradient, while its policy is updated, and both moments of the optimizer, from the
first step on."""
LOGIT_BYTES = 12
"""Bytes of a logit: three buffers of a chunk in float32."""
LARGE = 2**24
"""From this number of parameters on, passes take so many pages of memory that their allocation costs time."""
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
"""Options of glibc's mallopt."""
_KEEP_PAGES = ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 2047 << 20))
"""During an update, pages of tensors up to 32 MiB are used again. To allocate new pages for each tensor takes a quarter
to a third of an update's time."""
_RETURN_PAGES = ((_M_MMAP_THRESHOLD, 256 << 10),)
"""If memory is short, tensors above 256 KiB are given back to the system when they are freed. By default glibc raises
this threshold with the sizes that it sees, and the gaps between pages then take twice the memory."""
GAPS = {False: 1.3, True: 0.5}
"""The memory of gaps between kept pages, by whether the pass is checkpointed, as a multiple of the memory that a plain
pass keeps for its backward pass. In a checkpointed pass the states that stay lie between the temporary tensors of each
layer, which are several times as large. Measured with SmolLM2 in plain passes of 512 tokens, and in checkpointed passes
of 4,094 and 8,192 tokens."""
GROWTH = 1.25
"""Passes that were halved grow again if the room for a pass is this many times the room when memory ran out. Otherwise
each update would run out of memory again."""
SPARE = 1 / 2
"""While this share of the machine's memory is free, an update's pages are kept for the next one. To allocate them again
takes up to a fifth of its time."""


class PassSize:
    """The number of tokens of a pass of a network. It is halved if memory runs out.

    There are passes of two kinds: plain passes, and checkpointed ones, whose layers are computed again in the backward
    pass. Dictionaries of this class have a value for each kind, by whether it is checkpointed.
    """

    def __init__(self, tokens: int, *, alone: bool, always: bool = False) -> None:
        """`tokens` is the size of plain passes until `adapt` chooses others. With `always`, all passes are
        checkpointed. `alone` says that no other rank takes part in the passes, so that this process may choose them
        without the others.
        """
        self._sizes = {False: tokens, True: 0}  # by whether the pass is checkpointed
        self._longest_plain_row = math.inf  # the longest row that fits into memory without checkpointing
        self._longest_row = math.inf  # the longest row that fits at all
        self._memory_name = ""
        self._alone = alone
        self._always = always
        self.checkpointed = always
        """Whether passes are checkpointed now."""
        self._has_warned = False
        self._room = 0.0
        self._room_when_halved = 0.0
        self._is_halved = {False: False, True: False}
        self.halved = 0
        """How often memory ran out and a size was halved."""

    @property
    def tokens(self) -> int:
        """The most tokens of a pass, unless a single row has more."""
        return self._sizes[self.checkpointed]

    @property
    def by_kind(self) -> dict[bool, int]:
        """The most tokens of a pass of each kind; 0 for a kind that is not used."""
        return dict(self._sizes)

    def choose(self, longest: int, count_computed: Callable[[int], int]) -> bool:
        """Choose whether the next passes are checkpointed, that is, whether they compute layers again in the backward
        pass to save memory. Returns the choice. Their longest row has `longest` tokens.

        `count_computed` returns the number of tokens that all passes compute if a pass has at most this many tokens.
        Small passes compute more: rows that share a beginning are divided over several passes, and each computes it.
        """
        plain_size = self._sizes[False]
        checkpointed_size = self._sizes[True]  # 0 if passes cannot be checkpointed
        longest_plain_row = max(plain_size, self._longest_plain_row)
        if self._always:
            self.checkpointed = True
        elif checkpointed_size > 0 and longest > longest_plain_row:
            self.checkpointed = True
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "A row of %d tokens takes activation checkpointing, as %.0f fit without it",
                    longest,
                    longest_plain_row,
                )
        elif checkpointed_size > plain_size:
            # For each token, a checkpointed pass takes 4/3 of the time of a plain one.
            self.checkpointed = 3 * count_computed(plain_size) > 4 * count_computed(checkpointed_size)
        else:
            self.checkpointed = False
        return self.checkpointed

    def check(self, rows: Sequence[TrainRow]) -> None:
        """Raise LearnerError for a row that does not fit into memory, even as the only row of a pass."""
        longest = max(rows, key=lambda row: len(tokens_of(row)))
        length = len(tokens_of(longest))
        if length > self._longest_row:
            raise LearnerError(
                f"Row {longest.id} of role {longest.role!r} has {length} tokens; a pass of one row fits up to "
                f"{self._longest_row:.0f} into {self._memory_name}.",
                "Set learner.memory higher, or shorten prompts or sampling.max_tokens.",
            )

    def adapt(
        self,
        fitting_tokens: Mapping[bool, int],
        wanted_tokens: Mapping[bool, int],
        *,
        room: float,
        longest_row: int,
        memory_name: str,
    ) -> None:
        """Choose the sizes for an update that begins with `room` bytes for a pass.

        By whether a pass is checkpointed, `fitting_tokens` has the most tokens that fit into memory, and
        `wanted_tokens` the size that the settings ask for. `longest_row` is the length of the longest row that fits
        into memory in a pass of any kind, and `memory_name` names this memory in errors. Sizes that were halved when
        memory ran out grow only if there is more room than then.
        """
        self._longest_plain_row = fitting_tokens[False]
        self._longest_row = longest_row
        self._memory_name = memory_name
        has_more_room = room > GROWTH * self._room_when_halved
        for checkpointed, tokens in wanted_tokens.items():
            if has_more_room or not self._is_halved[checkpointed]:
                self._sizes[checkpointed] = tokens
                self._is_halved[checkpointed] = False
            else:
                self._sizes[checkpointed] = min(self._sizes[checkpointed], tokens)
        # While plain passes are halved, more tokens than theirs have run out of memory, also in a pass of one row.
        if self._is_halved[False]:
            self._longest_plain_row = min(self._longest_plain_row, self._sizes[False])
        self._room = room

    def run_in_memory(self, compute: Callable[[], T], *, reset: Callable[[], None] | None = None) -> T:
        """Return the result of `compute`, which makes passes of `tokens`. If memory runs out, halve `tokens`, undo the
        work so far by `reset`, and compute again. Raises LearnerError if smaller passes cannot help."""
        while True:
            try:
                return compute()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                too_many_tokens = self.tokens
                # Ranks make their passes together, so one of several ranks cannot make smaller ones by itself.
                if too_many_tokens < 2 * LEAST or not self._alone:
                    cause = f"Memory ran out in a pass of {too_many_tokens} tokens."
                    remedy = "Set learner.memory lower, or shorten prompts or sampling.max_tokens."
                    raise LearnerError(cause, remedy) from error
            self._sizes[self.checkpointed] = too_many_tokens // 2
            self._is_halved[self.checkpointed] = True
            self._room_when_halved = self._room  # for `adapt`, which lets the size grow again above it
            self._longest_plain_row = min(self._longest_plain_row, self._sizes[False])
            self.halved += 1
            log.warning(
                "Memory ran out in a pass of %d tokens: passes are of %d from now on", too_many_tokens, self.tokens
            )
            if reset is not None:
                reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had no memory for a tensor."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


@contextmanager
def giving_back(model: PolicyModel) -> Iterator[None]:
    """At the end of the block, give back memory that was kept for later passes of `model`. A sampler may need it on the
    same GPU, or the machine may have little memory left."""
    try:
        yield
    finally:
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        elif _is_large(model) and (libc := _glibc()) is not None:
            free, total = machine_memory()
            if free < SPARE * total:
                libc.malloc_trim(0)


class PassSizes:
    """Chooses the sizes of passes when an update begins. Policies that share a network share a `PassSize`.

    `auto_tokens` has the choice of "auto". In a process group all ranks choose the same, so all must call `choose`.
    """

    def __init__(
        self,
        policies: Mapping[str, PolicyModel],
        settings: LearnerSettings,
        group: ProcessGroup,
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        """Measure the memory that passes take, and choose their first sizes.

        Raises ConfigError if not even a small pass fits into `learner.memory`.
        """
        self._policies = dict(policies)
        self._settings = settings
        self._group = group
        self._optimizers = optimizers
        self._networks = {id(model.network): model for model in policies.values()}

        # Bytes for each token of a pass, by network and by whether its layers are checkpointed. They do not change.
        self._token_bytes: dict[int, dict[bool, float]] = {}
        memories: dict[int, PassMemory] = {}
        self._fixed = 0.0  # bytes of any pass, in addition to its tokens
        self._sizes: dict[int, PassSize] = {}
        for network, model in self._networks.items():
            memory = pass_memory(model)
            memories[network] = memory
            self._fixed = max(self._fixed, memory.fixed + memory.logits)
            self._token_bytes[network] = {False: memory.planned(checkpointed=False)}
            if settings.activation_checkpointing and model.logprob_model.checkpointing.possible:
                self._token_bytes[network][True] = memory.planned(checkpointed=True)
            always = settings.activation_checkpointing is True
            self._sizes[network] = PassSize(LEAST, alone=group.size == 1, always=always)

        self.choose()

        # On a CPU, large models gain from an allocator that keeps pages, if there is memory for the gaps between them.
        device = next(iter(self._networks.values())).device.type
        if device == "cpu" and any(_is_large(model) for model in self._networks.values()):
            limit = self._measure_room().limit
            fits = all(
                may_keep_freed_pages(memory, self._sizes[network].by_kind, limit)
                for network, memory in memories.items()
            )
            _set_malloc_options(_KEEP_PAGES if fits and not settings.memory else _RETURN_PAGES)

    def __getitem__(self, policy: str) -> PassSize:
        return self._sizes[id(self._policies[policy].network)]

    def choose(self) -> None:
        """Choose the size of the passes of each network so that they fit into the memory that is free now.

        Raises ConfigError if not even the smallest pass fits into `learner.memory`.
        """
        room = self._measure_room()
        settings = self._settings
        for network, model in self._networks.items():
            # Of the two kinds of passes, plain and checkpointed, a checkpointed one takes fewer bytes for each token.
            token_bytes = self._token_bytes[network]
            least_token_bytes = min(token_bytes.values())
            smallest_pass_bytes = LEAST * least_token_bytes
            if settings.memory and room.planned < smallest_pass_bytes:
                missing_bytes = smallest_pass_bytes - room.planned
                needed = (parse_size(settings.memory) + missing_bytes) / 2**30
                fault = f"is too little: this model takes at least {needed:.1f}GiB in this process"
                raise ConfigError("learner.memory", settings.memory, fault, "Raise it, or use a smaller model.")

            fitting_tokens: dict[bool, int] = {}
            wanted_tokens: dict[bool, int] = {}
            for checkpointed, bytes_of_token in token_bytes.items():
                tokens = self._least_of_ranks(room.planned / bytes_of_token, model)
                fitting_tokens[checkpointed] = tokens
                if settings.micro_batch_tokens == "auto":
                    wanted_tokens[checkpointed] = auto_tokens(tokens, model.device.type)
                else:
                    wanted_tokens[checkpointed] = settings.micro_batch_tokens
            self._sizes[network].adapt(
                fitting_tokens,
                wanted_tokens,
                room=room.planned,
                longest_row=self._least_of_ranks(room.limit / least_token_bytes, model),
                memory_name=room.limit_name,
            )

    def has_room(self, tokens: int) -> bool:
        """Whether passes of this number of tokens fit into the memory that is free now. If the settings name a size,
        passes of this size must fit. All ranks must call this."""
        room = self._measure_room().planned
        settings = self._settings
        wanted = tokens if settings.micro_batch_tokens == "auto" else int(settings.micro_batch_tokens)
        for network, model in self._networks.items():
            token_bytes = self._token_bytes[network]
            bytes_of_token = token_bytes[False]
            # With "auto" only some passes are checkpointed, so plain passes must fit.
            if settings.activation_checkpointing is True and True in token_bytes:
                bytes_of_token = token_bytes[True]
            if self._least_of_ranks(room / bytes_of_token, model) < wanted:
                return False
        return True

    def _least_of_ranks(self, tokens: float, model: PolicyModel) -> int:
        """Return the least of the numbers of all ranks."""
        # The group has a maximum and no minimum.
        return -int(self._group.max(torch.tensor([-int(tokens)], device=model.device)).item())

    def _measure_room(self) -> Room:
        """Return the memory for a pass, after the memory that the update will take in addition to it."""
        most_gradients, new_moments = 0, 0
        for name, policy in self._policies.items():
            state = self._optimizers[name].state
            parameters = policy.parameters().values()
            # Only one policy has gradients at a time, but all keep their moments.
            most_gradients = max(most_gradients, sum(GRADIENT_BYTES * p.numel() for p in parameters))
            new_moments += sum(MOMENT_BYTES[self._settings.optimizer] * p.numel() for p in parameters if p not in state)
        # Ranks share gradients and moments evenly.
        reserved = (most_gradients + new_moments) // self._group.size + int(self._fixed)
        return _free_room(next(iter(self._policies.values())), self._settings, reserved)


def auto_tokens(fit: float, device: str) -> int:
    """Return the tokens of a pass that "auto" chooses if `fit` tokens fit.

    It is one of a few numbers, so that similar machines choose the same. On a GPU, whose memory is not shared with
    other processes, it is a power of two. On a CPU it is at most an eighth less than fits.
    """
    tokens = int(max(LEAST, min(MOST.get(device, MOST["cpu"]), fit)))
    # Round down to a number with so many significant bits.
    significant_bits = 4 if device == "cpu" else 1
    dropped_bits = tokens.bit_length() - significant_bits
    return tokens >> dropped_bits << dropped_bits


class PassMemory(NamedTuple):
    """The memory of a pass, in bytes. The learner chooses the size of passes by it, and `cotune doctor` forecasts this
    choice."""

    plain: float
    """Bytes of a token that stay in memory until the backward pass, in a plain pass."""
    checkpointed: float
    """Bytes of a token that stay in memory until the backward pass, in a checkpointed pass."""
    layers: int
    fixed: float
    """Bytes of any pass, independent of its tokens: weights in the precision of products, and the gradient of a trained
    output embedding. If the output embedding is the input embedding too, autograd keeps its gradient until the gradient
    of the input embedding is computed."""
    logits: float
    """Bytes of a chunk of logits, which the log-probabilities take in addition to the states."""

    def kept(self, *, checkpointed: bool) -> float:
        """Return the bytes of a token that stay in memory until the backward pass."""
        return self.checkpointed if checkpointed else self.plain

    def backward(self, *, checkpointed: bool) -> float:
        """Return the additional bytes of a token in the present layer of the backward pass: its gradients, and the
        results of a checkpointed layer, which is computed again. The factors are measured (`benchmarks.forecast`)."""
        return (1.4 if checkpointed else 1.0) * self.plain / self.layers

    def peak(self, tokens: int, *, checkpointed: bool) -> float:
        """Return the most bytes of a pass with this number of tokens. Logits are freed before the gradients of layers
        are computed."""
        until_backward = tokens * self.kept(checkpointed=checkpointed)
        return self.fixed + until_backward + max(self.logits, tokens * self.backward(checkpointed=checkpointed))

    def gaps(self, tokens: int, *, checkpointed: bool) -> float:
        """Return the bytes of pages that stay allocated in addition to a pass, on a CPU where pages are kept."""
        return GAPS[checkpointed] * tokens * self.plain

    def planned(self, *, checkpointed: bool) -> float:
        """Return the bytes of a token by which sizes are chosen, in the memory next to `fixed` and `logits`."""
        return MARGIN * (self.kept(checkpointed=checkpointed) + self.backward(checkpointed=checkpointed))


def pass_memory(model: PolicyModel) -> PassMemory:
    """Measure how much memory a pass of a model takes for each token, with small plain and checkpointed passes."""
    plain = kept_bytes(model, checkpointed=False)
    checkpointed = plain
    if model.logprob_model.checkpointing.possible:
        checkpointed = kept_bytes(model, checkpointed=True)
    head = model.network.get_output_embeddings().weight
    head_gradient = GRADIENT_BYTES * head.numel() if head.requires_grad else 0
    # Extrapolated from passes of two sizes, so it may come out a little below zero.
    fixed_bytes = max(plain.fixed, 0.0)
    return PassMemory(
        plain=plain.token,
        checkpointed=checkpointed.token,
        layers=int(model.network.config.get_text_config().num_hidden_layers),
        fixed=fixed_bytes + head_gradient,
        logits=logit_bytes(int(head.shape[0]), model.device.type),
    )


def logit_bytes(vocabulary: int, device: str) -> float:
    """Return the bytes of log-probabilities in addition to the states."""
    return float(LOGIT_BYTES * vocabulary * chunk_tokens(vocabulary, device))


class KeptBytes(NamedTuple):
    """Bytes of a pass that stay in memory until its backward pass."""

    token: float
    """Bytes of each token."""
    fixed: float
    """Bytes of any pass, independent of its tokens: casts of weights."""


def kept_bytes(model: PolicyModel, *, checkpointed: bool) -> KeptBytes:
    """Measure the bytes that stay in memory until the backward pass, by passes of two sizes. `cotune doctor` does this
    with models without storage."""
    switch = model.logprob_model.checkpointing
    switch.on = checkpointed
    try:
        small_tokens, small_bytes = _measure_graph(model, _probe_rows(groups=1))
        large_tokens, large_bytes = _measure_graph(model, _probe_rows(groups=3))
    finally:
        switch.on = False
    bytes_of_token = (large_bytes - small_bytes) / (large_tokens - small_tokens)
    return KeptBytes(token=bytes_of_token, fixed=small_bytes - small_tokens * bytes_of_token)


def _probe_rows(groups: int) -> list[TrainRow]:
    """Make rows for a small pass: groups of two rows."""
    prompt_length, response_length = 24, 9
    rows: list[TrainRow] = []
    for group in range(groups):
        # The two rows of a group share their prompt. Prompts of different groups differ from the first token on, and
        # no prompt has the tokens of the responses.
        for token in (groups, groups + 1):
            row = TrainRow(
                id="",
                role="",
                # Of a different length in each group, as prompts are in a real pass.
                prompt_ids=(group,) * (prompt_length - group),
                response_ids=(token,) * response_length,
                logprobs=(),
                advantage=0.0,
            )
            rows.append(row)
    return rows


def _measure_graph(model: PolicyModel, rows: Sequence[TrainRow]) -> tuple[int, int]:
    """Return the number of tokens that a pass over `rows` computes, and the bytes of the tensors in its graph."""
    parameters = {_storage_id(local_shard(p)) for p in model.network.parameters()}
    saved: dict[int, Tensor] = {}

    # The hook returns nothing, so the graph keeps no tensor: a graph with its own outputs would never be freed.
    def save(tensor: Tensor) -> None:
        storage = _storage_id(tensor)
        if storage not in parameters:
            saved[storage] = tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda none: none):
        model.token_logprobs(rows)
    model.logprob_model.release()
    saved_bytes = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    return pass_tokens(rows, model.logprob_model.shares), saved_bytes


def _storage_id(tensor: Tensor) -> int:
    """Return a number that is equal for tensors of one storage, which may have no memory."""
    number: int = tensor.untyped_storage()._cdata
    return number


class Room(NamedTuple):
    """The memory that is free for a pass, in bytes."""

    planned: float
    """The bytes that a pass should take."""
    limit: float
    """The most bytes that a pass can take."""
    limit_name: str
    """The memory that `limit` is, for errors."""


def _free_room(model: PolicyModel, settings: LearnerSettings, reserved: int) -> Room:
    """Return the memory for a pass, without `reserved` bytes for other tensors."""
    on_gpu = model.device.type == "cuda"
    if settings.memory:
        used = int(torch.cuda.memory_allocated(model.device)) if on_gpu else process_memory()
        limit = parse_size(settings.memory) - used - reserved
        return Room(limit, limit, f"learner.memory = {settings.memory!r}")
    if on_gpu:
        free_outside, _ = torch.cuda.mem_get_info(model.device)
        # Memory that torch's allocator keeps for later counts as free, because passes take it from there.
        cached = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
        free = int(free_outside) + int(cached)
        limit = free - reserved
        return Room(
            usual_share(limit, total=0, device="cuda"), limit, f"the {free / 2**30:.1f} GiB that are free on the GPU"
        )
    free, total = machine_memory()
    limit = free - reserved
    return Room(usual_share(limit, total, "cpu"), limit, f"the {free / 2**30:.1f} GiB that are free")


def usual_share(room: float, total: float, device: str) -> float:
    """Return the bytes that a pass should take if the settings have no `learner.memory`: a part of the free `room` of a
    machine with `total` bytes."""
    return min(total * CPU_SHARE, room) if device == "cpu" else room * GPU_SHARE


def may_keep_freed_pages(memory: PassMemory, sizes: Mapping[bool, int], room: float) -> bool:
    """Return whether the allocator may keep the memory of freed tensors for later tensors of an update.

    This saves the time to ask the system for memory again, but unused gaps stay between the tensors. The allocator may
    keep it if every kind of pass fits into `room` bytes together with its gaps. `sizes` has the tokens of a pass by
    whether it is checkpointed.
    """
    for checkpointed, tokens in sizes.items():
        needed = tokens * memory.planned(checkpointed=checkpointed) + memory.gaps(tokens, checkpointed=checkpointed)
        if needed > room:
            return False
    return True


def _is_large(model: PolicyModel) -> bool:
    return sum(int(p.numel()) for p in model.network.parameters()) > LARGE


def _glibc() -> ctypes.CDLL | None:
    """Return the C library, if it is glibc."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None


def _set_malloc_options(options: Sequence[tuple[int, int]]) -> None:
    """Set options of glibc's allocator, each with its value. Other C libraries are left as they are."""
    libc = _glibc()
    if libc is not None:
        for option, value in options:
            libc.mallopt(option, value)
