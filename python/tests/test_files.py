"""numpy's files and safetensors, good and bad."""

import http.server
import io
import json
import random
import struct
import threading
import zipfile

import numpy as np
import pytest
import quire
from numpy.testing import assert_array_equal

KINDS = ["f8", ">i2", "S7", [("a", "i4"), ("b", "f8", (2,))], "?"]


def fuzzed(good, times=400):
    """A file with bytes changed, cut and inserted, again and again by the same chance."""
    chance = random.Random(1)
    for _ in range(times):
        bad = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(bad) + 1)
            bad[at : at + chance.choice((0, 1, 1, 8))] = chance.randbytes(chance.choice((0, 1, 1, 8)))
        yield bytes(bad[: chance.choice((len(bad), chance.randrange(len(bad) + 1)))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_npy_file_is_what_numpy_saved(memory, tmp_path, kind, order):
    values = np.zeros((3, 5), kind, order)
    values.view(np.uint8 if order == "C" else values.dtype).flat[: values.size] = np.ones(1, values.dtype).view(
        np.uint8 if order == "C" else values.dtype
    )[0]
    path = tmp_path / "a.npy"
    np.save(path, values)
    array = quire.load(path, memory=memory)
    assert array.dtype == values.dtype and array.strides == values.strides
    assert_array_equal(array, values)
    written = quire.load(path, "r+", memory=memory)
    written[...] = np.zeros(1, values.dtype)
    written.flush()
    assert_array_equal(np.load(path), np.zeros_like(values))


def test_npy_files_of_every_version_and_shape(memory, tmp_path):
    path = tmp_path / "a.npy"
    for values in (np.zeros(()), np.zeros((0, 3)), np.arange(3, dtype="<f4"), np.zeros(2, [("ä" * 9, "i4")])):
        for version in ((1, 0), (2, 0), (3, 0)):
            with open(path, "wb") as file:
                try:
                    np.lib.format.write_array(file, values, version)
                except UnicodeError:
                    continue
            assert_array_equal(quire.load(path, memory=memory), values)


def test_an_npz_file_is_its_stored_arrays(memory, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, one=np.arange(10), two=np.ones((100, 100)))
    with quire.load(path, memory=memory) as arrays:
        assert list(arrays) == arrays.files == ["one", "two"]
        assert_array_equal(arrays["two"], np.ones((100, 100)))
        one = arrays["one"]
        with pytest.raises(KeyError):
            arrays["three"]
    with pytest.raises(ValueError, match="closed"):
        arrays["one"]
    assert_array_equal(one, np.arange(10))
    np.savez_compressed(path, one=np.arange(10))
    with pytest.raises(ValueError, match="a.npz:one.*compressed"):
        quire.load(path, memory=memory)["one"]
    with pytest.raises(ValueError, match="only be read"):
        quire.load(path, "r+", memory=memory)


def test_a_packed_npy_file_is_an_array(memory, tmp_path, quire_command):
    path = tmp_path / "a.npy"
    values = np.arange(100_000.0)
    np.save(path, values)
    quire_command("pack", path, "-o", f"{path}.zst")
    assert_array_equal(quire.load(f"{path}.zst", memory=memory), values)


class Ranges(http.server.BaseHTTPRequestHandler):
    """Serves ranges of `body`."""

    body = b""

    def do_HEAD(self):
        self.answer(200, self.body, False)

    def do_GET(self):
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        self.answer(206, self.body[int(first) : int(last) + 1], True, f"bytes {first}-{last}/{len(self.body)}")

    def answer(self, status, body, has_body, of=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"1"')
        if of:
            self.send_header("Content-Range", of)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_an_object_of_a_server_is_an_array(memory, tmp_path, rng):
    values = rng.random((2000, 1000))
    np.save(tmp_path / "a.npy", values)
    Ranges.body = (tmp_path / "a.npy").read_bytes()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ranges) as server:
        threading.Thread(target=server.serve_forever).start()
        array = quire.load(f"http://127.0.0.1:{server.server_port}/a.npy", memory=memory)
        assert_array_equal(array, values)
        server.shutdown()


def test_a_file_is_a_buffer_without_numpys_types(memory, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(struct.pack("<7d", *range(7)))
    with quire.open_buffer(path, "r+", "d", (2, 3), offset=8, memory=memory) as made:
        with memoryview(made) as view:
            assert view.tolist() == [[1, 2, 3], [4, 5, 6]]
            view[1, 0] = 9
    assert struct.unpack("<7d", path.read_bytes()) == (0, 1, 2, 3, 9, 5, 6)
    for wrong in ({"shape": (8,)}, {"offset": 57}, {"offset": -1}, {"mode": "w"}, {"format": "no"}, {"order": "K"}):
        with pytest.raises(ValueError):
            quire.open_buffer(path, **{"mode": "r", "format": "d", **wrong}, memory=memory)


def test_arrays_of_objects_are_refused(memory, tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}, []], object), allow_pickle=True)
    with pytest.raises(ValueError, match="a.npy.*pickled"):
        quire.load(tmp_path / "a.npy", memory=memory)


