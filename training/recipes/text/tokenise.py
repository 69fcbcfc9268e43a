"""One shard of text files → one TFRecord file: an example for each paragraph that is kept.

Paragraphs are split at empty lines. Tokens and sentences are those of spaCy's blank English
pipeline: its rule-based tokenizer, and its sentencizer. No model is needed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import spacy

from mayfly_train.convert import tfrecord
from mayfly_train.recipe.store import Store, open_store

LEAST_WORDS = 5
LEAST_LETTERS = 0.6  # of what is no blank
LONGEST = 100_000  # characters


def main() -> int:
    """Work on one shard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", required=True, help="file or object with the names of texts")
    parser.add_argument("--data", required=True, help="where these names are")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    where, _, file = args.shard.rpartition("/")
    listed = (open_store(where, None).read(file) or b"").decode().split("\n")
    names = [name for name in listed if name]
    target = args.out / f"{Path(file).stem}.tfrecord"
    print(json.dumps(convert(open_store(args.data, None), names, target)))
    return 0


def convert(store: Store, names: list[str], target: Path) -> dict[str, int]:
    """Write the examples of these files; how much there was, and how much was left out."""
    pipeline = spacy.blank("en")
    pipeline.add_pipe("sentencizer")
    count: Counter[str] = Counter(files=len(names))
    seen: set[str] = set()
    with tfrecord.Writer(target) as writer:
        for document, (name, number) in pipeline.pipe(
            _kept(store, names, seen, count), as_tuples=True
        ):
            writer.write(tfrecord.encode(example(document, name, number)))
            count.update(paragraphs=1, tokens=len(document), sentences=len(list(document.sents)))
    return dict(sorted(count.items()))


def example(document: Any, name: str, number: int) -> dict[str, Any]:
    """The features of a paragraph; `sentence_starts` are places among its tokens."""
    return {
        "source": [name.encode()],
        "paragraph": [number],
        "text": [document.text.encode()],
        "tokens": [token.text.encode() for token in document],
        "sentence_starts": [sentence.start for sentence in document.sents],
    }


def _kept(
    store: Store, names: list[str], seen: set[str], count: Counter[str]
) -> Iterator[tuple[str, tuple[str, int]]]:
    """Each paragraph that is kept, with its file and its number there."""
    for name in names:
        text = (store.read(name) or b"").decode("utf-8", errors="replace")
        for number, paragraph in enumerate(paragraphs(text)):
            why = "repeated" if paragraph in seen else why_not(paragraph)
            if why:
                count[why] += 1
                continue
            seen.add(paragraph)
            yield paragraph, (name, number)


def paragraphs(text: str) -> list[str]:
    """What stands between empty lines, with its blanks made single."""
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [part for part in parts if part]


def why_not(paragraph: str) -> str:
    """Why a paragraph is left out: too short or too long, or no prose; empty when it is kept."""
    if len(paragraph) > LONGEST:
        return "too_long"
    if len(paragraph.split()) < LEAST_WORDS:
        return "too_short"
    solid = paragraph.replace(" ", "")
    return "" if sum(map(str.isalpha, solid)) >= LEAST_LETTERS * len(solid) else "no_prose"


if __name__ == "__main__":
    sys.exit(main())
