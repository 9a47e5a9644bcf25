"""`audit`, `verify` and `inspect`: what a file asks for, whether it is whole, and what it holds. Nothing is loaded."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ..core._printing import printable
from .container._byte_sources import ProgressOption, Readable, showing
from .load import Opened, opened
from .trust._resolved_names import Request, imports
from .trust._trusted_names import Trust, Trusted
from .values._decoding import audit as requests_of
from .values._paths import Line, Lines, array_nbytes, columns

MAX_LINES = 10_000
"""How many lines of a tree are printed if nobody asks for more."""


class Audit(NamedTuple):
    """What a file asks for. Prints as a table, with the allow-list that it needs.

    Attributes:
        requests: one for each name in the file.
    """

    requests: tuple[Request, ...]

    @property
    def refused(self) -> tuple[Request, ...]:
        """The names that the allow-list does not have."""
        return tuple(request for request in self.requests if not request.allowed)

    @property
    def not_imported(self) -> tuple[Request, ...]:
        """The names that the file gets once their modules are imported, which loading does not do."""
        return tuple(request for request in self.requests if request.not_imported)

    @property
    def allow_list(self) -> tuple[str, ...]:
        """What to pass as `trusted` if you trust all of it."""
        classes = {request.name for request in self.refused if request.kind == "class"}
        return tuple(r.name for r in self.refused if r.kind != "method" or r.name.rpartition(".")[0] not in classes)

    def __str__(self) -> str:
        if not self.requests:
            return "The file names no classes and no functions."
        rows = [(r.name, r.kind, _verdict(r), ", ".join(r.paths) or "(the tree itself)") for r in self.requests]
        lines = columns([("name", "as", "", "at"), *(tuple(map(printable, row)) for row in rows)])
        if self.refused:
            listed = ", ".join(f'"{printable(name)}"' for name in self.allow_list)
            lines += ["If you trust what is refused:", f"    sharedtree.load(path, trusted=[{listed}])"]
        lines += imports([request.not_imported for request in self.requests])
        return "\n".join(lines)


def _verdict(request: Request) -> str:
    if not request.allowed:
        return f"REFUSED: {request.why}"
    if request.not_imported:
        return f"allowed, once `{request.not_imported}` is imported"
    return "allowed" if request.found else f"allowed, but {request.why}"


class Verified(NamedTuple):
    """A file in which everything is as it was written.

    Attributes:
        nbytes: of its arrays.
        num_arrays: how many there are.
        num_nodes: how many nodes the tree has.
    """

    nbytes: int
    num_arrays: int
    num_nodes: int


class ArrayInfo(NamedTuple):
    """An array in a file.

    Attributes:
        name: of its tensor, which is its first path without the first dot.
        dtype: its dtype.
        shape: its shape.
        nbytes: in the file.
        kind: `"jax"`, `"numpy"`, or `"key"` for typed PRNG keys, whose dtype and shape are those of their data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: str


class Inspection(NamedTuple):
    """What a file holds. Prints as a tree in which what is tied is marked, or as its first 10,000 lines.

    Attributes:
        library: who wrote it.
        metadata: what was saved beside the tree. Printed are the first 100 texts, and 1,000 characters of each.
        arrays: its arrays, each once.
        lines: the tree, from the root down. Each iteration makes them anew.
        nbytes: of all arrays.
    """

    library: str
    metadata: dict[str, str]
    arrays: tuple[ArrayInfo, ...]
    lines: Iterable[Line]
    nbytes: int

    def __str__(self) -> str:
        head = [f"{len(self.arrays)} arrays, {self.nbytes:,} bytes, written by {printable(self.library)}"]
        head += [printable(key + value) for key, value in metadata_lines(self.metadata)]
        lines = list(itertools.islice(map(str, self.lines), MAX_LINES + 1))
        if len(lines) > MAX_LINES:
            lines[MAX_LINES:] = ["... and more: iterate over `.lines`"]
        return "\n".join([*head, *lines])


def metadata_lines(metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The lines that show metadata, each a key and a value. A file may have any number of texts, of any length."""
    for key, value in itertools.islice(metadata.items(), _MAX_METADATA):
        yield f"{_shortened(key, _MAX_KEY)}: ", _shortened(value, _MAX_VALUE)
    if len(metadata) > _MAX_METADATA:
        yield f"and {len(metadata) - _MAX_METADATA:,} more", ""


_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 100, 100, 1_000


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def audit(path: Readable, *, trusted: Trusted | Iterable[Trusted] = ()) -> Audit:
    """Lists the classes and functions that a file asks for, and which of them it would get.

    Args:
        path: as for `load`.
        trusted: as for `load`.

    Raises:
        FormatError: if it is no sharedtree file, or malformed.
        CorruptFileError: if its header was changed.

    Cost: reads the header only. Modules on the allow-list are imported, from where they are installed, nothing else.

    Example:
        >>> import jax, sharedtree as st
        >>> print(st.audit(st.to_bytes({"activation": jax.nn.relu})))
        name         as                 at
        jax.nn:relu  function  allowed  ['activation']
    """
    with opened(path) as file:
        return Audit(requests_of(file.manifest, Trust(trusted)))


def verify(path: Readable, *, progress: ProgressOption = None) -> Verified:
    """Checks that a file is what was written: digests of header and data, references, and that tensors fill the file.

    Args:
        path: as for `load`.
        progress: as for `load`.

    Raises:
        FormatError: if it is no sharedtree file, or malformed.
        CorruptFileError: if it was cut short or changed. All tensors that are damaged are listed.

    Cost: reads the whole file, and holds 4 MiB of it a thread.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> st.verify(st.to_bytes([jnp.zeros(4)]))
        Verified(nbytes=16, num_arrays=1, num_nodes=2)
    """
    with opened(path) as (container, manifest), showing(progress, "verifying") as report:
        container.require_undamaged(progress=report)
        nbytes = sum(tensor.nbytes for tensor in container.tensors.values())
        return Verified(nbytes, len(manifest.arrays), len(manifest.nodes))


def inspect(path: Readable) -> Inspection:
    """Says what a file holds: its tree with ties marked, its arrays, its metadata.

    Args:
        path: as for `load`.

    Raises:
        FormatError: if it is no sharedtree file, or malformed.
        CorruptFileError: if its header was changed.

    Cost: reads the header only. No name in it is looked up.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.zeros((2, 3))
        >>> print(st.inspect(st.to_bytes({"embed": w, "head": w})))
        1 arrays, 24 bytes, written by sharedtree ...
        dict
          ['embed']  float32[2, 3]  24 bytes
          ['head']  = ['embed']
    """
    with opened(path) as file:
        return inspection_of(file)


def inspection_of(file: Opened) -> Inspection:
    """What an open checkpoint holds. It may be closed before the result is used."""
    container, manifest = file
    arrays: list[ArrayInfo] = []
    for entry in manifest.arrays:
        kind = "key" if entry.key is not None else entry.kind
        arrays.append(ArrayInfo(entry.tensor, entry.dtype, entry.shape, array_nbytes(entry), kind))
    nbytes = sum(array.nbytes for array in arrays)
    return Inspection(manifest.library, dict(container.metadata), tuple(arrays), Lines(manifest), nbytes)
