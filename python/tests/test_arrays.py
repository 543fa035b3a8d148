"""Arrays over files and over nothing, against numpy's own."""

import gc
import os
import weakref

import numpy as np
import pytest
import quire
from numpy.testing import assert_array_equal


def test_an_array_of_twice_the_memory_has_what_was_written(memory, rng):
    values = rng.random((2048, 1024))
    array = quire.empty(values.shape, memory=memory)
    array[...] = values
    assert_array_equal(array, values)
    assert array.sum() == values.sum()
    stats = memory.stats()
    assert stats["held_max"] <= stats["limit"] == 8 << 20
    assert stats["pswpout"] > 0


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f8", ">i2", "S7", "M8[s]", [("a", "i4"), ("b", "f8", (2,))], "?", "c16"])
def test_every_type_and_order_is_as_numpys(memory, dtype, order):
    ours, theirs = (make((5, 3), dtype, order) for make in (lambda *a: quire.zeros(*a, memory=memory), np.zeros))
    assert (ours.dtype, ours.shape, ours.strides) == (theirs.dtype, theirs.shape, theirs.strides)
    assert_array_equal(ours, theirs)


def test_full_and_array_are_as_numpys(memory):
    assert_array_equal(quire.full((3, 2), 7, memory=memory), np.full((3, 2), 7))
    given = np.asfortranarray(np.arange(12).reshape(3, 4))
    copy = quire.array(given, memory=memory)
    assert_array_equal(copy, given)
    assert copy.strides == given.strides and copy.dtype == given.dtype
    assert quire.array([[1, 2], [3, 4]], "f4", memory=memory).dtype == np.float32


def test_arrays_without_items_are_there(memory, tmp_path):
    assert quire.zeros((0, 3), memory=memory).shape == (0, 3)
    assert quire.open(tmp_path / "none", "w+", "f8", (0,), memory=memory).size == 0
    quire.zeros((0, 3), memory=memory).flush()
    quire.zeros((0, 3), memory=memory).prefetch()
    quire.zeros((5, 3), memory=memory)[5:].prefetch()


def test_what_is_written_reaches_the_file(memory, tmp_path):
    path = tmp_path / "written"
    array = quire.open(path, "w+", "i4", (1000, 1000), memory=memory)
    array[...] = np.arange(1_000_000).reshape(1000, 1000)
    array.flush()
    assert_array_equal(np.fromfile(path, "i4"), np.arange(1_000_000))
    array[500] = -1
    del array
    gc.collect()
    assert (np.fromfile(path, "i4").reshape(1000, 1000)[500] == -1).all()


def test_a_copy_on_write_leaves_the_file(memory, numbers):
    path, values = numbers
    array = quire.open(path, "c", "f8", values.shape, memory=memory)
    array *= 2
    assert_array_equal(array, values * 2)
    assert_array_equal(np.fromfile(path).reshape(values.shape), values)


def test_a_read_only_array_refuses_writes(memory, numbers):
    path, values = numbers
    array = quire.open(path, "r", "f8", values.shape, memory=memory)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert_array_equal(array, values)


def test_offsets_need_no_alignment(memory, numbers):
    path, values = numbers
    array = quire.open(path, "r", "u1", (10_000,), 4099, memory=memory)
    assert_array_equal(array, np.frombuffer(values.tobytes()[4099:14_099], "u1"))


def test_views_keep_the_memory_alive(memory, numbers):
    path, values = numbers
    view = quire.open(path, "r", "f8", values.shape, memory=memory)[10:20, ::3]
    gc.collect()
    assert_array_equal(view, values[10:20, ::3])
    with pytest.raises(BufferError, match="1 arrays"):
        memory.close()
    plain = np.asarray(view)
    del view
    gc.collect()
    assert_array_equal(plain, values[10:20, ::3])
    del plain
    memory.close()
    memory.close()
    assert memory.closed and "closed" in repr(memory)
    with pytest.raises(ValueError, match="closed"):
        quire.zeros(3, memory=memory)


def test_a_block_closes_its_memory_and_an_arrays_block_flushes(tmp_path):
    with quire.Memory("4M") as memory:
        with quire.open(tmp_path / "f", "w+", "u1", (5,), memory=memory) as array:
            array[:] = 7
        assert (tmp_path / "f").read_bytes() == b"\7" * 5
        del array
    assert memory.closed


