"""`audit`, `verify` and `inspect`: a file's names, its soundness and its contents. Nothing is loaded.

audit       the names of classes and functions, each with the verdict of the allow-list
verify      digests, references, sizes: an error, or the numbers of what was checked
inspect     the tree with its ties, the arrays, the metadata
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ..core._printing import printable
from .container._byte_sources import ProgressOption, Readable, progress_reporter
from .load import Opened, opened
from .trust._resolved_names import Request, import_advice
from .trust._trusted_names import Trust, Trusted
from .values._decoding import audit as requests_of
from .values._paths import Line, Lines, array_nbytes, columns

MAX_LINES = 10_000
"""Most lines of a tree that are printed. A small file may hold a tree with any number of paths."""

# ---- `audit(path)` lists what a file asks for, and has three answers ----


class Audit(NamedTuple):
    """Names a file asks for. Prints as a table, with the allow-list the file needs.

    Attributes:
        requests: one for each name in the file.
    """

    requests: tuple[Request, ...]

    @property
    def refused(self) -> tuple[Request, ...]:
        """The names the allow-list does not have."""
        return tuple(request for request in self.requests if not request.allowed)

    @property
    def not_imported(self) -> tuple[Request, ...]:
        """The names whose modules have to be imported first. Loading imports nothing."""
        return tuple(request for request in self.requests if request.not_imported)

    @property
    def allow_list(self) -> tuple[str, ...]:
        """The names to pass as `trusted` if you trust all of them. Methods come with their classes."""
        classes = {request.name for request in self.refused if request.kind == "class"}
        return tuple(r.name for r in self.refused if r.kind != "method" or r.name.rpartition(".")[0] not in classes)

    def __str__(self) -> str:
        """Table of names and verdicts, then what to trust and what to import."""
        if not self.requests:
            return "The file names no classes and no functions."
        rows = [(r.name, r.kind, _verdict(r), ", ".join(r.paths) or "(the tree itself)") for r in self.requests]
        lines = columns([("name", "as", "", "at"), *(tuple(map(printable, row)) for row in rows)])
        if self.refused:
            listed = ", ".join(f'"{printable(name)}"' for name in self.allow_list)
            lines += ["If you trust what is refused:", f"    sharedtree.load(path, trusted=[{listed}])"]
        lines += import_advice([request.not_imported for request in self.requests])
        return "\n".join(lines)


def _verdict(request: Request) -> str:
    """Returns one of three answers: allowed, allowed once a module is imported, or refused."""
    if not request.allowed:
        return f"REFUSED: {request.why}"
    if request.not_imported:
        return f"allowed, once `{request.not_imported}` is imported"
    return "allowed" if request.found else f"allowed, but {request.why}"


class Verified(NamedTuple):
    """Result of `verify` for a file in which everything is as it was written.

    Attributes:
        nbytes: bytes of its arrays.
        num_arrays: number of arrays.
        num_nodes: number of nodes of the tree.
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
    """Contents of a file. Prints as a tree with ties marked, up to 10,000 lines.

    Attributes:
        library: name and version of the library that wrote it.
        metadata: texts that were saved beside the tree. The first 100 are printed, with 1,000 characters of each.
        arrays: its arrays, each once.
        lines: the tree, from the root down. Each iteration makes them anew.
        nbytes: bytes of all arrays.
    """

    library: str
    metadata: dict[str, str]
    arrays: tuple[ArrayInfo, ...]
    lines: Iterable[Line]
    nbytes: int

    def __str__(self) -> str:
        head = [f"{len(self.arrays)} arrays, {self.nbytes:,} bytes, written by {printable(self.library)}"]
        head += [printable(key + value) for key, value in metadata_lines(self.metadata)]
        # Lines are made one by one, so that no more are made than are printed.
        lines = list(itertools.islice(map(str, self.lines), MAX_LINES + 1))
        if len(lines) > MAX_LINES:
            lines[MAX_LINES:] = ["... and more: iterate over `.lines`"]
        return "\n".join([*head, *lines])


# ---- Work and memory are linear in the file's size for every printout ----


def metadata_lines(metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Iterates over the lines that show metadata, as keys and values. A file may have any number, of any length."""
    for key, value in itertools.islice(metadata.items(), _MAX_METADATA):
        yield f"{_shortened(key, _MAX_KEY)}: ", _shortened(value, _MAX_VALUE)
    if len(metadata) > _MAX_METADATA:
        yield f"and {len(metadata) - _MAX_METADATA:,} more", ""


# Texts that are printed, and characters of each key and value.
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 100, 100, 1_000


def _shortened(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[:max_length]}... ({len(text):,} characters)"


# ---- The three functions ----


def audit(path: Readable, *, trusted: Trusted | Iterable[Trusted] = ()) -> Audit:
    """Lists the classes and functions a file asks for, and says which of them it would get.

    Args:
        path: as for `load`.
        trusted: as for `load`.

    Raises:
        FormatError: if it is no sharedtree file, or malformed.
        CorruptFileError: if its header was changed.

    Cost: reads the header only. Names are looked up in modules that are imported already.

    Example:
        >>> import jax, sharedtree as st
        >>> print(st.audit(st.to_bytes({"activation": jax.nn.relu})))
        name         as                 at
        jax.nn:relu  function  allowed  ['activation']
    """
    with opened(path) as file:
        return Audit(requests_of(file.manifest, Trust(trusted)))


def verify(path: Readable, *, progress: ProgressOption = None) -> Verified:
    """Checks that a file is as it was written: digests of header and data, references, and tensors that fill the file.

    Args:
        path: as for `load`.
        progress: as for `load`.

    Raises:
        FormatError: if it is no sharedtree file, or malformed.
        CorruptFileError: if it was cut short or changed. All damaged tensors are listed.

    Cost: reads the whole file, and holds 4 MiB of it a thread.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> st.verify(st.to_bytes([jnp.zeros(4)]))
        Verified(nbytes=16, num_arrays=1, num_nodes=2)
    """
    with opened(path) as (container, manifest), progress_reporter(progress, "verifying") as report:
        container.require_undamaged(progress=report)
        nbytes = sum(tensor.nbytes for tensor in container.tensors.values())
        return Verified(nbytes, len(manifest.arrays), len(manifest.nodes))


def inspect(path: Readable) -> Inspection:
    """Shows the contents of a file: its tree with ties marked, its arrays, its metadata.

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
    """Returns the contents of an open checkpoint. The checkpoint may be closed before they are used."""
    container, manifest = file
    arrays: list[ArrayInfo] = []
    for entry in manifest.arrays:
        kind = "key" if entry.key is not None else entry.kind
        arrays.append(ArrayInfo(entry.tensor, entry.dtype, entry.shape, array_nbytes(entry), kind))
    nbytes = sum(array.nbytes for array in arrays)
    return Inspection(manifest.library, dict(container.metadata), tuple(arrays), Lines(manifest), nbytes)
