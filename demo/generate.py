#!/usr/bin/env python3
"""Makes the demo's input: a library of books with their text, and who borrowed them.

    generate.py DIRECTORY

The same bytes on every machine: everything follows from one seed.
"""

import itertools
import os
import random
import sys
from pathlib import Path

SEED = 1453
AUTHORS = 3_000
BOOKS = 50_000
LOANS = 900_000
READERS = 40_000
SYLLABLES = "ka lo mi ren sta vel or an ti bu sen dra quo pel ni ver tas lim go fer ash el un ith".split()


def vocabulary(rng):
    words = set()
    while len(words) < 6_000:
        words.add("".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))))
    return sorted(words, key=lambda word: (len(word), word))


def text_of(rng, words, weights):
    """A few paragraphs; common words are common, as in any language."""
    picked = rng.choices(words, cum_weights=weights, k=rng.randint(150, 600))
    sentences, at = [], 0
    while at < len(picked):
        length = rng.randint(6, 18)
        sentences.append(" ".join(picked[at : at + length]).capitalize() + ".")
        at += length
    return " ".join(sentences)


def write_rows(path, rows):
    """Under another name first: what is there is whole."""
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "w", encoding="ascii") as file:
        for row in rows:
            file.write("\t".join(map(str, row)) + "\n")
    os.rename(unfinished, path)


def main():
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    words = vocabulary(rng)
    weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(words))))

    def title(low, high):
        return " ".join(rng.choices(words[100:], k=rng.randint(low, high))).title()

    countries = [title(1, 1) for _ in range(60)]
    write_rows(
        directory / "authors.tsv",
        ((i, title(2, 2), rng.choice(countries)) for i in range(AUTHORS)),
    )
    write_rows(
        directory / "books.tsv",
        (
            (i, int(rng.random() ** 2 * AUTHORS), title(2, 5), rng.randint(1453, 1999),
             text_of(rng, words, weights))
            for i in range(BOOKS)
        ),
    )
    write_rows(
        directory / "loans.tsv",
        (
            (i, int(rng.random() ** 2 * BOOKS), rng.randrange(READERS), rng.randint(1, 3650))
            for i in range(LOANS)
        ),
    )


main()
