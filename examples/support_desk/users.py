"""Simulated users who talk to the gateway through the official `openai` client and rate answers.

Some users stream, some ask a second question in the same conversation, and some do not rate. The
number of active users can change at any time, but is never zero, because traffic must go on while
weights change.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from examples.support_desk.questions import SYSTEM_PROMPT, Topic, accepts, ask

MAX_TOKENS = 48
STREAM_SHARE = 0.5
SECOND_QUESTION_SHARE = 0.25
RATING_SHARE = 0.9
REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """One served answer, as its user saw it."""

    interaction_id: str
    version: str
    """The policy version that answered, e.g. `assistant/3`."""
    question: str
    text: str
    num_tokens: int
    finished: bool
    """Whether the model ended the answer itself, rather than the limit on tokens."""
    accepted: bool
    """Whether the user likes it."""
    rated: bool
    """Whether the user said so."""
    at_s: float
    """Seconds since the crowd began."""


@dataclass(frozen=True)
class Pace:
    """How many users are active, and how long each waits between two conversations."""

    users: int
    pause_s: float
    """Seconds."""


@dataclass
class Crowd:
    """Simulates users who talk until they are stopped.

    Args:
        base_url: Address of the gateway, with `/v1`.
        api_key: A key whose consent is `train`.
        model: Name of the policy.
        size: Largest number of active users.
        pace: How busy the users are; it may be changed at any time.
        seed: Seed of the questions; answers depend on the model.
    """

    base_url: str
    api_key: str
    model: str
    size: int
    pace: Pace
    seed: int
    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    async def talk(self, stop: asyncio.Event) -> None:
        """Let users talk until `stop` is set, and finish the conversations that have begun."""
        client = AsyncOpenAI(
            base_url=self.base_url,
            api_key=self.api_key,
            max_retries=0,  # a retry would hide a request that a weight swap cut off
            timeout=REQUEST_TIMEOUT_S,
        )
        async with client, asyncio.TaskGroup() as group:
            for number in range(self.size):
                group.create_task(self._user(client, number, stop))

    def rated(self, version: str) -> list[Answer]:
        """Rated answers of one policy version."""
        return [a for a in self.answers if a.rated and a.version == version]

    def counts(self) -> Counter[str]:
        """Rated answers by version."""
        return Counter(answer.version for answer in self.answers if answer.rated)

    async def _user(self, client: AsyncOpenAI, number: int, stop: asyncio.Event) -> None:
        random_ = random.Random(f"{self.seed}/{number}")
        while not stop.is_set():
            if number >= self.pace.users:
                await asyncio.sleep(0.2)
                continue
            try:
                await self._conversation(client, random_)
                await self._rest()
            except openai.OpenAIError as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(1.0)

    async def _rest(self) -> None:
        """Wait for `pace.pause_s`, or less when the pace rises meanwhile."""
        began = time.monotonic()
        while time.monotonic() - began < self.pace.pause_s:
            await asyncio.sleep(0.2)

    async def _conversation(self, client: AsyncOpenAI, random_: random.Random) -> None:
        turns = 2 if random_.random() < SECOND_QUESTION_SHARE else 1
        streams = random_.random() < STREAM_SHARE
        messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": SYSTEM_PROMPT}]
        for _ in range(turns):
            topic, question = ask(random_)
            messages.append({"role": "user", "content": question})
            answer = await (self._stream if streams else self._unary)(client, messages, topic)
            messages.append({"role": "assistant", "content": answer.text})
            rates = random_.random() < RATING_SHARE
            if rates:
                await _rate(client, answer)
            self.answers.append(answer if rates else _unrated(answer))

    async def _unary(
        self, client: AsyncOpenAI, messages: Sequence[ChatCompletionMessageParam], topic: Topic
    ) -> Answer:
        raw = await client.chat.completions.with_raw_response.create(
            model=self.model,
            messages=list(messages),
            max_tokens=MAX_TOKENS,
            metadata={"task": topic.name},
        )
        completion = raw.parse()
        choice = completion.choices[0]
        return self._answer(
            raw.headers,
            messages,
            topic,
            text=choice.message.content or "",
            finish_reason=choice.finish_reason,
            num_tokens=completion.usage.completion_tokens if completion.usage else 0,
        )

    async def _stream(
        self, client: AsyncOpenAI, messages: Sequence[ChatCompletionMessageParam], topic: Topic
    ) -> Answer:
        raw = await client.chat.completions.with_raw_response.create(
            model=self.model,
            messages=list(messages),
            max_tokens=MAX_TOKENS,
            metadata={"task": topic.name},
            stream=True,
            stream_options={"include_usage": True},
        )
        parts: list[str] = []
        finish_reason: str | None = None
        num_tokens = 0
        async for chunk in raw.parse():
            for choice in chunk.choices:
                parts.append(choice.delta.content or "")
                finish_reason = choice.finish_reason or finish_reason
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
        return self._answer(
            raw.headers,
            messages,
            topic,
            text="".join(parts),
            finish_reason=finish_reason,
            num_tokens=num_tokens,
        )

    def _answer(
        self,
        headers: Mapping[str, str],
        messages: Sequence[ChatCompletionMessageParam],
        topic: Topic,
        *,
        text: str,
        finish_reason: str | None,
        num_tokens: int,
    ) -> Answer:
        if finish_reason not in ("stop", "length"):
            self.failures.append(f"cut off with finish_reason {finish_reason!r}")
        finished = finish_reason == "stop"
        return Answer(
            interaction_id=headers["x-onlinerl-interaction-id"],
            version=headers["x-onlinerl-policy-version"],
            question=str(messages[-1].get("content")),
            text=text,
            num_tokens=num_tokens,
            finished=finished,
            accepted=accepts(topic, text, finished=finished),
            rated=True,
            at_s=time.monotonic() - self.began,
        )


async def _rate(client: AsyncOpenAI, answer: Answer) -> None:
    await client.post(
        "/feedback",
        body={
            "interaction_id": answer.interaction_id,
            "metric": "accepted",
            "value": answer.accepted,
        },
        cast_to=object,
    )


def _unrated(answer: Answer) -> Answer:
    return Answer(**{**vars(answer), "rated": False})
