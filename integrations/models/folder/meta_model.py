"""A model without its weights, to check names and shapes of published weights before an engine gets them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from cotune.errors import RequestRefused, SamplerError
from cotune.integrations.models.folder.folder import (
    count_token_ids,
    errors_of_model,
    loading_options,
    locate_model,
    read_tokenizer,
)
from cotune.integrations.models.folder.kinds import auto_class
from cotune.records.policies import ALL_LINEAR, LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import RemoteWeights, Weights, weight_shapes


class ModelSkeleton:
    """A transformers causal LM on torch's meta device: it takes no memory."""

    def __init__(self, model: str | Path) -> None:
        """Build the network of a model without its weights, to check published weights against it. Raises ConfigError
        if the model does not exist.
        """
        import torch
        from transformers import AutoConfig

        self.folder = locate_model(model)
        with errors_of_model(self.folder), torch.device("meta"):
            config = AutoConfig.from_pretrained(self.folder, **loading_options())
            self._model = auto_class(config).from_config(config, **loading_options())
        self.logits: int = config.get_text_config().vocab_size
        self.token_ids = count_token_ids(read_tokenizer(self.folder), self.logits)
        """Number of the first logits, whose token ids may be drawn."""

    def check(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> None:
        """Raise RequestRefused for weights that are not finite or do not fit, with the name of the first tensor."""
        check_finite(policy, weights)
        if lora is None:
            check_full(self._model, weights)
        else:
            from cotune.integrations.models.folder.adapter import read_adapter

            try:
                read_adapter(weights, lora, self._model)
            except SamplerError as error:
                raise RequestRefused(error.cause, error.remedy) from None

    def empty_adapter(self, rank: int) -> Weights:
        """An adapter that changes nothing. Raises RequestRefused for a model without the usual modules."""
        for name, module in self._model.named_modules():
            if name.rpartition(".")[2] in ALL_LINEAR:
                stem = f"base_model.model.{name}"
                return {
                    f"{stem}.lora_A.weight": np.zeros((rank, module.in_features), np.float32),
                    f"{stem}.lora_B.weight": np.zeros((module.out_features, rank), np.float32),
                }
        raise RequestRefused(f"{self.folder} has none of the modules {ALL_LINEAR}.", "Use another model.")


def check_finite(policy: PolicyRef, weights: Weights) -> None:
    """Raise RequestRefused for values that are not finite, with the name of the first tensor."""
    if isinstance(weights, RemoteWeights) and math.isfinite(weights.norm):
        return
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise RequestRefused(f"{policy} has values that are not finite, first in {name}.", "Do not publish it.")


def check_full(model: Any, weights: Weights) -> None:
    """Raise RequestRefused unless the weights are all parameters of a model, by their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # A shared parameter has several names, of which one is enough.
    covered = {id(parameters[name]) for name in weights if name in parameters}
    unknown = sorted(set(weights) - set(parameters))
    missing = sorted(name for name, parameter in parameters.items() if id(parameter) not in covered)
    if unknown or missing:
        raise RequestRefused(
            f"The weights do not fit the model: unknown {unknown[:3]}, missing {missing[:3]}.",
            "Publish all parameters of the sampler's own model, by their names.",
        )
    for name, shape in weight_shapes(weights).items():
        if shape != tuple(parameters[name].shape):
            raise RequestRefused(
                f"{name} has shape {shape}; the model's is {tuple(parameters[name].shape)}.",
                "Publish weights that were trained from the sampler's base model.",
            )
