"""The reward that another model gives: a judge behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace.score.signature import RewardError

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_FIELD = re.compile(r"\{(\w+)\}")
_TOO_BUSY = (408, 409, 425, 429)
_MISCONFIGURED = (401, 403, 404, 405)
_MOST_SECONDS = 30.0
"""Between two attempts."""


class JudgeError(RuntimeError):
    """The judge gave no score; the rollout is not to blame."""


async def judge(
    completion: str,
    prompt: Any = None,  # noqa: ANN401
    *,
    url: str,
    model: str,
    template: str,
    system_prompt: str = "",
    score_pattern: str = _NUMBER,
    lowest: float = 0.0,
    highest: float = 1.0,
    temperature: float = 0.0,
    max_tokens: int = 512,
    request_fields: Mapping[str, Any] = {},
    key_variable: str = "",
    retries: int = 5,
    retry_seconds: float = 1.0,
    reply_seconds: float = 120.0,
    **row: Any,  # noqa: ANN401
) -> float:
    """The judge's score, with `lowest` as 0 and `highest` as 1. `template` is its prompt: `{prompt}`, `{completion}` and
    `{COLUMN}` are filled in. Its score is the last match of `score_pattern` in its reply. A server that is busy, failing or
    silent for `reply_seconds` is asked again up to `retries` times, after `retry_seconds`, twice that, and so on."""
    pattern = _checked(url=url, score_pattern=score_pattern, lowest=lowest, highest=highest, retries=retries)
    text = _filled(template, {**row, "prompt": _as_text(prompt), "completion": completion})
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    body = {"model": model, "messages": [*messages, {"role": "user", "content": text}], "temperature": temperature}
    headers = {"Authorization": f"Bearer {_key(key_variable)}"} if key_variable else {}
    reply = await _asked(
        f"{url.rstrip('/')}/chat/completions",
        {**body, "max_tokens": max_tokens, **request_fields},
        headers,
        retries=retries,
        retry_seconds=retry_seconds,
        reply_seconds=reply_seconds,
    )
    found = [match[1] for match in pattern.finditer(reply)]
    try:
        value = float(found[-1])
    except (IndexError, ValueError):
        raise JudgeError(f"the judge's reply has no score that {score_pattern!r} finds: {reply[-200:]!r}") from None
    if not lowest <= value <= highest:
        raise JudgeError(
            f"the judge's score {value:g} is not from {lowest:g} to {highest:g} (lowest, highest): {reply[-200:]!r}"
        )
    return (value - lowest) / (highest - lowest)


async def _asked(
    url: str, body: dict[str, Any], headers: dict[str, str], *, retries: int, retry_seconds: float, reply_seconds: float
) -> str:
    """The text of the reply."""
    import aiohttp

    limit = aiohttp.ClientTimeout(total=reply_seconds)
    async with aiohttp.ClientSession(timeout=limit, headers=headers) as session:
        for attempt in range(retries + 1):
            wait = 0.0
            try:
                async with session.post(url, json=body, allow_redirects=False) as response:
                    said = await response.read()
                    if response.status == 200:
                        return _content(said)
                    problem = f"{response.status} {response.reason}: {said[:300].decode(errors='replace')}"
                    if response.status in _MISCONFIGURED:
                        raise RewardError(
                            f"judge at {url}: {problem}; check url, model and key_variable of reward.options.judge"
                        )
                    if response.status not in _TOO_BUSY and response.status < 500:
                        raise JudgeError(f"judge at {url}: {problem}")
                    wait = _seconds(response.headers.get("Retry-After", ""))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < retries:
                usual = retry_seconds * 2**attempt * random.uniform(0.5, 1.0)  # so that not all come back at once
                await asyncio.sleep(min(_MOST_SECONDS, max(usual, wait)))
    raise JudgeError(f"judge at {url} gave no answer in {retries + 1} attempts; the last: {problem}")


def _content(reply: bytes) -> str:
    try:
        text = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise JudgeError(f"the judge's answer is no chat completion: {reply[:200].decode(errors='replace')}") from None
    return text if isinstance(text, str) else ""


def _filled(template: str, values: Mapping[str, Any]) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            known = ", ".join(values)
            raise RewardError(f"reward.options.judge.template: there is no column {match[1]!r} (there are: {known})")
        return str(values[match[1]])

    return _FIELD.sub(value, template)


def _as_text(prompt: Any) -> str:  # noqa: ANN401
    """A chat as lines of `role: content`."""
    if isinstance(prompt, list):
        return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    return str(prompt)


def _checked(*, url: str, score_pattern: str, lowest: float, highest: float, retries: int) -> re.Pattern[str]:
    where = "reward.options.judge"
    parts = urlsplit(url)
    if not url.startswith(("http://", "https://")) or not parts.hostname or "@" in parts.netloc:
        fix = "an http(s) address without a password, such as 'http://127.0.0.1:8000/v1'; key_variable names where the key is"
        raise RewardError(f"{where}.url = {url.rpartition('@')[2]!r}: must be {fix}")
    if not lowest < highest:
        raise RewardError(f"{where}: lowest = {lowest!r} must be below highest = {highest!r}")
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise RewardError(f"{where}.retries = {retries!r}: must be a whole number ≥ 0")
    try:
        pattern = re.compile(score_pattern)
    except re.error as error:
        raise RewardError(f"{where}.score_pattern = {score_pattern!r}: {error}") from error
    if pattern.groups < 1:
        raise RewardError(
            f"{where}.score_pattern = {score_pattern!r}: must have a group around the number, as in 'Score: ([0-9]+)'"
        )
    return pattern


def _key(variable: str) -> str:
    if not os.environ.get(variable):
        raise RewardError(f"reward.options.judge.key_variable = {variable!r}: no such environment variable is set")
    return os.environ[variable]


def _seconds(text: str) -> float:
    """Of a Retry-After header; 0 if it is a date or missing."""
    return float(text) if re.fullmatch(r"\d{1,6}(\.\d+)?", text) else 0.0
