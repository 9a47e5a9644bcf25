"""`load` and `from_bytes`: a file, or a part of it, becomes a tree with its ties.

`load_tree` has these steps, from top to bottom:

    1. make the allow-list                of the call, of `trust`, and of the template
    2. open and check the file            header and manifest; do both describe the same tensors?
    3. plan                               judge every name of the file, choose the arrays and their placements
    4. read the arrays                    only those that are wanted; their digests are checked
    5. build the tree                     from the manifest and the arrays

A *foreign* file is a safetensors file of another program. It has no tree. `plain_safetensors.py` loads it.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, overload

from ..core._comparison import array_text
from ..core._printing import printable
from ..transforms._option_lists import lists_options_of
from .arrays._dtypes import dtype_named, stored_form
from .arrays._placing import Select, Shardings, read_arrays
from .container._byte_sources import ProgressOption, Readable, Source, open_source
from .container._header import invalid_file_error, is_foreign
from .container._reading import Container, open_container
from .plain_safetensors import load_tensors
from .trust._trusted_names import Trust, Trusted
from .values._changed_classes import Renames
from .values._decoding import Plan
from .values._encoding import names_in
from .values._manifest import parse_manifest
from .values._nodes import Manifest
from .values._template import LoadReport

T = TypeVar("T")


class Options(TypedDict, total=False):
    """The options of `load` that do not change the type of the result, for type checkers."""

    trusted: Trusted | Iterable[Trusted]
    sharding: Shardings
    renames: Renames | None
    mmap: bool
    verify: bool
    progress: ProgressOption
    foreign: bool


_SelectFunction = Callable[[str], bool] | None
"""The type of `select` if the result has the template's type. With a path in `select`, the result is another tree."""


