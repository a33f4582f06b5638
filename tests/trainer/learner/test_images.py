"""Models that see images: what the sampler draws has the same log-probability in the learner, which trains on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.config.learner import LearnerSettings
from cotune.config.records import RecordsConfig
from cotune.errors import RequestRefused
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.folder.vision import ImageInputs
from cotune.integrations.models.transformers.batch import BASE, Batch
from cotune.integrations.models.transformers.rows import Job
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.ids import pack_ids
from cotune.records.policies import LoraSpec, Policies, PolicySpec
from cotune.records.structs import Candidate, PolicyRef, Task
from cotune.sampling.protocol import NEVER, SamplingParams
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.logprob_model import LogprobModel
from cotune.trainer.records.answers import read_answers
from tests.integrations.pictures import asks, picture
from tests.integrations.seeing_models import build_rows_and_columns, build_seeing
from tests.trainer.learner.forced import ForcedSettings
from tests.trainer.records.records import reading

torch.set_num_threads(1)
LORA = LoraSpec(rank=4, alpha=8.0)
POLICY = PolicyRef("p")
SIGHT = ("vision", "connector", "projector")
SETTINGS = ForcedSettings(lr=1e-2, device="cpu")


@pytest.fixture(scope="module", params=["llava", "idefics3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    build_seeing(made, request.param)
    return made


@pytest.fixture(scope="module")
def chat(folder: Path) -> ChatTemplate:
    return ChatTemplate.load(folder)


def prompts(chat: ChatTemplate) -> list[tuple[list[int], tuple[bytes, ...]]]:
    """One image, another with the same token ids, two of other sizes, and a text."""
    asked = [
        [asks("what?", picture("red"))],
        [asks("what?", picture("blue"))],
        [{"role": "system", "content": "look"}, asks("both?", picture("green", 50), picture("white", 20))],
        [{"role": "user", "content": "no image"}],
    ]
    return [(chat.render(m, None), chat.images(m) if i < 3 else ()) for i, m in enumerate(asked)]


async def drawn(sampler: Any, chat: ChatTemplate, n: int = 3) -> list[TrainRow]:
    never = tuple((token, NEVER) for token in chat.image_tokens)
    asked = [
        (ids, SamplingParams(max_tokens=6, seed=i, images=images, logit_bias=never if images else ()))
        for i, (ids, images) in enumerate(prompts(chat))
    ]
    found = await asyncio.gather(*(sampler.sample(ids, n, params, POLICY) for ids, params in asked))
    return [
        TrainRow(
            id=f"{i}.{j}",
            role="seer",
            prompt_ids=tuple(ids),
            response_ids=one.token_ids,
            logprobs=one.logprobs,
            advantage=1.0 if j else -1.0,
            logit_bias=params.logit_bias,
            images=params.images,
        )
        for i, ((ids, params), completions) in enumerate(zip(asked, found, strict=True))
        for j, one in enumerate(completions)
    ]


def gap(learner: LocalLearner, rows: list[TrainRow]) -> float:
    found = learner.logprobs("p", rows)
    return max(float(np.abs(own - np.array(row.logprobs)).max()) for own, row in zip(found, rows, strict=True))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_sampler_and_learner_agree_before_and_after_training(folder, chat, kind, caplog):
    policies = Policies(roles={"seer": "p"}, specs={"p": PolicySpec(name="p", kind=kind, lora=LORA)})
    with caplog.at_level(logging.WARNING):
        learner = LocalLearner.open(str(folder), policies, SETTINGS, LossSpec())
    assert "or it sees images" in caplog.text

    async def session() -> None:
        sampler = await TransformersSampler.open(folder, host="thread", device="cpu")
        try:
            rows = await drawn(sampler, chat)
            assert gap(learner, rows) < 2e-5
            swapped = [msgspec.structs.replace(rows[0], images=rows[3].images)]
            assert rows[0].prompt_ids == rows[3].prompt_ids and gap(learner, swapped) > 1e-3
            before = {name: array.copy() for name, array in learner.weights("p").items()}
            figures = learner.update("p", rows)
            assert figures["unshared_rows"] == len(rows) and figures["sampler_gap_max"] < 2e-5
            after = learner.weights("p")
            moved = {name for name, array in after.items() if not np.array_equal(array, before[name])}
            assert moved and not [name for name in moved if any(part in name for part in SIGHT)]
            if kind == "lora":
                assert not [name for name in after if any(part in name for part in SIGHT)]
            await sampler.publish(PolicyRef("p", 1), after, LORA if kind == "lora" else None)
            again = await drawn_by(sampler, chat, PolicyRef("p", 1))
            assert gap(learner, again) < 2e-5 and gap(learner, rows) > 1e-3
        finally:
            await sampler.aclose()

    asyncio.run(session())


async def drawn_by(sampler: Any, chat: ChatTemplate, policy: PolicyRef) -> list[TrainRow]:
    class Bound:
        async def sample(self, ids: Any, n: int, params: SamplingParams, _: PolicyRef) -> Any:
            return await sampler.sample(ids, n, params, policy)

    return await drawn(Bound(), chat)


def test_images_of_one_form_go_through_the_model_together(folder, chat):
    """Three pictures of one size and a fourth of another, each with two candidates."""
    asked = [[asks("what?", picture(colour))] for colour in ("red", "blue", "green")] + [
        [asks("what?", picture("red", 50))]
    ]
    prompts = [(tuple(chat.render(messages, None)), chat.images(messages)) for messages in asked]
    of_one_form = 3 + (prompts[3][0] == prompts[0][0])  # a Llava makes all of one size
    sampler = Batch(AutoModelForImageTextToText.from_pretrained(folder).eval(), (2,), images=ImageInputs(str(folder)))
    jobs = [
        Job(i, ids, 2, SamplingParams(max_tokens=3, images=images), BASE, 3, seed=i)
        for i, (ids, images) in enumerate(prompts)
    ]
    with counted(sampler.model) as prefills:
        sampler.admit(jobs)
    assert prefills == [of_one_form, 1][: 1 + (of_one_form < 4)]
    while sampler.rows:
        sampler.step()
    rows = sampled_rows(jobs)
    learner = LogprobModel(sampler.model, LearnerSettings())
    with torch.no_grad(), counted(sampler.model) as passes:
        found, _ = learner(rows)
    assert sorted(passes, reverse=True) == [2 * count for count in prefills]
    assert np.abs(found.numpy() - np.concatenate([row.logprobs for row in rows])).max() < 2e-5


def sampled_rows(jobs: Sequence[Job]) -> list[TrainRow]:
    """The answers of jobs that are done, as rows."""
    return [
        TrainRow(
            id=f"{job.id}.{i}",
            role="seer",
            prompt_ids=job.prompt,
            response_ids=one.token_ids,
            logprobs=one.logprobs,
            advantage=1.0,
            images=job.params.images,
        )
        for job in jobs
        for i, one in enumerate(job.done)
        if one is not None
    ]


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """The number of sequences in each pass."""
    found: list[int] = []
    hook = model.base_model.register_forward_pre_hook(
        lambda module, args, given: found.append(len(given["input_ids"])), with_kwargs=True
    )
    yield found
    hook.remove()


def test_what_cannot_be_seen_is_refused_and_others_are_served(folder, chat):
    (ids, images), *_ = prompts(chat)

    async def session() -> None:
        sampler = await TransformersSampler.open(folder, host="thread", device="cpu")
        try:
            for wrong, cause in (((b"no image",), "cannot be read"), (images * 2, "image tokens")):
                with pytest.raises(RequestRefused, match=cause):
                    await sampler.sample(ids, 1, SamplingParams(max_tokens=2, images=wrong), POLICY)
            assert len(await sampler.sample(ids, 2, SamplingParams(max_tokens=2, images=images), POLICY)) == 2
        finally:
            await sampler.aclose()

    asyncio.run(session())


def test_the_prompt_of_a_conversation_goes_on_from_the_earlier_ids(folder, chat):
    first = [asks("what?", picture("red"))]
    prompt = chat.render(first, None)
    reply = [*chat.tokenizer.encode("red", add_special_tokens=False), 2]
    text, message, _ = chat.parse(reply, prompt=prompt)
    more = [*first, message, asks("and?", picture("blue"))]
    ids = chat.render(more, None, earlier=[pack_ids([*prompt, *reply])])
    assert text == "red" and ids[: len(prompt) + len(reply)] == [*prompt, *reply]
    assert chat.counts["extended"] == 1 and chat.render(more, None)[-10:] == ids[-10:]


def test_the_mark_of_images_in_a_text_stands_for_no_image(chat):
    marked = chat.render([asks("so <image> it is", picture("red"))], None)
    plain = chat.render([asks("so it is", picture("red"))], None)
    counts = [sum(token in chat.image_tokens for token in ids) for ids in (marked, plain)]
    assert counts[0] == counts[1] > 0


def test_positions_in_rows_and_columns_of_an_image_are_those_of_the_model(tmp_path):
    """A Qwen2-VL, whose images have positions of their own; its processor is put together without its part for videos,
    which needs torchvision."""
    model, images = build_rows_and_columns()
    text = "<|im_start|>user\n<|image_pad|>what?<|im_end|>\n<|im_start|>assistant\n"
    asked = [picture("red", 32), picture("blue", 16), picture("green", 32)]
    prompts = [images._processor().tokenizer.encode(images.expanded(text, [one])) for one in asked]
    batch = Batch(model, (2,), images=images)
    jobs = [
        Job(i, tuple(ids), 2, SamplingParams(max_tokens=8, images=(one,)), BASE, 8, seed=i)
        for i, (ids, one) in enumerate(zip(prompts, asked, strict=True))
    ]
    with counted(model) as prefills:
        batch.admit(jobs)
    assert prefills == [2, 1]
    while batch.rows:
        batch.step()
    learner = LogprobModel(model, LearnerSettings())
    learner.images = images
    rows = sampled_rows(jobs)
    with torch.no_grad():
        found, _ = learner(rows)
    assert len(rows) == 6 and np.abs(found.numpy() - np.concatenate([row.logprobs for row in rows])).max() < 2e-5
    assert model.model.rope_deltas is not None and int(model.model.rope_deltas.flatten()[0]) < 0


def test_answers_on_record_are_learned_from_with_their_images(tmp_path, folder, chat):
    with SqliteStore.open(tmp_path) as store:
        live = LiveEpisode(store, Task(id="t", input=None), workflow="w")
        for colour in ("red", "blue", "red"):
            body = {"model": "m", "messages": [asks("what?", picture(colour))]}
            said = Candidate(index=0, text=colour, message={"role": "assistant", "content": colour})
            live.start(CallerContext("seer", "test"), body).finish(Answer(candidates=(said,)))
        live.end("ok", rewards={"team": 1.0})
        store.flush()
        (episode,) = store.episodes()
        rows = read_answers(store, reading(chat, 2048), RecordsConfig()).of([episode.id], {"seer": "p"})["p"]
    assert [row.images for row in rows] == [(picture("red"),), (picture("blue"),), (picture("red"),)]
    assert rows[0].images[0] is rows[2].images[0]  # as many bytes as there are images
    assert rows[0].prompt_ids == rows[1].prompt_ids and rows[0].prompt_ids == tuple(
        chat.render([asks("what?", picture("red"))], None)
    )
