"""Pickles, forks, threads, and what a process leaves behind."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import quire
from numpy.testing import assert_array_equal


def run(program, *args, **more):
    """Runs a program of Python in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)


def total(array):
    return float(array.sum())


@pytest.mark.parametrize("view", [np.s_[:], np.s_[5:50, ::-3], np.s_[::-1], np.s_[7], np.s_[3:3]])
def test_an_array_of_a_file_is_pickled_as_its_name(memory, numbers, view):
    path, values = numbers
    array = quire.open(path, "r", "f8", values.shape, memory=memory)[view]
    sent = pickle.dumps(array)
    assert len(sent) < 1000
    back = pickle.loads(sent)
    assert type(back) is type(array) and back.strides == array.strides
    assert_array_equal(back, values[view])
    assert back.size == 0 or not back.flags.writeable


def test_other_arrays_are_pickled_by_value(memory, numbers):
    path, values = numbers
    for array in (quire.open(path, "c", "f8", values.shape, memory=memory), quire.array(values, memory=memory)):
        array[0, 0] = 5
        back = pickle.loads(pickle.dumps(array))
        assert type(back) is np.ndarray
        assert_array_equal(back, array)
    with pytest.warns(UserWarning, match="are pickled"):
        pickle.dumps(quire.zeros((65 << 20,), "u1", memory=memory))


def test_a_pickled_array_of_a_file_that_was_cut_is_refused(memory, numbers):
    path, values = numbers
    sent = pickle.dumps(quire.open(path, "r", "f8", values.shape, memory=memory))
    os.truncate(path, 4096)
    with pytest.raises(ValueError, match="there are 4096"):
        pickle.loads(sent)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        pickle.loads(sent)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_of_every_method_have_arrays_of_files(memory, numbers, method):
    path, values = numbers
    array = quire.open(path, "r", "f8", values.shape, memory=memory)
    with multiprocessing.get_context(method).Pool(2) as pool:
        sums = pool.map(total, [array[:1000], array[1000:]])
    assert sums == [values[:1000].sum(), values[1000:].sum()]


