"""Run by the json case: documents as dicts and lists, through json and back."""

import hashlib
import json
import random
import sys


def document(rng, number):
    return {
        "id": number,
        "name": f"document {rng.randrange(10**6)}",
        "tags": rng.choices(("red", "green", "blue", "black", "white"), k=6),
        "points": [{"x": rng.random(), "y": rng.randrange(1000)} for _ in range(8)],
        "text": " ".join(f"word{rng.randrange(5000)}" for _ in range(30)),
    }


def main():
    rng = random.Random(5)
    documents = [document(rng, i) for i in range(10000 * int(sys.argv[1]))]
    text = json.dumps(documents)
    print(len(text), hashlib.sha256(text.encode()).hexdigest())
    again = json.loads(text)
    print(again == documents)
    del documents
    again.sort(key=lambda entry: (entry["name"], entry["id"]))
    index = {}
    for entry in again:
        for word in entry["text"].split():
            index.setdefault(word, []).append(entry["id"])
    print(sum(len(places) for places in index.values()), min(index), max(index))
    print(hashlib.sha256(json.dumps([entry["id"] for entry in again]).encode()).hexdigest())


main()
