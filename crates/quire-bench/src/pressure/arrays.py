"""An array of numbers: sorted, or gathered from in no order."""

import sys

import numpy


def main():
    what, count = sys.argv[1], int(sys.argv[2])
    rng = numpy.random.default_rng(17)
    numbers = rng.random(count)
    if what == "sort":
        numbers.sort()
        print(numbers[:: count // 10].tolist())
    else:
        picked = rng.integers(0, count, count // 4)
        total = 0.0
        for _ in range(3):
            total += float(numbers[picked].sum())
        print(total)


main()
