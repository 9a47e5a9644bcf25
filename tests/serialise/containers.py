"""Containers for tests: sources for arrays, and files forged by hand, byte by byte, without the code under test."""

import io
import json
import struct
import zlib

import jax
import numpy as np

from sharedtree.serialise.arrays._dtypes import tensor_source
from sharedtree.serialise.container._writing import write

START = b'{"__metadata__":{"sharedtree.header":"'


def sources(arrays):
    return [tensor_source(name, array) for name, array in arrays.items()]


def written(arrays, manifest="{}", metadata=None):
    """The bytes of a container of some arrays."""
    file = io.BytesIO()
    write(file, sources(arrays), manifest, metadata)
    return file.getvalue()


def split(data):
    """The header of a file as text, without padding, and the data."""
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + length].decode().rstrip(" "), data[8 + length :]


def forged(text, data=b"", align=64):
    """A file with any text for a header, whose own digest is right if the text begins as a container's does."""
    text = text.encode() if isinstance(text, str) else text
    text += b" " * (-(8 + len(text)) % align)
    raw = struct.pack("<Q", len(text)) + text
    if text.startswith(START):
        at = 8 + len(START)
        raw = raw[:at] + b"0" * 8 + raw[at + 8 :]
        raw = raw[:at] + b"%08x" % zlib.crc32(raw) + raw[at + 8 :]
    return raw + data


def header_text(tensors, data, metadata=None, **own):
    """A header as the format has it, for tensors {name: entry}; `own` overrides sharedtree's own keys."""
    digests = ""
    for entry in tensors.values():
        start, stop = entry["data_offsets"]
        digests += "".join(f"{zlib.crc32(data[i : min(i + 2**22, stop)]):08x}" for i in range(start, stop, 2**22))
    keys = {"sharedtree.header": "0" * 8, "sharedtree.digests": digests, "sharedtree": "{}"}
    keys |= {"sharedtree" + key: value for key, value in own.items()}
    entries = {"__metadata__": {key: value for key, value in keys.items() if value is not None} | (metadata or {})}
    return json.dumps(entries | tensors, separators=(",", ":"))


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def file_of(nodes=(), **changes):
    """The bytes of a file without data whose tree is the last of some nodes; `changes` are of keys of its manifest."""
    manifest = {"format": 1, "library": "x", "types": [], "arrays": [], "nodes": list(nodes)}
    manifest |= {"root": len(manifest["nodes"]) - 1, **changes}
    return forged(header_text({}, b"", **{"": json.dumps(manifest)}))


def naming(*atoms):
    """The bytes of a file that holds a tuple of values, such as `["class", "os:PathLike"]`."""
    return file_of([["tuple", list(atoms)]])


class Counting(io.RawIOBase):
    """A file that counts the bytes that are read from it, and the offsets."""

    def __init__(self, data):
        self._inner = io.BytesIO(data)
        self.num_read = 0
        self.touched = set()

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, *args):
        return self._inner.seek(*args)

    def tell(self):
        return self._inner.tell()

    def readinto(self, buffer):
        at = self._inner.tell()
        count = self._inner.readinto(buffer)
        self.num_read += count
        self.touched.add((at, at + count))
        return count


def is_of_jax(dtype):
    """Whether JAX has arrays of a dtype."""
    try:
        jax.device_put(np.zeros(1, dtype))
    except (TypeError, ValueError, jax.errors.JaxRuntimeError):
        return False
    return True
