#!/usr/bin/env python3
"""Loads the library into an in-memory SQLite database and asks it questions.

    library.py DIRECTORY

Prints the answers and a digest of all their rows; the same output every time.
"""

import hashlib
import sqlite3
import sys
from pathlib import Path

SCHEMA = """
PRAGMA temp_store = MEMORY;
CREATE TABLE author (id INTEGER PRIMARY KEY, name TEXT, country TEXT);
CREATE TABLE book (id INTEGER PRIMARY KEY, author INTEGER, title TEXT, year INTEGER, text TEXT);
CREATE TABLE loan (id INTEGER PRIMARY KEY, book INTEGER, reader INTEGER, day INTEGER);
"""
INDEXES = """
CREATE INDEX book_by_author ON book (author, year);
CREATE INDEX loan_by_book ON loan (book, day);
CREATE INDEX loan_by_reader ON loan (reader, day);
CREATE VIRTUAL TABLE words USING fts5 (title, opening, content='', detail='column');
INSERT INTO words (rowid, title, opening) SELECT id, title, substr(text, 1, 600) FROM book;
"""
QUERIES = {
    "the countries whose books are borrowed most (join of three tables)": """
        SELECT country, count(*) AS loans, count(DISTINCT reader) AS readers
        FROM loan JOIN book ON book.id = loan.book JOIN author ON author.id = book.author
        GROUP BY country ORDER BY loans DESC, country""",
    "readers who came back to a book (join of a table with itself)": """
        SELECT first.reader, count(*) AS times
        FROM loan AS first JOIN loan AS later
          ON later.book = first.book AND later.reader = first.reader AND later.day > first.day
        GROUP BY first.reader ORDER BY times DESC, first.reader""",
    "all books by how their text begins (sort of the whole text)": """
        SELECT id, title, substr(text, 1, 40) FROM book ORDER BY text, id""",
    "the longest book of each author (window over all books)": """
        SELECT name, title, letters FROM (
          SELECT author, title, length(text) AS letters,
                 row_number() OVER (PARTITION BY author ORDER BY length(text) DESC, id) AS place
          FROM book) JOIN author ON author.id = author
        WHERE place = 1 ORDER BY letters DESC, name""",
    "books that speak of a thing (scan of all text)": """
        SELECT id, year, title FROM book
        WHERE text LIKE '%quo verse%' OR text LIKE '%sen tasti%' ORDER BY year, id""",
    "books whose opening has all three words (full-text index)": """
        SELECT book.id, book.title FROM words JOIN book ON book.id = words.rowid
        WHERE words MATCH 'opening : ka AND lo AND quo' ORDER BY book.id""",
    "the busiest day of each year's books (two sorts and a join)": """
        SELECT year, day, count(*) AS loans FROM loan JOIN book ON book.id = loan.book
        GROUP BY year, day HAVING loans > 2 ORDER BY loans DESC, year, day""",
}


def rows_of(path):
    with open(path, encoding="ascii") as file:
        for line in file:
            yield line.rstrip("\n").split("\t")


def load(directory):
    database = sqlite3.connect(":memory:")
    database.executescript(SCHEMA)
    for table, columns in (("author", 3), ("book", 5), ("loan", 4)):
        marks = ", ".join("?" * columns)
        database.executemany(
            f"INSERT INTO {table} VALUES ({marks})", rows_of(directory / f"{table}s.tsv")
        )
    database.executescript(INDEXES)
    return database


def ask(database, question, query):
    digest, count, first = hashlib.sha256(), 0, []
    for row in database.execute(query):
        digest.update(repr(row).encode())
        count += 1
        if count <= 3:
            first.append(row)
    print(f"{question}: {count} rows, {digest.hexdigest()[:16]}")
    for row in first:
        print("   ", *row, sep="  ")


def look_up(database, count):
    """Books one by one, all over the database."""
    digest, number = hashlib.sha256(), 1
    for _ in range(count):
        number = number * 48271 % 2147483647
        row = database.execute(
            "SELECT title, length(text), (SELECT count(*) FROM loan WHERE book = book.id)"
            " FROM book WHERE id = ?",
            (number % 50_000,),
        ).fetchone()
        digest.update(repr(row).encode())
    print(f"{count} books looked up one by one: {digest.hexdigest()[:16]}")


def main():
    database = load(Path(sys.argv[1]))
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    print(f"database of {pages * 4096 >> 20} MiB in memory")
    for question, query in QUERIES.items():
        ask(database, question, query)
    look_up(database, 20_000)


main()
