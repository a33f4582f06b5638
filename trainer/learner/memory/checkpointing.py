"""Activation checkpointing: layers store only their inputs, and are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


class Checkpointing:
    """Switches the checkpointing of a network's layers for the next passes. Gradients do not depend on it.

    The layers' `forward` is replaced, not their call, so that hooks (FSDP gathers weights) run only once.
    """

    on = False

    def __init__(self, network: Any) -> None:
        layers = [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]
        self.possible = bool(layers)
        """Whether the network's layers can be checkpointed. A network that brings its own code may not name them."""
        for layer in layers:
            layer.forward = partial(self._forward, layer.forward)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self.on and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
