"""One trained policy: its weights, and its forward pass over training rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cotune.policies import PolicySpec
from cotune.sampler import Weights
from cotune.samples import TrainRow
from cotune.trainer.forward import can_share, plain_states, shared_states
from cotune.trainer.learner_settings import LearnerSettings
from cotune.trainer.logprobs import token_logprobs

COPY = {"dtype": torch.float32, "device": "cpu", "copy": True}


@dataclass
class PolicyModel:
    """A causal LM of its own (`adapter` None), or one adapter of a PEFT model that several policies may share."""

    spec: PolicySpec
    network: Any
    settings: LearnerSettings
    peft: Any = None
    adapter: str | None = None
    frozen_copy: Any = None

    @property
    def device(self) -> torch.device:
        return self.network.get_input_embeddings().weight.device

    @property
    def shares_prompts(self) -> bool:
        """Whether rows of one prompt compute it once: asked for, and possible with this model and checkpointing."""
        settings = self.settings
        return settings.shared_prompts and not settings.activation_checkpointing and can_share(self.network)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by the names they have inside the network."""
        if self.adapter is None:
            return dict(self.network.named_parameters())
        mark = f".{self.adapter}."
        return {name: p for name, p in self.peft.named_parameters() if mark in name}

    def activate(self) -> None:
        """Make the network compute, and take gradients for, this policy."""
        if self.adapter is not None and self.peft.active_adapter != self.adapter:
            self.peft.set_adapter(self.adapter)

    def token_logprobs(self, rows: Sequence[TrainRow]) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each response token, rows in order; both [tokens], float32, in nats."""
        self.activate()
        return self._run(self.network, rows)

    def reference_logprobs(self, rows: Sequence[TrainRow]) -> Tensor:
        """What `token_logprobs` gives for the untrained policy, without gradients."""
        with torch.no_grad():
            if self.adapter is None:
                return self._run(self.frozen_copy, rows)[0]
            self.activate()
            with self.peft.disable_adapter():
                return self._run(self.network, rows)[0]

    def weights(self) -> Weights:
        """Trainable weights as fp32 copies on the CPU: PEFT state-dict names for a LoRA, else parameter names."""
        return {name: tensor.to(**COPY).numpy() for name, tensor in self.state().items()}

    def state(self) -> dict[str, Tensor]:
        """Trainable tensors (not copies) by the names of `weights`; tied tensors once."""
        if self.adapter is None:
            return {name: p.detach() for name, p in self.network.named_parameters()}
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self.peft, adapter_name=self.adapter, save_embedding_layers=False)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy tensors under the names of `state` into the policy."""
        own = self.state()
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)

    def _run(self, network: Any, rows: Sequence[TrainRow]) -> tuple[Tensor, Tensor]:
        head = network.get_output_embeddings()
        device = head.weight.device
        targets = torch.from_numpy(np.concatenate([np.asarray(r.response_ids, np.int64) for r in rows])).to(device)
        temperature = torch.tensor([row.temperature for row in rows], device=device)
        lengths = torch.tensor([len(row.response_ids) for row in rows], device=device)
        states = shared_states if self.shares_prompts else plain_states
        with self._precision(device):
            hidden = states(network, rows)
        return token_logprobs(hidden, head.weight, head.bias, targets, temperature.repeat_interleave(lengths))

    def _precision(self, device: torch.device) -> Any:
        if self.settings.dtype == "float32":
            return nullcontext()
        return torch.autocast(device.type, dtype=getattr(torch, self.settings.dtype))
