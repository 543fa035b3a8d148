"""Finds the principal components of an array of four times the memory that it may take.

python examples/python/pca.py [MEMORY, 64M by default]
"""

import sys

import numpy as np
import quire

memory = quire.set_limit(sys.argv[1] if len(sys.argv) > 1 else "64M")
columns = 64
rows = 4 * memory.limit // (8 * columns)
random = np.random.default_rng(1)
directions = np.linalg.qr(random.standard_normal((columns, 3)))[0]

points = quire.empty((rows, columns))
for part in np.array_split(points, 64):
    part[:] = random.standard_normal((len(part), 3)) * [9, 6, 3] @ directions.T
    part += 0.1 * random.standard_normal(part.shape)

with quire.progress():
    mean = points.mean(axis=0)
    covariance = np.zeros((columns, columns))
    for part in np.array_split(points, 64):
        centred = part - mean
        covariance += centred.T @ centred
    variances, components = np.linalg.eigh(covariance / (rows - 1))

found = np.abs(np.sum(components[:, :-4:-1] * directions, axis=0))
assert (found > 0.99).all(), found
print(f"components of {points.nbytes >> 20} MiB have variances {np.round(variances[:-4:-1], 1)}")
