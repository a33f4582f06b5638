"""A vLLM engine that this process starts, as a `Sampler`: it serves many adapters, or one policy's full weights."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from cotune.errors import ConfigError, LearnerLost, RequestRefused, SamplerError, error_line
from cotune.integrations.apps.activation import NO_ACTIVATION
from cotune.integrations.cluster.weight_transfer import STALL_SECONDS, LearnerWeights, Received
from cotune.integrations.models.engine_sampler import BY_FILES, LoopSampler
from cotune.integrations.models.folder.meta_model import ModelSkeleton
from cotune.integrations.models.served_versions import BASE, Version
from cotune.integrations.models.vllm.adapters import SharedFolders, left_in_shared_memory, write_shared
from cotune.integrations.models.vllm.arguments import EngineSize, engine_arguments
from cotune.integrations.models.vllm.device import check_gpu, has_bfloat16, on_gpu
from cotune.integrations.models.vllm.images import image_prompt
from cotune.integrations.models.vllm.requests import python_completion, python_params
from cotune.integrations.models.vllm.slots import UNKNOWN
from cotune.integrations.versions import require_version
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams, Weights

log = logging.getLogger(__name__)

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)

START_REPORT_SECONDS = 15.0
CLOSE_SECONDS = 20.0
"""How long vLLM's processes may take to end by themselves."""

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    **NO_ACTIVATION,  # vLLM's processes import cotune's worker
}
# Otherwise the first request compiles small functions of vLLM's sampler, which takes a minute and gains nothing here.
_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}

_REOPEN = "Read vLLM's log, then open a new sampler."


def adapter_slots(policies: int, staleness: int) -> int:
    """How many adapters an engine must hold: each policy in all versions that may be sampled from, and a new one."""
    return policies * (staleness + 1) + 1


def prepare_environment() -> None:
    """Set the environment variables of vLLM. Raises ConfigError if vLLM is not installed, UnsupportedVersion."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    check_installed()


def check_installed() -> None:
    """Raises ConfigError if vLLM is not installed, UnsupportedVersion."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("engine", "vllm", "is not installed", "See docs/how-to/vllm.md for how to install it.")
    require_version("vllm")


