"""Search over a corpus: BM25 by SQLite's full-text search, the best document first."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence

from examples.workloads.search.tasks import Document

MAX_WORDS = 6
"""Words of a query that are looked for."""


def last_line(message: str) -> str:
    """What counts of a message: a model may think before."""
    return message.strip().rpartition("\n")[2]


class Index:
    """A corpus that can be searched."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("create virtual table corpus using fts5(title, text)")
        rows = [(document["title"], document["text"]) for document in documents]
        self._database.executemany("insert into corpus values (?, ?)", rows)

    def best(self, query: str) -> Document | None:
        """The document that fits the first words of a query best; its title weighs most. None where none has any."""
        documents = self._search(re.findall(r"\w+", query)[:MAX_WORDS], 1)
        return documents[0] if documents else None

    def best_documents(self, text: str, most: int) -> list[Document]:
        """At most `most` documents that fit all words of a text best."""
        return self._search(re.findall(r"\w+", text), most)

    def _search(self, words: Sequence[str], most: int) -> list[Document]:
        if not words:
            return []
        matches = self._database.execute(
            "select title, text from corpus where corpus match ? order by bm25(corpus, 4.0, 1.0), title limit ?",
            (" OR ".join(f'"{word}"' for word in words), most),
        )
        return [{"title": title, "text": text} for title, text in matches]
