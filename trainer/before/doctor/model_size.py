"""Sizes of a model, by its configuration alone: counted on tensors without storage, so 70B take no memory."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from cotune.records.policies import LoraSpec, PolicySpec

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cotune.trainer.learner.memory.adapter_copies import AdapterCopies
    from cotune.trainer.learner.memory.pass_size import KeptBytes, PassMemory
    from cotune.trainer.learner.policy_model import PolicyModel

PIXEL_COPIES = 4.0
"""Memory of pixel values with their masks and copies, as a multiple of the pixel values."""


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a causal LM, from which its memory and its time are forecast."""

    parameters: int
    """Parameters of the base."""
    adapter: int
    """Parameters of one LoRA; 0 if all weights are trained."""
    vocabulary: int
    layers: int
    cache_values: int
    """Numbers (keys and values) that one token has in the cache, in all layers together."""
    token_bytes: float
    """Bytes that a training pass keeps for its backward pass, for each token."""
    pass_bytes: float
    """Bytes that a training pass keeps independent of its tokens: casts of weights."""
    checkpointed_bytes: float
    """Bytes that a training pass keeps for each token with activation checkpointing."""
    rounded: bool = False
    """Whether a CPU holds the frozen layers in bfloat16 and multiplies with them in it."""
    head: int = 0
    """Parameters of the output embedding. With `tied` it is the input embedding, too."""
    tied: bool = True
    attention_width: int = 0
    """Numbers of the queries of one token, in all layers together."""
    shares_prompts: bool = True
    """Whether a pass computes tokens that its rows have in common once."""
    sees_images: bool = False
    image_factor: float = 0.0
    """Peak memory of a pass over images, as a multiple of their pixel values; 0 if the configuration does not have the
    sizes of the vision tower."""

    def pass_memory(self, device: str) -> PassMemory:
        """The memory of a pass of the learner on a "cpu" or "cuda"."""
        from cotune.trainer.learner.memory.pass_size import GRADIENT_BYTES, PassMemory, logit_bytes

        # Only a policy without an adapter trains its output embedding, which then has a gradient.
        head_gradient = 0 if self.adapter else GRADIENT_BYTES * self.head
        return PassMemory(
            plain=self.token_bytes,
            checkpointed=self.checkpointed_bytes,
            layers=self.layers,
            fixed=self.pass_bytes + head_gradient,
            logits=logit_bytes(self.vocabulary, device),
        )

    def rounded_bytes(self, heads: int) -> float:
        """Bytes of the frozen weights if they are `rounded`: layers in bfloat16, embeddings in float32, and `heads`
        copies of the output embedding in bfloat16."""
        embeddings = self.head if self.tied else 2 * self.head
        layers = 2.0 * (self.parameters - embeddings)
        return layers + 4.0 * embeddings + 2.0 * heads * self.head


def measure_folder(
    folder: Path, lora: LoraSpec | None, dtype: str, *, joined: bool = False, device: str = "cpu"
) -> ModelSize:
    """Measure the model in a folder, with an adapter, or without one (None) if all weights are trained. `joined` and
    `device` are arguments of `measure`. Raises ConfigError."""
    from transformers import AutoConfig

    from cotune.integrations.models.folder.folder import errors_of_model, loading_options

    with errors_of_model(folder):
        return measure(
            AutoConfig.from_pretrained(folder, **loading_options()), lora, dtype, joined=joined, device=device
        )


def measure(config: Any, lora: LoraSpec | None, dtype: str, *, joined: bool = False, device: str = "cpu") -> ModelSize:
    """Measure a model by its transformers configuration, without its weights.

    `lora` is the shape of an adapter, or None if all weights are trained. `joined`: the learner computes each frozen
    layer and its adapters in one step, as a learner of one process does (`products.open_joined`). `device` is "cpu" or
    "cuda". On a CPU a joined learner rounds only products to `dtype`.
    """
    from cotune.integrations.models.folder.kinds import cached_numbers, head_width, sees_images

    joins_adapter = joined and lora is not None
    empty = empty_policy(config, lora, dtype, joined=joins_adapter, device=device)
    plain = empty.kept_bytes(checkpointed=False)
    checkpointed = empty.kept_bytes(checkpointed=True)
    text = config.get_text_config()
    return ModelSize(
        parameters=empty.parameters,
        rounded=joins_adapter and dtype == "bfloat16" and device == "cpu",
        head=empty.policy.network.get_output_embeddings().weight.numel(),
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        adapter=empty.adapter,
        vocabulary=text.vocab_size,
        layers=text.num_hidden_layers,
        cache_values=cached_numbers(text),
        token_bytes=plain.token,
        pass_bytes=max(plain.fixed, 0.0),
        checkpointed_bytes=checkpointed.token,
        attention_width=text.num_hidden_layers * text.num_attention_heads * head_width(text),
        shares_prompts=empty.policy.logprob_model.shares,
        sees_images=sees_images(config),
        image_factor=_image_factor(config.vision_config) if sees_images(config) else 0.0,
    )