def in_child(look):
    """What `look` returns, or raises, in a child by fork; the signal that ended it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            said = repr(look())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        with os.fdopen(writing, "w") as file:
            file.write(said)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    return said or signal.Signals(os.WTERMSIG(status)).name


def test_a_forks_child_has_files_that_are_read_where_they_were(memory, numbers):
    path, values = numbers
    array = quire.open(path, "r", "f8", (1000, 1024), 4104, memory=memory)
    wanted = float(values.ravel()[513 : 513 + 1_024_000].sum())

    def look():
        address = array.__array_interface__["data"][0]
        return float(np.asarray(array).sum()), address, len(pickle.dumps(array)) < 1000, in_child(lambda: total(array))

    said = in_child(look)
    assert said == repr((wanted, array.__array_interface__["data"][0], True, repr(wanted)))
    assert total(array) == wanted


TOUCHES = {
    "item": lambda a: a[0],
    "write": lambda a: a.__setitem__(0, 1),
    "iterate": lambda a: list(a),
    "print": str,
    "sum": lambda a: a.sum(),
    "ufunc": lambda a: np.add(1, a),
    "operator": lambda a: 1 + a,
    "out": lambda a: np.add(1, 2, out=a),
    "function": lambda a: np.concatenate([a, a]),
    "copy": lambda a: a.copy(),
    "tobytes": lambda a: a.tobytes(),
    "pickle": pickle.dumps,
    "flush": lambda a: a.flush(),
    "view": lambda a: a[1:].sum(),
}


@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("kind", ["anonymous", "r+", "c"])
def test_what_a_forks_child_does_not_have_raises(memory, tmp_path, touch, kind):
    if kind == "anonymous":
        array = quire.full(5000, 7.0, memory=memory)
    else:
        np.full(5000, 7.0).tofile(tmp_path / "f")
        array = quire.open(tmp_path / "f", kind, "f8", memory=memory)
        array[0] = 7
    assert "before a fork" in in_child(lambda: TOUCHES[touch](array))
    assert (array == 7).all()


def test_a_forks_child_makes_arrays_of_its_own(memory, tmp_path):
    quire.set_limit("8M")
    inherited = quire.full(1000, 7.0)

    def look():
        array = quire.full((2048, 1024), 1.5)
        written = quire.open(tmp_path / "child", "w+", "f8", (1000,))
        written[:] = 3
        written.flush()
        return float(array.sum()), quire.default_memory().limit > 0

    assert in_child(look) == repr((1.5 * 2048 * 1024, True))
    assert (np.fromfile(tmp_path / "child") == 3).all()
    with_memory = in_child(lambda: quire.zeros(3, memory=memory))
    assert "before a fork" in with_memory
    assert (inherited == 7).all()


def test_what_was_written_is_in_the_file_when_the_process_ends(tmp_path):
    for end in ("", "sys.exit(0)", "raise ValueError"):
        path = tmp_path / "written"
        path.unlink(missing_ok=True)
        run(
            f"""
            import sys, quire
            array = quire.open(sys.argv[1], "w+", "i4", (100_000,))
            array[:] = 5
            {end}
            """,
            path,
        )
        assert (np.fromfile(path, "i4") == 5).all() and path.stat().st_size == 400_000


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_what_a_worker_wrote_is_in_the_file(tmp_path, method):
    process = multiprocessing.get_context(method).Process(target=write_fives, args=(tmp_path / "worker",))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (np.fromfile(tmp_path / "worker", "i4") == 5).all()


def write_fives(path):
    global kept
    kept = quire.open(path, "w+", "i4", (100_000,), memory=quire.Memory("4M"))
    kept[:] = 5


def test_threads_fault_in_parallel(memory, numbers):
    path, values = numbers
    array = quire.open(path, "r", "f8", values.shape, memory=memory)

    def look(seed):
        rows = np.random.default_rng(seed).integers(0, len(values), 300)
        return all((array[row] == values[row]).all() for row in rows)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(look, range(16)))


def test_calls_that_wait_let_other_threads_run(memory, numbers):
    path, values = numbers
    array = quire.open(path, "r", "f8", values.shape, memory=memory)
    end, turns = threading.Event(), []

    def count():
        while not end.is_set():
            turns.append(None)

    thread = threading.Thread(target=count)
    thread.start()
    for _ in range(5):
        array.evict()
        before = len(turns)
        array.prefetch()
        assert len(turns) > before
    end.set()
    thread.join()


@pytest.mark.parametrize("delivery", ["handlers", "inline"])
def test_an_access_that_fails_says_which_file_and_where(tmp_path, delivery):
    path = tmp_path / "cut"
    np.arange(100_000.0).tofile(path)
    ended = run(
        """
        import os, sys, quire
        array = quire.open(sys.argv[1], "r", "f8", memory=quire.Memory("4M", delivery=sys.argv[2]))
        os.truncate(sys.argv[1], 8192)
        try:
            array[-1:].prefetch()
        except OSError as error:
            print(error)
        array[50_000]
        """,
        path,
        delivery,
    )
    assert ended.returncode == -signal.SIGBUS
    assert str(path) in ended.stdout
    assert f"{path}: the page at offset 400000" in ended.stderr


def test_ctrl_c_ends_a_call_that_waits():
    ended = run(
        """
        import http.server, os, signal, threading, quire

        # A shell's background jobs ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        class Silent(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.send_response(200)
                self.send_header("Content-Length", "1000000")
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("ETag", '"1"')
                self.end_headers()

            def do_GET(self):
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                threading.Event().wait()

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        array = quire.open(f"http://127.0.0.1:{server.server_port}/x", memory=quire.Memory("4M"))
        try:
            array.prefetch()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        os._exit(0)
        """
    )
    assert ended.stdout == "interrupted\n", ended


def test_the_package_loads_without_numpy():
    ended = run(
        """
        import sys
        sys.modules["numpy"] = None
        import quire
        made = quire.buffer((3, 4), "d", memory=quire.Memory("4M"))
        view = memoryview(made)
        view[1, 2] = 1.5
        assert view.tolist()[1] == [0, 0, 1.5, 0] and made.strides == (32, 8)
        try:
            made.close()
        except BufferError as error:
            print(error)
        view.release()
        made.close()
        try:
            quire.zeros(3)
        except ImportError as error:
            print(error)
        """
    )
    assert ended.returncode == 0, ended.stderr
    assert "1 views" in ended.stdout and "numpy" in ended.stdout


def test_the_import_takes_no_numpy():
    ended = run("import sys, quire; assert 'numpy' not in sys.modules")
    assert ended.returncode == 0, ended.stderr
