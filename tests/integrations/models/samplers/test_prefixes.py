"""What the in-process sampler keeps of earlier prompts: the tree, its bound, and answers that are the same with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cotune.errors import ConfigError
from cotune.integrations.models.transformers.prefill import (
    LEAST_SAVED_TOKENS,
    cache_argument,
    find_shared_stems,
    group_by_length,
    join_states,
)
from cotune.integrations.models.transformers.prefixes import PrefixCache
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplingParams
from tests.integrations import tiny_models

TOKEN_BYTES = 16
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)


def states(tokens: tuple[int, ...]) -> list[torch.Tensor]:
    """Of one layer: a token's key is a number of all up to it, as in a model."""
    sums = torch.tensor([hash(tokens[: end + 1]) % 10**6 for end in range(len(tokens))], dtype=torch.float32)
    return [sums[None, :, None].repeat(1, 1, 2), -sums[None, :, None].repeat(1, 1, 2)]


def put(cache: PrefixCache, key: str, tokens: tuple[int, ...]) -> None:
    cache.insert(key, tokens, lambda start, stop: [part[:, start:stop].clone() for part in states(tokens)])


@given(st.lists(st.tuples(st.sampled_from("ab"), IDS), max_size=30), st.integers(1, 40))
def test_a_match_is_the_longest_known_beginning_within_the_bound(requests: list[Any], tokens: int) -> None:
    cache = PrefixCache(tokens * TOKEN_BYTES)
    roomy = PrefixCache(10**6)
    known: set[tuple[str, tuple[int, ...]]] = set()
    for key, ids in requests:
        found, whole = cache.match(key, ids), roomy.match(key, ids)
        assert found.length <= whole.length
        assert whole.length == max((end for end in range(len(ids)) if (key, ids[:end]) in known), default=0)
        for prefix in (found, whole):
            if prefix.length:
                for part, expected in zip(join_states([prefix], [prefix.length]), states(ids), strict=True):
                    torch.testing.assert_close(part[0], expected[:, : prefix.length])
        for one in (cache, roomy):
            put(one, key, ids)
        known |= {(key, ids[:end]) for end in range(1, len(ids) + 1)}
        assert cache.bytes <= cache.limit
        assert roomy.bytes == len(known) * TOKEN_BYTES
    roomy.drop("a")
    assert roomy.bytes == TOKEN_BYTES * sum(key == "b" for key, _ in known)
    roomy.drop("b")
    assert roomy.bytes == 0


def test_the_one_used_longest_ago_goes_first() -> None:
    cache = PrefixCache(6 * TOKEN_BYTES)
    put(cache, "a", (1, 2, 3))
    put(cache, "a", (1, 2, 4, 5))  # 1 2 -> 3 | 4 5
    cache.match("a", (1, 2, 3, 9))
    put(cache, "a", (7, 8))  # one too many: 4 5 goes, which was used before 3
    assert cache.bytes == 5 * TOKEN_BYTES
    lengths = [cache.match("a", ids).length for ids in ((1, 2, 4, 5, 9), (1, 2, 3, 9), (7, 8, 9))]
    assert lengths == [2, 3, 2]


def test_prompts_with_much_to_compute_go_apart_from_those_with_little() -> None:
    assert group_by_length([900, 1, 30, 34, 35, 102, 103]) == [[1, 2, 3], [4, 5], [6], [0]]


@given(st.lists(IDS.map(lambda ids: ids * 30), min_size=1, max_size=12, unique=True))
def test_stems_are_begun_with_by_several_and_worth_it(prompts: list[tuple[int, ...]]) -> None:
    found = find_shared_stems(prompts, [0] * len(prompts))
    taken = [[ids for ids in prompts if ids[: len(stem)] == stem] for stem in found]
    for stem, members in zip(found, taken, strict=True):
        assert len(members) > 1 and (len(members) - 1) * len(stem) >= LEAST_SAVED_TOKENS
        assert not any(other[: len(stem)] == stem for other in found if other is not stem)
    rest = [ids for ids in prompts if not any(ids in members for members in taken)]
    for one in rest:
        for other in rest:
            alike = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
            assert one == other or min(alike, len(other)) < LEAST_SAVED_TOKENS


def test_what_is_known_is_no_stem_and_what_fewer_share_comes_next() -> None:
    system, task = tuple(range(100)), tuple(range(200, 500))
    prompts = [(*system, *task, 1), (*system, *task, 2), *((*system, number) for number in range(600, 604))]
    assert find_shared_stems(prompts, [0] * 6) == [system]
    assert find_shared_stems(prompts, [100] * 6) == [(*system, *task)]
    assert find_shared_stems(prompts, [400, 400, 100, 100, 100, 100]) == []


