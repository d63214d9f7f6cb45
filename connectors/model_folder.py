"""A Hugging Face model folder: its tokenizer, its stop tokens and the digest that says two sides tokenise alike.

Goes in: a folder; comes out: text to token ids and back. Reading the digest and the stop tokens needs no torch and no
transformers; the tokenizer is loaded when first used.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Prompt

__all__ = ("ModelFolder", "tokenizer_digest")

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class ModelFolder:
    """A model folder. Raises ConfigurationError when ``path`` has no config.json."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise ConfigurationError(
                f"{self.path} is no Hugging Face model folder: it has no config.json; check policies.P.model"
            )

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence: the eos_token_id of generation_config.json, else of config.json."""
        for name in ("generation_config.json", "config.json"):
            found = _read_json(self.path / name).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
        return ()

    def encode(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        """Token ids (int32) of a prompt: its text as it is, or its messages through the chat template."""
        if prompt.messages:
            text = self.render([{"role": message.role, "content": message.content} for message in prompt.messages])
        else:
            text = prompt.prompt
        return self.tokenize(text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the chat template makes of messages and tools, up to where the answer begins.

        settings: variables of the template's own. Raises ValueError for what the template refuses.
        """
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **(settings or {}),
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template of {self.path} refuses the messages: {error}") from error
        return text

    def tokenize(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids (int32) of text as it is; special tokens in it become themselves.

        Raises ValueError for half a surrogate pair, which is no text.
        """
        if not text.isascii():
            text.encode("utf-8")
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def detokenize(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> str:
        """Text of token ids, special tokens written out."""
        return str(self._backend.decode([int(t) for t in tokens], skip_special_tokens=False))

    def decode(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._backend.decode([int(t) for t in tokens], skip_special_tokens=True))

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path)

    @cached_property
    def _backend(self) -> Any:
        """The fast tokenizer below transformers' own, whose calls cost a tenth."""
        from tokenizers import Tokenizer

        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise ConfigurationError(f"{self.path} has no tokenizer.json; save the model with its fast tokenizer")
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer


def tokenizer_digest(folder: Path | str) -> str:
    """sha256 (64 hex digits) of what decides how text becomes tokens: tokenizer, chat template, special tokens.

    Unchanged by what saving a tokenizer again rewrites (padding side, versions, order of keys).
    Raises ConfigurationError when the folder has no tokenizer.json.
    """
    path = Path(folder)
    if not (path / "tokenizer.json").is_file():
        raise ConfigurationError(f"{path} has no tokenizer.json: the tokenizer's digest cannot be taken")
    tokenizer = _read_json(path / "tokenizer.json")
    settings = _read_json(path / "tokenizer_config.json")
    special = {**_read_json(path / "special_tokens_map.json"), **settings}
    template = path / "chat_template.jinja"
    content = {
        "tokenizer": {key: value for key, value in tokenizer.items() if key not in ("padding", "truncation")},
        "chat_template": template.read_text("utf-8") if template.is_file() else settings.get("chat_template"),
        "special": {name: _token_text(special.get(name)) for name in _SPECIAL},
        "stop": list(ModelFolder(path).stop_token_ids),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _token_text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON: {error}") from error
    return data if isinstance(data, dict) else {}
