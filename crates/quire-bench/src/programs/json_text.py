"""Text to objects and back, the way a service does it: much is allocated, little is kept."""

import json
import random
import sys


def main():
    rng = random.Random(7)
    document = json.dumps(
        [
            {"id": i, "name": f"item {rng.randrange(10**6)}", "values": [rng.random() for _ in range(20)]}
            for i in range(20000)
        ]
    )
    total = 0
    for _ in range(int(sys.argv[1])):
        total += len(json.dumps(json.loads(document)))
    print(total)


main()
