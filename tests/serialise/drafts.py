"""A file taken apart, to be changed and put together again with digests that are right, as a forger would do it."""

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

from .containers import forged


class Draft:
    """A file taken apart, to be changed and put together again."""

    def __init__(self, data: bytes) -> None:
        (length,) = struct.unpack("<Q", data[:8])
        self.header: dict[str, Any] = json.loads(data[8 : 8 + length])
        self.data = bytearray(data[8 + length :])
        own = self.header["__metadata__"]["sharedtree"]
        self.is_spilled = own == "tensor"
        if self.is_spilled:
            start, stop = self.header["sharedtree.manifest"]["data_offsets"]
            own = self.data[start:stop].decode()
            del self.data[start:]
        self.manifest: Any = json.loads(own)
        self.manifest_text: str | None = None  # in place of the manifest, if it is set
        self.edit_text: Callable[[str], str] = lambda text: text

    @property
    def tensors(self) -> dict[str, Any]:
        return {
            name: entry for name, entry in self.header.items() if name not in ("__metadata__", "sharedtree.manifest")
        }

    def file(self, *, with_digests: bool) -> bytes:
        """The bytes, the header's digest being right; those of the data too if asked for."""
        text = self.manifest_text
        text = json.dumps(self.manifest, separators=(",", ":")) if text is None else text
        data = bytes(self.data)
        if self.is_spilled:
            raw = text.encode("utf-8", "replace")
            start = len(data)
            self.header["sharedtree.manifest"] = {
                "dtype": "U8",
                "shape": [len(raw)],
                "data_offsets": [start, start + len(raw)],
            }
            data += raw
        metadata = self.header.get("__metadata__")
        if isinstance(metadata, dict):
            if not self.is_spilled:
                metadata["sharedtree"] = text
            if with_digests or self.is_spilled:
                metadata["sharedtree.digests"] = digests_of(self.header, data)
        return forged(self.edit_text(json.dumps(self.header, separators=(",", ":"))), data)


def digests_of(header: dict[str, Any], data: bytes) -> str:
    digests = ""
    for name, entry in header.items():
        try:
            start, stop = entry["data_offsets"]
            if name != "__metadata__" and 0 <= start < stop <= len(data):
                digests += f"{zlib.crc32(data[start:stop]):08x}"
        except (TypeError, ValueError, KeyError):
            continue
    return digests
