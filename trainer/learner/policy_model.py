"""One trained policy: its weights, and its forward pass over training rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cotune.algorithms.samples import TrainRow
from cotune.records.policies import PolicySpec
from cotune.sampling.protocol import Weights
from cotune.trainer.learner.dist import ProcessGroup, copy_whole, gather
from cotune.trainer.learner.logprob_model import LogprobModel
from cotune.trainer.learner.pass_inputs import PassInputs

COPY = {"dtype": torch.float32, "device": "cpu", "copy": True}


@dataclass
class PolicyModel:
    """The model of a trained policy: a causal LM of its own, or one adapter of a PEFT model that policies share."""

    spec: PolicySpec
    index: int
    """The number of the policy among the trained ones."""
    logprob_model: LogprobModel
    peft: Any = None
    """The PEFT model, if the policy is an adapter."""
    adapter: str | None = None
    """The name of the adapter in the PEFT model; None for a causal LM of its own."""
    frozen_copy: LogprobModel | None = None
    """The untrained model. A policy with an adapter needs none, because its base is not trained."""

    @property
    def network(self) -> Any:
        """The causal LM, with all its adapters inside."""
        return self.logprob_model.network

    @property
    def device(self) -> torch.device:
        return self.network.get_input_embeddings().weight.device

    @property
    def width(self) -> int:
        """The size of the hidden states."""
        return int(self.network.config.get_text_config().hidden_size)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by the names that they have inside the network."""
        if self.adapter is None:
            return {name: p for name, p in self.network.named_parameters() if p.requires_grad}
        infix = f".{self.adapter}."
        return {name: p for name, p in self.peft.named_parameters() if infix in name}

    def choose_attention(self, group: ProcessGroup) -> None:
        """Choose the attention of the model, and of its untrained copy: see `LogprobModel.choose_attention`."""
        for model in (self.logprob_model, self.frozen_copy):
            if model is not None:
                model.choose_attention(group)

    def activate(self) -> None:
        """Make the network compute with this policy's adapter, and train it."""
        if self.adapter is not None and self.peft.active_adapter != self.adapter:
            self.peft.set_adapter(self.adapter)

    def token_logprobs(self, rows: Sequence[TrainRow] | PassInputs) -> tuple[Tensor, Tensor]:
        """Compute the log-probability and the entropy of each response token, rows in order; both [tokens], float32, in
        nats."""
        self.activate()
        logprobs, entropy = self.logprob_model(rows)
        return logprobs, entropy

    def logprobs(self, rows: Sequence[TrainRow] | PassInputs) -> Tensor:
        """Compute the log-probabilities of `token_logprobs` without gradients."""
        self.activate()
        return _without_gradients(self.logprob_model, rows)

    def states(self, rows: Sequence[TrainRow] | PassInputs) -> Tensor:
        """Compute the last hidden states that predict the response tokens, [tokens, hidden], without gradients."""
        self.activate()
        with torch.no_grad():
            states = self.logprob_model.states(rows).float()
        self.logprob_model.release()
        return states

    def reference_logprobs(self, rows: Sequence[TrainRow] | PassInputs) -> Tensor:
        """Compute the log-probabilities of the response tokens under the untrained model, without gradients."""
        if self.frozen_copy is not None:
            return _without_gradients(self.frozen_copy, rows)
        self.activate()
        with self.peft.disable_adapter():
            return _without_gradients(self.logprob_model, rows)

    def without_forced_tokens(self, rows: Sequence[TrainRow]) -> list[TrainRow]:
        """Return the rows of an update with loss masks that leave out the tokens that a grammar forced."""
        distribution = self.logprob_model.sampled_distribution
        distribution.clear()
        return distribution.without_forced_tokens(rows)

    def weights(self, *, keep: bool = True) -> Weights:
        """Return the trainable weights as fp32 copies on the CPU, by PEFT's state-dict names for a LoRA, else by
        parameter names.

        Sharded tensors are gathered one by one, so all ranks must call this. A rank that needs no copies passes `keep`
        False and gets an empty dictionary.
        """
        weights = {}
        for name, tensor in self.state().items():
            gathered = gather(tensor)
            if keep:
                weights[name] = gathered.to(**COPY).numpy()
        return weights

    def state(self) -> dict[str, Tensor]:
        """Return the trainable tensors (not copies) by the names of `weights`. Tied tensors are listed once."""
        if self.adapter is None:
            return {name: p.detach() for name, p in self.network.named_parameters()}
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self.peft, adapter_name=self.adapter, save_embedding_layers=False)
        return dict(state)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy whole tensors into the policy, by the names of the method `state`."""
        targets = self.state()
        with torch.no_grad():
            for name, tensor in state.items():
                copy_whole(targets[name], tensor)


def _without_gradients(model: LogprobModel, rows: Sequence[TrainRow] | PassInputs) -> Tensor:
    with torch.no_grad():
        logprobs: Tensor = model(rows)[0]
    model.release()
    return logprobs
