"""`save` and `to_bytes`: a DAG to a file, each shared node once."""

import functools
import io
import json
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from .._errors import UnserialisableError
from .._printable import printable
from .arrays._shards import on_host
from .container._durable import replacing
from .container._progress import ProgressOption, showing
from .container._writing import TensorSource, write
from .values._encoding import Encoded, encode

Writable = str | os.PathLike[str] | BinaryIO
"""A path, or a binary file object open for writing."""


def save(
    path: Writable, tree: Any, *, metadata: Mapping[str, str] | None = None, progress: ProgressOption = None
) -> None:
    """Saves a tree to one file, from which `load` makes an equal one without a template.

    Each array, module and mutable container is written once, however many paths lead to it, and is one object again
    when it is loaded. The file is a valid `.safetensors` file, whose tensors are named by their first paths.

    Args:
        path: where to save. What is there is replaced as a whole or not at all: after a crash or with a full disk it is
            the old file or the new one. Or a binary file object, which is written to from where it stands and is
            neither closed nor forced to the disk.
        tree: models, optimizer states, PRNG keys, counters, configurations, in any containers: see `docs/format.md` for
            every kind of value. All of it counts as inside a module.
        metadata: texts to save beside it, which any reader of safetensors finds.
        progress: called with the bytes done and the bytes in all after each write; or True for a bar (needs tqdm).

    Raises:
        UnserialisableError: if the tree holds what cannot be saved, a lambda say. All of it is listed; no file was
            touched.
        CycleError: if an object contains itself.
        TypeError: if `path` is no path, nor a file in binary mode.
        ValueError: if keys or values of `metadata` are no texts, or a key begins with `sharedtree`.
        OSError: if the file cannot be written.

    Cost: one walk over the nodes, and one pass over the arrays' bytes, which are hashed while they are written. Nothing
    is copied but what is not contiguous, 4 MiB at a time, and what is on other devices, an array or a piece of a
    sharded one at a time.

    Limitations: the arrays must be addressable by this process; for many processes there is `sharedtree.orbax`.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(3)
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> st.save(path, {"embed": w, "head": w, "step": 7}, metadata={"run": "first"})
        >>> model = st.load(path)
        >>> model["embed"] is model["head"], model["step"]
        (True, 7)
    """
    if not isinstance(path, str | os.PathLike) and (isinstance(path, io.TextIOBase) or not hasattr(path, "write")):
        raise TypeError(
            f"`{type(path).__qualname__}` is not a path, nor a file open for writing in binary mode. The path comes "
            'first:\n    sharedtree.save("model.safetensors", model)'
        )
    encoded = _encoded(tree)
    _check_metadata(metadata)
    with showing(progress, "saving") as report:
        if isinstance(path, str | os.PathLike):
            with replacing(path) as file:
                write(file, _sources(encoded), _text(encoded), metadata, report)
        else:
            write(path, _sources(encoded), _text(encoded), metadata, report)


def to_bytes(tree: Any, *, metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes that `save` would write.

    Args:
        tree: as for `save`.
        metadata: as for `save`.

    Raises:
        UnserialisableError: as `save`, and likewise `CycleError` and `ValueError`.

    Cost: as `save`, and a copy of all of it.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> st.from_bytes(st.to_bytes([jnp.arange(3), "text", None]))
        [Array([0, 1, 2], dtype=int32), 'text', None]
    """
    file = io.BytesIO()
    save(file, tree, metadata=metadata)
    return file.getvalue()


def _encoded(tree: Any) -> Encoded:
    encoded = encode(tree)
    elsewhere = [
        name
        for name, array in zip(encoded.names, encoded.arrays, strict=True)
        if not isinstance(array, np.ndarray) and not array.is_fully_addressable
    ]
    if elsewhere:
        listed = "\n".join(f"    `{printable(name)}`" for name in elsewhere)
        raise UnserialisableError(
            f"Parts of these arrays are on devices of other processes:\n{listed}\n"
            "One file is written by one process. Save them together with the others:\n"
            "    sharedtree.orbax.save(manager, step, tree)",
            elsewhere,
            ["not fully addressable"] * len(elsewhere),
        )
    return encoded


def _sources(encoded: Encoded) -> list[TensorSource]:
    return [
        TensorSource(name, array.dtype, array.shape, functools.partial(on_host, array))
        for name, array in zip(encoded.names, encoded.arrays, strict=True)
    ]


def _text(encoded: Encoded) -> str:
    return json.dumps(encoded.manifest, separators=(",", ":"), check_circular=False)


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(
                f"`metadata` maps texts to texts, but has {key!r}: {value!r}. Write other values as texts, or put them "
                'into the tree:\n    sharedtree.save(path, {"model": model, "config": config})'
            )
        if key.startswith("sharedtree"):
            raise ValueError(f"The metadata key {key!r} is taken: those that begin with `sharedtree` are. Rename it.")
