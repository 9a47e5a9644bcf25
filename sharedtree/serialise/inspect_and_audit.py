"""`audit`, `verify` and `inspect`: information about a file without loading it.

audit       the names of classes and functions in it, each with the verdict of the allow-list
verify      is it as it was written? digests, references and sizes are checked
inspect     its tree with ties marked, its arrays, its metadata
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ..core._printing import printable
from .container._byte_sources import ProgressOption, Readable, progress_reporter
from .load import Opened, open_checkpoint
from .trust._resolved_names import Request, import_advice
from .trust._trusted_names import Trust, Trusted
from .values._decoding import audit as requests_of
from .values._paths import Line, Lines, array_nbytes, columns

MAX_LINES = 10_000
"""Most lines of a tree that are printed. A small file may hold a tree with any number of paths."""

# ---- Results of the three functions ----


class Audit(NamedTuple):
    """The names of classes and functions in a file, each with a verdict.

    `str` returns a table, and what to trust and import in order to load the file.

    Attributes:
        requests: one for each name in the file.
    """

    requests: tuple[Request, ...]

    @property
    def refused(self) -> tuple[Request, ...]:
        """The names that loading refuses."""
        return tuple(request for request in self.requests if not request.allowed)

    @property
    def not_imported(self) -> tuple[Request, ...]:
        """The names whose modules you have to import before you load the file. Loading imports nothing."""
        return tuple(request for request in self.requests if request.not_imported)

    @property
    def allow_list(self) -> tuple[str, ...]:
        """The refused names, to pass as `trusted` if you trust all of them.

        A method is left out if its class is among them, since trust in the class includes it.
        """
        classes = {request.name for request in self.refused if request.kind == "class"}
        return tuple(r.name for r in self.refused if r.kind != "method" or r.name.rpartition(".")[0] not in classes)

    def __str__(self) -> str:
        """Returns a table of names and verdicts, then what to trust and what to import."""
        if not self.requests:
            return "The file refers to no classes and no functions."
        rows = [(r.name, r.kind, _verdict(r), ", ".join(r.paths) or "the root") for r in self.requests]
        lines = columns([("name", "kind", "decision", "where"), *(tuple(map(printable, row)) for row in rows)])
        lines.insert(0, self._summary())
        if self.refused:
            listed = ", ".join(f'"{printable(name)}"' for name in self.allow_list)
            lines += ["If you trust the refused names:", f"    sharedtree.load(path, trusted=[{listed}])"]
        lines += import_advice([request.not_imported for request in self.requests])
        return "\n".join(lines)

    def _summary(self) -> str:
        """Returns a sentence about all names."""
        if self.refused:
            verb = "is" if len(self.refused) == 1 else "are"
            return f"The file would not load: {len(self.refused)} of its {len(self.requests)} names {verb} refused."
        if any(not request.found and not request.not_imported for request in self.requests):
            return "The file would not load: it refers to names that do not exist here."
        if self.not_imported:
            return "The names in the file are allowed, but some libraries are not imported."
        return "All names in the file are allowed."


def _verdict(request: Request) -> str:
    """Returns the verdict as text: "allowed", "allowed, once ... is imported", "allowed, but ..." or "REFUSED: ..."."""
    if not request.allowed:
        return f"REFUSED: {request.why}"
    if request.not_imported:
        return f"allowed, once `{request.not_imported}` is imported"
    return "allowed" if request.found else f"allowed, but {request.why}"


class Verified(NamedTuple):
    """Result of `verify` for a sound file: the numbers of what was checked.

    Attributes:
        nbytes: number of bytes of its arrays.
        num_arrays: number of arrays.
        num_nodes: number of nodes of the tree.
    """

    nbytes: int
    num_arrays: int
    num_nodes: int


class ArrayInfo(NamedTuple):
    """An array in a file.

    Attributes:
        name: name of its tensor, which is its first path without the first dot.
        dtype: name of its dtype. For typed PRNG keys, the shape of their raw data.
        shape: its shape. For typed PRNG keys, the shape of their raw data.
        nbytes: its number of bytes in the file.
        kind: `"jax"`, `"numpy"`, or `"key"` for typed PRNG keys.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: str


