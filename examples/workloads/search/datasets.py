"""The public data sets as questions, from files of JSON lines or Parquet, which `tasks.py --download` fetches.

| data set | Hugging Face id | documents of a question |
|---|---|---|
| HotpotQA | hotpotqa/hotpot_qa, distractor | 10 paragraphs, two of them needed |
| 2WikiMultihopQA | framolfese/2WikiMultihopQA, in the columns of HotpotQA | 10 paragraphs, two or four of them needed |
| MuSiQue | dgslibisey/MuSiQue, answerable questions | 20 paragraphs, two to four of them needed |
| Bamboogle | chiayewken/bamboogle | none: they come from a corpus of the user's own |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from examples.workloads.data_files import rows, text_id
from examples.workloads.search.index import Index
from examples.workloads.search.tasks import Document, Question

SEARCHES = 4
"""Searches for a question: the most documents that one needs."""
CANDIDATES = 20
"""Documents of the user's corpus that a question of Bamboogle gets."""


def hotpotqa(file: Path) -> Iterator[Question | None]:
    """HotpotQA and 2WikiMultihopQA. Fields id, question, answer; supporting_facts with lists title and sent_id; context
    with lists title and sentences. Left out are rows without an answer, or whose needed paragraphs are not there."""
    for row in rows(file, "id", "question", "answer", "supporting_facts", "context"):
        documents: list[Document] = []
        sentences_of: dict[str, Sequence[str]] = {}
        for title, sentences in zip(row["context"]["title"], row["context"]["sentences"], strict=True):
            if title not in sentences_of:
                sentences_of[title] = sentences
                documents.append({"title": title, "text": joined(sentences)})

        # What a document says of the question are its supporting sentences.
        numbers_of: dict[str, list[int]] = {}
        for title, number in zip(row["supporting_facts"]["title"], row["supporting_facts"]["sent_id"], strict=True):
            numbers_of.setdefault(title, []).append(number)
        if not row["answer"] or not numbers_of or not numbers_of.keys() <= sentences_of.keys():
            yield None
            continue
        facts: list[str] = []
        for title, numbers in numbers_of.items():
            sentences = sentences_of[title]
            # A few rows name a sentence that their paragraph does not have.
            facts.append(joined([sentences[number] for number in numbers if number < len(sentences)]))
        yield question_of(
            row["id"], row["question"], row["answer"], documents, dict(zip(numbers_of, facts, strict=True))
        )


def musique(file: Path) -> Iterator[Question | None]:
    """MuSiQue. Fields id, question, answer, answer_aliases; paragraphs, each with idx, title, paragraph_text;
    question_decomposition, each with answer and paragraph_support_idx. Left out are rows that cannot be answered."""
    for row in rows(file, "id", "question", "answer", "paragraphs", "question_decomposition"):
        hops = row["question_decomposition"]
        if (
            not row.get("answerable", True)
            or not row["answer"]
            or any(hop["paragraph_support_idx"] is None for hop in hops)
        ):
            yield None
            continue
        # Several paragraphs may have one title. Documents are told apart by title, so further ones get a number.
        documents: list[Document] = []
        title_of: dict[int, str] = {}
        times: Counter[str] = Counter()
        for paragraph in row["paragraphs"]:
            title = paragraph["title"]
            times[title] += 1
            if times[title] > 1:
                title = f"{title} ({times[title]})"
            title_of[paragraph["idx"]] = title
            documents.append({"title": title, "text": paragraph["paragraph_text"]})

        facts: dict[str, str] = {}
        for hop in hops:
            title = title_of[hop["paragraph_support_idx"]]
            facts[title] = f"{facts[title]} {hop['answer']}" if title in facts else hop["answer"]
        question = question_of(row["id"], row["question"], row["answer"], documents, facts)
        question["also"] = list(row.get("answer_aliases") or [])
        yield question


def bamboogle(file: Path, corpus: Index) -> Iterator[Question | None]:
    """Bamboogle. Fields Question and Answer. Each question gets the documents of the corpus that fit its words best;
    which of them it needs is not known, so the answer alone counts."""
    for row in rows(file, "Question", "Answer"):
        documents = corpus.best_documents(row["Question"], CANDIDATES)
        yield question_of(f"bamboogle-{text_id(row['Question'])}", row["Question"], row["Answer"], documents, {})


READERS: Mapping[str, Callable[[Path], Iterator[Question | None]]] = {"hotpotqa": hotpotqa, "musique": musique}
"""By name: a function of a file; None for a row that is left out."""


def read_corpus(file: Path) -> Index:
    """A corpus for Bamboogle: JSON lines or Parquet with fields title and text."""
    return Index([{"title": row["title"], "text": row["text"]} for row in rows(file, "title", "text")])


def question_of(name: str, question: str, answer: str, documents: list[Document], facts: Mapping[str, str]) -> Question:
    """A task. `facts` has what each needed document says, by title, in the order in which they are found."""
    return {
        "id": name,
        "question": question,
        "documents": documents,
        "answer": answer,
        "evidence": list(facts),
        "facts": list(facts.values()),
        "searches": SEARCHES,
    }


def joined(sentences: Sequence[str]) -> str:
    """Sentences as one text."""
    return " ".join(sentence.strip() for sentence in sentences)
