"""A judge: a model that ranks candidates of one prompt, or episodes of one task, if no function can score them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from cotune.errors import ConfigError, JudgeError, SamplerError
from cotune.integrations.judging.endpoint import Endpoint, JudgeSettings, TransientError
from cotune.judging.episodes import FinishedEpisode, Ranking
from cotune.judging.question import AGAIN, Question, Unusable, Verdict, question, values_of_tiers
from cotune.judging.shown import shown_message, shown_messages, shown_tools
from cotune.recording.call_records import CallerContext
from cotune.recording.context import judging
from cotune.recording.model_calls import ask_async
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.recording.redaction import Redaction
from cotune.records.ids import address, canonical
from cotune.records.structs import Candidate
from cotune.runtime.run_context import current_run
from cotune.sampling.scoring import Call, Feedback
from cotune.storage.judge_ledger import Ledger

log = logging.getLogger("cotune")

Ask = Callable[[Mapping[str, Any]], Awaitable[str]]
"""Answers a chat request with a text; raises TransientError or JudgeError."""


@dataclass(frozen=True)
class _Shown:
    """The part of a question that depends on the siblings."""

    kind: str
    """What the siblings are."""
    shared: str
    """The request or the task that they have in common."""
    texts: list[str]
    """The text of each sibling."""
    episode: LiveEpisode | None
    """The episode of the candidates, or the episode for the judge's calls about whole episodes."""


def _show_candidates(candidates: Sequence[Candidate], call: Call) -> _Shown:
    """The texts for a judge who compares the candidates of a call: its request once, then each answer."""
    messages_and_tools = [shown_messages(call.messages), shown_tools(call.tools)]
    answers = [shown_message(candidate.message or {"content": candidate.text}) for candidate in candidates]
    return _Shown(
        kind="answers to one request",
        shared="\n\n".join(filter(None, messages_and_tools)),
        texts=answers,
        episode=call.episode if isinstance(call, LiveCall) else None,
    )


def _show_episodes(episodes: Sequence[FinishedEpisode], task: Any) -> _Shown:
    return _Shown(
        kind="attempts at one task",
        shared=canonical(task).decode(),
        texts=[episode.transcript for episode in episodes],
        episode=judging.get().episode,
    )


def _redacted(verdict: Verdict, redaction: Redaction | None) -> Verdict:
    """The verdict to store. Its reason may quote a text that a redactor must keep out of the records."""
    if redaction is None or not verdict.reason:
        return verdict
    return verdict._replace(reason=redaction.text(verdict.reason, "feedback") or "")


def _check_costs(price: tuple[float, float] | None, max_cost: float | None) -> None:
    """Raise ConfigError for a price that is no pair of numbers from 0, or for a `max_cost` that cannot be kept."""
    if price is not None and (len(price) != 2 or not all(number >= 0 for number in price)):
        fault = "must be the prices of a million prompt and completion tokens"
        raise ConfigError("Judge.price", price, fault, "For example: price=(0.15, 0.6).")
    if max_cost is not None and price is None:
        raise ConfigError("Judge.max_cost", max_cost, "needs a price", "For example: price=(0.15, 0.6).")
    if max_cost is not None and not max_cost > 0:
        raise ConfigError("Judge.max_cost", max_cost, "must be a number above 0")


