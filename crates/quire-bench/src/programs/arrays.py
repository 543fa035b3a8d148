"""Does one thing with an array of random numbers in a file: by numpy in plain memory, numpy.memmap, or quire.

arrays.py WAY WHAT FILE BYTES LIMIT
"""

import os
import sys
import time

import numpy as np

COLUMNS = 1024


def write(path, count):
    """Makes the file, unless it is there."""
    if os.path.exists(path) and os.path.getsize(path) == count:
        return
    random = np.random.default_rng(1)
    with open(path, "wb") as file:
        while file.tell() < count:
            random.random(min(1 << 20, (count - file.tell()) // 8)).tofile(file)


def forget(path):
    """Drops the file from the kernel's page cache, so that each way begins alike."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def opened(way, path, shape, mode="r"):
    if way == "numpy":
        return np.fromfile(path).reshape(shape)
    if way == "memmap":
        return np.memmap(path, "f8", mode, shape=shape)
    import quire

    return quire.open(path, mode, "f8", shape)


def took(work):
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def again(work):
    """The median of five times, or of as many as a second has room for."""
    times = [took(work)]
    while len(times) < 5 and sum(times) < 1:
        times.append(took(work))
    return sorted(times)[len(times) // 2]


def main():
    way, what, path, count, limit = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    ahead, way = way == "quire-prefetch", way.split("-")[0]
    shape = (count // 8 // COLUMNS, COLUMNS)
    gathered = limit >> 15
    write(path, count)
    if what == "sort":
        # What is sorted is a copy, so that the next one finds it unsorted.
        copy = f"{path}.sorted"
        with open(path, "rb") as source, open(copy, "wb") as into:
            while block := source.read(1 << 20):
                into.write(block)
        path = copy
    if way == "quire":
        import quire

        quire.set_limit(limit)
    forget(path)
    started = time.perf_counter()
    array = opened(way, path, shape, "r+" if what == "sort" else "r")
    random = np.random.default_rng(2)

    if what == "sum":
        work = array.sum
    elif what == "dot":
        vector = random.random(COLUMNS)
        work = lambda: array @ vector
    elif what == "sort":
        work = array.reshape(-1).sort
    elif what == "fancy":
        at = random.integers(0, array.size, gathered)
        flat = array.reshape(-1)
        work = lambda: flat[at]
    else:
        batches = random.integers(0, len(array), (gathered // 64, 64))

        def work():
            for rows in batches:
                if ahead:
                    array.prefetch(rows)
                array[rows]

    work()
    # With what it takes to open it; plain memory reads all of the file there.
    print(f'{{"phase": "first", "seconds": {time.perf_counter() - started:.6f}}}')
    if what != "sort":
        print(f'{{"phase": "later", "seconds": {again(work):.6f}}}')
    if way == "quire":
        stats = array.stats()
        held = array.memory.stats()["held_max"]
        assert held <= limit and stats["cached"] <= limit


main()
