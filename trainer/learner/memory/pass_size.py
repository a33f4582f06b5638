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
"""Bounds of the choice of "auto", in tokens. On a CPU larger passes are not faster. On a GPU they save kernel launches;
above 65,536 tokens the tensors of a layer come near the 2^31 entries that some kernels can number."""
CPU_SHARE, GPU_SHARE = 1 / 16, 0.8
"""The share of the machine's memory, and of a GPU's free memory, that the activations of a pass may take. On a CPU
larger passes are hardly faster, and the application and the sampler need memory too."""
MARGIN = 1.25
"""Passes are chosen for so many times the memory that their tensors take: allocators leave gaps."""
_OUT_OF_MEMORY = ("allocate memory", "not enough memory", "out of memory", "STATUS_ALLOC_FAILED")
"""Parts of torch's errors when memory runs out: on the CPU, on the GPU outside of torch's allocator, and in CUDA's
libraries (cuBLAS, cuDNN)."""
GRADIENT_BYTES, MOMENT_BYTES = 4, {"adamw": 8, "adamw8bit": 2}
"""Per trained parameter: its gradient, while its policy is updated, and both moments of the optimizer, from the first
step on."""
LOGIT_BYTES = 12
"""Of a logit: three buffers of a chunk in float32."""
LARGE = 2**24
"""From this number of parameters on, passes take so many pages that their allocation costs time."""
_KEEP = ((-3, 32 << 20), (-1, 2047 << 20))
"""glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD: during an update, pages of tensors up to 32 MiB are used again. To
allocate new ones for each tensor takes a quarter to a third of an update's time."""
GAPS = {False: 1.3, True: 0.5}
"""What the gaps between kept pages take, as a multiple of what a plain pass keeps for its backward pass, by whether the
pass is checkpointed. In a checkpointed pass the states that stay lie between the temporary tensors of each layer, which
are several times as large. Measured with SmolLM2 in plain passes of 512 tokens, and in checkpointed ones of 4,094 and
8,192."""
_ANEW = ((-3, 256 << 10),)
"""Larger tensors are given back to the system when they are freed, where memory is short. By itself glibc
raises the threshold with the sizes that it sees, and the gaps then take twice the memory."""
GROWTH = 1.25
"""Passes that were halved grow again once there is so much more room than when memory ran out: otherwise each update
would run out of memory again."""
SPARE = 1 / 2
"""Of the machine's memory: while so much is free, an update's pages are kept for the next one. To ask for them again
takes up to a fifth of its time."""


