"""Many small objects that refer to each other, and a collector that goes through all of them."""

import gc
import random
import sys


class Node:
    __slots__ = ("next", "other", "number")

    def __init__(self, number, next):
        self.number = number
        self.next = next
        self.other = None


def main():
    count, rounds = int(sys.argv[1]), int(sys.argv[2])
    gc.disable()
    rng = random.Random(13)
    nodes, last = [], None
    for number in range(count):
        last = Node(number, last)
        nodes.append(last)
    for node in nodes:
        node.other = nodes[rng.randrange(count)]
    collected = 0
    for _ in range(rounds):
        # Some die, in cycles with each other, and others take their places.
        for _ in range(count // 50):
            first = Node(0, None)
            first.next = Node(1, first)
            at = rng.randrange(count)
            nodes[at].other = nodes[rng.randrange(count)]
        collected += gc.collect()
    total, node = 0, last
    while node is not None:
        total += node.other.number & 7
        node = node.next
    print(count, collected, total)


main()
