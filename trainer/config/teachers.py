"""The teacher of each policy: the one in its [[policy]] table, or else the one in `[distill]`."""

from __future__ import annotations

import re

from cotune.algorithms.run_recipe import taught_by
from cotune.config.policy import PolicyConfig
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError


def is_address(teacher: str) -> bool:
    """Whether a teacher is the address of a server, not a model in this process."""
    return teacher.startswith(("http://", "https://"))


def teacher_of(config: TrainConfig, policy: PolicyConfig | None) -> str:
    """The teacher of the policy with this [[policy]] table (None: of policies without a table); "" if it does not learn
    from a teacher."""
    if taught_by(config, policy) != "teacher":
        return ""
    if policy is not None and policy.teacher:
        return policy.teacher
    return config.distill.teacher


def teachers_of(config: TrainConfig, model: str) -> dict[str, dict[str, str]]:
    """By teacher, the base models whose policies learn from it, each with the setting that names the teacher. `model`
    is the base model of the run, for policies without one of their own.
    """
    bases_of_teacher: dict[str, dict[str, str]] = {}
    for policy in _trained_tables(config):
        teacher = teacher_of(config, policy)
        if not teacher:
            continue
        field, base = "distill.teacher", model
        if policy is not None and policy.teacher:
            field = "policy.teacher"
        if policy is not None and policy.model:
            base = policy.model
        bases_of_teacher.setdefault(teacher, {})[base] = field
    return bases_of_teacher


def check_teachers(config: TrainConfig, model: str) -> None:
    """Check the teachers of a run, whose base model is `model`.

    Raises ConfigError for a teacher that no policy learns from, a policy that lacks its teacher, an address without
    http://, and a server that would score at another temperature than the one of sampling.
    """
    # 1. Each policy that learns from a teacher has one, and the default teacher has a policy.
    default_teacher = config.distill.teacher
    uses_default = False
    for policy in _trained_tables(config):
        learns_from_teacher = taught_by(config, policy) == "teacher"
        teacher_in_table = policy.teacher if policy else ""
        if policy and teacher_in_table and not learns_from_teacher:
            fault = f"has no effect: policy {policy.name} does not learn from a teacher"
            remedy = 'Set recipe = "distill" for it, or leave this out.'
            raise ConfigError("policy.teacher", teacher_in_table, fault, remedy)
        if not learns_from_teacher or teacher_in_table:
            continue
        # The policy learns from the default teacher.
        uses_default = True
        if not default_teacher:
            fault = "is missing: recipe distill needs a model folder, Hugging Face id or a vLLM server's address"
            remedy = f"Or set `teacher` of policy {policy.name}." if policy else ""
            raise ConfigError("distill.teacher", "", fault, remedy)
    if default_teacher and not uses_default and config.policy:
        fault = "has no effect: no policy learns from a teacher without one of its own"
        raise ConfigError("distill.teacher", default_teacher, fault, "Leave it out.")
    if default_teacher and not uses_default:
        remedy = "Use --recipe distill (for a class of your own, set loss.kl_to), or leave the teacher out."
        raise ConfigError("recipe", config.recipe, "has no use for distill.teacher", remedy)

    # 2. Addresses and temperatures of servers.
    for teacher, bases in teachers_of(config, model).items():
        if re.fullmatch(r"(?!https?://)[^/]+:\d+(/.*)?", teacher):
            field = next(iter(bases.values()))
            raise ConfigError(field, teacher, "is an address without http:// or https://", f"Write http://{teacher}.")
    for policy in _trained_tables(config):
        field = "sampling.temperature"
        temperature = config.sampling.temperature
        if policy is not None and policy.temperature is not None:
            field = "policy.temperature"
            temperature = policy.temperature
        if is_address(teacher_of(config, policy)) and temperature != 1.0:
            raise ConfigError(
                field,
                temperature,
                "cannot be used with a teacher by its address: vLLM scores at temperature 1 alone",
                "Or name the teacher's model folder, to load it in this process.",
            )


def _trained_tables(config: TrainConfig) -> list[PolicyConfig | None]:
    """The [[policy]] tables of trained policies. Without any, a list with None, which stands for the policies of the
    layout `policies`."""
    return [policy for policy in config.policy if policy.trained] or [None]