class PassSize:
    """The tokens per pass of a learner, which become fewer where memory runs out.

    There are passes of two kinds: plain ones, and those whose layers are computed again in the backward pass.
    """

    def __init__(self, tokens: int, *, alone: bool, always: bool = False) -> None:
        """`tokens` of a pass, until `adapt` chooses others. `always`: layers are computed again in all passes. `alone`:
        this process has the weights to itself, so that it may make passes that no other knows of.
        """
        self._sizes = {False: tokens, True: 0}
        self._single = self._most = math.inf
        self._where = ""
        self._alone = alone
        self._always = always
        self.checkpointed = always
        """Whether passes are now of that kind."""
        self._said = False
        self._room = self._room_when_halved = 0.0
        self._halved = {False: False, True: False}
        self.halved = 0

    @property
    def tokens(self) -> int:
        """Tokens of a pass, at most, unless a single row has more."""
        return self._sizes[self.checkpointed]

    @property
    def by_kind(self) -> dict[bool, int]:
        """Tokens of a pass by whether its layers are computed again; 0 for passes of a kind that is not made."""
        return dict(self._sizes)

    def choose(self, longest: int, computed: Callable[[int], int]) -> bool:
        """Decide whether the layers are checkpointed in passes of rows whose longest has `longest` tokens.

        `computed` returns the number of tokens that passes of a size compute: small passes compute the tokens that rows
        share several times. Checkpointing costs a third of the time, so it is used if it saves more.
        """
        plain = max(self._sizes[False], self._single)
        small, large = self._sizes[False], self._sizes[True]
        long = bool(large) and longest > plain
        self.checkpointed = self._always or long or (large > small and 3 * computed(small) > 4 * computed(large))
        if long and not (self._always or self._said):
            self._said = True
            log.warning("A row of %d tokens takes activation checkpointing, as %.0f fit without it", longest, plain)
        return self.checkpointed

    def check(self, rows: Sequence[TrainRow]) -> None:
        """Raise LearnerError for a row that does not fit, even alone in a pass."""
        row = max(rows, key=lambda row: len(tokens_of(row)))
        length = len(tokens_of(row))
        if length > self._most:
            raise LearnerError(
                f"Row {row.id} of role {row.role!r} has {length} tokens; a pass of one row fits up to "
                f"{self._most:.0f} into {self._where}.",
                "Set learner.memory higher, or shorten prompts or sampling.max_tokens.",
            )

    def adapt(self, fits: Mapping[bool, int], wanted: Mapping[bool, int], room: float, most: int, where: str) -> None:
        """Choose the sizes for an update that begins with `room` bytes for a pass.

        `fits` and `wanted` are numbers of tokens by kind of pass (whether its layers are computed again): the most that
        fit, and the wanted size. `most` is the longest row that fits at all into the memory that `where` names. Sizes
        that were halved when memory ran out grow only if there is more room than then.
        """
        self._single, self._most, self._where = fits[False], most, where
        grows = room > GROWTH * self._room_when_halved
        for kind, tokens in wanted.items():
            if grows or not self._halved[kind]:
                self._sizes[kind], self._halved[kind] = tokens, False
            else:
                self._sizes[kind] = min(self._sizes[kind], tokens)
        if self._halved[False]:
            self._single = min(self._single, self._sizes[False])
        self._room = room

    def fitting(self, compute: Callable[[], T], again: Callable[[], None]) -> T:
        """Return the result of `compute`, which makes passes of `tokens`. If memory runs out, halve `tokens`, call
        `again`, and compute once more. Raises LearnerError if a smaller size cannot help."""
        while True:
            try:
                return compute()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failed = self.tokens
                # Other ranks make the same passes at the same time, and cannot make smaller ones without each other.
                if failed < 2 * LEAST or not self._alone:
                    cause = f"Memory ran out in a pass of {failed} tokens."
                    remedy = "Set learner.memory lower, or shorten prompts or sampling.max_tokens."
                    raise LearnerError(cause, remedy) from error
            self._sizes[self.checkpointed] = failed // 2
            self._halved[self.checkpointed] = True
            self._room_when_halved = self._room  # for `adapt`, which lets the size grow again above it
            self._single = min(self._single, self._sizes[False])
            self.halved += 1
            log.warning("Memory ran out in a pass of %d tokens: passes are of %d from now on", failed, self.tokens)
            again()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had no memory for a tensor."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


