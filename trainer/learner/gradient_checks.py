"""Checks that each trained tensor is in exactly one optimizer, gets a gradient, and changes in its first step, or that
the step is too small for its precision, which is reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cotune.errors import LearnerError
from cotune.trainer.learner.dist import ProcessGroup, SingleProcess, local_shard

BFLOAT16 = 2.0**16
"""A unit in the last place of bfloat16, as a multiple of a unit in the last place of float32."""

SURE = 2.0
"""A step of more than this number of half units changes its entry, even if the optimizer rounds on the way."""

CHUNK = 1 << 22
"""Entries of a tensor that are examined at once. It limits the memory."""


def check_optimizers(
    trainable: Mapping[str, Mapping[str, nn.Parameter]], optimizers: Mapping[str, torch.optim.Optimizer]
) -> None:
    """Raises LearnerError unless each policy's tensors are float32 and in its optimizer, and in no other one.

    `trainable` gives the tensors of each policy by name.
    """
    # By tensor, the policy of each optimizer that has it. An optimizer that has it twice is listed twice.
    policies_of_tensor: defaultdict[int, list[str]] = defaultdict(list)
    for policy, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                policies_of_tensor[id(parameter)].append(policy)

    for policy, parameters in trainable.items():
        for name, parameter in parameters.items():
            owners = policies_of_tensor[id(parameter)]
            if owners != [policy]:
                raise LearnerError(
                    f"Tensor {name} of policy {policy!r} is in the optimizers of {owners or 'no policy'}.",
                    "Build one optimizer per policy, after its adapter has been added, over its own tensors only.",
                )
            # In bfloat16 most steps would be rounded away: a step is usually below 1/256 of its entry.
            if parameter.dtype != torch.float32:
                raise LearnerError(
                    f"Tensor {name} of policy {policy!r} is trained in {str(parameter.dtype).removeprefix('torch.')} "
                    "instead of float32.",
                    "Report this with the versions of torch, transformers and peft.",
                )


class GradientChecks:
    """Checks that each tensor of a policy has changed in an optimizer step. `pending` has the tensors that no step has
    changed yet; once it is empty, the checks cost nothing.

    One entry of each tensor is compared before and after the step: the entry with the largest step of all ranks, in
    units in the last place. If this step is below half a unit, float32 rounds the whole step of the tensor away, which
    may happen early in a warm-up. The tensor is then in `lost`, and it is checked again at the next step. The matrix B
    of a LoRA starts at zero, so its matrix A has no gradient before the second step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        group: ProcessGroup | None = None,
        *,
        dtype: str = "float32",
    ) -> None:
        """Check the tensors in `parameters`, by name, which `optimizer` steps. `dtype` is the precision of passes: with
        "bfloat16", steps too small for it are reported too."""
        self.pending = dict(parameters)
        self.lost: dict[str, float] = {}
        """The tensors that their last step did not change, with the largest step of their entries, in halves of a unit
        in the last place."""
        self.steps = 0
        """Number of steps that were checked, also before a resume."""
        self._optimizer = optimizer
        self._dtype = dtype
        self._group = group or SingleProcess()
        self._watched: dict[str, _WatchedEntry] = {}
        self._counts = torch.zeros(3, dtype=torch.float64)  # sums of `_NextStep.counts` over the steps of an update
        self._new_metrics: dict[str, float] = {}
        self._reported: set[str] = set()
        """Names of metrics that an earlier update has returned. Each is returned once."""

    def before_step(self) -> None:
        """Store the value of one entry of each tensor that has a gradient, and the size of its coming step."""
        names = list(self.pending)
        next_steps = [_examine_step(self.pending[name], self._optimizer) for name in names]
        largest_of_ranks = self._group.max(torch.tensor([step.largest for step in next_steps])).tolist()
        counts = torch.tensor([step.counts for step in next_steps], dtype=torch.float64).reshape(-1, 3)
        self._counts = self._counts + self._group.sum(counts.sum(0))
        self._watched = {}
        for name, step, largest in zip(names, next_steps, largest_of_ranks, strict=True):
            if largest == 0:
                continue  # no gradient, on any rank
            # Only the rank that has the entry with the largest step can compare it.
            if step.largest == largest:
                value = _entry_value(self.pending[name], step.entry)
                self._watched[name] = _WatchedEntry(half_units=largest, entry=step.entry, value=value)
            else:
                self._watched[name] = _WatchedEntry(half_units=largest, entry=None, value=0.0)

    def after_step(self) -> None:
        """Compare the entries with their values before the step. Raises LearnerError if an entry has not changed
        although its step was too large to be rounded away."""
        # A step whose gradients are all zero says nothing about the tensors, so it is not counted. A step without any
        # gradient is counted, because `after_update` must report it.
        has_no_gradients = all(parameter.grad is None for parameter in self.pending.values())
        if self._watched or has_no_gradients:
            self.steps += 1
        # Whether each watched entry is unchanged, as the rank sees it that has the entry.
        unchanged_here = [
            watched.entry is not None and _entry_value(self.pending[name], watched.entry) == watched.value
            for name, watched in self._watched.items()
        ]
        unchanged = self._group.max(torch.tensor(unchanged_here, dtype=torch.float32)).tolist()
        for (name, watched), is_unchanged in zip(self._watched.items(), unchanged, strict=True):
            half_units = watched.half_units
            if is_unchanged and half_units > SURE:
                raise LearnerError(
                    f"Tensor {name} has a gradient but did not move in its first optimizer step, which reaches "
                    f"{half_units:.3g} times half a unit in the last place.",
                    "The optimizer does not have the trained tensors: report this with the versions of torch and peft.",
                )
            if self._dtype == "bfloat16" and half_units < BFLOAT16:
                self._new_metrics[f"lost_bfloat16/{name}"] = half_units / BFLOAT16
            if is_unchanged:
                self.lost[name] = half_units
                self._new_metrics[f"lost/{name}"] = half_units
            else:
                self.lost.pop(name, None)
                del self.pending[name]

    def after_update(self, policy: str) -> dict[str, float]:
        """Return metrics about lost steps of the update. The step of an entry (a single weight) is lost if rounding
        removes it: it is below half a unit in the entry's last place.

        - `lost_tensors`: the number of tensors whose entries have all lost their steps so far
        - `lost_share`: the share of entries with a lost step, over the tensors that were checked; absent if none was
        - `lost/<tensor>`, once for each tensor whose largest step was lost: this step, in half units

        With passes in bfloat16, `lost_share_bfloat16` and `lost_bfloat16/<tensor>` are about steps that are too small
        for bfloat16. They are not lost for good: they add up in the float32 weights until a pass sees them.

        Raises LearnerError if a tensor has had no gradient although it should.
        """
        without_gradient = []
        for name in self.pending:
            # The matrix A of a LoRA has no gradient in the first step, as B is zero then.
            may_lack_gradient = self.steps <= 1 and ".lora_A." in name
            if name not in self.lost and not may_lack_gradient:
                without_gradient.append(name)
        if without_gradient and self.steps:
            raise LearnerError(
                f"{len(without_gradient)} tensors of policy {policy!r} got no gradient from its first update: "
                f"{without_gradient[:3]}",
                "Check lora.targets: the loss must depend on every target module.",
            )

        metrics = {"lost_tensors": float(len(self.lost))}
        entries, lost_entries, lost_in_bfloat16 = self._counts.tolist()
        if entries:
            metrics["lost_share"] = lost_entries / entries
            if self._dtype == "bfloat16":
                metrics["lost_share_bfloat16"] = lost_in_bfloat16 / entries
        # The size of a lost step is returned only in the first update that loses one in its tensor.
        for name, half_units in self._new_metrics.items():
            if name not in self._reported:
                metrics[name] = half_units
        self._reported |= self._new_metrics.keys()
        self._counts = torch.zeros(3, dtype=torch.float64)
        self._new_metrics = {}
        return metrics


