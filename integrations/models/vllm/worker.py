"""What runs inside vLLM's worker processes: it tells what has arrived there, and receives full weights.

vLLM imports this module itself (`worker_extension_cls`); nothing else does.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.peft_helper import PEFTHelper

from cotune.integrations.models.vllm.adapters import read_weights
from cotune.integrations.models.vllm.arguments import BACKEND
from cotune.integrations.models.vllm.slots import slot_digest
from cotune.sampling.protocol import fingerprint

CACHE_TAG = "kv_cache"
"""How vLLM's allocator marks the memory of the cache."""


class CotuneWorker:
    """Methods that vLLM adds to its workers, called with `collective_rpc`."""

    model_runner: Any
    weight_transfer_engine: Any
    device: torch.device
    wake_up: Any

    def cotune_adapter(self, lora_id: int, folder: str) -> str:
        """Fingerprint of a folder, after a check that the adapter in this engine was made from the same values.

        Raises RuntimeError when the adapter is not loaded, or is another one.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        loaded = manager.get_adapter(lora_id)
        if loaded is None or lora_id not in manager.lora_index_to_id:
            raise RuntimeError(f"adapter {lora_id} is not in the engine")
        weights = read_weights(Path(folder))
        scale = PEFTHelper.from_local_dir(folder, None).vllm_lora_scaling_factor
        dtype = manager.lora_config.lora_dtype
        expected = Counter(_digest(_as_loaded(name, array, dtype, scale)) for name, array in weights.items())
        if expected != Counter(_digest(tensor) for tensor in _tensors(loaded.loras)):
            raise RuntimeError(f"adapter {lora_id} in the engine has other values than {folder}")
        return fingerprint(weights)

    def cotune_mask_padding(self, token_ids: int) -> str:
        """Give the logits of a padded vocabulary, which begin at `token_ids`, no probability from now on.

        This costs one write per pass. Parameters of a request (`logit_bias`, `allowed_token_ids`) cost the engine work
        for every request, and logits processors of its own exclude vLLM's newer model runner.
        """
        model = self.model_runner.get_model()
        compute = model.compute_logits

        def compute_masked(*arguments: Any, **options: Any) -> torch.Tensor | None:
            logits = compute(*arguments, **options)
            if logits is not None:  # only one of several workers has them
                logits[..., token_ids:] = -torch.inf
            return logits

        model.compute_logits = compute_masked
        return str(token_ids)

    def cotune_slot(self, lora_id: int) -> str:
        """Digest of the values that an adapter has in its slot on the device; see `slot_digest`."""
        return slot_digest(self.model_runner.lora_manager._adapter_manager, lora_id)

    def cotune_release_cache(self) -> str:
        """Give the memory of the cache back, and keep the weights where they are.

        vLLM's levels of sleep free the weights too. Level 1 copies them to the host and back, which takes seconds.
        """
        from vllm.device_allocator import get_mem_allocator_instance

        get_mem_allocator_instance().discard(CACHE_TAG)
        return CACHE_TAG

    def cotune_restore_cache(self) -> str:
        """Take memory for an empty cache again."""
        self.wake_up(tags=[CACHE_TAG])
        return CACHE_TAG

    def cotune_model(self) -> str:
        """Digest of the model's weights and buffers, computed where they are; adapters aside.

        What vLLM has packed into a form of its own, as it does with some layers on CPUs, it cannot see.
        """
        model = self.model_runner.get_model()
        digest = hashlib.sha256()
        for name, tensor in sorted(chain(model.named_parameters(), model.named_buffers()), key=lambda item: item[0]):
            values = tensor.detach()
            if values.element_size() == 1:
                values = values.view(torch.uint8)
            value = torch.hash_tensor(values).item() if values.numel() else 0
            digest.update(f"{name}{tuple(values.shape)}{value}".encode())
        return digest.hexdigest()

    def cotune_weights(self) -> str:
        """Fingerprint of the full weights that this worker loaded last."""
        return self.weight_transfer_engine.loaded


def _as_loaded(name: str, array: Any, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """vLLM keeps the second factor times the scale, in the dtype of the model."""
    tensor = torch.from_numpy(array).to(dtype)
    return tensor * scale if ".lora_B." in name and scale != 1 else tensor


def _tensors(loras: dict[str, Any]) -> Iterator[torch.Tensor]:
    for layer in loras.values():
        for factor in (layer.lora_a, layer.lora_b):
            yield from (t for t in (factor if isinstance(factor, list) else [factor]) if t is not None)


def _digest(tensor: torch.Tensor) -> tuple[tuple[int, ...], bytes]:
    data = tensor.cpu().contiguous().view(torch.uint8).numpy()
    return tuple(tensor.shape), hashlib.sha256(data).digest()


@dataclass
class NoInit(WeightTransferInitInfo):
    """Folders need no connection."""


@dataclass
class Folder(WeightTransferUpdateInfo):
    """Where the weights of one update stand."""

    path: str


class FolderWeights(WeightTransferEngine[NoInit, Folder]):
    """vLLM's weight transfer from a folder that every worker sees: shared memory on one machine."""

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
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Folder) -> None:
        """Raises RuntimeError when a parameter of the model was not among the weights."""
        self.loaded = ""
        weights = read_weights(Path(update_info.path))
        done = self.model.load_weights((name, torch.from_numpy(array)) for name, array in weights.items())
        if done is not None and (missing := sorted(self._expected - set(done))):
            raise RuntimeError(f"no weights for {missing[:3]}")
        self.loaded = fingerprint(weights)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        # vLLM leaves layers alone that were loaded under another name, and with them what it packed from old weights.
        for name in self._tied:
            layer = self.model.get_submodule(name)
            layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, FolderWeights)