@contextmanager
def giving_back(model: PolicyModel) -> Iterator[None]:
    """Give memory that is kept for later back in the end: a sampler may be on the same GPU, or on a machine that has
    little left."""
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
    """Chooses, whenever an update begins, how large the passes of each policy are; policies of one network have one
    `PassSize`.

    For "auto" see `auto_tokens`. In a process group of several all ranks choose the same, so all must call `choose`.
    """

    def __init__(
        self,
        policies: Mapping[str, PolicyModel],
        settings: LearnerSettings,
        group: ProcessGroup,
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        """Raise ConfigError if not even a small pass fits into `learner.memory`."""
        self._policies, self._settings, self._group, self._optimizers = dict(policies), settings, group, optimizers
        self._networks = {id(model.network): model for model in policies.values()}

        # Bytes for each token of a pass, by network and by whether its layers are checkpointed. They do not change.
        self._token_bytes: dict[int, dict[bool, float]] = {}
        memories: dict[int, PassMemory] = {}
        self._fixed = 0.0
        self._sizes: dict[int, PassSize] = {}
        for network, model in self._networks.items():
            memory = memories[network] = pass_memory(model)
            self._fixed = max(self._fixed, memory.fixed + memory.logits)
            self._token_bytes[network] = {False: memory.planned(checkpointed=False)}
            if settings.activation_checkpointing and model.logprob_model.checkpointing.possible:
                self._token_bytes[network][True] = memory.planned(checkpointed=True)
            always = settings.activation_checkpointing is True
            self._sizes[network] = PassSize(LEAST, alone=group.size == 1, always=always)

        self.choose()
        device = next(iter(self._networks.values())).device.type
        if device == "cpu" and any(_is_large(model) for model in self._networks.values()):
            _, room, _ = self._room()
            roomy = all(keeps_pages(memory, self._sizes[network].by_kind, room) for network, memory in memories.items())
            _manage_pages(_KEEP if roomy and not settings.memory else _ANEW)

    def __getitem__(self, policy: str) -> PassSize:
        return self._sizes[id(self._policies[policy].network)]

    def choose(self) -> None:
        """Choose the sizes that fit into the memory that is free now. Raises ConfigError as `__init__` does."""
        room, limit, where = self._room()
        settings = self._settings
        for network, model in self._networks.items():
            token_bytes = self._token_bytes[network]
            least = min(token_bytes.values())
            if settings.memory and room < LEAST * least:
                needed = (parse_size(settings.memory) - room + LEAST * least) / 2**30
                fault = f"is too little: this model takes at least {needed:.1f}GiB in this process"
                raise ConfigError("learner.memory", settings.memory, fault, "Raise it, or use a smaller model.")
            fits = {kind: self._smallest(room / each, model) for kind, each in token_bytes.items()}
            wanted = {kind: _pass_tokens(settings, fit, model.device.type) for kind, fit in fits.items()}
            self._sizes[network].adapt(fits, wanted, room, self._smallest(limit / least, model), where)

    def has_room(self, tokens: int) -> bool:
        """Whether passes of so many tokens, or of as many as the settings ask for, fit into the memory that is free
        now. All ranks must call this."""
        room, _, _ = self._room()
        settings = self._settings
        wanted = tokens if settings.micro_batch_tokens == "auto" else int(settings.micro_batch_tokens)
        for network, model in self._networks.items():
            token_bytes = self._token_bytes[network]
            recomputes = settings.activation_checkpointing is True and True in token_bytes
            if self._smallest(room / token_bytes[recomputes], model) < wanted:
                return False
        return True

    def _smallest(self, tokens: float, model: PolicyModel) -> int:
        """The least of the numbers that all ranks have found."""
        # The group has a maximum and no minimum.
        return -int(self._group.max(torch.tensor([-int(tokens)], device=model.device)).item())

    def _room(self) -> tuple[float, float, str]:
        """Bytes that a pass should take, bytes that it can, and a name for the latter."""
        gradients, moments = 0, 0
        for name, policy in self._policies.items():
            state = self._optimizers[name].state
            parameters = policy.parameters().values()
            gradients = max(gradients, sum(GRADIENT_BYTES * p.numel() for p in parameters))
            moments += sum(MOMENT_BYTES[self._settings.optimizer] * p.numel() for p in parameters if p not in state)
        to_come = (gradients + moments) // self._group.size
        return _room(next(iter(self._policies.values())), self._settings, to_come + int(self._fixed))


def _pass_tokens(settings: LearnerSettings, fit: int, device: str) -> int:
    """Return the wanted tokens of a pass, if `fit` tokens would fit."""
    wanted = settings.micro_batch_tokens
    return auto_tokens(fit, device) if wanted == "auto" else wanted


def auto_tokens(fit: float, device: str) -> int:
    """Return the tokens of a pass that "auto" chooses if `fit` tokens fit.

    It is one of a few numbers, so that similar machines choose the same: on a GPU, whose memory is not shared with
    other processes, a power of two; on a CPU at most an eighth less than fits.
    """
    tokens = int(max(LEAST, min(MOST.get(device, MOST["cpu"]), fit)))
    lower_bits = tokens.bit_length() - (4 if device == "cpu" else 1)
    return tokens >> lower_bits << lower_bits


class PassMemory(NamedTuple):
    """The memory of a pass, in bytes. The learner chooses by it, and `cotune doctor` forecasts the choice with it."""

    plain: float
    """Bytes of a token that stay in memory until the backward pass."""
    checkpointed: float
    """The same if layers are computed again in the backward pass."""
    layers: int
    fixed: float
    """Bytes of any pass, independent of its tokens: weights in the precision of products, and the gradient of a trained
    output embedding. If that is the input embedding too, autograd keeps it until the gradient of the input embedding
    is computed."""
    logits: float
    """Bytes of log-probabilities in addition to the states: a chunk of logits."""

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
    """Measure the memory of a pass with small passes."""
    whole = kept_bytes(model, checkpointed=False)
    again = kept_bytes(model, checkpointed=True) if model.logprob_model.checkpointing.possible else whole
    head = model.network.get_output_embeddings().weight
    return PassMemory(
        plain=whole.token,
        checkpointed=again.token,
        layers=int(model.network.config.get_text_config().num_hidden_layers),
        fixed=max(whole.fixed, 0.0) + (GRADIENT_BYTES * head.numel() if head.requires_grad else 0),
        logits=logit_bytes(int(head.shape[0]), model.device.type),
    )


def logit_bytes(vocabulary: int, device: str) -> float:
    """Return the bytes of log-probabilities in addition to the states."""
    return float(LOGIT_BYTES * vocabulary * chunk_tokens(vocabulary, device))


class KeptBytes(NamedTuple):
    """Bytes of a pass that stay in memory until its backward pass: of each token, and independent of tokens (casts of
    weights)."""

    token: float
    fixed: float


def kept_bytes(model: PolicyModel, *, checkpointed: bool) -> KeptBytes:
    """Measure the bytes that stay in memory until the backward pass, with passes of two sizes. `cotune doctor` does
    this with models without storage."""
    switch = model.logprob_model.checkpointing
    switch.on = checkpointed
    try:
        (few, small), (many, large) = (_kept(model, count) for count in (1, 3))
    finally:
        switch.on = False
    token = (large - small) / (many - few)
    return KeptBytes(token, small - few * token)


def _kept(model: PolicyModel, groups: int) -> tuple[int, int]:
    """Return the tokens of a pass over this number of groups of two rows, and the bytes of the tensors in its graph."""
    prompt, response = 24, 9
    rows: list[TrainRow] = []
    for group in range(groups):
        # The two rows of a group share their prompt; prompts of groups differ from the first token on.
        for token in (groups, groups + 1):
            row = TrainRow(
                id="",
                role="",
                prompt_ids=(group,) * (prompt - group),
                response_ids=(token,) * response,
                logprobs=(),
                advantage=0.0,
            )
            rows.append(row)
    parameters = {_storage_id(local_shard(p)) for p in model.network.parameters()}
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> None:  # returns nothing: a graph that holds its own outputs would never be freed
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


def _room(model: PolicyModel, settings: LearnerSettings, fixed: int) -> tuple[float, float, str]:
    """Return the bytes that a pass should take and the most that it can take, both without the `fixed` ones, and the
    name of the limit."""
    cuda = model.device.type == "cuda"
    if settings.memory:
        used = int(torch.cuda.memory_allocated(model.device)) if cuda else process_memory()
        room = parse_size(settings.memory) - used - fixed
        return room, room, f"learner.memory = {settings.memory!r}"
    if not cuda:
        free, total = machine_memory()
        room = free - fixed
        return usual_share(room, total, "cpu"), room, f"the {free / 2**30:.1f} GiB that are free"
    free = int(torch.cuda.mem_get_info(model.device)[0])
    # Memory that torch's allocator holds for later counts as free, as passes take it from there.
    unused = int(torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device))
    room = free + unused - fixed
    return usual_share(room, 0, "cuda"), room, f"the {(free + unused) / 2**30:.1f} GiB that are free on the GPU"


def usual_share(room: float, total: float, device: str) -> float:
    """Return the bytes that a pass should take without `learner.memory`: a part of the free `room` in a machine with
    `total` bytes."""
    return min(total * CPU_SHARE, room) if device == "cpu" else room * GPU_SHARE


def keeps_pages(memory: PassMemory, sizes: Mapping[bool, int], room: float) -> bool:
    """Return whether pages may stay allocated during updates: `room` bytes hold a pass of either kind, and its gaps.
    `sizes` are the tokens of a pass by whether it is checkpointed."""
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


def _manage_pages(options: Sequence[tuple[int, int]]) -> None:
    if (libc := _glibc()) is not None:
        for option, value in options:
            libc.mallopt(option, value)
