"""Prompts of a stream from a dataset: every row is checked at load, then prompts are given by position.

Goes in: rows and the stream's settings; comes out: the Prompt of any position, in an order that depends on the seed and
the epoch alone, so a source goes on where it was. A bad row is named with file, line and field before anything runs.
"""

import difflib
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.connectors.datasets.rows import BadRow, Rows, open_rows
from headrace.schemas.config import StreamConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.ids import prompt_id_of
from headrace.schemas.parts import Message
from headrace.schemas.records import Prompt

__all__ = ("NamedRow", "PromptDataset")

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A row that is not used: where it stands, why, and its bytes."""

    where: str
    reason: str
    raw: bytes


class PromptDataset:
    """The prompts of one stream.

    stream: its name, as records carry it. config: columns, reward, order, and what to do about bad rows. rewards: known
    reward names. seed: of the order. limit: rows used at most, 0 for all. ``bad`` lists the rows left out; with
    ``on_bad_row = "fail"`` any bad row raises ConfigurationError that names the first ones.
    """

    def __init__(
        self, stream: str, config: StreamConfig, *, rewards: Collection[str], seed: int = 0, limit: int = 0
    ) -> None:
        self._stream = stream
        self._config = config
        self._rewards = rewards
        self._seed = seed
        self._rows: Rows = open_rows(config.dataset, config.format)
        self._name = Path(config.dataset).name
        self.bad: list[NamedRow] = []
        good, digest = self._check(min(limit or len(self._rows), len(self._rows)))
        if self.bad and config.on_bad_row == "fail":
            shown = "\n".join(f"  {row.where}: {row.reason}" for row in self.bad[:_SHOWN])
            more = f"\n  and {len(self.bad) - _SHOWN} more" if len(self.bad) > _SHOWN else ""
            raise ConfigurationError(
                f"dataset of stream {stream}: {len(self.bad)} of {len(self._rows)} rows cannot be used:\n{shown}{more}"
                f'\ncorrect them, or set streams.{stream}.on_bad_row = "dead-letter" to leave them out by name'
            )
        if not good:
            raise ConfigurationError(f"dataset of stream {stream}: {config.dataset} has no row that can be used")
        self._good = np.array(good, np.int64)
        self.digest = digest
        """16 hex digits over the rows in use and the settings that decide what stands at which position."""

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return int(self._good.size)

    def prompt(self, position: int) -> Prompt:
        """The prompt at a position; positions count through all epochs from 0."""
        epoch, index = divmod(position, len(self))
        number = int(self._order(epoch)[index])
        return self._prompt(self._rows.read(number), number, epoch, position)

    @lru_cache(maxsize=2)  # noqa: B019 - one dataset lives as long as its process
    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._config.shuffle:
            return self._good
        return np.random.default_rng([self._seed, epoch]).permutation(self._good)

    def _check(self, count: int) -> tuple[list[int], str]:
        """Look at every row; returns the usable ones and the digest, and fills ``bad``."""
        config = self._config
        columns = [config.prompt_column, config.answer_column, config.id_column]
        hashed = hashlib.sha256(json.dumps([config.shuffle and self._seed, *columns]).encode())
        good: list[int] = []
        first: dict[str, int] = {}
        for number in range(count):
            raw = b""
            try:
                row = self._rows.read(number)
                raw = _canonical(row)
                prompt = self._prompt(row, number, 0, number)
                if config.id_column:
                    earlier = first.setdefault(prompt.prompt_id, number)
                    if earlier != number:
                        other = self._rows.where(earlier)
                        raise BadRow(f"column {config.id_column!r}: id {prompt.prompt_id!r} stands at {other} too", raw)
            except BadRow as error:
                self.bad.append(NamedRow(self._rows.where(number), str(error), error.raw or raw))
                continue
            good.append(number)
            hashed.update(raw)
        return good, hashed.hexdigest()[:16]

    def _prompt(self, row: Mapping[str, Any], number: int, epoch: int, position: int) -> Prompt:
        config = self._config
        used = {config.prompt_column, config.answer_column, config.id_column, config.reward_column, "task_type"}
        text, messages = _prompt_text(config.prompt_column, self._column(row, "prompt_column"))
        answer = _text(config.answer_column, self._column(row, "answer_column")) if config.answer_column else ""
        reward = config.reward
        if config.reward_column:
            reward = _text(config.reward_column, self._column(row, "reward_column"))
        if reward not in self._rewards and ":" not in reward:
            near = difflib.get_close_matches(reward, list(self._rewards), n=1)
            field = f"column {config.reward_column!r}" if config.reward_column else f"streams.{self._stream}.reward"
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BadRow(f"{field}: there is no reward {reward!r}{hint}", b"")
        if config.id_column:
            prompt_id = _text(config.id_column, self._column(row, "id_column"))
            if not prompt_id:
                raise BadRow(f"column {config.id_column!r}: the id is empty", b"")
        else:
            prompt_id = prompt_id_of(_canonical(row))
        return Prompt(
            prompt_id=prompt_id,
            stream=self._stream,
            dataset=self._name,
            row=number,
            epoch=epoch,
            position=position,
            task_type=_text("task_type", row.get("task_type") or ""),
            reward=reward,
            prompt=text,
            answer=answer,
            messages=messages,
            columns={
                _text(str(n), str(n)): _text(str(n), v) for n, v in row.items() if n not in used and v is not None
            },
        )

    def _column(self, row: Mapping[str, Any], setting: str) -> Any:
        name = getattr(self._config, setting)
        if name not in row:
            near = difflib.get_close_matches(name, [str(column) for column in row], n=1)
            hint = f"; did it become {near[0]!r}?" if near else ""
            raise BadRow(
                f"column {name!r} is missing{hint}. The row has {', '.join(map(repr, row)) or 'no column'} "
                f"(set streams.{self._stream}.{setting})",
                b"",
            )
        return row[name]


def _prompt_text(column: str, value: Any) -> tuple[str, list[Message]]:
    """A prompt as text, or as chat messages."""
    if isinstance(value, str):
        if not value.strip():
            raise BadRow(f"column {column!r}: the prompt is empty", b"")
        return _text(column, value), []
    if isinstance(value, list) and value and all(isinstance(m, Mapping) for m in value):
        messages = []
        for i, message in enumerate(value):
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise BadRow(f"column {column!r}: message {i} needs the texts 'role' and 'content'", b"")
            messages.append(Message(role=_text(column, role), content=_text(column, content)))
        if not any(message.content.strip() for message in messages):
            raise BadRow(f"column {column!r}: the prompt is empty", b"")
        return "", messages
    raise BadRow(f"column {column!r}: a prompt is text or a list of messages, not {_short(value)}", b"")


def _text(column: str, value: Any) -> str:
    """A value as text: strings as they are, everything else as JSON."""
    if value is None:
        raise BadRow(f"column {column!r}: the value is null", b"")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.start + 1]
        where = f"column {column!r}: {bad!r} at character {error.start}"
        raise BadRow(f"{where} is a lone surrogate, no text", b"") from None
    return text


def _canonical(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, sort_keys=True, default=str).encode("ascii")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
