"""Does one thing with an array of random numbers in a file: by numpy in plain memory, numpy.memmap, or quire.

arrays.py WAY WHAT FILE BYTES LIMIT
"""

import os
import sys
import time

import numpy as np

COLUMNS = 1024
GATHERED = 4096


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


def timed(name, work):
    started = time.perf_counter()
    result = work()
    print(f'{{"phase": "{name}", "seconds": {time.perf_counter() - started:.6f}}}')
    return result


def main():
    way, what, path, count, limit = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    ahead, way = way == "quire-prefetch", way.split("-")[0]
    shape = (count // 8 // COLUMNS, COLUMNS)
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
        again = array.sum
    elif what == "dot":
        vector = random.random(COLUMNS)
        again = lambda: array @ vector
    elif what == "sort":
        again = array.reshape(-1).sort
    elif what == "fancy":
        at = random.integers(0, array.size, GATHERED)
        flat = array.reshape(-1)
        again = lambda: flat[at]
    else:
        batches = random.integers(0, len(array), (GATHERED // 64, 64))

        def again():
            for rows in batches:
                if ahead:
                    array.prefetch(rows)
                array[rows]

    again()
    # With what it takes to open it; plain memory reads all of the file there.
    print(f'{{"phase": "first", "seconds": {time.perf_counter() - started:.6f}}}')
    if what != "sort":
        timed("later", again)
    if way == "quire":
        stats = array.stats()
        held = array.memory.stats()["held_max"]
        assert held <= limit and stats["cached"] <= limit
        print(f'{{"figure": "held", "MiB": {held / (1 << 20):.3f}}}')


main()