@pytest.mark.parametrize("room", [None, 150_000])
def test_prompts_that_arrive_together_compute_their_common_beginnings_once(tmp_path: Path, room: int | None) -> None:
    tiny_models.build("qwen3", tmp_path)
    system, tasks = [i % 50 + 3 for i in range(100)], [[i % 47 + 3 for i in range(at, at + 260)] for at in (5, 9)]
    prompts = [[*system, *task, end] for task in tasks for end in (7, 8)] + [[*system, 9], [*system, 10]]

    async def answers(prefix_cache: int | None) -> tuple[list[Completion], PrefixCache]:
        sampler = await TransformersSampler.open(tmp_path, host="thread", prefix_cache=prefix_cache)
        how = SamplingParams(max_tokens=8, temperature=0.0)
        found = await asyncio.gather(*(sampler.sample(prompt, 2, how, PolicyRef("base")) for prompt in prompts))
        await sampler.aclose()
        return [one for some in found for one in some], sampler._host._engine.prefixes  # type: ignore[union-attr]

    expected, without = asyncio.run(answers(0))
    found, within = asyncio.run(answers(room))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)
    assert without.computed == sum(map(len, prompts))
    if room is None:
        assert within.computed == 100 + 2 * 260 + 6
        assert within.reused == sum(map(len, prompts)) - 6
    else:
        assert 0 < within.bytes <= room


class Talk:
    """Four turns of two conversations under two roles, which share their system text; greedy and drawn."""

    def __init__(self, folder: Path, prefix_cache: int | None) -> None:
        self.folder, self.prefix_cache = folder, prefix_cache
        self.reused: list[int] = []

    async def run(self, policies: list[PolicyRef], adapters: dict[PolicyRef, Any]) -> list[Completion]:
        sampler = await TransformersSampler.open(self.folder, host="thread", prefix_cache=self.prefix_cache)
        prefixes = sampler._host._engine.prefixes  # type: ignore[union-attr]
        for policy, weights in adapters.items():
            await sampler.publish(policy, weights, LoraSpec(rank=4, alpha=8.0))
        talks = [[*range(20, 52), *range(60 + number, 70 + number)] for number in range(4)]
        found: list[Completion] = []
        for turn in range(4):
            how = [SamplingParams(max_tokens=8, temperature=float(drawn), seed=turn) for drawn in (0, 1)]
            answers = await asyncio.gather(
                *(sampler.sample(talk, 3, how[i % 2], policies[i % 2]) for i, talk in enumerate(talks))
            )
            for number, candidates in enumerate(answers):
                found += candidates
                talks[number] = [*talks[number], *candidates[turn % 3].token_ids, 5, 6 + number, 7 + turn]
            self.reused.append(prefixes.reused)
        self.kept = prefixes
        await sampler.aclose()
        return found


def test_the_cache_is_passed_under_the_name_that_the_model_has_for_it() -> None:
    class Newer:
        def forward(self, input_ids: Any, cache: Any = None) -> None: ...

    class Older:
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    assert cache_argument(Newer()) == "cache"
    assert cache_argument(Older()) == "past_key_values"


# transformers 5.24 warns of the older name of the cache.
@pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "bloom", "qwen3-sliding"])
def test_answers_are_the_same_with_what_is_kept(architecture: str, tmp_path: Path) -> None:
    tiny_models.build(architecture, tmp_path)
    policies = [PolicyRef("a"), PolicyRef("b")]
    without, within, tight = Talk(tmp_path, 0), Talk(tmp_path, None), Talk(tmp_path, 100_000)
    expected = asyncio.run(without.run(policies, {}))
    for talk in (within, tight):
        answers = asyncio.run(talk.run(policies, {}))
        assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
        for one, other in zip(answers, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)
    assert without.reused == [0, 0, 0, 0] and without.kept.bytes == 0
    assert 0 < tight.kept.bytes <= 100_000
    # From the second turn on all but the three new tokens and the last of the answer, which was never read, is known.
    assert within.kept.computed == 42 * 4 + 3 * 4 * 4


def test_adapters_keep_apart_and_a_new_version_drops_the_old(tmp_path: Path, qwen_adapter: Any) -> None:
    adapters = {PolicyRef("a", 1): qwen_adapter(1), PolicyRef("b", 1): qwen_adapter(2)}
    expected = asyncio.run(Talk(tmp_path, 0).run(list(adapters), adapters))
    talk = Talk(tmp_path, None)
    assert [c.token_ids for c in asyncio.run(talk.run(list(adapters), adapters))] == [c.token_ids for c in expected]
    assert talk.reused[-1] > 3 * 4 * 40

    async def republished() -> tuple[int, int, int]:
        sampler = await TransformersSampler.open(tmp_path, host="thread")
        prefixes = sampler._host._engine.prefixes  # type: ignore[union-attr]
        spec, how = LoraSpec(rank=4, alpha=8.0), SamplingParams(max_tokens=1)
        await sampler.publish(PolicyRef("a", 1), qwen_adapter(1), spec)
        await sampler.sample([3, 4, 5], 1, how, PolicyRef("a", 1))
        before = prefixes.bytes
        await sampler.publish(PolicyRef("a", 2), qwen_adapter(2), spec)
        dropped = prefixes.bytes
        await sampler.sample([3, 4, 5], 1, how, PolicyRef("a", 2))
        await sampler.aclose()
        return before, dropped, prefixes.reused

    before, dropped, reused = asyncio.run(republished())
    assert before > 0 == dropped == reused


@pytest.fixture
def qwen_adapter(tmp_path: Path) -> Any:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    model = tiny_models.build("qwen3", tmp_path)
    tuned = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )

    def weights(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        state = get_peft_model_state_dict(tuned)
        return {name: torch.randn(t.shape, generator=generator).mul(0.1).numpy() for name, t in state.items()}

    return weights


def test_a_negative_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefix_cache = -1 must be a number of bytes, or 0 for none"):
        asyncio.run(TransformersSampler.open(tmp_path, prefix_cache=-1))
