"""Run by the interpreter case: CPython's own ways of using threads and processes."""

import multiprocessing
import subprocess
import sys
import threading
import zlib


def blocks(seed, count):
    return [bytes((seed + i) % 251 for i in range(64)) * (1 << 12) for _ in range(count)]


def digest(data):
    crc = 0
    for block in data:
        crc = zlib.crc32(block, crc)
    return crc


def in_pool(seed):
    return digest(blocks(seed, 80))


def main():
    data = blocks(1, 400)
    results = [None] * 4

    def work(index):
        results[index] = digest(blocks(index, 100))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(results)
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(in_pool, range(4)))
    program = "import sys; d = sys.stdin.buffer.read(); print(len(d), d[:3])"
    child = subprocess.run(
        [sys.executable, "-c", program], input=b"".join(data), capture_output=True, check=True
    )
    print(child.stdout)
    print(digest(data))


if __name__ == "__main__":
    main()
