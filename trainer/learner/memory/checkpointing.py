"""Activation checkpointing: layers keep only what they were given, and are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


class Checkpointing:
    """Whether the layers of a network are checkpointed in the passes to come; gradients do not depend on it.

    Their `forward` is replaced, not their call: what hooks do to them (FSDP gathers weights) is done once.
    """

    on = False

    def __init__(self, network: Any) -> None:
        layers = [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]
        self.possible = bool(layers)
        """Whether the network names its layers; one that brings its own code may not."""
        for layer in layers:
            layer.forward = partial(self._forward, layer.forward)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self.on and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
