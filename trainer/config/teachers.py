"""Who learns from which teacher: that of its [[policy]] table, else of `[distill]`."""

from __future__ import annotations

import re

from cotune.algorithms.run_recipe import taught_by
from cotune.config.policy import PolicyConfig
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError


def is_address(teacher: str) -> bool:
    """Whether a teacher is a server, and no model in this process."""
    return teacher.startswith(("http://", "https://"))


def teacher_of(config: TrainConfig, policy: PolicyConfig | None) -> str:
    """The teacher of a policy with this table, or of one without; "" if it does not learn from a teacher."""
    if taught_by(config, policy) != "teacher":
        return ""
    if policy is not None and policy.teacher:
        return policy.teacher
    return config.distill.teacher


def teachers_of(config: TrainConfig, model: str) -> dict[str, dict[str, str]]:
    """By teacher: the base models whose policies learn from it, each with the setting that names the teacher. `model`
    is the base model of the run, for policies without one of their own.
    """
    bases_of_teacher: dict[str, dict[str, str]] = {}
    for policy in _trained_tables(config):
        if name := teacher_of(config, policy):
            field = "policy.teacher" if policy and policy.teacher else "distill.teacher"
            bases_of_teacher.setdefault(name, {})[(policy.model if policy else "") or model] = field
    return bases_of_teacher


def check_teachers(config: TrainConfig, model: str) -> None:
    """Raises ConfigError for a teacher of whom nobody learns, the reverse, an address without its scheme, and a server
    under another sampling temperature than it scores at."""
    default = config.distill.teacher
    shared = False
    for policy in _trained_tables(config):
        taught = taught_by(config, policy) == "teacher"
        named = policy.teacher if policy else ""
        if policy and named and not taught:
            fault = f"has no effect: policy {policy.name} does not learn from a teacher"
            raise ConfigError("policy.teacher", named, fault, 'Set recipe = "distill" for it, or leave this out.')
        if taught and not (named or default):
            fault = "is missing: recipe distill needs a model folder, Hugging Face id or a vLLM server's address"
            remedy = f"Or set `teacher` of policy {policy.name}." if policy else ""
            raise ConfigError("distill.teacher", "", fault, remedy)
        shared |= taught and not named
    if default and not shared and config.policy:
        fault = "has no effect: no policy learns from a teacher without one of its own"
        raise ConfigError("distill.teacher", default, fault, "Leave it out.")
    if default and not shared:
        remedy = "Use --recipe distill (for a class of your own, set loss.kl_to), or leave the teacher out."
        raise ConfigError("recipe", config.recipe, "has no use for distill.teacher", remedy)
    for name, bases in teachers_of(config, model).items():
        if re.fullmatch(r"(?!https?://)[^/]+:\d+(/.*)?", name):
            field = next(iter(bases.values()))
            raise ConfigError(field, name, "is an address without http:// or https://")
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
    """The [[policy]] tables of trained policies; None alone stands for the policies of a layout."""
    return [*(policy for policy in config.policy if policy.trained)] or [None]