@overload
def load(path: Readable, *, like: None = None, select: Select = None, **options: Unpack[Options]) -> Any: ...
@overload
def load(
    path: Readable, *, like: T, select: _SelectFunction = None, strict: Literal[True] = True, **options: Unpack[Options]
) -> T: ...
@overload
def load(
    path: Readable, *, like: T, select: _SelectFunction = None, strict: Literal[False], **options: Unpack[Options]
) -> tuple[T, LoadReport]: ...
@overload
def load(path: Readable, *, like: Any, select: str, strict: bool = True, **options: Unpack[Options]) -> Any: ...
def load(
    path: Readable,
    *,
    trusted: Trusted | Iterable[Trusted] = (),
    like: Any = None,
    select: Select = None,
    sharding: Shardings = None,
    strict: bool = True,
    renames: Renames | None = None,
    mmap: bool = False,
    verify: bool = True,
    progress: ProgressOption = None,
    foreign: bool = False,
) -> Any:
    """Loads what `save` saved. No template is needed: classes are found by their names.

    Loading imports nothing, and calls no function because a file names it. A file may use the names on an allow-list:
    Equinox modules, optax states, and harmless functions of JAX and the libraries built on it. Your own classes and
    functions are not on that list. Name them in `trusted`. If you trust a package, the file may name any function
    defined in it. If a module has to be imported first, the error says which.

    Args:
        path: a path; a binary file object, which is read from its position on; or the bytes of a file.
        trusted: classes, functions, names (`"my_models:Encoder"`) or packages (`"my_models"`) that this file may name.
            `sharedtree.audit(path)` lists those it needs. See also `sharedtree.trust`.
        like: a template: a tree like the one that was saved, with arrays or `jax.ShapeDtypeStruct`s. Its classes and
            functions are trusted. The file is compared with it: shapes, dtypes, weak types, names, ties and the static
            values in modules. An array of NumPy's differs from one of JAX's; a `ShapeDtypeStruct` stands for either.
            Arrays go to the devices of the template's arrays if those are committed. All values are the file's, except
            those that `save` has left out: they are the template's.
        select: the path of a part (`".encoder"`), of which alone the result consists. Or a function from the name of
            an array, which is its path without the first dot, to True if it is wanted. Instead of the others, the
            result has `jax.ShapeDtypeStruct`s. Only the bytes of the selected arrays are read.
        sharding: where JAX arrays go: a device or a sharding for all of them, or a function from the name and the
            `jax.ShapeDtypeStruct` of an array to a device, a sharding or None. Each process reads the bytes of its own
            shards. None, the default, puts arrays where JAX puts new ones.
        strict: True to raise an error if the file differs from the template. If False, the result is a pair: the
            template, static values included, with those arrays of the file that fit, and a `LoadReport` of all
            differences.
        renames: new names for old ones: `{"old.module:Old": "new.module:New", "old.module:Old.weight": "kernel"}`. A
            field renamed to None is dropped. A new name may also be given as the class or the function itself, which is
            trusted then.
        mmap: True to map the file instead of reading it. Then loading takes no time and no memory, whatever the size,
            and NumPy arrays are read-only.
        verify: True to check the digests of the bytes that are read. With `mmap`, the file is read once for that. If
            False, any byte of a boolean other than 0 counts as True.
        progress: function called with the bytes done and the total; or True for a bar (needs tqdm).
        foreign: True if the file may be a safetensors file of another program. Such a file has no tree and no digests.
            The result is then a flat dictionary: name of a tensor → JAX array. Files of sharedtree's are loaded as
            trees all the same.

    Returns:
        The tree. What was one object when it was saved is one object. With `strict=False` and a template, a pair (tree,
        report).

    Raises:
        UntrustedTypeError: if the file names something that is not allowed. Nothing was loaded.
        StructureMismatchError: if a class or the template does not fit the file, a value was left out and no template
            has it, a name leads nowhere, a selected part does not exist, or arrays have 64-bit numbers and these are
            switched off in JAX.
        FormatError: if the file is not a sharedtree file, is malformed, or is of a newer version; with `foreign`, if it
            is not a safetensors file, or JAX lacks the dtype of a wanted tensor.
        CorruptFileError: if the file was cut short or changed.
        OSError: if the file cannot be read.
        TypeError: if `path`, `select`, `sharding` or `renames` has a type that it may not have.
        ValueError: if `renames` has an old name that no file can have; or if an option needs a tree, and the foreign
            file has none.

    Cost: one walk over the nodes. The bytes of the arrays are read once, into memory that JAX uses without a copy on a
    CPU. Arrays of less than 4 MiB share pieces of memory of at most 16 MiB. A piece is freed with the last of its
    arrays.

    Limitations: with `mmap`, if another program cuts the file short, using its arrays ends the process (SIGBUS), and if
    one writes into the file, the arrays change. `save` in this process is safe, to the path or to a file object. On
    Windows, the file cannot be replaced while it is mapped.

    Example:
        >>> import os, tempfile, equinox as eqx, jax, sharedtree as st
        >>> model = eqx.nn.MLP(2, 2, 8, depth=2, key=jax.random.key(0))
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> st.save(path, model)
        >>> loaded = st.load(path)
        >>> bool(eqx.tree_equal(model, loaded)), loaded.activation is jax.nn.relu
        (True, True)
        >>> st.load(path, select=".layers[1].bias").shape
        (8,)
    """
    # The bytes of a pipe can be read only once. So all of the code below reads from this one source.
    with contextlib.closing(open_source(path)) as source:
        reading = {"select": select, "sharding": sharding, "mmap": mmap, "verify": verify, "progress": progress}
        if foreign and is_foreign(source):
            # Options that make sense for a tree only. Each value is true if the user passed the option.
            tree_options = {"trusted": trusted, "like": like is not None, "strict": not strict, "renames": renames}
            return load_tensors(source, **reading, **tree_options)
        return load_tree(source, trusted=trusted, like=like, strict=strict, renames=renames, **reading)