class EmptyPolicy:
    """A policy whose tensors have a shape and no storage, for measurements in the learner's own code.

    Its network has only the first two layers of each kind, because the hundreds of operators of a layer take
    milliseconds even without storage. Every other layer keeps as many bytes as the second layer of its kind.
    """

    def __init__(
        self,
        policy: PolicyModel,
        mode: FakeTensorMode,
        parameters: int,
        adapter: int,
        layers: RepeatedLayers,
        copies: AdapterCopies | None,
    ) -> None:
        """Wrap a policy that was built in `mode`, which all computations with it need.

        `parameters` counts the base and `adapter` the LoRA. `layers` chooses which layers the network has. `copies`
        rounds adapters that are joined to their layers; None if they are not joined.
        """
        self.policy = policy
        self.mode = mode
        self.parameters = parameters
        self.adapter = adapter
        self._layers = layers
        self._copies = copies
        self._adapted = [] if copies is None else list(copies.layers)

    def kept_bytes(self, *, checkpointed: bool) -> KeptBytes:
        """Measure the bytes that a pass of the whole model keeps for its backward pass.

        The network is measured with one layer of each kind, and then with a second layer of one kind after the other.
        The difference counts for all further layers of this kind.
        """
        from cotune.trainer.learner.memory.pass_size import KeptBytes, kept_bytes

        with self.mode:
            self._set_layers(second_of=None)
            one_of_each = kept_bytes(self.policy, checkpointed=checkpointed)
            token, fixed = one_of_each.token, one_of_each.fixed
            for kind, count in enumerate(self._layers.counts):
                if count > 1:
                    self._set_layers(second_of=kind)
                    with_second = kept_bytes(self.policy, checkpointed=checkpointed)
                    token += (count - 1) * (with_second.token - one_of_each.token)
                    fixed += (count - 1) * (with_second.fixed - one_of_each.fixed)
        return KeptBytes(token, fixed)

    def _set_layers(self, *, second_of: int | None) -> None:
        """Set the layers of the network as `RepeatedLayers.use` does, and let passes copy only the adapters of these
        layers."""
        self._layers.use(second_of)
        if self._copies is not None:
            present = set(self.policy.network.modules())
            self._copies.layers = [layer for layer in self._adapted if layer in present]


class RepeatedLayers:
    """The layers of a network by kind, and the network with fewer of them.

    Two layers are of one kind if their class and the shapes of their weights are the same.
    """

    def __init__(self, network: Any, *, whole: bool) -> None:
        """Leave only the first two layers of each kind in the network. Layers are of one kind if they have the same
        class and shapes.

        All layers stay if `whole`, and in a network with code of its own whose list of layers is not found.
        """
        self.counts: list[int] = []
        """The number of layers of each kind; empty if the network keeps all."""
        self._first: list[Any] = []
        self._second: list[Any] = []
        """The second layer of each kind; None for a kind with one layer."""
        self._parent, self._name = _find_layers(network)
        if whole or self._parent is None:
            return
        layers_by_kind: dict[Any, list[Any]] = {}
        for layer in getattr(self._parent, self._name):
            shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
            kind = (type(layer), shapes)
            layers_by_kind.setdefault(kind, []).append(layer)
        for layers in layers_by_kind.values():
            self.counts.append(len(layers))
            self._first.append(layers[0])
            self._second.append(layers[1] if len(layers) > 1 else None)
        self._set([*self._first, *(layer for layer in self._second if layer is not None)])

    def adapter_parameters(self, network: Any) -> int:
        """Trained parameters of the whole model, while the network has two layers of each kind."""
        trained = _count_trained(network)
        for count, second in zip(self.counts, self._second, strict=True):
            if second is not None:
                trained += (count - 2) * _count_trained(second)
        return trained

    def use(self, second_of: int | None) -> None:
        """Let the network have one layer of each kind, and a second layer of the kind with index `second_of`."""
        if not self.counts:
            return
        second = [] if second_of is None else [self._second[second_of]]
        self._set([*self._first, *second])

    def _set(self, layers: Sequence[Any]) -> None:
        from torch.nn import ModuleList

        setattr(self._parent, self._name, ModuleList(layers))


