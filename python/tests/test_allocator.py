"""numpy's own arrays under a limit, and programs that we did not write on ours."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import quire
from numpy.testing import assert_array_equal


@pytest.fixture
def adopted(memory):
    quire.adopt_numpy(memory)
    yield memory
    quire.release_numpy()


def test_numpys_arrays_are_under_the_limit(adopted, rng):
    before = adopted.stats()["pgfault"]
    values = np.arange(4_000_000.0)
    assert values.sum() == 4_000_000 * 3_999_999 / 2
    assert_array_equal(np.sort(values[::-1]), values)
    stats = adopted.stats()
    assert stats["pgfault"] > before and stats["held_max"] <= stats["limit"]


def test_arrays_outlive_the_adoption_and_grow(memory):
    quire.adopt_numpy(memory)
    made = np.ones(1_000_000)
    grown = np.fromiter((i for i in range(1_500_000)), "i8")
    quire.release_numpy()
    grown.resize(2_000_000, refcheck=False)
    assert made.sum() == 1_000_000
    assert grown.sum() == 1_500_000 * 1_499_999 // 2
    made.resize(10, refcheck=False)
    assert made.sum() == 10
    with pytest.raises(BufferError):
        memory.close()


def test_zeros_are_zeros_in_memory_that_was_used(adopted):
    for _ in range(20):
        array = np.zeros(500_000)
        assert not array.any()
        array[:] = 1


def run(program, *args):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, args)], capture_output=True, text=True, timeout=300
    )


#: Mebibytes, and rows of 4 MiB.
SIZES = [(64, 256), pytest.param(512, 2048, marks=pytest.mark.skipif("QUIRE_LONG" not in os.environ, reason="it is long"))]


@pytest.mark.parametrize(("limit", "rows"), SIZES)
def test_an_array_of_sixteen_times_the_limit_is_right(tmp_path, limit, rows):
    ended = run(
        """
        import resource, sys
        import numpy as np, quire
        memory = quire.set_limit(int(sys.argv[2]) << 20, swap=sys.argv[1])
        array = quire.empty((int(sys.argv[3]), 1 << 19))
        rng = np.random.default_rng(1)
        wanted = 0.0
        for row in array:
            values = rng.random(row.shape)
            row[:] = values
            wanted += values.sum()
        assert sum(row.sum() for row in array) == wanted
        stats = memory.stats()
        assert stats["held_max"] <= stats["limit"]
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        """,
        tmp_path,
        limit,
        rows,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < limit + 150


def test_scikit_learn_takes_an_array(memory, rng):
    cluster = pytest.importorskip("sklearn.cluster")
    points = quire.array(rng.random((20_000, 32)), memory=quire.Memory("4M"))
    fit = cluster.MiniBatchKMeans(4, random_state=1, n_init=1).fit(points)
    bare = cluster.MiniBatchKMeans(4, random_state=1, n_init=1).fit(np.asarray(points).copy())
    assert_array_equal(fit.cluster_centers_, bare.cluster_centers_)


def test_scipy_takes_an_array(rng):
    linalg = pytest.importorskip("scipy.linalg")
    matrix = quire.array(rng.random((300, 300)), memory=quire.Memory("1M"))
    assert_array_equal(linalg.svdvals(matrix), linalg.svdvals(np.asarray(matrix).copy()))


def test_pandas_takes_an_array_without_a_copy(memory, rng):
    pandas = pytest.importorskip("pandas")
    array = quire.array(rng.random((1000, 3)), memory=memory)
    frame = pandas.DataFrame(array, columns=list("abc"), copy=False)
    assert np.shares_memory(frame.to_numpy(), array)
    assert frame["b"].sum() == pandas.Series(np.asarray(array)[:, 1].copy()).sum()


def test_joblib_and_dask_pass_arrays_cheaply(memory, numbers):
    joblib = pytest.importorskip("joblib")
    path, values = numbers
    array = quire.open(path, "r", "f8", values.shape, memory=memory)
    sums = joblib.Parallel(2)(joblib.delayed(np.sum)(part) for part in (array[:1000], array[1000:]))
    assert sums == [values[:1000].sum(), values[1000:].sum()]
    dask = pytest.importorskip("dask.array")
    lazy = dask.from_array(array, chunks=(512, 1024))
    assert np.isclose(lazy.sum().compute(), values.sum())
