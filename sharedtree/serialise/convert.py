"""`convert`: from the files of other libraries to a tree with ties."""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import tree_util as jtu

from ..core._errors import CorruptFileError
from ..core._printing import printable
from ..ties._tie_and_untie import retie
from .container._byte_sources import Readable, Source, open_source
from .container._header import begins_with_header, require_no_zip
from .foreign._equinox_leaves import MAGIC, read_leaves
from .foreign._flax_msgpack import read_state
from .foreign._foreign_differences import is_key
from .load import load_tree
from .save import save
from .trust._trusted_names import Trusted


class Conversion(NamedTuple):
    """What `convert` did. Prints as a report.

    Attributes:
        tree: what the source holds.
        tied: of each array that was made of several equal ones, the paths, as `jax.tree_util.keystr` prints them.
    """

    tree: Any
    tied: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = [f"{len(self.tied)} ties found by equality"]
        lines += ["    " + " is ".join(f"`{printable(path)}`" for path in paths) for paths in self.tied]
        return "\n".join(lines)


def convert(
    source: Readable,
    target: str | os.PathLike[str] | None = None,
    *,
    like: Any = None,
    ties: Literal["like", "equal"] = "like",
    trusted: Trusted | Iterable[Trusted] = (),
) -> Conversion:
    """Reads a file of Equinox's, flax's or `save`'s, and writes it as one of `save`'s if a target is given.

    The files of the other two write a shared array at each of its paths, and do not say that it was one. So ties come
    from the template, or are found by equality.

    Args:
        source: a path, a binary file object that stands at the beginning of the file, or its bytes. What it is is seen
            from how it begins: arrays of `equinox.tree_serialise_leaves`, a manifest of `save`, or else the msgpack of
            `flax.serialization.to_bytes`.
        target: a path for `save`, or None to write nothing. What is there is replaced as a whole or not at all. What
            Equinox and flax read, they write themselves, from the tree that is returned.
        like: a template: a tree like the one that was written, with arrays or `jax.ShapeDtypeStruct`s, and with the
            ties that the result is to have: a `ShapeDtypeStruct` at two paths is one, as an array is. Equinox's files
            need a template. Without one, flax's give dictionaries of NumPy arrays.
        ties: `"like"` for the ties of the template, or `"equal"` to make one also of all arrays that are equal in
            dtype, shape and every bit, but of those with one value throughout, such as biases that begin as zeros.
            Arrays are made one, not the modules or variables that hold them.
        trusted: as for `load`, if the source is a file of `save`'s.

    Returns:
        The tree, and the ties that were found by equality. Arrays are of the library of the template's, on the default
        device.

    Raises:
        StructureMismatchError: if names, shapes or dtypes are not the template's, or arrays differ that are one in the
            template, or 64-bit types are switched off and the template has JAX arrays of them. All such paths are
            listed. Also if flax cannot take the template apart.
        FormatError: if the source is none of these files, or holds what is pickled; nothing is unpickled. Also if
            booleans have bytes other than 0 and 1.
        CorruptFileError: if it was cut short.
        UnserialisableError: if the tree holds what `save` cannot write. Nothing was written.
        CompatibilityError: if a file of flax's is asked for, and flax is not installed.
        ValueError: if a template is missing, `ties` is something else, or the target ends in `.eqx` or `.msgpack`.

    Cost: the bytes of the file, once; of one of flax's twice. With `ties="equal"` all arrays are hashed.

    Limitations: of Equinox's files those written with the default `filter_spec`. Other leaves than arrays and numbers
    are the template's there. Of bfloat16, fp8 and small integers Equinox's files have only the size of an element, so
    that a template with another such dtype of that size is not found out; `float8_e5m2` is not read. Neither has a form
    for typed PRNG keys. flax takes apart what is registered with `flax.serialization`;
    models of other classes it does not know. Files of flax's are in memory as a whole.

    Example:
        >>> import io, equinox as eqx, jax, sharedtree as st
        >>> net = [eqx.nn.Linear(2, 2, key=jax.random.key(i)) for i in range(2)]
        >>> net = st.tie(net, lambda net: (net[0].weight, net[1].weight))
        >>> file = io.BytesIO()
        >>> eqx.tree_serialise_leaves(file, net)
        >>> again = st.convert(file.getvalue(), like=net).tree
        >>> again[0].weight is again[1].weight
        True
        >>> print(st.convert(file.getvalue(), like=st.untie(net), ties="equal"))
        1 ties found by equality
            `[0].weight` is `[1].weight`
    """
    if ties not in ("like", "equal"):
        raise ValueError(f'`ties` is {ties!r}. Say `ties="like"` for those of the template, or `ties="equal"`.')
    if target is not None and os.path.splitext(os.fsdecode(target))[1] in (".eqx", ".msgpack"):
        raise ValueError(
            f"`{printable(os.fsdecode(target))}` would be a file of another library, and those are only read. Let "
            "the library write it, flax by `flax.serialization.to_bytes(tree)`:\n"
            "    tree = sharedtree.convert(source, like=template).tree\n"
            "    equinox.tree_serialise_leaves(target, tree)"
        )
    with contextlib.closing(open_source(source)) as opened:
        tree = _read(opened, like, trusted)
    tied: tuple[tuple[str, ...], ...] = ()
    if ties == "equal":
        tree, tied = _with_equal_tied(tree)
    if target is not None:
        save(target, tree)
    return Conversion(tree, tied)


def _read(opened: Source, like: Any, trusted: Trusted | Iterable[Trusted]) -> Any:
    if begins_with_header(opened):
        return load_tree(opened, like=like, trusted=trusted)
    start = bytes(opened.read(0, len(MAGIC)))
    require_no_zip(opened.label, start)
    if start and not start.startswith(MAGIC):
        tree = read_state(opened, like)
        return tree if like is None else retie(tree, like)
    if like is not None:
        return retie(read_leaves(opened, like), like)
    if not start:
        raise CorruptFileError(f"`{opened.label}` is empty: it was cut short, or never written. Copy it again.")
    raise ValueError(
        "The files of `equinox.tree_serialise_leaves` do not say to which tree their arrays belong. Give one that is "
        "like it, such as:\n    sharedtree.convert(source, like=equinox.filter_eval_shape(make_model, key))"
    )


def _with_equal_tied(tree: Any) -> tuple[Any, tuple[tuple[str, ...], ...]]:
    """The tree with one object for all arrays that are equal, and the paths of those that were several."""
    paths, treedef = jtu.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in paths]
    groups: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        groups.setdefault(_key_of(leaf), []).append(number)
    groups.pop(None, None)
    tied: list[tuple[str, ...]] = []
    for group in groups.values():
        if any(leaves[number] is not leaves[group[0]] for number in group):
            tied.append(tuple([jtu.keystr(paths[number][0]) for number in group]))
            for number in group:
                leaves[number] = leaves[group[0]]
    return (retie(treedef.unflatten(leaves), tree) if tied else tree), tuple(tied)


def _key_of(leaf: Any) -> Any:
    """What two arrays have in common that may be one; None for other leaves, and for one value throughout."""
    if not isinstance(leaf, jax.Array | np.ndarray) or is_key(leaf) or leaf.dtype.hasobject:
        return None
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return None
    data = np.asarray(leaf).tobytes()
    if not data or data == data[: leaf.dtype.itemsize] * leaf.size:
        return None
    placed = (leaf.sharding, leaf.weak_type) if isinstance(leaf, jax.Array) else None
    return placed, leaf.dtype, leaf.shape, hashlib.blake2b(data).digest()
