"""Finding documents by words: BM25 over a small corpus in memory.

Goes in: documents and a query; comes out: documents by falling score, ties in the order of the corpus, so that equal
corpora and queries give equal answers everywhere. Robertson and Zaragoza 2009, with the idf that is never negative.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ("Document", "Index", "words_of")

_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75


@dataclass(frozen=True, slots=True)
class Document:
    """A title and a text."""

    title: str
    text: str


def words_of(text: str) -> list[str]:
    """The words of a text in lower case."""
    return _WORD.findall(text.lower())


class Index:
    """A corpus that can be searched."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = list(documents)
        counts = [Counter(words_of(f"{d.title} {d.text}")) for d in documents]
        self._lengths = [sum(c.values()) for c in counts]
        self._mean = sum(self._lengths) / max(1, len(self._lengths)) or 1.0
        self._places: dict[str, list[tuple[int, int]]] = {}
        for number, count in enumerate(counts):
            for word, times in count.items():
                self._places.setdefault(word, []).append((number, times))

    def search(self, query: str, most: int) -> list[Document]:
        """Up to ``most`` documents that share a word with the query, the best first."""
        scores: dict[int, float] = {}
        for word in set(words_of(query)):
            places = self._places.get(word, [])
            weight = math.log(1 + (len(self.documents) - len(places) + 0.5) / (len(places) + 0.5))
            for number, times in places:
                long = 1 - _B + _B * self._lengths[number] / self._mean
                scores[number] = scores.get(number, 0.0) + weight * times * (_K1 + 1) / (times + _K1 * long)
        best = sorted(scores, key=lambda number: (-scores[number], number))[:most]
        return [self.documents[number] for number in best]
