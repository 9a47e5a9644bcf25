"""`load` and `from_bytes`: a file, or a part of one, to a DAG.

`load_tree` has these steps, from top to bottom:

    1. make the allow-list                of the call, of `trust`, and of the template
    2. open and check the file            digests, header, manifest; do both describe the same tensors?
    3. plan                               judge every name of the file, choose the arrays, place them
    4. read the arrays                    only those that are wanted
    5. build the tree                     from the manifest and the arrays

A file of another program has no tree. `plain_safetensors.py` loads it.
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
    """The options of `load` that do not change what it returns."""

    trusted: Trusted | Iterable[Trusted]
    sharding: Shardings
    renames: Renames | None
    mmap: bool
    verify: bool
    progress: ProgressOption
    foreign: bool


_Wanted = Callable[[str], bool] | None
"""`select` where a template gives the result its type: only a function keeps the shape of the tree."""


@overload
def load(path: Readable, *, like: None = None, select: Select = None, **options: Unpack[Options]) -> Any: ...
@overload
def load(
    path: Readable, *, like: T, select: _Wanted = None, strict: Literal[True] = True, **options: Unpack[Options]
) -> T: ...
@overload
def load(
    path: Readable, *, like: T, select: _Wanted = None, strict: Literal[False], **options: Unpack[Options]
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

    Loading imports nothing, and calls no function because a file names it. A file may name what an allow-list has:
    Equinox modules, optax states, and harmless functions of JAX and the libraries built on it. Your own classes and
    functions are not on it: name them in `trusted`. To trust a package is to let the file name any function defined in
    it. If a module is not imported yet, the error says which.

    Args:
        path: a path, a binary file object that stands at the beginning of the file, or its bytes.
        trusted: classes, functions, names (`"my_models:Encoder"`) or packages (`"my_models"`) that this file may name.
            `sharedtree.audit(path)` says which it needs. See also `sharedtree.trust`.
        like: a template: a tree like the one that was saved, with arrays or `jax.ShapeDtypeStruct`s. Its classes and
            functions are trusted. Shapes, dtypes, weak types, names, ties and what is static in modules are checked
            against it, and arrays go to the devices where those of the template are, if they are committed to them. A
            NumPy array is another thing than one of JAX; a `ShapeDtypeStruct` stands for both. The values are the
            file's, also those that are no arrays; but what `save` was told to leave out is the template's own.
        select: the path of a part (`".encoder"`), which is then all that is loaded; or a function from the name of an
            array, which is its path without the first dot, to whether it is wanted. In the place of the others are
            `jax.ShapeDtypeStruct`s. Only the bytes of what is selected are read.
        sharding: where JAX arrays go: a device or a sharding for all of them, or a function from name and
            `jax.ShapeDtypeStruct` to one or None. Each process reads the bytes of its own shards. Default: as for new
            arrays.
        strict: whether a difference to the template is an error. If not, the result is the template, static values
            included, with the arrays that fit, in a pair with a `LoadReport` of all that differs.
        renames: what was renamed since: `{"old.module:Old": "new.module:New", "old.module:Old.weight": "kernel"}`. A
            field renamed to None is dropped. The new name may be the class or the function itself, which is then
            trusted.
        mmap: whether to map the file instead of reading it. Then loading takes no time and no memory, whatever the
            size, and NumPy arrays are read-only.
        verify: whether to check the digests of what is read; with `mmap` the file is read once for that. Without it,
            all bytes of booleans but 0 are true.
        progress: called with the bytes done and the bytes in all; or True for a bar (needs tqdm).
        foreign: whether the file may be a safetensors file of another program. Such a file has no tree: what is
            returned is a flat dictionary from the names of its tensors to JAX arrays. It has no digests either. A file
            of sharedtree's is loaded as always.

    Returns:
        The tree. What was one object is one object. With `strict=False` and a template, (tree, report).

    Raises:
        UntrustedTypeError: if the file names what it may not. Nothing was loaded.
        StructureMismatchError: if a class or the template does not fit, no template has what was left out, a name leads
            nowhere, a selected part is not there, or arrays have 64-bit numbers and JAX has them switched off.
        FormatError: if it is no sharedtree file, a malformed one, or one of a newer version; with `foreign`, if it is
            no safetensors file, or JAX lacks the dtype of a wanted tensor.
        CorruptFileError: if it was cut short or changed.
        OSError: if it cannot be read.
        TypeError: if `path`, `select`, `sharding` or `renames` is of another type than it may be.
        ValueError: if `renames` has an old name that can be in no file, or `foreign` meets a file without a tree, and
            another option needs one.

    Cost: one walk over the nodes, and the bytes of the arrays read once into memory JAX uses without a copy on a
    CPU. Arrays of less than 4 MiB share memory, 16 MiB of it at most, which is freed with the last of them.

    Limitations: with `mmap`, if another program cuts the file short, looking at its arrays ends the process (SIGBUS),
    and if one writes into it, they change. `save` in this process is safe, to the path or to a file object. On Windows
    it cannot be replaced meanwhile.

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
    # A pipe can be opened only once, so whatever looks at the file looks at this source.
    with contextlib.closing(open_source(path)) as source:
        reading = {"select": select, "sharding": sharding, "mmap": mmap, "verify": verify, "progress": progress}
        if foreign and is_foreign(source):
            # Options that need a tree, each true if the user passed it.
            of_a_tree = {"trusted": trusted, "like": like is not None, "strict": not strict, "renames": renames}
            return load_tensors(source, **reading, **of_a_tree)
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
    """Loads the tree from an open source, which stays open. Options and errors are those of `load`."""
    # 1. Make the allow-list. A template's classes and functions are trusted.
    trust = Trust(trusted, names_in(like) if like is not None else None)
    # 2. Open and check the file.
    with opened(source) as (container, manifest):
        # 3. Plan: every name of the file is judged before anything is read or built.
        label = container.label
        plan = Plan(manifest, label, trust, like=like, select=select, sharding=sharding, strict=strict, renames=renames)
        # 4. Read the arrays that are wanted.
        arrays = read_arrays(container, plan.wanted, plan.place, mmap=mmap, verify=verify, progress=progress)
    # 5. Build the tree.
    return plan.tree(arrays)


class Opened(NamedTuple):
    """An open checkpoint.

    Attributes:
        container: its tensors.
        manifest: its tree.
    """

    container: Container
    manifest: Manifest


@contextlib.contextmanager
def opened(location: Readable | Source) -> Iterator[Opened]:
    """Opens a checkpoint, checks container and manifest, and that both describe the same tensors.

    An open source stays open.
    """
    with open_container(location) as container:
        manifest = parse_manifest(container.manifest)
        disagreement = next(_disagreements(container, manifest), None)
        if disagreement is not None:
            raise invalid_file_error(container.label, disagreement)
        yield Opened(container, manifest)


def _disagreements(container: Container, manifest: Manifest) -> Iterator[str]:
    """Iterates over texts that say what differs between the tensors of the container and those of the manifest."""
    tensors = container.tensors
    for entry in manifest.arrays:
        tensor = tensors.get(entry.tensor)
        if tensor is None:
            yield f"the manifest names a tensor `{printable(entry.tensor)}`, which is not there"
            continue
        dtype, shape = stored_form(dtype_named(entry.dtype), entry.shape)
        if (tensor.dtype, tensor.shape) != (dtype, shape):
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
        **options: those of `load`.

    Raises:
        FormatError: as `load`, whose other errors it raises, too.

    Example:
        >>> import sharedtree as st
        >>> st.from_bytes(st.to_bytes({"step": 3}))
        {'step': 3}
    """
    return load(data, **options)
