"""A template compared with what a file holds: names, shapes, dtypes and ties, all differences at once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import tree_util as jtu

from .._errors import StructureMismatchError
from .._sharing import name_of
from .._statics import Static
from .._structure import LEAF, Node
from .._ties import ReadTree, can_be_tied, read_tree

_MAX_LISTED = 100


class Difference(NamedTuple):
    """One thing in which a file and a template differ.

    Attributes:
        path: where.
        in_file: what the file has there.
        in_template: what the template has there.
    """

    path: str
    in_file: str
    in_template: str

    def __str__(self) -> str:
        return f"`{self.path}`: the file has {self.in_file}, the template {self.in_template}"


class LoadReport(NamedTuple):
    """What `load(..., like=template, strict=False)` did.

    Attributes:
        loaded: the paths whose arrays came from the file.
        kept: the paths whose arrays are the template's, since the file has none that fits.
        differences: everything in which the two differ.
        unused: the names of the arrays of the file that found no place: the second of two where the template has one
            object, and whatever the template does not have, or has in another form.
    """

    loaded: tuple[str, ...]
    kept: tuple[str, ...]
    differences: tuple[Difference, ...]
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} arrays loaded, {len(self.kept)} kept from the template"]
        lines += [f"    kept `{path}`" for path in self.kept]
        lines += [f"    not used of the file: `{name}`" for name in self.unused]
        lines += [f"    {difference}" for difference in self.differences]
        return "\n".join(lines)


class Comparison(NamedTuple):
    """A file's tree beside a template.

    Attributes:
        template: the template, taken apart.
        fitting: record of the template → the file's traced leaf at the same place, where shape and dtype are the same.
        differences: everything in which the two differ.
    """

    template: ReadTree
    fitting: dict[int, Any]
    differences: list[Difference]


def compare(held: Any, template: Any, kind_of: Callable[[Any], str | None] | None = None) -> Comparison:
    """Compares what a file holds with a template.

    Args:
        held: the file's tree, with a `jax.ShapeDtypeStruct` for each array.
        template: any tree. Of its arrays only shapes, dtypes and whether they are JAX's or NumPy's matter, of other
            values only their types: the file has the values. A `ShapeDtypeStruct` in it stands for both kinds of array.
        kind_of: what the description of an array in `held` stands for, "jax" or "numpy"; None if for nothing else.

    Cost: one visit for each pair of nodes.
    """
    file, own = read_tree(held), read_tree(template)
    fitting: dict[int, Any] = {}
    found: list[Difference] = []
    in_file: dict[int, tuple[int, str]] = {}  # record of the file → that of the template that it met first, and where
    in_template: dict[int, tuple[int, str]] = {}
    seen: set[tuple[int, int]] = set()
    stack: list[tuple[int, int, str, bool]] = [(file.structure.root, own.structure.root, "", False)]
    while stack:
        left, right, path, is_told = stack.pop()
        if (left, right) in seen:
            continue
        seen.add((left, right))
        (op, children), (other, others) = file.structure.records[left], own.structure.records[right]
        if not is_told and can_be_tied(op) and can_be_tied(other):
            tie = _tie(in_file.setdefault(left, (right, path)), right, path)
            lost = _tie(in_template.setdefault(right, (left, path)), left, path)
            if tie is not None or lost is not None:
                is_told = True  # what is in a module parts with it, and need not be listed
                first = tie or lost
                found.append(Difference(path, *_PARTED[tie is None].format(first).split("|")))
        if type(op) is Node and type(other) is Node and op.type.cls is other.type.cls:
            here = {jtu.keystr((key,)): child for key, child in zip(op.keys, children, strict=True)}
            there = {jtu.keystr((key,)): child for key, child in zip(other.keys, others, strict=True)}
            for step in reversed({**here, **there}):
                if step not in there:
                    found.append(Difference(path + step, name_of(file.structure.records[here[step]][0]), "nothing"))
                elif step not in here:
                    found.append(Difference(path + step, "nothing", name_of(own.structure.records[there[step]][0])))
                else:
                    stack.append((here[step], there[step], path + step, is_told))
            continue
        if type(op) is Node or type(other) is Node:
            found.append(Difference(path, name_of(op), name_of(other)))
            continue
        one, two = _value(file, left), _value(own, right)
        if _described(one) != _described(two):
            found.append(Difference(path, _described(one), _described(two)))
        elif isinstance(two, jax.Array | np.ndarray) and _kind(one, kind_of) != _kind(two):
            found.append(Difference(path, _KINDS[_kind(one, kind_of)], _KINDS[_kind(two)]))
        elif op is LEAF and other is LEAF:
            fitting.setdefault(right, one)
    return Comparison(own, fitting, found)


def require_no_differences(differences: Sequence[Difference], label: str) -> None:
    """Raises `StructureMismatchError` that lists them all."""
    if not differences:
        return
    lines = [f"    {difference}" for difference in differences[:_MAX_LISTED]]
    if len(differences) > _MAX_LISTED:
        lines.append(f"    and {len(differences) - _MAX_LISTED} more")
    raise StructureMismatchError(
        "\n".join(
            [
                f"`{label}` does not hold what the template asks for:",
                *lines,
                "Load it as it is, or load what fits and see the rest reported:",
                "    model = sharedtree.load(path)",
                "    model, report = sharedtree.load(path, like=template, strict=False)",
            ]
        ),
        [difference.path for difference in differences],
    )


_PARTED = ("one object with `{0}`|another one", "another object than `{0}`|one object with it")


def _tie(first: tuple[int, str], other: int, path: str) -> str | None:
    """Where a record was met first, if that was with another one."""
    return first[1] if first[0] != other and first[1] != path else None


def _value(tree: ReadTree, number: int) -> Any:
    """A leaf, traced or not: an array that JAX cannot trace is one in a template, but not its description in a file."""
    op = tree.structure.records[number][0]
    return op.peek() if type(op) is Static else tree.leaf_of.get(number)


def _described(leaf: Any) -> str:
    if isinstance(leaf, _ARRAYS):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return "a function" if callable(leaf) else f"a `{type(leaf).__name__}`"


def _kind(array: Any, kind_of: Callable[[Any], str | None] | None = None) -> str | None:
    if isinstance(array, jax.ShapeDtypeStruct):
        return kind_of(array) if kind_of is not None else None
    return "jax" if isinstance(array, jax.Array) else "numpy"


_KINDS = {"jax": "a JAX array", "numpy": "a NumPy array", None: "a `ShapeDtypeStruct`"}
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
