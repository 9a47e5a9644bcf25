"""`save` and `to_bytes`: a tree becomes a file, with each shared node once.

`save` has these steps, from top to bottom:

    1. check the arguments                nothing is touched yet
    2. encode the tree                    a manifest, and the distinct arrays with their names
    3. make a source of each array        bytes in pieces, read when they are written
    4. free arrays mapped from the file   only if the file is overwritten in place
    5. write                              to a file object, or to a new file that then replaces the one at the path
"""

import io
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, BinaryIO

import numpy as np

from ..core._errors import UnserialisableError
from ..core._printing import printable
from .arrays._dtypes import tensor_source
from .container._byte_sources import ProgressOption, progress_reporter
from .container._header import TensorSource
from .container._mapped_files import detach_from
from .container._writing import force_to_disk, replacing, write
from .values._encoding import Encoded, encode

Writable = str | os.PathLike[str] | BinaryIO
"""A path, or a binary file object open for writing."""


def save(
    path: Writable,
    tree: Any,
    *,
    leave_out: str | Iterable[str] = (),
    metadata: Mapping[str, str] | None = None,
    progress: ProgressOption = None,
) -> None:
    """Saves a tree to one file, from which `load` makes an equal tree without a template.

    Each array, module and mutable container is written once, however many paths lead to it, and is one object again
    when it is loaded. The file is a valid `.safetensors` file, whose tensors are named by their first paths.

    Args:
        path: where to save. A file at this path is replaced as a whole or not at all: after a crash, or if the disk is
            full, there is either the old file or the new one. Or a binary file object: it is written to from its
            position on, and is neither closed nor forced to the disk.
        tree: models, optimizer states, PRNG keys, counters, configurations, in any containers: see `docs/format.md` for
            every kind of value. All of it counts as inside a module.
        leave_out: values that no file can hold, such as the functions of a `TrainState`. Either names of attributes,
            `["apply_fn", "tx"]`, which are left out everywhere; or paths of single values, as errors print them. `load`
            takes these values from its template, `like=`, and needs one for such a file.
        metadata: texts to save beside the tree. Any reader of safetensors finds them.
        progress: function called with the bytes done and the total after each write; or True for a bar (needs tqdm).

    Raises:
        UnserialisableError: if the tree holds something that cannot be saved, such as a lambda; or if a value that is
            left out is saved elsewhere in the tree, or holds one that is. All such values are listed. No file was
            touched.
        CycleError: if an object contains itself.
        TypeError: if `path` is neither a path nor a file in binary mode, or `metadata` or `progress` has a type that it
            may not have.
        ValueError: if a key or value of `metadata` is not a text, or a key begins with `sharedtree`; or if the tree has
            nothing at an entry of `leave_out`.
        OSError: if the file cannot be written; or if `path` is a file object, and an array to be saved is mapped from
            that very file, for example by `numpy.memmap`.

    Cost: one walk over the nodes, and one pass over the arrays' bytes, which are hashed while they are written. JAX
    arrays are not copied if they are contiguous and on the host. NumPy arrays are copied, 1 MiB at a time, since
    another thread may write to them: then the file has an array that is half old and half new, and can still be loaded.
    Arrays that are not contiguous are copied 4 MiB at a time. Arrays on other devices are copied one at a time, sharded
    ones in pieces. If a file object cannot be patched (a pipe, a compressed stream), copies of NumPy's arrays are kept
    until they are written: up to 8 MiB in memory, more in a temporary file.

    A file object may write into a file that `load(mmap=True)` has mapped. The mapped bytes are read into memory first,
    so that all arrays keep their values, also those of other trees. This works on Linux, and is an `OSError` elsewhere.

    Limitations: this process must have all shards of each array; for many processes there is `sharedtree.orbax`. To
    find out if a value that is left out holds one that is saved, its attributes, closures and containers are searched,
    up to 10,000 objects. On a CPU, `jax.device_put` and `from_dlpack` may make a JAX array over the memory of a NumPy
    array, and JAX expects that memory not to change. If something writes to it during the save, the file may be
    unloadable. A file that is replaced keeps its permissions, but no setuid, setgid or sticky bit.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(3)
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> st.save(path, {"embed": w, "head": w, "step": 7}, metadata={"run": "first"})
        >>> model = st.load(path)
        >>> model["embed"] is model["head"], model["step"]
        (True, 7)
    """
    # 1. Check the arguments.
    if not isinstance(path, str | os.PathLike) and (isinstance(path, io.TextIOBase) or not hasattr(path, "write")):
        raise TypeError(
            f"`{type(path).__qualname__}` is not a path, nor a file open for writing in binary mode. The path comes "
            'first:\n    sharedtree.save("model.safetensors", model)'
        )
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(
            f"`metadata` must be a dict from strings to strings, not a `{type(metadata).__qualname__}`:\n"
            '    metadata = {"run": "first"}'
        )
    # 2. Encode the tree: a manifest, and the distinct arrays with their names.
    encoded = encode(tree, leave_out)
    # 3. Make a source of each array, and the text of the manifest.
    sources = _sources(encoded)
    # No part of the manifest can hold itself, so the search for cycles is left out.
    manifest = json.dumps(encoded.manifest, separators=(",", ":"), check_circular=False)
    # 4. Free arrays that are mapped from the file: the mapped bytes are read into memory. If the file is replaced
    # instead, its mappings keep the old one alive.
    is_path = isinstance(path, str | os.PathLike)
    if not is_path:
        detach_from(path, encoded.names, encoded.arrays)
    # 5. Write. A user's file object is not forced to the disk.
    with progress_reporter(progress, "saving") as report, replacing(path) if is_path else nullcontext(path) as file:
        write(file, sources, manifest, metadata, progress=report, force=force_to_disk if is_path else None)


def to_bytes(tree: Any, *, leave_out: str | Iterable[str] = (), metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns the bytes that `save` would write.

    Args:
        tree: as for `save`.
        leave_out: as for `save`.
        metadata: as for `save`.

    Raises:
        UnserialisableError: as `save`. Other errors are those of `save` as well, except `OSError`.

    Cost: as `save`, and a copy of all bytes.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> st.from_bytes(st.to_bytes([jnp.arange(3), "text", None]))
        [Array([0, 1, 2], dtype=int32), 'text', None]
    """
    file = io.BytesIO()
    save(file, tree, leave_out=leave_out, metadata=metadata)
    return file.getvalue()


def _sources(encoded: Encoded) -> list[TensorSource]:
    """Returns the description of each array as a future tensor.

    Raises:
        UnserialisableError: if shards of an array are on devices of another process. All such arrays are listed.
    """
    named_arrays = list(zip(encoded.names, encoded.arrays, strict=True))
    remote_names: list[str] = []
    for name, array in named_arrays:
        if not isinstance(array, np.ndarray) and not array.is_fully_addressable:
            remote_names.append(name)
    if remote_names:
        lines = "\n".join(f"    `{printable(name)}`" for name in remote_names)
        raise UnserialisableError(
            f"Parts of these arrays are on devices of other processes:\n{lines}\n"
            "One file is written by one process. Save them together with the others:\n"
            "    sharedtree.orbax.save(manager, step, tree)",
            remote_names,
            ["not fully addressable"] * len(remote_names),
        )
    return [tensor_source(name, array) for name, array in named_arrays]
