"""Sorts an array of four times the memory that it may take, by numpy's own sort.

python examples/python/sort.py [MEMORY, 64M by default]
"""

import sys

import numpy as np
import quire

memory = quire.set_limit(sys.argv[1] if len(sys.argv) > 1 else "64M")
numbers = quire.empty(4 * memory.limit // 8)
random = np.random.default_rng(1)
for part in np.array_split(numbers, 64):
    part[:] = random.random(part.size)

with quire.progress():
    numbers.sort()

parts = np.array_split(numbers, 64)
assert all((part[:-1] <= part[1:]).all() for part in parts)
assert all(before[-1] <= after[0] for before, after in zip(parts, parts[1:], strict=False))
print(f"{numbers.size} numbers, {numbers.nbytes >> 20} MiB, sorted in {memory.stats()['held_max'] >> 20} MiB")
