#!/usr/bin/env python3
"""Loads a library and its service's log into an in-memory SQLite database and asks it questions.

    library.py DIRECTORY [PHASES]

Prints the answers and a digest of all their rows: the same output every time. What differs from run
to run, the time that each phase took and what it read from disk, goes to the file PHASES.
"""

import hashlib
import json
import sqlite3
import sys
import time
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

SCHEMA = """
PRAGMA temp_store = MEMORY;
CREATE TABLE author (id INTEGER PRIMARY KEY, name TEXT, country TEXT);
CREATE TABLE book (id INTEGER PRIMARY KEY, author INTEGER, title TEXT, year INTEGER);
CREATE TABLE summary (book INTEGER PRIMARY KEY, text TEXT);
CREATE TABLE reader (id INTEGER PRIMARY KEY, name TEXT, town TEXT);
CREATE TABLE event (
  id INTEGER PRIMARY KEY, time INTEGER, kind TEXT, status INTEGER, micros INTEGER,
  reader INTEGER, book INTEGER, visit INTEGER, line TEXT);
"""
INDEXES = """
CREATE INDEX book_by_author ON book (author, year);
CREATE INDEX loan_by_book ON event (book, time, reader) WHERE kind = 'loan';
CREATE INDEX loan_by_reader ON event (reader, time, book) WHERE kind = 'loan';
"""
FULL_TEXT = """
CREATE VIRTUAL TABLE words USING fts5 (title, text, content='', detail='column');
INSERT INTO words (rowid, title, text)
  SELECT id, title, text FROM book JOIN summary ON summary.book = book.id;
"""
QUESTIONS = {
    "what the service did, month by month": """
        SELECT time / 2592000 AS month, kind, count(*), sum(status >= 500), sum(micros) / count(*)
        FROM event GROUP BY month, kind ORDER BY month, kind""",
    "countries whose authors are borrowed most": """
        SELECT country, count(*) AS loans, count(DISTINCT event.reader), count(DISTINCT town)
        FROM event JOIN book ON book.id = event.book JOIN author ON author.id = book.author
          JOIN reader ON reader.id = event.reader
        WHERE kind = 'loan' GROUP BY country ORDER BY loans DESC, country""",
    "readers who borrowed a book again": """
        SELECT book, reader, count(*) AS loans, max(time) - min(time) AS apart
        FROM event WHERE kind = 'loan' GROUP BY book, reader HAVING loans > 1
        ORDER BY apart DESC, book, reader""",
    "longest pauses between a reader's loans": """
        SELECT reader, max(pause) AS longest, count(*) FROM (
          SELECT reader, time - lag(time) OVER (PARTITION BY reader ORDER BY time) AS pause
          FROM event WHERE kind = 'loan')
        WHERE pause > 86400 GROUP BY reader ORDER BY longest DESC, reader""",
    "log lines that speak of a failure": """
        SELECT id, time, line FROM event WHERE line LIKE '%gave up after%attempts%' ORDER BY id""",
    "fields of the last year's lines": """
        WITH field AS MATERIALIZED (
          SELECT json_extract(line, '$.agent') AS agent, json_extract(line, '$.host') AS host, micros
          FROM event WHERE time >= 731 * 86400)
        SELECT agent, host, count(*), max(micros) FROM field GROUP BY agent, host ORDER BY agent, host""",
    "books whose summary has all three words": """
        SELECT book.id, book.title, year FROM words JOIN book ON book.id = words.rowid
        WHERE words MATCH 'text : ka AND lo AND quo' ORDER BY words.rank, book.id""",
    "the longest summary of each author": """
        SELECT name, title, letters FROM (
          SELECT author, title, length(text) AS letters,
            row_number() OVER (PARTITION BY author ORDER BY length(text) DESC, id) AS place
          FROM book JOIN summary ON summary.book = book.id)
        JOIN author ON author.id = author WHERE place = 1 ORDER BY letters DESC, name""",
    "visits, longest first, into a table": """
        CREATE TEMP TABLE visited AS
        SELECT visit, reader, count(*) AS events, max(time) - min(time) AS seconds, sum(micros) AS micros
        FROM event GROUP BY visit ORDER BY micros DESC, visit""",
    "towns whose readers waited longest": """
        SELECT town, count(*), sum(micros) / sum(events) AS mean, max(seconds)
        FROM visited JOIN reader ON reader.id = visited.reader
        GROUP BY town ORDER BY mean DESC, town""",
    "a month made anonymous": """
        UPDATE event SET reader = -1, line = json_remove(line, '$.reader', '$.agent', '$.host')
        WHERE time BETWEEN 300 * 86400 AND 330 * 86400""",
    "events made anonymous, per month": """
        SELECT time / 2592000 AS month, count(*), sum(reader < 0) FROM event
        GROUP BY month ORDER BY month""",
}