class Inspection(NamedTuple):
    """Contents of a file. `str` returns the tree with ties marked, up to 10,000 lines.

    Attributes:
        library: name and version of the library that wrote the file.
        metadata: the texts that were saved beside the tree. `str` shows the first 100, with 1,000 characters of each.
        arrays: the arrays, each once.
        lines: the lines of the tree, from the root down. Each iteration makes them anew.
        nbytes: number of bytes of all arrays.
    """

    library: str
    metadata: dict[str, str]
    arrays: tuple[ArrayInfo, ...]
    lines: Iterable[Line]
    nbytes: int

    def __str__(self) -> str:
        """Returns the numbers, the metadata and the tree as text."""
        head = [f"{len(self.arrays)} arrays, {self.nbytes:,} bytes, written by {printable(self.library)}"]
        head += [printable(key + value) for key, value in metadata_lines(self.metadata)]
        # A line is made when the iteration reaches it. So just one more is made than is shown.
        lines = list(itertools.islice(map(str, self.lines), MAX_LINES + 1))
        if len(lines) > MAX_LINES:
            lines[MAX_LINES:] = ["... and more: iterate over `.lines`"]
        return "\n".join([*head, *lines])


# ---- Metadata as text. A file may have any number of texts, of any length, so just a part is shown ----


def metadata_lines(metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the lines that show metadata, as pairs: `("run: ", "first")`. Long ones are cut, and many are counted."""
    for key, value in itertools.islice(metadata.items(), _MAX_METADATA):
        yield f"{_shortened(key, _MAX_KEY)}: ", _shortened(value, _MAX_VALUE)
    if len(metadata) > _MAX_METADATA:
        yield f"and {len(metadata) - _MAX_METADATA:,} more", ""


# How many texts are shown, and how many characters of each key and each value.
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 100, 100, 1_000


def _shortened(text: str, max_length: int) -> str:
    """Returns a text, cut off after so many characters. The length of a text that was cut is added."""
    return text if len(text) <= max_length else f"{text[:max_length]}... ({len(text):,} characters)"


# ---- The three functions ----


def audit(path: Readable, *, trusted: Trusted | Iterable[Trusted] = ()) -> Audit:
    """Returns the names of classes and functions in a file, and for each whether `load` would accept it.

    Args:
        path: as for `load`.
        trusted: as for `load`.

    Raises:
        FormatError: if the file is not a sharedtree file, or malformed.
        CorruptFileError: if its header or its manifest was changed, or it was cut short.

    Cost: reads the header and the manifest only. Names are looked up in modules that are imported already.

    Example:
        >>> import jax, sharedtree as st
        >>> print(st.audit(st.to_bytes({"activation": jax.nn.relu})))
        All names in the file are allowed.
        name         kind      decision  where
        jax.nn:relu  function  allowed   ['activation']
    """
    with open_checkpoint(path) as file:
        return Audit(requests_of(file.manifest, Trust(trusted)))


def verify(path: Readable, *, progress: ProgressOption = None) -> Verified:
    """Checks that a file is as it was written: digests of header and data, references, and tensors that fill the file.

    Args:
        path: as for `load`.
        progress: as for `load`.

    Raises:
        FormatError: if the file is not a sharedtree file, or malformed.
        CorruptFileError: if it was cut short or changed. All damaged tensors are listed.

    Cost: reads the whole file. Each thread has 4 MiB of it in memory at a time.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> st.verify(st.to_bytes([jnp.zeros(4)]))
        Verified(nbytes=16, num_arrays=1, num_nodes=2)
    """
    with open_checkpoint(path) as (container, manifest), progress_reporter(progress, "verifying") as report:
        container.require_undamaged(progress=report)
        nbytes = sum(tensor.nbytes for tensor in container.tensors.values())
        return Verified(nbytes, len(manifest.arrays), len(manifest.nodes))


def inspect(path: Readable) -> Inspection:
    """Returns the contents of a file: its tree with ties marked, its arrays, its metadata.

    Args:
        path: as for `load`.

    Raises:
        FormatError: if the file is not a sharedtree file, or malformed.
        CorruptFileError: if its header or its manifest was changed, or it was cut short.

    Cost: reads the header and the manifest only. No name in the file is looked up.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.zeros((2, 3))
        >>> print(st.inspect(st.to_bytes({"embed": w, "head": w})))
        1 arrays, 24 bytes, written by sharedtree ...
        dict
          ['embed']  float32[2, 3]  24 bytes
          ['head']  = ['embed']
    """
    with open_checkpoint(path) as file:
        return inspection_of(file)


def inspection_of(file: Opened) -> Inspection:
    """Returns the contents of an open checkpoint. They can still be used after the checkpoint is closed."""
    container, manifest = file
    arrays: list[ArrayInfo] = []
    for entry in manifest.arrays:
        kind = "key" if entry.key is not None else entry.kind
        arrays.append(ArrayInfo(entry.tensor, entry.dtype, entry.shape, array_nbytes(entry), kind))
    nbytes = sum(array.nbytes for array in arrays)
    return Inspection(manifest.library, dict(container.metadata), tuple(arrays), Lines(manifest), nbytes)
