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

PIXELS = 4.0
"""Pixel values, their masks and copies, as a multiple of the former."""


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a causal LM: `parameters` of the base, and of one LoRA in `adapter` (0: all weights are trained)."""

    parameters: int
    adapter: int
    vocabulary: int
    layers: int
    cache_values: int
    """Keys and values that a token leaves in all layers."""
    token_bytes: float
    """Bytes that a training pass keeps for its backward pass, for each token."""
    pass_bytes: float
    """The same for each pass, however few tokens it has: casts of weights."""
    checkpointed_bytes: float
    """Bytes that it keeps for each token with activation checkpointing."""
    rounded: bool = False
    """Whether a CPU multiplies with its frozen layers in bfloat16, in which they are held."""
    head: int = 0
    """Parameters of the output embedding, which with `tied` is the other one too."""
    tied: bool = True
    attention_width: int = 0
    """Numbers of a query in all layers."""
    shares_prompts: bool = True
    """Whether a pass computes what rows have in common once."""
    sees: bool = False
    image_factor: float = 0.0
    """Peak memory of seeing images, as a multiple of their pixel values; 0 where the configuration does not
    tell the sizes of the vision tower."""

    def pass_memory(self, device: str) -> PassMemory:
        """What the tensors of a pass of the learner take, on a "cpu" or "cuda"."""
        from cotune.trainer.learner.memory.pass_size import GRADIENT_BYTES, PassMemory, logit_bytes

        return PassMemory(
            plain=self.token_bytes,
            checkpointed=self.checkpointed_bytes,
            layers=self.layers,
            fixed=self.pass_bytes + (0 if self.adapter else GRADIENT_BYTES * self.head),
            logits=logit_bytes(self.vocabulary, device),
        )

    def rounded_bytes(self, heads: int) -> float:
        """Of the frozen weights where `rounded`: layers in bfloat16, embeddings in float32, and the output embedding in
        bfloat16 as often as `heads` says."""
        embeddings = self.head if self.tied else 2 * self.head
        layers = 2.0 * (self.parameters - embeddings)
        return layers + 4.0 * embeddings + 2.0 * heads * self.head


def measure_folder(
    folder: Path, lora: LoraSpec | None, dtype: str, *, joined: bool = False, device: str = "cpu"
) -> ModelSize:
    """The size of the model in a folder, with an adapter or (None) for training all weights; `joined` and `device` as
    in `measure`. Raises ConfigError."""
    from transformers import AutoConfig

    from cotune.integrations.models.folder.folder import errors_of_model, loading_options

    with errors_of_model(folder):
        return measure(
            AutoConfig.from_pretrained(folder, **loading_options()), lora, dtype, joined=joined, device=device
        )


def measure(config: Any, lora: LoraSpec | None, dtype: str, *, joined: bool = False, device: str = "cpu") -> ModelSize:
    """The size of a model of a transformers configuration.

    `joined`: the learner computes each frozen layer and its adapters in one step, as a learner of one process does
    (`products.open_joined`). `device`: "cpu" or "cuda". On a CPU a joined learner rounds only products to `dtype`.
    """
    from cotune.integrations.models.folder.kinds import sees_images

    joins = joined and lora is not None
    empty = empty_policy(config, lora, dtype, joined=joins, device=device)
    kept = {checkpointed: empty.kept_bytes(checkpointed=checkpointed) for checkpointed in (False, True)}
    text = config.get_text_config()
    return ModelSize(
        parameters=empty.parameters,
        rounded=joins and dtype == "bfloat16" and device == "cpu",
        head=empty.policy.network.get_output_embeddings().weight.numel(),
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        adapter=empty.adapter,
        vocabulary=text.vocab_size,
        layers=text.num_hidden_layers,
        cache_values=_cache_values(text),
        token_bytes=kept[False].token,
        pass_bytes=max(kept[False].fixed, 0.0),
        checkpointed_bytes=kept[True].token,
        attention_width=text.num_hidden_layers * text.num_attention_heads * _head_width(text),
        shares_prompts=empty.policy.logprob_model.shares,
        sees=sees_images(config),
        image_factor=_image_factor(config.vision_config) if sees_images(config) else 0.0,
    )


class EmptyPolicy:
    """A policy whose tensors have a shape and no storage, for measurements in the learner's own code.

    `parameters` are those of its base, and `adapter` those of its LoRA. Its network has only the first two layers of
    each kind, as hundreds of operators of each layer take milliseconds even without storage. The other layers keep
    what the second one keeps. Computations go on in `mode`.
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
        """Wrap a policy that was built in `mode`. `layers` chooses which layers the network has. `copies` rounds
        adapters that are joined to their layers; None if they are not joined."""
        self.policy = policy
        self.mode = mode
        self.parameters = parameters
        self.adapter = adapter
        self._layers = layers
        self._copies = copies
        self._adapted = [] if copies is None else list(copies.layers)

    def kept_bytes(self, *, checkpointed: bool) -> KeptBytes:
        """What a pass of the whole model keeps for its backward pass."""
        from cotune.trainer.learner.memory.pass_size import KeptBytes, kept_bytes

        with self.mode:
            self._use(None)
            once = kept_bytes(self.policy, checkpointed=checkpointed)
            token = once.token
            fixed = once.fixed
            for kind, count in enumerate(self._layers.counts):
                if count > 1:
                    self._use(kind)
                    twice = kept_bytes(self.policy, checkpointed=checkpointed)
                    token += (count - 1) * (twice.token - once.token)
                    fixed += (count - 1) * (twice.fixed - once.fixed)
        return KeptBytes(token, fixed)

    def _use(self, twice: int | None) -> None:
        """As `RepeatedLayers.use`. A pass copies only the adapters of layers that the network has then."""
        self._layers.use(twice)
        if self._copies is not None:
            present = set(self.policy.network.modules())
            self._copies.layers = [layer for layer in self._adapted if layer in present]


