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
        # Few for each page, as nearly each of them is a fault where half of the pages are gone.
        picked = rng.integers(0, count, count // 256)
        total = 0.0
        for _ in range(3):
            total += float(numbers[picked].sum())
        print(total)


main()
