"""The engine of the in-process sampler: one thread that owns the models and decodes everything that was asked for."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import queue
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cotune.errors import ConfigError, RequestRefused, SamplerError, error_line
from cotune.integrations.models.bfloat16 import LARGE, pack_linear_layers, rounds_products
from cotune.integrations.models.child.wire import Answer, Command
from cotune.integrations.models.devices import usual_device, usual_threads
from cotune.integrations.models.engine_sampler import room_after
from cotune.integrations.models.float32 import prefers_onednn, speed_linear_layers, widen_logits
from cotune.integrations.models.folder.adapter import read_adapter
from cotune.integrations.models.folder.folder import errors_of_model, loading_options, loading_weights, read_tokenizer
from cotune.integrations.models.folder.kinds import auto_class, end_ids, sees_images
from cotune.integrations.models.folder.meta_model import check_finite, check_full
from cotune.integrations.models.folder.vision import ImageInputs
from cotune.integrations.models.memory import machine_memory
from cotune.integrations.models.served_versions import Version, Versions
from cotune.integrations.models.transformers.batch import BASE, Batch
from cotune.integrations.models.transformers.cache import attention_only, buffer_tokens
from cotune.integrations.models.transformers.prefixes import PrefixCache
from cotune.integrations.models.transformers.rows import Job
from cotune.integrations.models.transformers.wire import PREFIX_PART, ModelSource
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplerInfo, SamplingParams, Weights, fingerprint

log = logging.getLogger(__name__)

PREFILL_TOKENS = 8192
"""Most prompt tokens that are prefilled between two decode steps. A single longer prompt is prefilled all the same."""

IDLE_SECONDS = 0.05
"""Seconds without a request after which the memory of keys and values is freed. A learner on the same machine or GPU
chooses the size of its passes by the free memory when an update begins."""


class DecodingEngine:
    """Runs in one thread. `submit` may be called from any; `emit` receives all replies of one round at once."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        end_token_ids: Sequence[int],
        source: ModelSource,
        emit: Callable[[list[Answer]], None],
        *,
        packed: bool = False,
    ) -> None:
        """An engine that decodes with a loaded model. `emit` gets the answers to commands.

        `source` has the limits of the engine. With `packed`, the products with the weights of the float32 `model` are
        computed in bfloat16.
        """
        if not attention_only(model.config.get_text_config()):
            raise SamplerError(
                f"The in-process sampler cannot serve {type(model).__name__}: not all its layers are full or sliding "
                "attention.",
                "Serve it with vLLM.",
            )
        self.source = source
        self.threads = usual_threads(model.num_parameters()) if source.threads is None else source.threads
        self.max_model_len: int = getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 20)
        self._emit = emit
        self._ends = tuple(end_token_ids)
        self._tokenizer = tokenizer
        prefix_bytes = source.prefix_cache
        if prefix_bytes is None:
            prefix_bytes = _total_memory(model.device) // PREFIX_PART
        self.prefixes = PrefixCache(prefix_bytes)
        path = source.model if isinstance(source.model, str) else model.config.name_or_path
        self._images = ImageInputs(path) if sees_images(model.config) else None

        # Prepare the model for decoding. These calls replace its layers by faster ones, and its logits by float32.
        self._packed = packed
        if packed:
            pack_linear_layers(model)
        elif model.device.type == "cpu" and prefers_onednn() and model.num_parameters() >= LARGE:
            speed_linear_layers(model)
        widen_logits(model)

        # One batch decodes the base model and all adapters over it. Each policy with full weights gets one more.
        self._base = Batch(model.eval(), self._ends, tokenizer, self.prefixes, self._images)
        self._batches = [self._base]
        self._waiting: dict[Batch, deque[Job]] = {self._base: deque()}
        self._versions = Versions((self._base, BASE))
        """The served versions. The target of a version is its batch, and the id of its adapter in this batch."""
        self._jobs: dict[int, tuple[Job, Version]] = {}
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._replies: list[Answer] = []
        self._adapter_ids = itertools.count(1)
        self._out_of_memory = 0

    def submit(self, command: Command) -> None:
        self._inbox.put(command)

    def run(self) -> None:
        """Serve until the command `close`. Raises the error that ended the engine."""
        torch.set_num_threads(self.threads)
        while self._receive():
            for batch in self._batches:
                self._decode(batch)
            self._flush()

    def _decode(self, batch: Batch) -> None:
        """Admit waiting jobs, then draw one token for every row."""
        try:
            self._finish(self._admit(batch))
            if batch.rows:
                self._finish(batch.step())
            return
        except torch.OutOfMemoryError as error:
            cause = error_line(error)
        # Not within `except`, where the traceback would keep the tensors of the failed step in memory.
        self._restart_halved(batch, cause)

    def _restart_halved(self, batch: Batch, cause: str) -> None:
        """After running out of memory: decode all jobs of the batch again from their beginning, half as many at once.

        A job draws the same tokens again. A job that ran alone fails, as there is nothing to halve. `cause` is the
        error's text.
        """
        waiting = self._waiting[batch]
        jobs_of_batch = [job for job, version in self._jobs.values() if version.target[0] is batch]
        running = [job for job in jobs_of_batch if job not in waiting]
        self.prefixes.clear()
        batch.halve()
        self._out_of_memory += 1
        if self._out_of_memory == 1:  # told once; later ones are counted in the sampler's info
            log.warning(
                "The sampler ran out of memory and puts requests back into its queue, to decode fewer at once (%s).",
                cause,
            )
        if len(running) == 1:
            (job,) = running
            error = SamplerError(
                f"The sampler has no memory for {job.n} candidates of up to {job.span} tokens ({cause}).",
                "Lower plan.k or sampling.max_tokens, or give the sampler a GPU with more free memory.",
            )
            self._replies.append(Answer(job.id, error=error))
            self._forget(job)
            return
        for job in running:
            job.restart()
        # Before the jobs that came later, in their old order: `extendleft` reverses what it is given.
        waiting.extendleft(reversed(running))

    def _receive(self) -> bool:
        """Handle all commands in the inbox. Without a job to decode, wait for commands until there is one. Returns
        False after `close`.
        """
        while True:
            if self._inbox.empty():
                if self._jobs:
                    return True
                self._flush()  # the answers to the commands so far
            command = self._next_command()
            if command.method == "close":
                return False
            self._handle(command)

    def _next_command(self) -> Command:
        """Wait for the next command. After IDLE_SECONDS without one, free the memory of the batches."""
        try:
            return self._inbox.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            for batch in self._batches:
                batch.release()
            return self._inbox.get()

    def _handle(self, command: Command) -> None:
        """Run a command, and queue its answer. `sample` is answered later, when its tokens are drawn."""
        control_commands: dict[str, Callable[..., Any]] = {
            "publish": self._publish,
            "retire": self._retire,
            "info": self._info,
        }
        try:
            if command.method == "sample":
                self._start(command.id, *command.arguments)
            elif command.method == "cancel":
                self._cancel(command.id)
            elif command.method in control_commands:
                self._replies.append(Answer(command.id, control_commands[command.method](*command.arguments)))
            else:
                raise SamplerError(f"The in-process sampler cannot {command.method}.", "Sample with vLLM.")
        except SamplerError as error:
            self._replies.append(Answer(command.id, error=RequestRefused(error.cause, error.remedy)))

    def _info(self) -> SamplerInfo:
        counters = {"out_of_memory": self._out_of_memory} if self._out_of_memory else {}
        return SamplerInfo(
            name="transformers", max_model_len=self.max_model_len, served=self._versions.served(), counters=counters
        )

    def _start(self, id: int, prompt: tuple[int, ...], n: int, params: SamplingParams, policy: PolicyRef) -> None:
        """Check a request and put it in the queue of its batch. The answer gets the number `id`."""
        version = self._versions.locate(policy)
        batch, adapter_id = version.target
        room = room_after(len(prompt), self.max_model_len)
        self._check_request(batch, prompt, n, params)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        job = Job(id, prompt, n, params, adapter_id, min(params.max_tokens, room), seed)
        self._jobs[job.id] = job, version
        self._waiting[batch].append(job)
        version.running += 1

    def _check_request(self, batch: Batch, prompt: tuple[int, ...], n: int, params: SamplingParams) -> None:
        """Raise SamplerError for a request that the batch cannot decode, before it shares the batch with others."""
        if not 1 <= n <= self.source.max_batch_rows or params.max_tokens < 1:
            raise SamplerError(
                f"n = {n} and max_tokens = {params.max_tokens} were asked for; n may be 1 to "
                f"{self.source.max_batch_rows}, max_tokens at least 1.",
                "Ask for fewer candidates, or open the sampler with a larger max_batch_rows.",
            )
        if params.stop and self._tokenizer is None:
            raise SamplerError("Stop strings need a tokenizer, and the sampler has none.", "Open it with a tokenizer.")
        if params.grammar:
            if batch.grammars is None:
                raise SamplerError(
                    "A grammar needs a tokenizer, and the sampler has none.", "Open it with a tokenizer."
                )
            batch.grammars.start(params.grammar)
        if unknown := [token for token, _ in params.logit_bias if not 0 <= token < batch.vocabulary]:
            raise SamplerError(
                f"logit_bias names the token {unknown[0]}; the model has the tokens 0 to {batch.vocabulary - 1}.",
                "Name tokens of the model that answers, by their ids.",
            )
        if params.images:
            if self._images is None:
                raise SamplerError("The model sees no images.", "Open the sampler with one that does.")
            self._images.of(batch.model, prompt, params.images)  # raises for images that cannot be read

    def _admit(self, batch: Batch) -> list[Job]:
        """Move as many waiting jobs into the batch as fit, in order of arrival. Returns the jobs that have ended with
        their first token.
        """
        jobs: list[Job] = []
        waiting = self._waiting[batch]
        rows = batch.alive
        span = batch.span
        width = 0
        max_tokens = min(self.source.max_batch_tokens, batch.room()) if waiting else 0
        while waiting:
            job = waiting[0]
            rows += job.n
            span = max(span, job.span)
            width = max(width, len(job.prompt))
            fits = rows <= self.source.max_batch_rows and buffer_tokens(rows, span) <= max_tokens
            if (batch.rows or jobs) and not fits:
                break
            if jobs and (len(jobs) + 1) * width > PREFILL_TOKENS:
                break
            jobs.append(waiting.popleft())
        return batch.admit(jobs, max_tokens) if jobs else []

    def _finish(self, jobs: Sequence[Job]) -> None:
        """Queue the answers of jobs that have ended."""
        for job in jobs:
            if job.refused:
                token, position = job.refused
                error = RequestRefused(
                    f"Token {token} at position {position} of a reply was allowed by its grammar, which then did not "
                    "take it.",
                    "Simplify the schema or the tools of this call.",
                )
                self._replies.append(Answer(job.id, error=error))
            else:
                self._replies.append(Answer(job.id, [c for c in job.done if c is not None]))
            self._forget(job)

    def _forget(self, job: Job) -> None:
        """Remove a job that has ended or was cancelled. A retired version is unloaded after its last job."""
        _, version = self._jobs.pop(job.id)
        if self._versions.left(version):
            self._drop(version)

    def _cancel(self, id: int) -> None:
        """Drop a job, waiting or running. A job that has ended is ignored."""
        if id not in self._jobs:
            return
        job, version = self._jobs[id]
        batch, _ = version.target
        if job in self._waiting[batch]:
            self._waiting[batch].remove(job)
        else:
            batch.cancel(job)
        self._forget(job)

    def _publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> str:
        """Load a version and return its fingerprint. Cached prefixes of older versions of the policy are dropped."""
        if (served := self._versions.known(policy, weights)) is not None:
            return served
        target = self._place_weights(policy, weights, lora)
        for older in self._versions.all():
            if older.policy.name == policy.name:
                self.prefixes.drop(older.target)
        version = Version(policy, fingerprint(weights), target)
        self._versions.add(version)
        return version.fingerprint

    def _place_weights(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> tuple[Batch, int]:
        """Make weights ready for decoding. Returns their batch, and the number of the adapter in it.

        A full set of weights gets a model and a batch of its own. An adapter joins the batch of the base model.
        """
        check_finite(policy, weights)
        if lora is None:
            batch = Batch(self._copy_model(weights), self._ends, self._tokenizer, self.prefixes, self._images)
            self._batches.append(batch)
            self._waiting[batch] = deque()
            return batch, BASE
        adapter = read_adapter(weights, lora, self._base.model)
        adapter_id = next(self._adapter_ids)
        self._base.lora.add(adapter_id, adapter)
        return self._base, adapter_id

    def _copy_model(self, weights: Weights) -> Any:
        """A copy of the base model with these weights."""
        if self._packed:
            # The packed layers of the base model cannot take other weights, so load the model once more.
            model = _load_network(self.source.model, "float32").eval()
            check_full(model, weights)
        else:
            check_full(self._base.model, weights)
            with self._base.lora.removed():
                model = copy.deepcopy(self._base.model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, array in weights.items():
                parameters[name].copy_(torch.as_tensor(array))
        if self._packed:
            pack_linear_layers(model)
        return model

    def _retire(self, policy: PolicyRef) -> None:
        version = self._versions.retire(policy)
        if not version.running:
            self._drop(version)

    def _drop(self, version: Version) -> None:
        """Unload a version: its adapter, or its own model with full weights."""
        self._versions.forget(version)
        batch, adapter_id = version.target
        self.prefixes.drop(version.target)
        if batch is self._base:
            batch.lora.remove(adapter_id)
        else:
            self._batches.remove(batch)
            del self._waiting[batch]

    def _flush(self) -> None:
        if self._replies:
            replies = self._replies
            self._replies = []
            self._emit(replies)


def load(source: ModelSource, emit: Callable[[list[Answer]], None]) -> DecodingEngine:
    """Load the model and its tokenizer. Raises ConfigError when there is no such model."""
    from transformers.utils.logging import disable_progress_bar

    if source.threads is not None:
        torch.set_num_threads(source.threads)
    model = source.model
    tokenizer = source.tokenizer
    packed = False
    if isinstance(model, str):
        disable_progress_bar()
        device = source.device or usual_device()
        with errors_of_model(source.model):
            packed = rounds_products(source.dtype, device)
            dtype = source.dtype or ("float32" if device == "cpu" else "bfloat16")
            if packed:
                dtype = "float32"  # only the products are rounded to bfloat16, see `pack_linear_layers`
            model = _move_to_device(_load_network(source.model, dtype), device)
            if tokenizer is None:  # a folder of weights alone serves token ids, but no stop strings
                tokenizer = read_tokenizer(source.model)
    ends = source.end_token_ids
    if ends is None:
        ends = end_ids(model.generation_config.eos_token_id, getattr(tokenizer, "eos_token_id", None))
    return DecodingEngine(model, tokenizer, ends, source, emit, packed=packed)


def _total_memory(device: torch.device) -> int:
    """The bytes of memory of a GPU, or of the machine for a CPU."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
    else:
        _, total = machine_memory()
    return total


def _load_network(path: str, dtype: str) -> Any:
    from transformers import AutoConfig

    kind = auto_class(AutoConfig.from_pretrained(path, **loading_options()))
    return kind.from_pretrained(path, dtype=getattr(torch, dtype), **loading_weights())


def _move_to_device(model: Any, device: str) -> Any:
    """Move a model to a device. Raises ConfigError for a device that this machine does not have."""
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        raise  # a RuntimeError too, but the device exists
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises AssertionError
        first_line, _, _ = str(error).partition("\n")
        fault = f"is not a torch device of this machine ({first_line})"
        raise ConfigError("device", device, fault, "Use cpu, or a GPU that torch can use.") from None