class Judge(Ranking):
    """Ranks siblings with a model, in one request for all of them.

    It is a scorer for `@solve.scorer(role, group=True)` or, for the episodes of a task, a judge for `@solve.judge`.

    The reward `name` of a sibling is the share of the others that it is better than; equal ones count half. The best
    gets 1, the last 0. Episodes that the policy failed are siblings too, worse than all others. Siblings with the same
    text get the same reward. If an answer cannot be used, or a request fails or takes too long, the judge asks again
    once. If that fails too, the siblings get no reward, and are left out and counted. Answers are stored by content in
    the run folder, so the same question is never asked twice.

    ```python
    rubric = "Prefer the reply that answers the question, then the shorter one."
    judge = cotune.Judge(model="gpt-4o-mini", rubric=rubric, price=(0.15, 0.6), max_cost=5.0)
    solve.scorer("writer", group=True)(judge)
    ```
    """

    def __init__(
        self,
        *,
        rubric: str,
        model: str | None = None,
        role: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        price: tuple[float, float] | None = None,
        max_cost: float | None = None,
        settings: JudgeSettings | None = None,
    ) -> None:
        """Either `model`, at an OpenAI-compatible endpoint, or `role`, played by a policy of the run.

        Args:
            rubric: the criteria for a better answer, in words.
            model: name of the model at `base_url`. `base_url` and `api_key` default to the OpenAI SDK's.
            role: name of a role. Its requests are calls of the episode; if it judges whole episodes, each request is an
                episode of its own. They are recorded and, if the role has a policy, trained like any other call.
            price: price of a million prompt tokens, and of a million completion tokens.
            max_cost: most that the requests of a run may cost, at `price`. A request that could exceed it is not sent.
            settings: further settings, such as `passes`, `max_calls` and `timeout`.

        Raises ConfigError for values that do not fit.
        """
        settings = settings or JudgeSettings()
        if not isinstance(rubric, str) or not rubric.strip():
            raise ConfigError("Judge.rubric", rubric, "must be a text that says what makes an answer better")
        if (model is None) == (role is None):
            fault = "is missing" if model is None else "cannot be used with role"
            raise ConfigError("Judge.model", model, fault, "Name a model, or a role of the run.")
        options_of_model = (settings.max_calls, max_cost, price, base_url, api_key)
        if role is not None and any(option is not None for option in options_of_model):
            fault = "cannot be used with max_calls, max_cost, price, base_url or api_key: a policy of the run answers"
            raise ConfigError("Judge.role", role, fault)
        _check_costs(price, max_cost)
        self.rubric = rubric
        self.model = model
        self.role = role
        self.name = settings.name
        self.settings = settings
        self._body = {"model": model or role, "temperature": 0, "max_tokens": settings.max_tokens, **settings.params}
        if "max_completion_tokens" in self._body:
            del self._body["max_tokens"]
        self._folder = None if settings.folder is None else Path(settings.folder).absolute()
        self._memory = Ledger(None)
        self._base_url = base_url
        self.key = f"{self.name}:{model or role}:{address(canonical([base_url, rubric]))[:8]}"
        """The key under which its answers and costs are kept."""
        self._endpoint = Endpoint(self.key, str(self), base_url, api_key, price or (0.0, 0.0), max_cost, settings)

    def __str__(self) -> str:
        return f"The judge {self.model or self.role}"

    @overload
    async def __call__(self, siblings: Sequence[Candidate], call: Call, task: Any, /) -> Sequence[Feedback | None]: ...
    @overload
    async def __call__(self, siblings: Sequence[FinishedEpisode], task: Any, /) -> Sequence[Feedback | None]: ...
    async def __call__(self, siblings: Sequence[Any], *context: Any) -> Sequence[Feedback | None]:
        """Rank the candidates of a call, or the episodes of a task. Returns their rewards, with reasons.

        A single sibling gets no reward. If all siblings have the same text, each gets 0.5. Raises JudgeError.
        """
        if len(context) == 2:  # the arguments are (candidates, call, task)
            call, _ = context
            shown = _show_candidates(siblings, call)
        else:  # the arguments are (episodes, task)
            (task,) = context
            shown = _show_episodes(siblings, task)
        if len(siblings) < 2:
            return [None] * len(siblings)

        # Siblings with the same text are shown to the judge as one entry.
        entries = list(dict.fromkeys(shown.texts))
        questions = []
        for turn in range(self.settings.passes):  # each turn shows the entries in another order
            questions.append(
                question(
                    self.rubric,
                    shown.shared,
                    entries,
                    what=shown.kind,
                    seed=self.settings.seed,
                    turn=turn,
                    reason=self.settings.reason,
                )
            )
        if shown.episode is not None and shown.episode.offline:
            return await self._dry_run(shown.shared, len(siblings), questions[0], shown.episode)
        if len(entries) == 1:
            return [Feedback({self.name: 0.5}, "")] * len(siblings)

        verdicts = await self._verdicts_on(questions, shown.episode)
        return self._mean_feedback(questions, verdicts, [entries.index(text) for text in shown.texts])

    async def _verdicts_on(self, questions: Sequence[Question], episode: LiveEpisode | None) -> list[Verdict]:
        """The judge's verdicts on the questions, which are asked at once. Raises the first error after all have ended,
        as every verdict is stored and need not be asked for again.
        """
        ask = self._ask(episode)
        redaction = judging.get().redaction if episode is None else episode.redaction
        verdicts_or_errors = await asyncio.gather(
            *(self._verdict_on(asked, ask, redaction) for asked in questions), return_exceptions=True
        )
        verdicts = []
        for verdict in verdicts_or_errors:
            if isinstance(verdict, BaseException):
                self._ledger.count(self.key, "dropped")
                raise verdict
            verdicts.append(verdict)
        return verdicts

    def _mean_feedback(
        self, questions: Sequence[Question], verdicts: Sequence[Verdict], entry_of_sibling: Sequence[int]
    ) -> list[Feedback]:
        """The mean reward of each sibling over all questions, with the reasons of all.

        A question shows siblings with the same text as one entry. `entry_of_sibling` has the number of each sibling's
        entry. A verdict ranks the entries: its tiers are lists of equally good ones, the best first.
        """
        sums = [0.0] * len(entry_of_sibling)
        reasons: list[list[str]] = [[] for _ in entry_of_sibling]
        for asked, verdict in zip(questions, verdicts, strict=True):
            tiers_of_siblings = []
            for tier in verdict.tiers:
                tiers_of_siblings.append([sibling for sibling, entry in enumerate(entry_of_sibling) if entry in tier])
            for sibling, reward in enumerate(values_of_tiers(tiers_of_siblings)):
                sums[sibling] += reward
                reason = asked.feedback(verdict, entry_of_sibling[sibling])
                if reason:
                    reasons[sibling].append(reason)

        feedback = []
        for total, texts in zip(sums, reasons, strict=True):
            feedback.append(Feedback({self.name: total / len(questions)}, "\n".join(texts)))
        return feedback

    async def _verdict_on(self, asked: Question, ask: Ask, redaction: Redaction | None) -> Verdict:
        """The judge's verdict on a question: the stored one if it was asked before, else a new one.

        After an error that may not happen again, or an answer that cannot be used, the judge is asked a second time.
        Raises JudgeError.
        """
        ledger = self._ledger
        body = self._request(asked)
        request_key = address(canonical([self._base_url, body]))
        # The answers of a role are not stored: they are recorded as calls of its episode.
        stored_answer = ledger.answer(request_key) if self.role is None else None
        if stored_answer is not None:
            ledger.count(self.key, "cached")
            return asked.verdict(stored_answer)
        fault = ""
        for attempt in range(2):
            if attempt:
                ledger.count(self.key, "asked_again")
            try:
                text = await ask(body)
                verdict = asked.verdict(text)
            except TransientError as error:
                fault = str(error)
            except Unusable as error:
                fault = f"its answer cannot be used: {error}"
                correction = {"role": "user", "content": AGAIN.format(fault=error)}
                body["messages"] = [*asked.messages, {"role": "assistant", "content": text}, correction]
            else:
                if self.role is None:
                    ledger.keep(request_key, self.key, asked.answer(_redacted(verdict, redaction)))
                return verdict
        raise JudgeError(f"{self} was asked twice in vain: {fault}.", "See docs/how-to/judges.md.")

    def _ask(self, episode: LiveEpisode | None) -> Ask:
        """The function that asks the judge: its endpoint, or the policy of its role in the run. Raises JudgeError
        without a run.
        """
        if self.role is None:
            ledger = self._ledger
            return lambda body: self._endpoint.ask(body, ledger)
        if episode is None or episode.responder is None:
            raise JudgeError(
                f"{self} is a role of the run, and there is no run whose policy plays it.",
                "Give it a model and base_url: `cotune serve` serves a run's policies.",
            )
        return lambda body: self._ask_role(episode, body)

    async def _ask_role(self, episode: LiveEpisode, body: Mapping[str, Any]) -> str:
        """Ask the policy of the judge's role, in a call of the episode that is recorded like any other."""
        assert self.role is not None
        call = episode.start(CallerContext(self.role, "judge", given=True), body)
        try:
            answer = await ask_async(call)
        except SamplerError as error:
            raise JudgeError(f"{self} gave no answer: {error}") from error
        if answer is None:
            call.fail("error", "no policy plays the judge")
            raise JudgeError(
                f"{self} is a role that is left to the application's provider.",
                "Give it a policy, or a model instead of a role.",
            )
        return answer.candidates[answer.chosen].text

    async def _dry_run(
        self, shared: str, n_siblings: int, asked: Question, episode: LiveEpisode
    ) -> Sequence[Feedback | None]:
        """Random rewards of the siblings for a dry run, which contacts no server."""
        if self.role is not None:
            # The call shows the role to the dry run. Its answer has no meaning.
            await self._ask_role(episode, self._request(asked))
        # A random ranking without ties, the same whenever the same is judged.
        ranking = random.Random(address(shared.encode())).sample(range(n_siblings), n_siblings)
        tiers = [[sibling] for sibling in ranking]
        return [Feedback({self.name: value}, "") for value in values_of_tiers(tiers)]

    def _request(self, asked: Question) -> dict[str, Any]:
        body = {**self._body, "messages": asked.messages}
        if self.settings.structured:
            body["response_format"] = asked.response_format(reason=self.settings.reason)
        return body

    @property
    def _ledger(self) -> Ledger:
        """The ledger of answers and costs, in the folder of the judge or the run; in memory without a folder."""
        folder = self._folder
        if folder is None:
            folder = current_run.get().folder
        if folder is None:
            return self._memory
        if not folder.is_dir():
            folder.mkdir(parents=True)
            is_folder_of_run = folder != self._folder
            if is_folder_of_run:
                # The run has made its folder, so this process runs on another machine.
                log.warning(
                    "%s is not shared with this machine: a judge keeps answers and caps of its own here.", folder
                )
        return Ledger(folder)
