"""Finds the nearest neighbours of some vectors in a file of many, which is mapped in little memory.

python examples/python/neighbours.py [MEMORY, 64M by default]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import quire

memory = quire.set_limit(sys.argv[1] if len(sys.argv) > 1 else "64M")
folder = tempfile.TemporaryDirectory(dir="/var/tmp")
path = Path(folder.name, "vectors.f4")
shape = (4 * memory.limit // (4 * 96), 96)
random = np.random.default_rng(1)

vectors = quire.open(path, "w+", "f4", shape)
for part in np.array_split(vectors, 64):
    part[:] = random.standard_normal(part.shape)
wanted = random.integers(0, len(vectors), 10)
queries = vectors[wanted] + np.float32(0.01)
del vectors, part

vectors = quire.open(path, "r", "f4", shape)
vectors.advise("sequential")
nearest, distance = np.zeros(10, int), np.full(10, np.inf)
block = max(memory.limit // 16 // vectors.strides[0], 1)
for first in range(0, len(vectors), block):
    # The next block is read while this one is looked at.
    vectors[first + block : first + 2 * block].prefetch(wait=False)
    part = vectors[first : first + block]
    distances = (part * part).sum(axis=1) - 2 * queries @ part.T
    best = distances.argmin(axis=1)
    closer = distances[np.arange(10), best] < distance
    nearest[closer], distance[closer] = first + best[closer], distances[np.arange(10), best][closer]

assert (nearest == wanted).all()
# The rows themselves, many reads at once.
vectors.prefetch(nearest)
print(f"rows {nearest} of {len(vectors)} in {memory.stats()['held_max'] >> 20} MiB; the first begins {vectors[nearest[0], :3]}")
