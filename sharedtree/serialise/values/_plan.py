"""What is taken of a saved tree: which arrays, where each goes, and the tree that is made of them.

`load` and `orbax.restore` differ in who reads the bytes; all else is here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..._ties import all_paths
from ..arrays._arrays import ArrayEntry, finish
from ..arrays._dtypes import dtype_named
from ..arrays._placing import Place, Placement
from ..trust._trust import Trust
from ._decoding import decode, resolve
from ._evolution import Renames
from ._nodes import Manifest
from ._paths import part_at
from ._template import Comparison, LoadReport, compare, rebuilt, require_no_differences

Select = str | Callable[[str], bool] | None
"""The path of a part, or a function from the names of arrays to whether they are wanted."""

Shardings = Placement | Callable[[str, jax.ShapeDtypeStruct], Placement]
"""Where arrays go: one place for all of them, or a function from name and description."""


class Plan:
    """What is to be read for one call of `load`: the entries that are `wanted`, and the `place` for each.

    Names are looked up, and a template is compared, when it is made: what does not fit is an error before anything is
    read. Options are those of `load`; `label` is what errors call the file. Cost: with a template, a walk over both.
    """

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
        self._manifest = part_at(manifest, select) if isinstance(select, str) else manifest
        self._renames = renames
        self._resolved = resolve(self._manifest, trust, renames)
        self._compared: Comparison | None = None
        self._like = like if not strict else None
        self.place: Place = place_of(sharding)
        entries = self._manifest.arrays
        if like is not None:
            structs = {entry.tensor: struct_of(entry) for entry in entries}
            described = {id(structs[entry.tensor]): entry for entry in entries}  # alive in `structs`
            self._compared = compare(self._decoded(structs), like, described)
            if strict:
                require_no_differences(self._compared.differences, label)
            if sharding is None:
                places: dict[str, Placement] = {}
                for record, struct in self._compared.fitting.items():
                    if id(struct) in described:  # alive: see there
                        leaf = self._compared.template.objects[record]
                        has_place = isinstance(leaf, jax.ShapeDtypeStruct) or getattr(leaf, "committed", False)
                        places.setdefault(described[id(struct)].tensor, leaf.sharding if has_place else None)
                self.place = lambda entry: places.get(entry.tensor)
        self.wanted = [entry for entry in entries if not callable(select) or select(entry.tensor)]

    def tree(self, arrays: Sequence[Any]) -> Any:
        """The tree, from one array for each of `wanted`; with `strict=False` and a template, the report too.

        Cost: one walk over the nodes. The arrays are not copied.
        """
        read: dict[str, Any] = dict(zip([entry.tensor for entry in self.wanted], arrays, strict=True))
        others = [entry for entry in self._manifest.arrays if entry.tensor not in read]
        tree = self._decoded(read | {entry.tensor: struct_of(entry) for entry in others})
        return tree if self._like is None else _filled(self._like, tree, read, self._compared)

    def _decoded(self, held: Mapping[str, Any]) -> Any:
        """The tree, with given objects for its arrays, which need no finishing."""
        arrays, plain = self._manifest.arrays, self._manifest
        if any(entry.weak or entry.key is not None for entry in arrays):
            plain = plain._replace(arrays=tuple(entry._replace(weak=False, key=None) for entry in arrays))
        return decode(plain, lambda i: held[arrays[i].tensor], renames=self._renames, resolved=self._resolved)


def struct_of(entry: ArrayEntry) -> jax.ShapeDtypeStruct:
    """The description of an array."""
    return finish(entry, jax.ShapeDtypeStruct(entry.shape, dtype_named(entry.dtype)))


def place_of(sharding: Shardings) -> Place:
    """Where `sharding` would have each array."""

    def required(placement: Any) -> Placement:
        if placement is None or isinstance(placement, jax.sharding.Sharding | jax.Device):
            return placement
        raise TypeError(
            f"`sharding` is or gives {placement!r}, which is neither a device nor a sharding. Give one of JAX's:\n"
            "    sharedtree.load(path, sharding=jax.devices()[0])"
        )

    if callable(sharding) and not isinstance(sharding, jax.sharding.Sharding):
        return lambda entry: required(sharding(entry.tensor, struct_of(entry)))
    placement = required(sharding)
    return lambda _: placement


def _filled(like: Any, tree: Any, read: dict[str, Any], before: Any) -> tuple[Any, LoadReport]:
    """The template with what fits of the file, whose arrays that were read are given by name."""
    again = compare(tree, like, {})
    # What was not wanted is still a description of an array.
    found = {n: leaf for n, leaf in again.fitting.items() if not isinstance(leaf, jax.ShapeDtypeStruct)}
    used: dict[int, Any] = {}  # id → array, which it keeps alive

    def leaf_of(number: int) -> Any:
        leaf = found.get(number, again.template.objects[number])
        if number in found and isinstance(leaf, jax.Array | np.ndarray):
            # What is one object in the file may be two in the template, and stays two.
            return leaf.copy() if id(leaf) in used else used.setdefault(id(leaf), leaf)  # alive in `used`
        return leaf

    result = rebuilt(again.template, leaf_of)
    paths = all_paths(again.template.structure)
    loaded = [paths[number][0] for number in again.template.structure.leaf_numbers if number in found]
    kept = [paths[number][0] for number in again.template.structure.leaf_numbers if number not in found]
    unused = [tensor for tensor, array in read.items() if id(array) not in used]  # alive in `read`
    return result, LoadReport(tuple(loaded), tuple(kept), (*before.differences, *before.values), tuple(unused))