def load_tree(
    source: Source,
    *,
    trusted: Trusted | Iterable[Trusted] = (),
    like: Any = None,
    select: Select = None,
    sharding: Shardings = None,
    strict: bool = True,
    renames: Renames | None = None,
    mmap: bool = False,
    verify: bool = True,
    progress: ProgressOption = None,
) -> Any:
    """Loads the tree from an open source. Options, result and errors are those of `load`. The source stays open."""
    # 1. Make the allow-list. A template's classes and functions are trusted.
    trust = Trust(trusted, names_in(like) if like is not None else None)
    # 2. Open and check the file.
    with open_checkpoint(source) as (container, manifest):
        # 3. Plan: every name of the file is judged before any array is read and anything is built.
        label = container.label
        plan = Plan(manifest, label, trust, like=like, select=select, sharding=sharding, strict=strict, renames=renames)
        # 4. Read the arrays that are wanted.
        arrays = read_arrays(container, plan.wanted, plan.place, mmap=mmap, verify=verify, progress=progress)
    # 5. Build the tree.
    return plan.build_tree(arrays)


class Opened(NamedTuple):
    """An open checkpoint.

    Attributes:
        container: the container, which has the tensors.
        manifest: the parsed manifest, which describes the tree.
    """

    container: Container
    manifest: Manifest


@contextlib.contextmanager
def open_checkpoint(location: Readable | Source) -> Iterator[Opened]:
    """Yields an open checkpoint, and closes it at the end of the `with` block. A passed `Source` stays open.

    Raises:
        TypeError, OSError: as `open_source`.
        FormatError: if the file is not a sharedtree file, is malformed, or is of a newer version; or if its header and
            its manifest describe different tensors.
        CorruptFileError: if the file is longer or shorter than its header says, or its header or manifest has changed.
    """
    with open_container(location) as container:
        manifest = parse_manifest(container.manifest)
        disagreement = next(_disagreements(container, manifest), None)
        if disagreement is not None:
            raise invalid_file_error(container.label, disagreement)
        yield Opened(container, manifest)


def _disagreements(container: Container, manifest: Manifest) -> Iterator[str]:
    """Yields a clause for each difference between the tensors in the container and the arrays in the manifest.

    If the manifest leaves out several tensors, only the first by name is reported.
    """
    tensors = container.tensors
    for entry in manifest.arrays:
        tensor = tensors.get(entry.tensor)
        if tensor is None:
            yield f"the manifest names a tensor `{printable(entry.tensor)}`, which is not there"
            continue
        # The stored dtype and shape that the tensor should have.
        dtype, shape = stored_form(dtype_named(entry.dtype), entry.shape)
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            # For example "F32[2, 3], and to the manifest it is F32[2, 4]".
            difference = f"{array_text(tensor)}, and to the manifest it is {dtype}{list(shape)}"
            yield f"the tensor `{printable(entry.tensor)}` is {difference}"
    extra = tensors.keys() - {entry.tensor for entry in manifest.arrays}
    if extra:
        yield f"the manifest does not name the tensor `{printable(min(extra))}`"


@overload
def from_bytes(
    data: bytes | bytearray | memoryview, *, like: None = None, select: Select = None, **options: Unpack[Options]
) -> Any: ...
@overload
def from_bytes(data: bytes | bytearray | memoryview, *, like: T, **options: Unpack[Options]) -> T: ...
@overload
def from_bytes(
    data: bytes | bytearray | memoryview,
    *,
    like: Any,
    select: Select = None,
    strict: bool = True,
    **options: Unpack[Options],
) -> Any: ...
@lists_options_of(load)
def from_bytes(data: bytes | bytearray | memoryview, **options: Any) -> Any:
    """Loads a tree from the bytes of a file, as `to_bytes` makes them.

    Args:
        data: the bytes of a file.
        **options: options of `load`.

    Raises:
        FormatError: as `load`. Other errors are those of `load` as well.

    Example:
        >>> import sharedtree as st
        >>> st.from_bytes(st.to_bytes({"step": 3}))
        {'step': 3}
    """
    return load(data, **options)
