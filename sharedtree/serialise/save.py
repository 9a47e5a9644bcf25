"""`save` and `to_bytes`: a DAG to a file, each shared node once."""

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
from .container._byte_sources import ProgressOption, showing
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
        path: where to save. What is there is replaced as a whole or not at all: after a crash or with a full disk it is
            the old file or the new one. Or a binary file object, which is written to from where it stands and is
            neither closed nor forced to the disk.
        tree: models, optimizer states, PRNG keys, counters, configurations, in any containers: see `docs/format.md` for
            every kind of value. All of it counts as inside a module.
        leave_out: what no file can hold, such as the functions of a `TrainState`: names of attributes, `["apply_fn",
            "tx"]`, which are left out wherever they are, or paths of single values, as errors print them. `load` takes
            the like of them from its template, `like=`, without which such a file is not loaded.
        metadata: texts to save beside it, which any reader of safetensors finds.
        progress: called with the bytes done and the bytes in all after each write; or True for a bar (needs tqdm).

    Raises:
        UnserialisableError: if the tree holds what cannot be saved, a lambda say, or if what is left out is or holds
            what is also saved. All of it is listed; no file was touched.
        CycleError: if an object contains itself.
        TypeError: if `path` is no path, nor a file in binary mode, or `metadata` or `progress` is of another type than
            it may be.
        ValueError: if keys or values of `metadata` are no texts, or a key begins with `sharedtree`; or if the tree has
            nothing where `leave_out` says.
        OSError: if the file cannot be written; or if `path` is a file object, and what is saved is mapped from that
            very file, by `numpy.memmap` say.

    Cost: one walk over the nodes, and one pass over the arrays' bytes, which are hashed while they are written. Arrays
    of JAX are not copied if they are contiguous and on the host. Those of NumPy are copied, 1 MiB at a time, since
    another thread may write to them: such an array is saved half old and half new, and the file loads. What is not
    contiguous is copied 4 MiB at a time, and what is on other devices an array or a piece of a sharded one at a time.
    For a file object that cannot be patched (a pipe, a compressed stream), NumPy's arrays are kept until they are
    written, beyond 8 MiB in a temporary file.

    A file object may write into a file that `load(mmap=True)` has mapped. Before it does, what is mapped is read into
    memory, so that all its arrays stay as they are, those of other trees too (on Linux; elsewhere it is an `OSError`).

    Limitations: the arrays must be addressable by this process; for many processes there is `sharedtree.orbax`. Whether
    what is left out holds what is saved is looked for in its attributes, closures and containers, in 10,000 objects of
    each. On a CPU, `jax.device_put` and `from_dlpack` may make a JAX array over the memory of a NumPy array. JAX takes
    that memory for constant. If something writes to it while the file is written, the file may not load. A file that is
    replaced keeps its permissions, but no setuid, setgid or sticky bit.

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
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(
            f"`metadata` is a `{type(metadata).__qualname__}`, and must map texts to texts:\n"
            '    metadata = {"run": "first"}'
        )
    encoded = encode(tree, leave_out)
    sources = _sources(encoded)
    manifest = json.dumps(encoded.manifest, separators=(",", ":"), check_circular=False)
    is_path = isinstance(path, str | os.PathLike)
    if not is_path:
        detach_from(path, encoded.names, encoded.arrays)
    with showing(progress, "saving") as report, replacing(path) if is_path else nullcontext(path) as file:
        write(file, sources, manifest, metadata, report, force_to_disk if is_path else None)


def to_bytes(tree: Any, *, leave_out: str | Iterable[str] = (), metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes that `save` would write.

    Args:
        tree: as for `save`.
        leave_out: as for `save`.
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
    save(file, tree, leave_out=leave_out, metadata=metadata)
    return file.getvalue()


def _sources(encoded: Encoded) -> list[TensorSource]:
    named = list(zip(encoded.names, encoded.arrays, strict=True))
    elsewhere = [n for n, array in named if not isinstance(array, np.ndarray) and not array.is_fully_addressable]
    if elsewhere:
        listed = "\n".join(f"    `{printable(name)}`" for name in elsewhere)
        raise UnserialisableError(
            f"Parts of these arrays are on devices of other processes:\n{listed}\n"
            "One file is written by one process. Save them together with the others:\n"
            "    sharedtree.orbax.save(manager, step, tree)",
            elsewhere,
            ["not fully addressable"] * len(elsewhere),
        )
    return [tensor_source(name, array) for name, array in named]