def test_a_bad_npy_file_is_a_value_error_or_right(memory, tmp_path):
    path = tmp_path / "a.npy"
    good = io.BytesIO()
    np.save(good, np.arange(100.0).reshape(10, 10))
    for bad in fuzzed(good.getvalue()):
        path.write_bytes(bad)
        try:
            array = quire.load(path, memory=memory)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert array.tobytes() == np.load(path).tobytes()


def test_a_bad_npz_file_is_a_value_error(memory, tmp_path):
    path = tmp_path / "a.npz"
    good = io.BytesIO()
    np.savez(good, one=np.arange(10), two=np.ones(10))
    for bad in fuzzed(good.getvalue()):
        path.write_bytes(bad)
        try:
            for array in quire.load(path, memory=memory).values():
                array.tobytes()
        except (ValueError, zipfile.BadZipFile) as error:
            assert str(path) in str(error)


def safetensors(arrays, **more):
    """A safetensors file of arrays."""
    header, data = dict(more), b""
    for name, (kind, values) in arrays.items():
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_safetensors_are_arrays_by_name(memory, tmp_path, rng):
    path = tmp_path / "a.safetensors"
    weights, odd = rng.random((300, 200)).astype("f4"), np.arange(7, dtype="u1")
    empty, halves = np.zeros((0, 4)), np.arange(6, dtype="<u2").reshape(2, 3)
    arrays = {"odd": ("U8", odd), "w": ("F32", weights), "none": ("F64", empty), "b": ("BF16", halves)}
    path.write_bytes(safetensors(arrays, __metadata__={"format": "pt"}))
    tensors = quire.load_safetensors(path, memory=memory)
    assert list(tensors) == ["odd", "w", "none", "b"] and tensors.metadata == {"format": "pt"}
    assert_array_equal(tensors["w"], weights)
    assert_array_equal(tensors["odd"], odd)
    assert tensors["none"].shape == (0, 4)
    assert not tensors["w"].flags.writeable
    with pytest.raises(KeyError):
        tensors["x"]
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert_array_equal(tensors["b"], halves.view(bfloat16))


def test_safetensors_of_the_format_s_own_library_are_the_same(memory, tmp_path, rng):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    values = {"x": rng.random((50, 60)), "y": np.arange(5, dtype="i8")}
    save_file(values, tmp_path / "a.safetensors")
    tensors = quire.load_safetensors(tmp_path / "a.safetensors", memory=memory)
    assert set(tensors) == {"x", "y"}
    for name, array in tensors.items():
        assert_array_equal(array, values[name])


def test_types_that_numpy_does_not_have_are_refused(memory, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors({"x": ("F4", np.zeros(3, "u1"))}))
    with pytest.raises(TypeError, match="'x' has items of F4"):
        quire.load_safetensors(path, memory=memory)["x"]


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{x",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        safetensors({"x": ("F64", np.zeros(3))})[:-1],
        safetensors({}, x={"dtype": "U8", "shape": [-1], "data_offsets": [0, 0]}),
        safetensors({}, x={"dtype": "U8", "shape": [True], "data_offsets": [0, 0]}),
        safetensors({}, x={"dtype": "U8", "shape": [1 << 62, 8], "data_offsets": [0, 0]}),
        safetensors({}, x={"dtype": 8, "shape": [], "data_offsets": [0, 0]}),
        safetensors({}, x={"dtype": "U8", "shape": [], "data_offsets": [5, 2]}),
        safetensors({}, x=[]),
        safetensors({}, __metadata__=[]),
    ],
)
def test_bad_safetensors_are_value_errors(memory, tmp_path, bad):
    path = tmp_path / "a.safetensors"
    path.write_bytes(bad)
    with pytest.raises(ValueError, match="a.safetensors"):
        quire.load_safetensors(path, memory=memory)


def test_bad_safetensors_by_chance_are_value_errors(memory, tmp_path):
    path = tmp_path / "a.safetensors"
    for bad in fuzzed(safetensors({"x": ("F64", np.arange(10.0)), "y": ("U8", np.arange(3, dtype="u1"))})):
        path.write_bytes(bad)
        try:
            for array in quire.load_safetensors(path, memory=memory).values():
                array.tobytes()
        except (ValueError, TypeError) as error:
            assert str(path) in str(error)
