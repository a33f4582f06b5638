"""The teachers of a run, opened before any weights to train are loaded."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping

from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.integrations.models.folder.folder import locate_model, tokenizer_of
from cotune.trainer.config.teachers import is_address, teachers_of
from cotune.trainer.learner.protocol import Teacher

Teachers = Mapping[str, Teacher]
"""The teachers by their names in the configuration: a model or an address."""


async def open_teachers(config: TrainConfig, stack: contextlib.AsyncExitStack, say: Callable[[str], None]) -> Teachers:
    """Open each teacher of the run once, also if several policies learn from it.

    Raises ConfigError, before it is loaded, if a teacher has another tokenizer than the base models of its policies.
    """
    teachers: dict[str, Teacher] = {}
    for name, bases in teachers_of(config, config.model).items():
        if is_address(name):
            teachers[name] = await _open_served(name, bases, stack, say)
        else:
            teachers[name] = await _open_local(config, name, bases, say)
    return teachers


async def _open_served(
    address: str, bases: Mapping[str, str], stack: contextlib.AsyncExitStack, say: Callable[[str], None]
) -> Teacher:
    """Open a teacher that vLLM serves. `bases` has the base models that learn from it, each with the setting that names
    the teacher."""
    from cotune.integrations.models.vllm.teacher import VllmTeacher
    from cotune.trainer.learner.teacher import check_tokenizers

    say(f"asking the teacher at {address} ...")
    # The server's tokenizer cannot be read here. It must be the one that all its base models have.
    tokenizer = await asyncio.to_thread(tokenizer_of, str(locate_model(next(iter(bases)))))
    await asyncio.to_thread(check_tokenizers, address, tokenizer, bases)
    key = os.environ.get("VLLM_API_KEY")
    teacher = await asyncio.to_thread(VllmTeacher, address, tokenizer, api_key=key)
    stack.callback(teacher.close)
    if teacher.concurrency == 1:
        say("its server was started with --enable-lora, so it scores one answer at a time: start it without")
    return teacher


async def _open_local(config: TrainConfig, name: str, bases: Mapping[str, str], say: Callable[[str], None]) -> Teacher:
    """Load a teacher into this process. `bases` has the base models that learn from it, each with the setting that
    names the teacher."""
    from cotune.trainer.learner.teacher import LocalTeacher, check_tokenizers

    say(f"loading the teacher {name} ...")
    try:
        folder = str(await asyncio.to_thread(locate_model, name))
    except ConfigError as error:
        field = next(iter(bases.values()))
        remedy = f"{error.remedy} If it was moved, set its path: --set distill.teacher=..., or in its [[policy]]."
        raise ConfigError(field, name, error.fault, remedy.strip()) from None
    tokenizer = await asyncio.to_thread(tokenizer_of, folder)
    await asyncio.to_thread(check_tokenizers, name, tokenizer, bases)
    return await asyncio.to_thread(LocalTeacher, folder, config.learner)
