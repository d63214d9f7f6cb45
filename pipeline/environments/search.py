"""The environment ``search``: a question and a local corpus, by ``<search>``, ``<information>`` and ``<answer>``.

Goes in: a seed, the prompt's question and answer, actions; comes out: documents, and at the end reward 1 for the right
answer. With a corpus file the prompt is the question; without one a small world of people is made from the seed, whose
questions need two searches.
"""

import json
import random
import re
import string
from functools import lru_cache
from pathlib import Path

from pydantic import Field

from headrace.pipeline.environments.actions import tagged
from headrace.pipeline.environments.environment import EnvironmentOptions, Observation
from headrace.pipeline.environments.ranking import Document, Index
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Prompt

__all__ = ("Search", "SearchOptions", "make_world", "normal")

_FIRST = ("Ada", "Bo", "Cleo", "Dara", "Emre", "Fay", "Gus", "Hana", "Ivo", "Juno", "Kai", "Lena", "Milo", "Nora")
_LAST = ("Abel", "Brandt", "Costa", "Dietz", "Egan", "Falk", "Grau", "Holm", "Iqbal", "Jonas", "Krol", "Lund", "Marek")
_TOWNS = ("Arlen", "Brava", "Corvo", "Delft", "Eskil", "Fonte", "Gavle", "Hobro", "Ispra", "Jelsa", "Kotor", "Lagos")
_TRADES = ("potter", "pilot", "baker", "surgeon", "weaver", "printer", "sailor", "chemist")
_ASKED = (
    ("In which town was the teacher of {a} born?", "town"),
    ("What is the trade of the teacher of {a}?", "trade"),
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class SearchOptions(EnvironmentOptions):
    """Options of ``search``."""

    corpus: str = ""
    """File of JSON lines with ``title`` and ``text``; empty: a world made from the seed."""
    shown: int = Field(3, ge=1)
    """Documents of one search."""
    characters: int = Field(600, ge=1)
    """Characters that are shown of each."""
    searches: int = Field(8, ge=1)
    """Searches of an episode."""


def make_world(seed: int, people: int = 24) -> tuple[list[Document], str, str]:
    """Documents about people, a question that needs two of them, and its answer."""
    source = random.Random(seed)
    names = source.sample([f"{first} {last}" for first in _FIRST for last in _LAST], people)
    teacher = {name: source.choice([n for n in names if n != name]) for name in names}
    town = {name: source.choice(_TOWNS) for name in names}
    trade = {name: source.choice(_TRADES) for name in names}
    documents = [
        Document(name, f"{name} is a {trade[name]}, born in {town[name]}, and was taught by {teacher[name]}.")
        for name in names
    ]
    asked, question = source.choice(names), source.choice(_ASKED)
    told = {"town": town, "trade": trade}[question[1]]
    return documents, question[0].format(a=asked), told[teacher[asked]]


def normal(text: str) -> str:
    """An answer without case, articles, punctuation and further spaces, so that equal answers compare equal."""
    lowered = "".join(" " if c in string.punctuation else c for c in text.lower())
    return " ".join(_ARTICLES.sub(" ", lowered).split())


class Search:
    """A question and a local corpus. Raises ConfigurationError for a corpus that cannot be read."""

    Options = SearchOptions
    isolation = "inline"

    def __init__(self, options: SearchOptions | None = None) -> None:
        self._options = options or SearchOptions()
        self._fixed = _corpus(self._options.corpus) if self._options.corpus else None
        self._index: Index | None = None
        self._answer = ""
        self._left = 0

    def reset(self, seed: int, prompt: Prompt) -> Observation:
        """The question."""
        question, self._answer, self._left = prompt.prompt, prompt.answer, self._options.searches
        if self._fixed is not None:
            self._index = self._fixed
            return Observation(question)
        documents, made, self._answer = make_world(seed)
        self._index = Index(documents)
        return Observation(f"{question}\n{made}" if question else made)

    def step(self, action: str) -> Observation:
        """Search, or judge the answer. Raises ValueError after the end."""
        if self._index is None:
            raise ValueError("the episode has ended: call reset first")
        if (answer := tagged(action, "answer")) is not None:
            self._index = None
            right = normal(answer) == normal(self._answer)
            return Observation("", float(right), done=True, details={"verdict": "right" if right else "wrong"})
        query = tagged(action, "search")
        if query is None:
            said = "\nWrite <search>words</search> or <answer>text</answer>.\n"
            return Observation(said, details={"verdict": "neither"})
        if not self._left:
            return Observation("\nThere is no search left: answer.\n", details={"verdict": "no search left"})
        self._left -= 1
        found = self._index.search(query, self._options.shown)
        lines = [f"({i}) {d.title}: {d.text[: self._options.characters]}" for i, d in enumerate(found, 1)]
        return Observation(f"\n<information>\n{chr(10).join(lines) or 'Nothing was found.'}\n</information>\n")

    def close(self) -> None:
        """End the episode."""
        self._index = None


@lru_cache(maxsize=4)
def _corpus(path: str) -> Index:
    documents = []
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"environment search: corpus {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            documents.append(Document(str(row["title"]), str(row["text"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f'environment search: corpus {path}, line {number}: {error!r}; a line is {{"title": ..., "text": ...}}'
            ) from error
    return Index(documents)
