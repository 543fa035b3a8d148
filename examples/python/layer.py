"""Loads one layer of a large safetensors file: nothing else of it is read.

python examples/python/layer.py [FILE NAME]
"""

import json
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np
import quire

memory = quire.set_limit("16M")
if len(sys.argv) > 2:
    path, name = Path(sys.argv[1]), sys.argv[2]
else:
    # A file as models come in: 32 layers of 4 MiB.
    folder = tempfile.TemporaryDirectory(dir="/var/tmp")
    path, name = Path(folder.name, "model.safetensors"), "layers.7.weight"
    size = 4 << 20
    header = {
        f"layers.{n}.weight": {"dtype": "F32", "shape": [1024, 1024], "data_offsets": [n * size, (n + 1) * size]}
        for n in range(32)
    }
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for n in range(32):
            file.write(np.full(1 << 20, n, "<f4").tobytes())

with quire.load_safetensors(path) as model:
    layer = model[name]
    print(f"{name}: {layer.shape} {layer.dtype}, mean {layer.mean()}")
    read = memory.stats()["pgpgin"] << 12
    print(f"{read >> 20} MiB of {path.stat().st_size >> 20} read, {memory.stats()['held_max'] >> 20} held")