class RepeatedLayers:
    """The layers of a network by kind, and the network with fewer of them.

    Two layers are of one kind if their class and the shapes of their weights are the same.
    """

    def __init__(self, network: Any, *, whole: bool) -> None:
        """Unless `whole`, leave only the first two layers of each kind in the network. A network that brings its own
        code and does not name its layers keeps them all."""
        from torch.nn import ModuleList
        from transformers.modeling_layers import GradientCheckpointingLayer

        many = network.config.get_text_config().num_hidden_layers
        self._parent: Any = None
        self.counts: list[int] = []
        self._first: list[Any] = []
        self._second: list[Any] = []
        for name, module in network.named_modules():
            if (
                isinstance(module, ModuleList)
                and len(module) == many
                and isinstance(module[0], GradientCheckpointingLayer)
            ):
                parent, _, self._name = name.rpartition(".")
                self._parent = network.get_submodule(parent)
        if whole or self._parent is None:
            return
        kinds: dict[Any, list[Any]] = {}
        for layer in getattr(self._parent, self._name):
            shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
            kinds.setdefault((type(layer), shapes), []).append(layer)
        for layers in kinds.values():
            self.counts.append(len(layers))
            self._first.append(layers[0])
            self._second.append(layers[1] if len(layers) > 1 else None)
        self._set([*self._first, *(layer for layer in self._second if layer is not None)])

    def adapter_parameters(self, network: Any) -> int:
        """Trained parameters of the whole model."""
        trained = _count_trained(network)
        for count, second in zip(self.counts, self._second, strict=True):
            if second is not None:
                trained += (count - 2) * _count_trained(second)
        return trained

    def use(self, twice: int | None) -> None:
        """Let the network have one layer of each kind, and of kind `twice` two."""
        if self.counts:
            self._set([*self._first, *([] if twice is None else [self._second[twice]])])

    def _set(self, layers: Sequence[Any]) -> None:
        from torch.nn import ModuleList

        setattr(self._parent, self._name, ModuleList(layers))


def empty_policy(
    config: Any, lora: LoraSpec | None, dtype: str, *, joined: bool, device: str, whole: bool = False
) -> EmptyPolicy:
    """A policy of a learner that computes in `dtype`, with an adapter or (None) with all its weights trained.

    `joined` (only with an adapter) and `device` as in `measure`. `whole`: with all layers, which takes a minute for a
    large model.
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
        """Trees are tried with values, which tensors without storage do not have."""

        shared_prompts: ClassVar[bool] = False

    # As `open_policy_models` and `open_joined` load it: a CPU that rounds products holds the other weights in float32.
    loaded = "float32" if joined and device == "cpu" else dtype
    held = getattr(torch, loaded) if lora else torch.float32
    config = deepcopy(config)  # it is told of the attention that the network gets
    with torch.device("meta"):
        network = auto_class(config).from_config(config, dtype=held, **loading_options()).eval()
    parameters = sum(p.numel() for p in network.parameters())
    layers = RepeatedLayers(network, whole=whole)
    spec = PolicySpec(name="policy", kind="lora" if lora else "full", lora=lora or LoraSpec())
    adapted = add_adapter(network, spec, "policy") if lora else None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        _use_fake_cpu_tensors(network)
        logprob_model = LogprobModel(network, msgspec.convert({"dtype": loaded}, WithoutTrial))
        logprob_model.shares = logprob_model.images is None and use_tree_attention(network)
        copies = compute_joined(logprob_model, dtype) if joined else None
    adapter = None if adapted is None else "policy"
    policy = PolicyModel(spec, 0, logprob_model, peft=adapted, adapter=adapter)
    trained = layers.adapter_parameters(network) if lora else 0
    return EmptyPolicy(policy, mode, parameters, trained, layers, copies)


def _count_trained(module: Any) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _cache_values(text: Any) -> int:
    """Keys and values that a token leaves in all layers."""
    groups = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * groups * _head_width(text))


def _head_width(text: Any) -> int:
    """Numbers of a query in one head."""
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _image_factor(sight: Any) -> float:
    """The pixel values themselves with masks and copies, and of a layer, which keeps nothing for a backward pass, what
    its widest part holds at once: two tensors as wide as a patch is in the tower, and three of its inner width."""
    patch: int | None = getattr(sight, "patch_size", None)
    width: int | None = getattr(sight, "embed_dim", None) or getattr(sight, "hidden_size", None)
    if not isinstance(patch, int) or not width:
        return 0.0
    inner: float = getattr(sight, "intermediate_size", None) or width * getattr(sight, "mlp_ratio", 4)
    frames: int = getattr(sight, "temporal_patch_size", 1)
    return PIXELS + (2 * width + 3 * inner) / (3 * patch**2 * frames)


def _use_fake_cpu_tensors(network: Any) -> None:
    """Replace the tensors of a network on the meta device with tensors of the CPU, still without storage (fake
    tensors). Tied weights remain tied.
    """
    import torch

    filled: dict[int, tuple[Any, Any]] = {}  # the old ones stay referenced, so that their ids stay theirs
    for module in network.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if id(old) not in filled:
                new = torch.empty(old.shape, dtype=old.dtype)
                filled[id(old)] = old, torch.nn.Parameter(new, requires_grad=old.requires_grad)
            module.register_parameter(name, filled[id(old)][1])
        for name, old in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty(old.shape, dtype=old.dtype), persistent=False)