class Phases:
    """How long each phase took, and what it read from disk."""

    def __init__(self):
        self.all = []

    @contextmanager
    def phase(self, name):
        before, started = self.counters(), time.monotonic()
        yield
        seconds = time.monotonic() - started
        counted = {key: value - before[key] for key, value in self.counters().items()}
        self.all.append({"name": name, "seconds": seconds, **counted})

    @staticmethod
    def counters():
        with open("/proc/self/io", encoding="ascii") as file:
            io = dict(line.rstrip().split(": ") for line in file)
        return {"read_bytes": int(io["read_bytes"])}


def rows_of(path):
    with open(path, encoding="ascii") as file:
        yield from map(json.loads, file)


def events_of(path):
    with open(path, encoding="ascii") as file:
        for number, line in enumerate(file):
            event = json.loads(line)
            yield (number, event["time"], event["kind"], event["status"], event["micros"],
                   event["reader"], event["book"], event["visit"], line.rstrip())


def insert(database, table, rows, columns):
    """As loaders do it, a transaction for every so many rows."""
    statement = f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})"
    while some := list(islice(rows, 10_000)):
        with database:
            database.executemany(statement, some)


def ask(database, question, query):
    digest, count, first = hashlib.sha256(), 0, []
    for row in database.execute(query):
        digest.update(repr(row).encode())
        count += 1
        if count <= 2:
            first.append(row)
    print(f"{question}: {count} rows, {digest.hexdigest()[:16]}")
    for row in first:
        print("   ", *(str(value)[:60] for value in row), sep="  ")


def look_up(database, count):
    """Readers' last loans one by one, as their own pages show them; some readers come often."""
    digest, number = hashlib.sha256(), 1
    for _ in range(count):
        number = number * 48271 % 2147483647
        reader = (number / 2147483647) ** 6 * 40_000
        rows = database.execute(
            "SELECT time, title, line FROM event JOIN book ON book.id = event.book"
            " WHERE kind = 'loan' AND reader = ? ORDER BY time DESC LIMIT 3",
            (int(reader),),
        ).fetchall()
        digest.update(repr(rows).encode())
    print(f"{count} readers' last loans: {digest.hexdigest()[:16]}")


def main():
    directory, phases = Path(sys.argv[1]), Phases()
    database = sqlite3.connect(":memory:")
    database.executescript(SCHEMA)
    with phases.phase("load the log"):
        for table, columns in (("author", 3), ("book", 4), ("summary", 2), ("reader", 3)):
            insert(database, table, rows_of(directory / f"{table}.jsonl"), columns)
        insert(database, "event", events_of(directory / "event.jsonl"), 9)
    with phases.phase("make three indexes"):
        database.executescript(INDEXES)
    with phases.phase("make the full-text index"):
        database.executescript(FULL_TEXT)
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    print(f"database of {pages * 4096 >> 20} MiB in memory")
    for question, query in QUESTIONS.items():
        with phases.phase(question):
            ask(database, question, query)
    with phases.phase("look up 5000 readers' last loans"):
        look_up(database, 5_000)
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(phases.all), encoding="ascii")


main()