def test_arrays_and_memories_take_weak_references(memory):
    array = quire.zeros(3, memory=memory)
    assert weakref.ref(array)() is array and weakref.ref(memory)() is memory


def test_evict_and_prefetch(memory, numbers):
    path, values = numbers
    array = quire.open(path, "r", "f8", values.shape, memory=memory)[:256]
    array.prefetch()
    assert array.stats()["mapped"] >= array.nbytes
    faults = memory.stats()["pgfault"]
    assert_array_equal(array, values[:256])
    assert memory.stats()["pgfault"] == faults
    assert array.evict() >= array.nbytes - 2 * 4096
    assert array.stats()["mapped"] <= 2 * 4096
    assert_array_equal(array, values[:256])


@pytest.mark.parametrize("rows", [[5], [7, 3, 3, -1], slice(None, None, 7), np.arange(0)])
@pytest.mark.parametrize("view", [np.s_[:], np.s_[::-1], np.s_[100:1000, 10:20], np.s_[5::2, ::-1]])
def test_rows_that_were_prefetched_need_no_fault(memory, numbers, rows, view):
    path, values = numbers
    array = quire.open(path, "r", "f8", values.shape, memory=memory)[view]
    array.advise("random")
    rows = np.arange(len(array))[:200][rows] if isinstance(rows, slice) else np.asarray(rows, int)
    array.prefetch(rows)
    faults = memory.stats()["pgfault"]
    gathered = array[rows]
    assert memory.stats()["pgfault"] == faults
    assert_array_equal(gathered, values[view][rows])


def test_rows_that_there_are_not_are_refused(memory, numbers):
    path, values = numbers
    array = quire.open(path, "r", "f8", values.shape, memory=memory)
    with pytest.raises(IndexError, match="2048"):
        array.prefetch([2048])
    with pytest.raises(TypeError, match="integers"):
        array.prefetch([0.5])
    with pytest.raises(IndexError):
        array[0, 0:1].reshape(()).prefetch([0])


def test_a_pin_keeps_an_array_in_memory(memory, numbers):
    path, values = numbers
    array = quire.open(path, "r", "f8", values.shape, memory=memory)
    with array[:200].pin():
        assert memory.stats()["pinned"] >= array[:200].nbytes
        assert_array_equal(array, values)
        faults = memory.stats()["pgfault"]
        assert_array_equal(array[:200], values[:200])
        assert memory.stats()["pgfault"] == faults
    assert memory.stats()["pinned"] == 0
    with pytest.raises(quire.Error, match="pin"):
        array.pin()
    with pytest.raises(ValueError, match="read"):
        array[:1].pin(write=True)


def test_try_read_is_a_copy(memory, numbers):
    path, values = numbers
    array = quire.open(path, "r", "f8", values.shape, memory=memory)[20:0:-3, ::7]
    copy = array.try_read()
    assert type(copy) is np.ndarray
    assert_array_equal(copy, values[20:0:-3, ::7])


def test_stats_are_a_dict_and_readable(memory):
    array = quire.zeros(1000, memory=memory)
    array[:] = 1
    stats = array.stats()
    assert stats["nbytes"] == 8000 and stats["mapped"] >= 8000
    assert "7.812 KiB" in repr(stats)
    assert "8 MiB" in repr(memory) and "limit" in repr(memory.stats())


def test_a_copy_has_no_file(memory):
    copy = quire.zeros(3, memory=memory) + 1
    assert type(copy) is np.ndarray
    copied = quire.zeros(3, memory=memory).copy()
    copied.flush()
    with pytest.raises(ValueError, match="copy"):
        copied.evict()


def test_system_calls_take_arrays(memory, numbers, tmp_path):
    path, values = numbers
    array = quire.open(path, "r", "f8", values.shape, memory=memory)
    array.tofile(tmp_path / "copy")
    assert_array_equal(np.fromfile(tmp_path / "copy").reshape(values.shape), values)
    into = quire.empty(values.shape, memory=memory)
    with open(path, "rb") as file:
        assert file.readinto(into.data.cast("B")) == values.nbytes
    assert_array_equal(into, values)


