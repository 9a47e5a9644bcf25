"""What is taken of a saved tree: which arrays, where each goes, and the tree that is made of them.

`load` and `orbax.restore` differ in who reads the bytes; all else is here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..._graph import unpack
from ..._ties import all_paths
from ..arrays._arrays import ArrayEntry, finish
from ..arrays._dtypes import dtype_named
from ..arrays._placing import Place, Placement
from ..trust._trust import Trust
from ._decoding import decode
from ._evolution import Renames
from ._name_paths import resolve
from ._nodes import Manifest
from ._parts import part_at
from ._template import Comparison, LoadReport, compare, require_no_differences

Select = str | Callable[[str], bool] | None
"""The path of a part, or a function from the names of arrays to whether they are wanted."""

Shardings = Placement | Callable[[str, jax.ShapeDtypeStruct], Placement]
"""Where arrays go: one place for all of them, or a function from name and description."""


class Plan:
    """What is to be read for one call of `load`.

    Args:
        manifest: the tree that was saved.
        label: what to call the file in errors.
        trust: what it may name.
        like: see `load`; likewise `select`, `sharding`, `strict`, `renames`.

    Attributes:
        wanted: the entries of the arrays to read.
        place: where each of them goes.

    Raises:
        StructureMismatchError: if the selected part is not there, or the template does not fit.
        UntrustedTypeError: if the file names what it may not.
        FormatError: if there is a template, and the manifest describes what cannot be built.

    Cost: with a template, two walks over the nodes.
    """

    wanted: list[ArrayEntry]
    place: Place

    def __init__(
        self,
        manifest: Manifest,
        label: str,
        trust: Trust,
        *,
        like: Any = None,
        select: Select = None,
        sharding: Shardings = None,
        strict: bool = True,
        renames: Renames | None = None,
    ) -> None:
        self._manifest = manifest if not isinstance(select, str) else part_at(manifest, select)
        self._renames = {} if renames is None else renames
        self._resolved = resolve(self._manifest, trust, self._renames)
        self._like, self._strict = like, strict
        self._compared: Comparison | None = None
        self.place = _place(sharding)
        if like is not None:
            self._compared, of_template = self._compare(like)
            if strict:
                require_no_differences(self._compared.differences, label)
            if sharding is None:
                self.place = of_template
        self.wanted = [entry for entry in self._manifest.arrays if not callable(select) or select(entry.tensor)]

    def tree(self, arrays: Sequence[Any]) -> Any:
        """The tree, from the arrays that were wanted; with `strict=False` and a template, the report too.

        Args:
            arrays: one for each of `wanted`, in that order.

        Raises:
            UntrustedTypeError: if the file names what it may not.
            StructureMismatchError: if a name leads nowhere, a class has changed, or devices are missing.
            FormatError: if the manifest describes what cannot be built.

        Cost: one walk over the nodes. The arrays are not copied.
        """
        held: dict[str, Any] = dict(zip([entry.tensor for entry in self.wanted], arrays, strict=True))
        for entry in self._manifest.arrays if len(held) < len(self._manifest.arrays) else ():
            if entry.tensor not in held:
                held[entry.tensor] = _struct(entry)
        tree = self._decoded(held)
        if self._compared is None or self._strict:
            return tree
        return _filled(self._compared, tree, self._like, {entry.tensor: held[entry.tensor] for entry in self.wanted})

    def _decoded(self, held: Mapping[str, Any]) -> Any:
        """The tree, with given objects for its arrays, which need no finishing."""
        arrays = self._manifest.arrays
        plain = self._manifest
        if any(entry.weak or entry.key is not None for entry in arrays):
            plain = plain._replace(arrays=tuple(entry._replace(weak=False, key=None) for entry in arrays))
        return decode(plain, lambda i: held[arrays[i].tensor], renames=self._renames, resolved=self._resolved)

    def _compare(self, like: Any) -> tuple[Comparison, Place]:
        """The comparison with a template, and where it would have the arrays."""
        structs = {entry.tensor: _struct(entry) for entry in self._manifest.arrays}
        tensor_of = {id(struct): tensor for tensor, struct in structs.items()}  # alive in `structs`
        kinds = {entry.tensor: entry.kind for entry in self._manifest.arrays}

        def kind_of(struct: Any) -> str | None:
            tensor = tensor_of.get(id(struct))  # alive in `structs`, if it is one of them
            return kinds[tensor] if tensor is not None else None

        compared = compare(self._decoded(structs), like, kind_of)
        places: dict[str, Placement] = {}
        for record, struct in compared.fitting.items():
            tensor = tensor_of.get(id(struct))  # alive in `structs`, if it is one of them
            if tensor is not None:
                places.setdefault(tensor, _placement_of(compared.template.leaf_of[record]))
        return compared, lambda entry: places.get(entry.tensor)


def _struct(entry: ArrayEntry) -> jax.ShapeDtypeStruct:
    return finish(entry, jax.ShapeDtypeStruct(entry.shape, dtype_named(entry.dtype)))


def _place(sharding: Shardings) -> Place:
    if callable(sharding) and not isinstance(sharding, jax.sharding.Sharding):
        return lambda entry: _required(sharding(entry.tensor, _struct(entry)))
    placement = _required(sharding)
    return lambda _: placement


def _required(placement: Any) -> Placement:
    if placement is None or isinstance(placement, jax.sharding.Sharding | jax.Device):
        return placement
    raise TypeError(
        f"`sharding` is or gives {placement!r}, which is neither a device nor a sharding. Give one of JAX's:\n"
        "    sharedtree.load(path, sharding=jax.devices()[0])"
    )


def _placement_of(leaf: Any) -> Placement:
    if isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and leaf.committed):
        return leaf.sharding
    return None


def _filled(compared: Comparison, tree: Any, like: Any, read: dict[str, Any]) -> tuple[Any, LoadReport]:
    """The template with what fits of the file, whose arrays that were read are given by name."""
    again = compare(tree, like)
    paths = all_paths(again.template.structure)
    records = again.template.structure.leaf_numbers
    # What was not wanted is still a description of an array.
    found = {n: leaf for n, leaf in again.fitting.items() if not isinstance(leaf, jax.ShapeDtypeStruct)}
    used: dict[int, Any] = {}  # id → array, which it keeps alive
    leaves: list[Any] = []
    for number in records:
        leaf = found.get(number, again.template.leaf_of[number])
        if isinstance(leaf, jax.Array | np.ndarray) and number in found:
            # What is one object in the file may be two in the template, and stays two.
            leaf = leaf.copy() if id(leaf) in used else used.setdefault(id(leaf), leaf)  # alive in `used`
        leaves.append(leaf)
    unused = [tensor for tensor, array in read.items() if id(array) not in used]  # alive in `read`
    loaded = [paths[number][0] for number in records if number in found]
    kept = [paths[number][0] for number in records if number not in found]
    report = LoadReport(tuple(loaded), tuple(kept), (*compared.differences, *compared.values), tuple(unused))
    return unpack(again.template.structure, leaves), report