def _find_layers(network: Any) -> tuple[Any, str]:
    """Find the list of a network's layers: the module that has it, and its name there. Returns None and "" if there is
    no list with as many layers as the configuration says."""
    from torch.nn import ModuleList
    from transformers.modeling_layers import GradientCheckpointingLayer

    parent, list_name = None, ""
    layer_count = network.config.get_text_config().num_hidden_layers
    for name, module in network.named_modules():
        if not isinstance(module, ModuleList) or len(module) != layer_count:
            continue
        if isinstance(module[0], GradientCheckpointingLayer):
            parent_name, _, list_name = name.rpartition(".")
            parent = network.get_submodule(parent_name)
    return parent, list_name


def empty_policy(
    config: Any, lora: LoraSpec | None, dtype: str, *, joined: bool, device: str, whole: bool = False
) -> EmptyPolicy:
    """Build a policy whose tensors have a shape and no storage, as a learner that computes in `dtype` would load it.
    `lora` is the shape of its adapter (None: all weights are trained).

    `joined` (only with an adapter) and `device` are arguments of `measure`. With `whole` it has all layers, whose
    measurement takes a minute for a large model, and otherwise the first two of each kind.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cotune.config.learner import LearnerSettings
    from cotune.integrations.models.folder.folder import loading_options
    from cotune.integrations.models.folder.kinds import auto_class
    from cotune.trainer.learner.load import add_adapter
    from cotune.trainer.learner.logprob_model import LogprobModel
    from cotune.trainer.learner.memory.products import compute_joined
    from cotune.trainer.learner.policy_model import PolicyModel
    from cotune.trainer.learner.tree_attention import use_tree_attention

    class WithoutTrial(LearnerSettings, frozen=True):
        """Settings without shared prompts. A learner tries them on a small pass, which needs values."""

        shared_prompts: ClassVar[bool] = False

    # As `open_policy_models` and `open_joined` load it: a CPU that rounds products holds the other weights in float32,
    # and trained weights are always in float32.
    loaded_dtype = "float32" if joined and device == "cpu" else dtype
    weights_dtype = getattr(torch, loaded_dtype) if lora else torch.float32
    config = deepcopy(config)  # `use_tree_attention` changes the configuration of the network
    with torch.device("meta"):
        network = auto_class(config).from_config(config, dtype=weights_dtype, **loading_options()).eval()
    parameters = sum(p.numel() for p in network.parameters())
    layers = RepeatedLayers(network, whole=whole)
    spec = PolicySpec(name="policy", kind="lora" if lora else "full", lora=lora or LoraSpec())
    peft_model = add_adapter(network, spec, "policy") if lora else None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        _use_fake_cpu_tensors(network)
        logprob_model = LogprobModel(network, msgspec.convert({"dtype": loaded_dtype}, WithoutTrial))
        logprob_model.shares = logprob_model.images is None and use_tree_attention(network)
        copies = compute_joined(logprob_model, dtype) if joined else None
    policy = PolicyModel(spec, 0, logprob_model, peft=peft_model, adapter="policy" if lora else None)
    adapter_parameters = layers.adapter_parameters(network) if lora else 0
    return EmptyPolicy(policy, mode, parameters, adapter_parameters, layers, copies)


def _count_trained(module: Any) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _image_factor(vision_config: Any) -> float:
    """Peak memory of a pass over images, as a multiple of their pixel values; 0 if `vision_config` does not have the
    sizes of the vision tower.

    The peak has the pixel values with masks and copies, and the widest part of one layer: two tensors of the width of a
    patch in the tower, and three of its inner width. The pass keeps nothing for a backward pass.
    """
    patch_size: int | None = getattr(vision_config, "patch_size", None)
    width: int | None = getattr(vision_config, "embed_dim", None) or getattr(vision_config, "hidden_size", None)
    if not isinstance(patch_size, int) or not width:
        return 0.0
    inner_width: float = getattr(vision_config, "intermediate_size", None) or (
        width * getattr(vision_config, "mlp_ratio", 4)
    )
    frames: int = getattr(vision_config, "temporal_patch_size", 1)
    pixel_values_of_patch = 3 * patch_size**2 * frames  # 3 colours
    return PIXEL_COPIES + (2 * width + 3 * inner_width) / pixel_values_of_patch


def _use_fake_cpu_tensors(network: Any) -> None:
    """Replace the tensors of a network on the meta device with tensors of the CPU, still without storage (fake
    tensors). Tied weights remain tied.
    """
    import torch

    # By the id of the old parameter: a reference to it, so that no other object gets its id, and the new parameter.
    old_and_new: dict[int, tuple[Any, Any]] = {}
    for module in network.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if id(old) not in old_and_new:
                new = torch.empty(old.shape, dtype=old.dtype)
                old_and_new[id(old)] = old, torch.nn.Parameter(new, requires_grad=old.requires_grad)
            module.register_parameter(name, old_and_new[id(old)][1])
        for name, old in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty(old.shape, dtype=old.dtype), persistent=False)