class VllmSampler(LoopSampler):
    """vLLM's AsyncLLM as a `Sampler`, made by `open`. The engine runs in other processes."""

    name = "vllm"
    takes_remote_weights = True

    def __init__(self, skeleton: ModelSkeleton, size: EngineSize) -> None:
        """A sampler for vLLM in this process. `skeleton` checks published weights, and `size` has the number of
        adapters and their rank. The engine itself is started by `open`.
        """
        super().__init__()
        self._skeleton = skeleton
        self._size = size
        self._full = size.full
        self._slots = size.adapters
        self._rank = size.rank
        self._digest_before_sleep: str | None = None
        """Digest of the weights when the engine began to sleep; None while it is awake."""
        self._sleeps_with_weights = False
        """Whether the weights remain on the GPU while the engine sleeps."""
        self._published_slots: dict[int, list[str]] = {}
        """By slot of an adapter: its digest in each worker, computed when it was published."""
        self._warned_of_slots = False
        self._folders = SharedFolders()
        self._requests_made = itertools.count(1)
        self._adapters_made = itertools.count(1)
        self._replaced: set[PolicyRef] = set()
        """Versions whose full weights a newer version has replaced before they were retired."""
        self._receives = True
        """Whether the learner may send full weights to the workers."""
        self._failed_learners: set[str] = set()
        """Addresses of learners that have failed to do so."""
        self._by_files = 0
        """Number of publications by files that the learner could have sent."""
        self._llm: Any = None

    @classmethod
    async def open(
        cls,
        model: str | Path,
        *,
        weights: Literal["lora", "full"] = "lora",
        policies: int = 4,
        staleness: int = 1,
        max_lora_rank: int = 16,
        sequences: int = 0,
        sleeps: bool = False,
        engine_args: Mapping[str, Any] | None = None,
    ) -> VllmSampler:
        """Start an engine with a model folder or Hub id, and wait until it serves.

        With `weights` "lora", the engine serves adapters over the base, up to the rank `max_lora_rank`. It has enough
        slots for `policies` whose versions may be `staleness` steps old. With "full", it serves one version of one
        policy's full weights. `sequences` is the number of candidates that the run requests at once, 0 if it is not
        known. With `sleeps`, a learner can share the GPU: the engine can `sleep` and `wake`. On a CPU it only pauses.
        `engine_args` are arguments of vLLM (`tensor_parallel_size`, `gpu_memory_utilization`, `max_model_len`, ...)
        and replace cotune's. Raises ConfigError for a model or arguments that vLLM does not accept,
        UnsupportedVersion, and SamplerError if the engine does not start.
        """
        if weights not in ("lora", "full"):
            raise ConfigError("weights", weights, "must be lora or full")
        if max_lora_rank > _RANKS[-1]:
            remedy = "Train adapters of a lower rank."
            raise ConfigError("max_lora_rank", max_lora_rank, f"must be at most {_RANKS[-1]}", remedy)
        prepare_environment()
        skeleton = await asyncio.to_thread(ModelSkeleton, model)
        size = EngineSize(
            sequences=sequences,
            adapters=adapter_slots(policies, staleness),
            rank=next(r for r in _RANKS if r >= max_lora_rank),
            full=weights == "full",
            sleeps=sleeps,
        )
        sampler = cls(skeleton, size)
        return await sampler._open_or_close(sampler._open(dict(engine_args or {})))

    async def _open(self, engine_args: dict[str, Any]) -> None:
        """Start vLLM on this machine. Raises ConfigError for unknown engine arguments, SamplerError if vLLM does not
        start.
        """
        check_gpu()
        from vllm import AsyncEngineArgs

        gpu = on_gpu()
        if not gpu:
            for name, value in _ON_CPU.items():
                os.environ.setdefault(name, value)
        try:
            folder = str(self._skeleton.folder)
            bfloat16 = has_bfloat16()
            arguments = AsyncEngineArgs(**engine_arguments(folder, self._size, engine_args, gpu=gpu, bfloat16=bfloat16))
        except TypeError as error:
            raise ConfigError(
                "engine_args", engine_args, f"are not all engine arguments of vLLM ({error})", "Correct their names."
            ) from error
        try:
            with reported_start(gpu):
                await self._start_engine(arguments, gpu)
        except Exception as error:
            raise SamplerError(f"vLLM did not start: {error_line(error)}.", "Read vLLM's log above.") from error
        kind = "the full weights of one policy" if self._full else f"up to {self._slots} adapters of rank {self._rank}"
        log.info("vLLM serves %s, %s.", self._skeleton.folder, kind)

    async def _start_engine(self, arguments: Any, gpu: bool) -> None:
        """Start the engine, compile its kernels with a first request, and prepare it for padded vocabularies and new
        weights.
        """
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        # With this context, vLLM batches 8,192 tokens or more on a GPU. Its default of 2,048 has a lower throughput.
        context = UsageContext.LLM_CLASS if gpu else UsageContext.ENGINE_CONTEXT
        self._llm = AsyncLLM.from_engine_args(arguments, usage_context=context)
        self.max_model_len = self._llm.model_config.max_model_len
        await self._generate([1], 1, SamplingParams(max_tokens=1), BASE, None)  # compiles kernels
        if self._skeleton.token_ids < self._skeleton.logits:
            await self._ask("cotune_mask_padding", self._skeleton.token_ids)
        self._folders.adopt(await asyncio.to_thread(left_in_shared_memory))
        if self._full:
            from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest())
            # With several replicas in one engine, vLLM returns the answers of the first one only.
            self._receives = self._llm.vllm_config.parallel_config.data_parallel_size == 1

    async def _generate(
        self, prompt: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef, target: Any
    ) -> list[Completion]:
        """Sample from vLLM. `target` is the adapter of the version, None for the weights of the engine."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input

        id = str(next(self._requests_made))
        inputs = tokens_input(list(prompt))
        if params.images:
            inputs = await image_prompt(self._llm.renderer, prompt, params.images)
        answers = self._llm.generate(inputs, python_params(n, params), id, lora_request=target)
        complete: Any = None
        try:
            async for answer in answers:
                complete = answer  # each contains all before it
        except (VLLMClientError, ValueError) as error:
            raise RequestRefused(f"vLLM refused a request: {error}.", "Correct the request.") from error
        except Exception as error:
            raise self._failed(error) from error
        outputs = sorted(complete.outputs, key=lambda output: output.index)
        return [python_completion(output, params.top_logprobs) for output in outputs]

    def _locate(self, policy: PolicyRef) -> Version:
        """The version of a policy. With full weights, the engine no longer holds the base, so other policies are
        refused.
        """
        if self._full:
            for version in self._versions.all():
                if version.policy != policy:
                    raise RequestRefused(
                        f"{policy} is not served: the engine holds the full weights of {version.policy}, and of no "
                        "other version.",
                        "Sample from the version that was published last.",
                    )
        return super()._locate(policy)

    async def _retire(self, policy: PolicyRef) -> None:
        if policy in self._replaced:
            self._replaced.discard(policy)  # a newer version has already replaced it
        else:
            await super()._retire(policy)

    async def _load(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> Version:
        """Load a version. Adapters get to the workers as files in shared memory."""
        self._skeleton.check(policy, weights, lora)
        if lora is None:
            return await self._load_full(policy, weights)
        if self._full:
            raise RequestRefused(
                f"{policy} is an adapter, and this engine serves full weights.", 'Open one with weights="lora".'
            )
        if lora.rank > self._rank:
            raise RequestRefused(
                f"{policy} has rank {lora.rank}; the engine takes adapters of up to {self._rank}.",
                "Open it with a larger max_lora_rank.",
            )
        await self._wait_for_slot()
        number = next(self._adapters_made)
        # vLLM caches prefixes by the adapter's name, so a version that is loaded again needs another name.
        name = f"{policy}#{number}"
        folder = await asyncio.to_thread(write_shared, self._folders, name, policy, weights, lora)
        return await self._add_adapter(policy, name, number, folder)

    async def _add_adapter(self, policy: PolicyRef, name: str, number: int, folder: Path) -> Version:
        """Add an adapter to the engine, and compare its values in all workers. A failed adapter is removed again."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(name, number, str(folder))
        try:
            await self._llm.add_lora(request)
            version = Version(policy, _same_answer(await self._ask("cotune_adapter", number, str(folder))), request)
            if self._size.sleeps:
                self._published_slots[number] = await self._ask("cotune_slot", number)
            return version
        except Exception as error:
            self._folders.remove(name)
            failed = self._failed(error)
            if self._broken is None:
                await self._llm.remove_lora(number)
            raise failed from error

    async def _wait_for_slot(self) -> None:
        """Wait until a slot is free. Raises RequestRefused if no retired version will free one."""
        while len(versions := self._versions.all()) >= self._slots:
            if not any(version.retired for version in versions):
                raise RequestRefused(
                    f"The engine has room for {self._slots} adapters, and serves {sorted(self._versions.served())}.",
                    "Retire versions that are not sampled from any more, or open it with more policies or staleness.",
                )
            self._freed.clear()
            await self._freed.wait()

    async def _load_full(self, policy: PolicyRef, weights: Weights) -> Version:
        """Replace the weights of the engine: the learner sends them to the workers, or they are loaded from files.

        A failure to load the files breaks the engine: some workers may have the new weights.
        """
        if not self._full:
            raise RequestRefused(
                f"{policy} has full weights, and this engine serves adapters over its base.",
                'Open one with weights="full" for each policy that is trained in full.',
            )
        others = [version.policy for version in self._versions.all() if version.policy.name != policy.name]
        if others:
            raise RequestRefused(
                f"The engine serves {others[0]}: vLLM holds the full weights of one policy at a time.",
                "Open an engine for each policy that is trained in full.",
            )
        sendable: LearnerWeights | None = None  # weights that the learner can send; None to use files at once
        if isinstance(weights, LearnerWeights) and self._receives and weights.address not in self._failed_learners:
            sendable = weights
        folder: Path | None = None
        if sendable is None:
            folder = await self._write(policy, weights)  # already now, while the engine still answers
        try:
            await self._end_served_versions()
            await self._llm.pause_generation(mode="wait", clear_cache=True)
            loaded_fingerprint = ""
            if sendable is not None:
                loaded_fingerprint = await self._receive(policy, sendable)
            if not loaded_fingerprint:
                # Load the weights from files, also after a transfer that failed.
                if isinstance(weights, LearnerWeights):
                    self._by_files += 1
                if folder is None:
                    folder = await self._write(policy, weights)
                loaded_fingerprint = await self._load_files(folder)
            await self._llm.reset_prefix_cache()
            await self._llm.resume_generation()
            return Version(policy, loaded_fingerprint)
        except Exception as error:
            lost = SamplerError(
                f"{policy} arrived in part only, and the engine's weights are lost: {error_line(error)}.", _REOPEN
            )
            self._fail(lost)
            if isinstance(error, LearnerLost):
                raise  # the run can go back to its last checkpoint
            raise lost from error
        finally:
            self._folders.remove(str(policy))

    async def _end_served_versions(self) -> None:
        """Refuse new requests of all served versions, and wait until their last request has ended."""
        self._replaced |= {version.policy for version in self._versions.all()}
        ending = self._versions.clear()
        while any(version.running for version in ending):
            await asyncio.sleep(0.01)

    async def _receive(self, policy: PolicyRef, weights: LearnerWeights) -> str:
        """Let the learner send weights to all workers. Returns the fingerprint that all of them computed.

        Returns "" if the transfer failed, or if the fingerprint is not the learner's. From then on, the engine uses
        files for this learner, because another failure may take as long as the limits of a transfer. Raises
        SamplerError if a worker's model did not take the tensors: files may then fill other tensors than the model
        computes with.
        """
        workers = self._llm.vllm_config.parallel_config.world_size
        ticket = weights.ticket(workers, "cuda" if on_gpu() else "cpu")
        sending = weights.send(ticket)
        answers: list[Received] = await self._ask("cotune_receive", ticket)
        if {answer["fingerprint"] for answer in answers} == {weights.fingerprint}:
            return weights.fingerprint

        cause = "other values arrived than were sent"
        for answer in answers:
            if answer["load_error"]:
                raise SamplerError(f"A worker of vLLM did not load them: {answer['load_error']}.", _REOPEN)
            if answer["transfer_error"]:
                cause = answer["transfer_error"]
        # The learner may know more about the cause.
        try:
            await asyncio.wait_for(sending, STALL_SECONDS)
        except Exception as error:  # noqa: BLE001
            cause += f" (the learner: {error_line(getattr(error, 'cause', None) or error)})"
        self._failed_learners.add(weights.address)
        log.warning(
            "%s and later versions of this learner are published by files, which takes longer: %s.", policy, cause
        )
        return ""

    async def _write(self, policy: PolicyRef, weights: Weights) -> Path:
        """Write full weights into a folder that all workers can read."""
        return await asyncio.to_thread(write_shared, self._folders, str(policy), policy, weights, None)

    async def _load_files(self, folder: Path) -> str:
        """Let all workers load full weights from a folder. Returns their fingerprint."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"path": str(folder)}))
        await self._llm.finish_weight_update()
        return _same_answer(await self._ask("cotune_weights"))

    async def _sleep(self, keep_weights: bool) -> None:
        """Free the engine's GPU memory. With `keep_weights`, only the memory of the cache is freed. On a CPU, the
        engine only pauses.
        """
        if not self._size.sleeps:
            raise RequestRefused("This engine cannot sleep.", "Open it with sleeps=True.")
        is_asleep = self._digest_before_sleep is not None
        can_free_weights = self._sleeps_with_weights and not keep_weights
        if is_asleep and not can_free_weights:
            return  # the memory is free already
        try:
            # `_wake` compares the weights with this digest. An engine that frees its weights later, while it sleeps,
            # keeps the first one.
            digest = self._digest_before_sleep or await self._digest()
            if not on_gpu():
                await self._llm.pause_generation(mode="wait", clear_cache=True)
            elif keep_weights:
                await self._llm.pause_generation(mode="wait", clear_cache=True)
                await self._ask("cotune_release_cache")
            else:
                await self._llm.sleep(level=1, mode="wait")  # level 2 would drop the base weights
        except Exception as error:
            raise self._failed(error) from error
        self._digest_before_sleep = digest
        self._sleeps_with_weights = on_gpu() and keep_weights

    async def _wake(self) -> None:
        """Wake the engine, and check that its weights and adapters are still the published ones."""
        if self._digest_before_sleep is None:
            return
        try:
            if on_gpu() and not self._sleeps_with_weights:
                await self._llm.wake_up(tags=["weights"])
            digest = await self._digest()
            changed = [str(version.policy) for version in self._versions.all() if await self._adapter_changed(version)]
            if digest == self._digest_before_sleep and not changed:
                await self._wake_cache()
        except Exception as error:
            raise self._failed(error) from error
        if digest != self._digest_before_sleep:
            fault = f"other weights: {digest} instead of {self._digest_before_sleep}"
        elif changed:
            fault = f"other values in the adapters {', '.join(changed)} than were published"
        else:
            self._digest_before_sleep = None
            self._sleeps_with_weights = False
            return
        lost = SamplerError(f"The engine woke with {fault}.", _REOPEN)
        self._fail(lost)
        raise lost

    async def _wake_cache(self) -> None:
        """Allocate the memory of the cache again, and answer requests again."""
        if on_gpu() and not self._sleeps_with_weights:
            await self._llm.wake_up(tags=["kv_cache"])
            return
        if on_gpu():
            await self._ask("cotune_restore_cache")
        await self._llm.resume_generation()

    async def _adapter_changed(self, version: Version) -> bool:
        """Whether the adapter of a version has other values on the device than when it was published."""
        if version.target is None:
            return False  # full weights: `_digest` covers them
        adapter_id = version.target.lora_int_id
        published_digests = self._published_slots[adapter_id]
        if UNKNOWN in published_digests and not self._warned_of_slots:
            self._warned_of_slots = True
            log.warning(
                "This version of vLLM does not show the adapters that its kernels read: cotune cannot check them after "
                "the engine wakes. The probe after each publication still compares log-probabilities."
            )
        present_digests = await self._ask("cotune_slot", adapter_id)
        return present_digests != published_digests

    async def _digest(self) -> str:
        """Digest of the weights of all workers. Each worker has only a part of the weights if several share a model."""
        return " ".join(await self._ask("cotune_model"))

    async def _info(self) -> SamplerInfo:
        """Information about the sampler. Raises SamplerError if the engine no longer runs."""
        try:
            # An engine that runs answers `is_paused`, but not while it loads full weights. If its process ends during
            # the load, vLLM only sets `errored`, and the call that loads the weights waits without an end.
            loads_full_weights = self._full and self._versions.lock.locked()
            if not loads_full_weights:
                await self._llm.is_paused()
            elif self._llm.errored:
                raise RuntimeError("vLLM's engine process has ended")
        except Exception as error:
            raise self._failed(error) from error
        info = await super()._info()
        if self._by_files:
            info = msgspec.structs.replace(info, counters={BY_FILES: self._by_files})
        return info

    async def _unload(self, version: Version) -> None:
        if version.target is not None:
            await self._llm.remove_lora(version.target.lora_int_id)
            self._published_slots.pop(version.target.lora_int_id, None)
            self._folders.remove(version.target.lora_name)

    async def _ask(self, method: str, *arguments: Any) -> list[Any]:
        return await self._llm.collective_rpc(method, args=arguments)

    async def _close(self) -> None:
        if self._llm is not None:
            if self._llm.output_handler is not None:  # it would log the end of the engine as a failure
                self._llm.output_handler.cancel()
            await asyncio.to_thread(self._llm.shutdown, CLOSE_SECONDS)
        self._folders.close()

    def _failed(self, error: Exception) -> SamplerError:
        """The error to raise for a failure of vLLM. If the engine has ended, all later requests fail too."""
        if self._llm.errored:
            gone = SamplerError(f"The sampler's engine is gone: {error_line(error)}.", _REOPEN)
            self._fail(gone)
            return gone
        return SamplerError(f"vLLM failed: {error_line(error)}.", "Read vLLM's log.")


@contextlib.contextmanager
def reported_start(gpu: bool) -> Iterator[None]:
    """Log every `START_REPORT_SECONDS` that vLLM is still starting. vLLM logs nothing while it compiles."""
    start_time = time.monotonic()
    start_is_over = threading.Event()

    def report() -> None:
        work = "loads weights, compiles and captures graphs" if gpu else "loads weights and compiles"
        while not start_is_over.wait(START_REPORT_SECONDS):
            seconds = time.monotonic() - start_time
            log.warning("vLLM is starting: %.0f s so far. It %s, which can take minutes.", seconds, work)

    # vLLM blocks the event loop while it starts, so the log needs a thread.
    thread = threading.Thread(target=report, name="cotune-vllm-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        start_is_over.set()
        thread.join()


def _same_answer(answers: Sequence[str]) -> str:
    """The answer of all workers. Raises RuntimeError if their answers differ."""
    if len(set(answers)) != 1:
        raise RuntimeError(f"the engine's workers hold different weights: {sorted(set(answers))}")
    return answers[0]
