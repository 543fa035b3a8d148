#!/usr/bin/env python3
"""Makes the demo's input: a library's books and readers, and three years of its service's log.

    generate.py DIRECTORY [PARTS]

With PARTS, a part of so many. The same bytes on every machine: everything follows from one seed. What makes real data what it is
was kept: the log is in the order of time and says the same keys in every line; some books, words and
readers come up much more often than others; a reader's visits come in runs.
"""

import itertools
import json
import os
import random
import sys
from pathlib import Path

SEED = 1453
PARTS = int(sys.argv[2]) if len(sys.argv) > 2 else 1
AUTHORS = 3_000 // PARTS
BOOKS = 20_000 // PARTS
READERS = 40_000 // PARTS
EVENTS = 750_000 // PARTS
DAYS = 1_096
SYLLABLES = "ka lo mi ren sta vel or an ti bu sen dra quo pel ni ver tas lim go fer ash el un ith".split()
# What a visit consists of, how often, and what the service notes about it.
KINDS = {
    "search": (40, "catalogue", "GET", "/catalogue/search", "search answered from the catalogue"),
    "view": (34, "catalogue", "GET", "/catalogue/book", "book page shown, availability looked up"),
    "loan": (12, "circulation", "POST", "/circulation/loan", "loan entered, due date sent to reader"),
    "return": (10, "circulation", "POST", "/circulation/return", "book taken back, shelf informed"),
    "reserve": (4, "circulation", "PUT", "/circulation/reserve", "reservation queued behind the loan"),
}
FAILURES = (
    "upstream timed out while waiting for the shelf index",
    "connection reset by the circulation database, gave up after 3 attempts",
    "reader card could not be verified: certificate expired",
)


def vocabulary(rng):
    words = set()
    while len(words) < 6_000:
        words.add("".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))))
    return sorted(words, key=lambda word: (len(word), word))


def text_of(rng, words, weights):
    """A summary of a book; common words are common, as in any language."""
    picked = rng.choices(words, cum_weights=weights, k=rng.randint(60, 240))
    sentences, at = [], 0
    while at < len(picked):
        length = rng.randint(6, 18)
        sentences.append(" ".join(picked[at : at + length]).capitalize() + ".")
        at += length
    return " ".join(sentences)


def events(rng):
    """The log: visits one after the other, each of some events by one reader."""
    kinds = list(KINDS)
    weights = list(itertools.accumulate(KINDS[kind][0] for kind in kinds))
    number, visit = 0, 0
    while number < EVENTS:
        visit += 1
        reader = int(rng.random() ** 2 * READERS)
        host = f"web-{visit % 8 + 1}.books.example"
        agent = ("desktop", "desktop", "terminal", "phone", "phone")[reader % 5]
        second = DAYS * 86_400 * number // EVENTS
        # What is much asked for changes with the months.
        season = second // (86_400 * 30) * 400
        for kind in rng.choices(kinds, cum_weights=weights, k=rng.randint(1, 9)):
            chance = rng.random()
            book = (season + int(chance**4 * BOOKS)) % BOOKS
            failed = rng.random() < 0.004
            _, service, method, path, message = KINDS[kind]
            yield (
                f'{{"time":{second},"level":"{"error" if failed else "info"}",'
                f'"service":"{service}","host":"{host}","request":"{rng.getrandbits(48):012x}",'
                f'"visit":{visit},"reader":{reader},"agent":"{agent}","method":"{method}",'
                f'"path":"{path}","kind":"{kind}","book":{book},"status":{503 if failed else 200},'
                f'"micros":{int(900 / (1.001 - chance))},'
                f'"message":"{FAILURES[visit % 3] if failed else message}"}}'
            )
            number += 1
            second += rng.randint(2, 40)
            if number == EVENTS:
                return


def write_lines(path, lines):
    with open(path, "w", encoding="ascii") as file:
        file.writelines(line + "\n" for line in lines)


def write_rows(path, rows):
    write_lines(path, (json.dumps(row) for row in rows))


def main():
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True)
    rng = random.Random(SEED)
    words = vocabulary(rng)
    weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(words))))

    def title(low, high):
        return " ".join(rng.choices(words[100:], k=rng.randint(low, high))).title()

    countries = [title(1, 1) for _ in range(60)]
    towns = [title(1, 1) for _ in range(200)]
    write_rows(
        directory / "author.jsonl",
        ((i, title(2, 2), rng.choice(countries)) for i in range(AUTHORS)),
    )
    write_rows(
        directory / "book.jsonl",
        (
            (i, int(rng.random() ** 2 * AUTHORS), title(2, 5), rng.randint(1453, 1999))
            for i in range(BOOKS)
        ),
    )
    write_rows(
        directory / "summary.jsonl",
        ((i, text_of(rng, words, weights)) for i in range(BOOKS)),
    )
    write_rows(
        directory / "reader.jsonl",
        ((i, title(2, 2), rng.choice(towns)) for i in range(READERS)),
    )
    write_lines(directory / "event.jsonl", events(rng))


main()
