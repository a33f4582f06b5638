"""Code that runs in vLLM's worker processes: it computes fingerprints of loaded weights, and receives full weights.

Only vLLM imports this module (`worker_extension_cls`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.peft_helper import PEFTHelper

from cotune.errors import error_line
from cotune.integrations.cluster.weight_transfer import Received, Receiver, Ticket
from cotune.integrations.models.vllm.adapters import read_weights
from cotune.integrations.models.vllm.arguments import BACKEND
from cotune.integrations.models.vllm.slots import slot_digest
from cotune.sampling.protocol import fingerprint

CACHE_TAG = "kv_cache"
"""The tag of the cache's memory in vLLM's allocator."""


class CotuneWorker:
    """Methods that vLLM adds to its workers, called with `collective_rpc`."""

    model_runner: Any
    weight_transfer_engine: Any
    rank: int
    device: torch.device
    vllm_config: Any
    wake_up: Any
    start_weight_update: Any
    finish_weight_update: Any

    def cotune_adapter(self, lora_id: int, folder: str) -> str:
        """Compute the fingerprint of the adapter in a folder. First check that this engine has loaded the same values.

        Raises RuntimeError if the adapter is not loaded or has other values.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        loaded = manager.get_adapter(lora_id)
        if loaded is None or lora_id not in manager.lora_index_to_id:
            raise RuntimeError(f"adapter {lora_id} is not in the engine")
        weights = read_weights(Path(folder))
        # vLLM converts and renames the tensors, so compare the digests of all values, without names.
        scale = PEFTHelper.from_local_dir(folder, max_position_embeddings=None).vllm_lora_scaling_factor
        dtype = manager.lora_config.lora_dtype
        expected_digests = Counter(_digest(_as_loaded(name, array, dtype, scale)) for name, array in weights.items())
        loaded_digests = Counter(_digest(tensor) for tensor in _tensors(loaded.loras))
        if loaded_digests != expected_digests:
            raise RuntimeError(f"adapter {lora_id} in the engine has other values than {folder}")
        return fingerprint(weights)

    def cotune_mask_padding(self, n_token_ids: int) -> str:
        """Never draw an id of `n_token_ids` or more from now on. The model has more logits than the tokenizer has
        tokens, because vocabularies are padded to a round number.

        This costs one write per pass. Parameters of requests (`logit_bias`, `allowed_token_ids`) would cost work in
        each request, and vLLM's newer model runner does not support custom logits processors.
        """
        model = self.model_runner.get_model()
        compute = model.compute_logits

        def compute_masked(*arguments: Any, **options: Any) -> torch.Tensor | None:
            logits = compute(*arguments, **options)
            if logits is not None:  # only one of several workers has the logits
                logits[..., n_token_ids:] = -torch.inf
            return logits

        model.compute_logits = compute_masked
        return str(n_token_ids)

    def cotune_slot(self, lora_id: int) -> str:
        """Compute the digest of an adapter's values in its slot on the device; see `slot_digest`."""
        return slot_digest(self.model_runner.lora_manager._adapter_manager, lora_id)

    def cotune_release_cache(self) -> str:
        """Free the memory of the cache, but not that of the weights.

        vLLM's levels of sleep free both. Level 1 copies the weights to the host and back, which takes seconds.
        """
        from vllm.device_allocator import get_mem_allocator_instance

        get_mem_allocator_instance().discard(CACHE_TAG)
        return CACHE_TAG

    def cotune_restore_cache(self) -> str:
        """Allocate the memory of an empty cache again."""
        self.wake_up(tags=[CACHE_TAG])
        return CACHE_TAG

    def cotune_model(self) -> str:
        """Compute the digest of the model's weights and buffers on their device, without adapters.

        It does not include weights that vLLM has packed into another form, as it does for some layers on CPUs.
        """
        model = self.model_runner.get_model()
        digest = hashlib.sha256()
        for name, tensor in sorted(chain(model.named_parameters(), model.named_buffers()), key=lambda item: item[0]):
            values = tensor.detach()
            if values.element_size() == 1:
                values = values.view(torch.uint8)  # torch cannot hash float8
            tensor_hash = torch.hash_tensor(values).item() if values.numel() else 0
            digest.update(f"{name}{tuple(values.shape)}{tensor_hash}".encode())
        return digest.hexdigest()

    def cotune_weights(self) -> str:
        """The fingerprint of the full weights that this worker has loaded from files last."""
        return self.weight_transfer_engine.loaded

    def cotune_receive(self, ticket: Ticket) -> Received:
        """Replace the full weights by those that the learner sends for this ticket.

        Returns the fingerprint of the tensors that arrived, or the cause of a failure. It raises no error: vLLM would
        leave the answers of the other workers unread, and take them for answers to the next call.
        """
        receiver = Receiver(ticket, self.rank + 1, self.device)
        try:
            self.start_weight_update()
            self._load_received(receiver)
            # After a failed transfer too, so that an update from files can begin.
            self.finish_weight_update()
        except Exception as error:  # noqa: BLE001
            return {"fingerprint": "", "transfer_error": "", "load_error": error_line(error)}
        if receiver.error is not None:
            return {"fingerprint": "", "transfer_error": error_line(receiver.error), "load_error": ""}
        return {"fingerprint": receiver.fingerprint(), "transfer_error": "", "load_error": ""}

    def _load_received(self, receiver: Receiver) -> None:
        """Load the tensors of a receiver into the model, as they arrive.

        An error of the transfer ends the tensors early and is left in `receiver.error`. An error of the model is
        raised.
        """
        with set_current_vllm_config(self.vllm_config), closing(receiver.tensors()) as tensors:
            try:
                self.weight_transfer_engine.load(tensors)
            except Exception:
                # After an error of the transfer, the model only lacks the tensors that did not arrive.
                if receiver.error is None:
                    raise


