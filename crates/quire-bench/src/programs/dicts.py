"""A large tree of dicts, lists and strings: built, walked, changed, sorted."""

import random
import sys


def main():
    count = int(sys.argv[1])
    rng = random.Random(11)
    people = [
        {
            "id": i,
            "name": f"person {rng.randrange(10**7)}",
            "tags": [rng.randrange(1000) for _ in range(12)],
            "place": {"x": rng.random(), "y": rng.random()},
        }
        for i in range(count)
    ]
    by_tag = {}
    for person in people:
        for tag in person["tags"]:
            by_tag.setdefault(tag, []).append(person["id"])
    print(len(by_tag), sum(len(ids) for ids in by_tag.values()))
    for _ in range(2):
        print(sum(person["place"]["x"] > 0.5 for person in people))
        for person in people:
            person["tags"].append(person["id"] % 7)
    people.sort(key=lambda person: person["name"])
    print([person["id"] for person in people[:: count // 10]])


main()
