"""`save` and `to_bytes`: a DAG to a file, each shared node once.

`save` has these steps, from top to bottom:

    1. check the arguments                nothing is touched yet
    2. encode the tree                    a manifest, and the distinct arrays with their names
    3. make a source of each array        bytes in pieces, read when they are written
    4. free arrays mapped from the file   only if it is written to in place
    5. write                              to a file object, or beside the path, which is then replaced
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
    """Saves a tree to one file, from which `load` makes an equal one without a template.

    Each array, module and mutable container is written once, however many paths lead to it, and is one object again
    when it is loaded. The file is a valid `.safetensors` file, whose tensors are named by their first paths.

    Args:
        path: where to save. A file there is replaced as a whole or not at all: after a crash or with a full disk it is
            the old file or the new one. Or a binary file object, which is written to from its position and is neither
            closed nor forced to the disk.
        tree: models, optimizer states, PRNG keys, counters, configurations, in any containers: see `docs/format.md` for
            every kind of value. All of it counts as inside a module.
        leave_out: values no file can hold, such as the functions of a `TrainState`: names of attributes,
            `["apply_fn", "tx"]`, which are left out everywhere, or paths of single values, as errors print them. `load`
            takes these values from its template, `like=`. Such a file is not loaded without one.
        metadata: texts to save beside the tree. Any reader of safetensors finds them.
        progress: called with the bytes done and the bytes in all after each write; or True for a bar (needs tqdm).

    Raises:
        UnserialisableError: if the tree holds something that cannot be saved, such as a lambda, or if a value that is
            left out is, or holds, one that is saved. All such values are listed. No file was touched.
        CycleError: if an object contains itself.
        TypeError: if `path` is no path, nor a file in binary mode, or `metadata` or `progress` is of another type than
            it may be.
        ValueError: if keys or values of `metadata` are no texts, or a key begins with `sharedtree`; or if the tree has
            nothing where `leave_out` says.
        OSError: if the file cannot be written; or if `path` is a file object, and what is saved is mapped from that
            very file, by `numpy.memmap` say.

    Cost: one walk over the nodes, and one pass over the arrays' bytes, which are hashed while they are written. Arrays
    of JAX are not copied if they are contiguous and on the host. Those of NumPy are copied, 1 MiB at a time, since
    another thread may write to them: such an array is saved half old and half new, and the file loads. Arrays that are
    not contiguous are copied 4 MiB at a time. Arrays on other devices are copied one at a time, sharded ones in pieces.
    For a file object that cannot be patched (a pipe, a compressed stream), NumPy's arrays are kept until they are
    written, beyond 8 MiB in a temporary file.

    A file object may write into a file that `load(mmap=True)` has mapped. The mapped bytes are read into memory first,
    so that all arrays stay as they are, those of other trees too (on Linux; elsewhere it is an `OSError`).

    Limitations: the arrays must be addressable by this process; for many processes there is `sharedtree.orbax`. To see
    if a value that is left out holds one that is saved, its attributes, closures and containers are searched, up to
    10,000 objects. On a CPU, `jax.device_put` and `from_dlpack` may make a JAX array over the memory of a NumPy array.
    JAX takes that memory for constant. If something writes to it while the file is written, the file may not load. A
    file that is replaced keeps its permissions, but no setuid, setgid or sticky bit.

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
            f"`metadata` is a `{type(metadata).__qualname__}`, and must map texts to texts:\n"
            '    metadata = {"run": "first"}'
        )
    # 2. Encode the tree: a manifest, and the distinct arrays with their names.
    encoded = encode(tree, leave_out)
    # 3. Make a source of each array, and the text of the manifest.
    sources = _sources(encoded)
    manifest = json.dumps(encoded.manifest, separators=(",", ":"), check_circular=False)
    # 4. Free arrays that are mapped from the file: what they map is read into memory. A file that is replaced lives on
    # for its mappings.
    is_path = isinstance(path, str | os.PathLike)
    if not is_path:
        detach_from(path, encoded.names, encoded.arrays)
    # 5. Write. Only a file that is replaced is forced to the disk.
    with progress_reporter(progress, "saving") as report, replacing(path) if is_path else nullcontext(path) as file:
        write(file, sources, manifest, metadata, report, force_to_disk if is_path else None)


def to_bytes(tree: Any, *, leave_out: str | Iterable[str] = (), metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns the bytes `save` would write.

    Args:
        tree: as for `save`.
        leave_out: as for `save`.
        metadata: as for `save`.

    Raises:
        UnserialisableError: as `save`, whose other errors but `OSError` it raises, too.

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
    """Returns the source of each array's bytes. Raises `UnserialisableError` if another process has a part of one."""
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