def _as_loaded(name: str, array: Any, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Convert a tensor as vLLM does when it loads an adapter: to the model's dtype, and lora_B times the scale."""
    tensor = torch.from_numpy(array).to(dtype)
    return tensor * scale if ".lora_B." in name and scale != 1 else tensor


def _tensors(loras: dict[str, Any]) -> Iterator[torch.Tensor]:
    for layer in loras.values():
        for factor in (layer.lora_a, layer.lora_b):
            for tensor in factor if isinstance(factor, list) else [factor]:
                if tensor is not None:
                    yield tensor


def _digest(tensor: torch.Tensor) -> tuple[tuple[int, ...], bytes]:
    data = tensor.cpu().contiguous().view(torch.uint8).numpy()
    return tuple(tensor.shape), hashlib.sha256(data).digest()


@dataclass
class NoInit(WeightTransferInitInfo):
    """The start of a transfer from folders, which needs no connection."""


@dataclass
class Folder(WeightTransferUpdateInfo):
    """The folder with the weights of one update."""

    path: str


class PublishedWeights(WeightTransferEngine[NoInit, Folder]):
    """A weight transfer of vLLM from the learner (`CotuneWorker.cotune_receive`), or from a folder that every worker
    can read, such as shared memory on one machine."""

    init_info_cls = NoInit
    update_info_cls = Folder
    loaded = ""

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        named = dict(self.model.named_parameters(remove_duplicate=False))
        self._expected = {name for name, _ in self.model.named_parameters()}
        self._tied = {name.rpartition(".")[0] for name in named if name not in self._expected}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Folder) -> None:
        """Load the weights of a folder. Raises RuntimeError if they lack a parameter of the model."""
        self.loaded = ""
        weights = read_weights(Path(update_info.path))
        self.load((name, torch.from_numpy(array)) for name, array in weights.items())
        self.loaded = fingerprint(weights)

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load tensors by name. Raises RuntimeError if they lack a parameter of the model."""
        loaded_names = self.model.load_weights(tensors)
        if loaded_names is not None:
            missing = sorted(self._expected - set(loaded_names))
            if missing:
                raise RuntimeError(f"no weights for {missing[:3]}")
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        # vLLM does not process tied layers, which it loads under another name, so they would keep packed old weights.
        for name in self._tied:
            layer = self.model.get_submodule(name)
            layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, PublishedWeights)