class _WatchedEntry(NamedTuple):
    """The entry of a tensor with the largest step of all ranks. On ranks that do not have it, `entry` is None.

    `half_units` is the size of its step, in half units in the last place, and `value` its value before the step.
    """

    half_units: float
    entry: int | None
    value: float


class _NextStep(NamedTuple):
    """The next step of this rank's part of a tensor, in half units in the last place of float32.

    `largest` is the largest step, and `entry` the index of its entry. `counts` are three numbers of entries: with a
    step, with a step below one half unit, and with a step below one half unit of bfloat16.
    """

    entry: int
    largest: float
    counts: tuple[int, int, int]


def _examine_step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> _NextStep:
    """Compute how far the next step will move each entry of this rank's part of a tensor, from its gradient and the
    optimizer's moments. Returns the largest of these steps, and counts of entries."""
    if parameter.grad is None:
        return _NextStep(entry=0, largest=0.0, counts=(0, 0, 0))
    # AdamW's step depends on the learning rate and betas of the tensor's group.
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    state = optimizer.state.get(parameter, {})
    tensors = [parameter.detach(), parameter.grad]
    steps_taken = 0
    # adamw8bit has its moments in another form. Its step is then estimated from the gradient alone.
    if "exp_avg" in state:
        tensors += [state["exp_avg"], state["exp_avg_sq"]]
        steps_taken = int(state["step"])
    entry = 0
    largest = 0.0
    counts = torch.zeros(3, dtype=torch.int64)
    chunks = zip(*(local_shard(tensor).reshape(-1).split(CHUNK) for tensor in tensors), strict=True)
    for number, (value, gradient, *moments) in enumerate(chunks):
        if not value.numel():
            continue  # this rank has no part of the tensor
        step = _adam_step(group, steps_taken, gradient, *moments).abs()
        # A unit is the distance to the next float32 number: a step below half of it is rounded away.
        unit = torch.nextafter(value.abs(), value.new_tensor(torch.inf)) - value.abs()
        half_units = step / (unit / 2).clamp(min=torch.finfo(torch.float32).tiny)
        entry_in_chunk = int(half_units.argmax())
        if half_units[entry_in_chunk] > largest:
            entry = number * CHUNK + entry_in_chunk
            largest = float(half_units[entry_in_chunk])
        has_step = step > 0
        lost = has_step & (half_units < 1)
        lost_in_bfloat16 = has_step & (half_units < BFLOAT16)
        counts += torch.stack([has_step.sum(), lost.sum(), lost_in_bfloat16.sum()]).cpu()
    return _NextStep(entry, largest, tuple(counts.tolist()))


def _adam_step(
    group: Mapping[str, Any], steps_taken: int, gradient: Tensor, mean: Any = 0.0, square: Any = 0.0
) -> Tensor:
    """Return the next step of AdamW, without weight decay, from the moments `mean` and `square` after `steps_taken`
    steps."""
    beta1, beta2 = group["betas"]
    new_mean = (beta1 * mean + (1 - beta1) * gradient) / (1 - beta1 ** (steps_taken + 1))
    new_square = (beta2 * square + (1 - beta2) * gradient**2) / (1 - beta2 ** (steps_taken + 1))
    return group["lr"] * new_mean / (new_square.sqrt() + group["eps"])


def _entry_value(parameter: nn.Parameter, index: int) -> float:
    return float(local_shard(parameter.detach()).reshape(-1)[index])