def test_inline_delivery_serves_system_calls_of_what_is_pinned(numbers, tmp_path):
    path, values = numbers
    memory = quire.Memory("8M", delivery="inline")
    assert not memory.serves_system_calls
    array = quire.open(path, "r", "f8", values.shape, memory=memory)
    assert_array_equal(array, values)
    array.evict()
    array.tofile(tmp_path / "copy")
    assert_array_equal(np.fromfile(tmp_path / "copy").reshape(values.shape), values)
    array.evict()
    with open(os.devnull, "wb", buffering=0) as null, array[:100].pin():
        assert null.write(array[:100]) == array[:100].nbytes


def test_dlpack_shares_the_bytes(memory):
    array = quire.zeros((3, 4), memory=memory)
    other = np.from_dlpack(array)
    array[1, 2] = 5
    assert other[1, 2] == 5


def test_archives_are_arrays_of_what_was_packed(memory, numbers, quire_command):
    path, values = numbers
    quire_command("pack", path, "-o", f"{path}.zst")
    array = quire.open(f"{path}.zst", "r", "f8", values.shape, memory=memory)
    assert_array_equal(array, values)


class TestRefusals:
    def test_types(self, memory):
        with pytest.raises(TypeError, match="objects"):
            quire.zeros(3, object, memory=memory)
        with pytest.raises(TypeError, match="size"):
            quire.zeros(3, "S0", memory=memory)
        with pytest.raises(TypeError):
            quire.zeros(3, "no type", memory=memory)

    @pytest.mark.parametrize("shape", [(-1,), (1 << 62, 1 << 62), (1 << 61,)])
    def test_shapes(self, memory, shape):
        with pytest.raises((ValueError, quire.Error)):
            quire.zeros(shape, memory=memory)

    def test_files_that_are_too_short(self, memory, tmp_path):
        path = tmp_path / "short"
        path.write_bytes(b"12345")
        with pytest.raises(ValueError, match="short.*8000 bytes are wanted.*there are 5"):
            quire.open(path, "r", "f8", (1000,), memory=memory)
        with pytest.raises(ValueError, match="multiple of the data-type size"):
            quire.open(path, "r", "f8", memory=memory)
        with pytest.raises(ValueError, match="before the file"):
            quire.open(path, "r", "u1", offset=-1, memory=memory)

    def test_files_that_are_none(self, memory, tmp_path):
        with pytest.raises(FileNotFoundError, match="nothing"):
            quire.open(tmp_path / "nothing", memory=memory)
        with pytest.raises(IsADirectoryError):
            quire.open(tmp_path, memory=memory)
        with pytest.raises(OSError, match="/dev/null"):
            quire.open("/dev/null", memory=memory)

    def test_modes(self, memory, tmp_path):
        with pytest.raises(ValueError, match="mode must be one of"):
            quire.open(tmp_path, "x", memory=memory)
        with pytest.raises(ValueError, match="shape must be given"):
            quire.open(tmp_path / "f", "w+", memory=memory)
        with pytest.raises(ValueError, match="can only be read"):
            quire.open("https://localhost/x", "r+", memory=memory)

    @pytest.mark.parametrize("limit", [0, "4K", "much", -1, 1 << 60])
    def test_limits(self, limit):
        with pytest.raises(ValueError):
            quire.Memory(limit)

    def test_other_arguments(self, tmp_path):
        with pytest.raises(TypeError, match="size"):
            quire.Memory(None)
        with pytest.raises(ValueError, match="delivery"):
            quire.Memory("8M", delivery="by post")
        with pytest.raises(OSError, match="nothing"):
            quire.Memory("8M", swap=tmp_path / "nothing")
        with pytest.raises(OSError, match="swap file"):
            quire.Memory("8M", swap=tmp_path, swap_max=1)


def test_a_default_memory_is_replaced_only_while_nothing_is_under_it():
    first = quire.set_limit("8M")
    assert quire.default_memory() is first
    array = quire.zeros(3)
    assert array.memory is first
    with pytest.raises(quire.Error, match="1 arrays"):
        quire.set_limit("16M")
    del array
    assert quire.set_limit("16M").limit == 16 << 20
    assert first.closed
