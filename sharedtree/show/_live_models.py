"""The description of a live model, from the walk that every transform uses."""

from typing import Any

import jax
import numpy as np
from jax import tree_util as jtu

from ..core._errors import UnregisteredTypeError
from ..core._node_types import LIBRARIES, carries_identity, node_type_of
from ..core._printing import printable
from ..core._structure import LEAF, FlatDag, Node, roles_in
from ..ties._list_ties import is_inexact, nbytes_of, read_tree, sources_of_view, text_of_function
from ..tree._dag import Dag
from ._description import Description, Part

_OWN = frozenset[str]().union(*[library.attributes.own_entries for library in LIBRARIES])
"""Under which names libraries keep what is theirs in an instance."""

_NUMBERED = [f"[{i}]" for i in range(1_000)]


def description_of(tree: Any) -> Description:
    """Describes a model.

    Args:
        tree: a module, or any container of modules and arrays; of a Dag, its model.

    Raises:
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` is no pytree.
    """
    if isinstance(tree, Dag):
        read = FlatDag.of_leaves(tree.structure, jtu.tree_leaves(tree))
    else:
        _require_tree(tree)
        read = read_tree(tree)
    return Description(_parts(read), read.root)


def _require_tree(tree: Any) -> None:
    if node_type_of(tree) is not None or hasattr(tree, "dtype"):
        return
    is_class, name = isinstance(tree, type), printable(getattr(tree, "__name__", type(tree).__name__))
    if is_class:
        advice = f"Make a model of it first:\n    sharedtree.summary({name}(...))"
    elif isinstance(tree, str | bytes) or hasattr(tree, "__fspath__"):
        advice = (
            "To look at a file, use the command line, `sharedtree show FILE`, or load it first:\n"
            "    sharedtree.summary(sharedtree.load(path))"
        )
    elif callable(tree) and not hasattr(tree, "__dict__"):
        advice = "Pass the parameters that it uses."
    else:
        advice = (
            "Pass a model, or register its class:\n"
            f"    jax.tree_util.register_pytree_node({type(tree).__name__}, flatten, unflatten)"
        )
    what = f"The class `{name}`" if is_class else f"A `{type(tree).__name__}`"
    raise UnregisteredTypeError(f"{what} is no pytree, so there is nothing to show.\n{advice}", ("",))


def _parts(read: FlatDag) -> list[Part | None]:
    parts: list[Part | None] = []
    roles = roles_in(read)
    for number, (op, children) in enumerate(read.records):
        if op is LEAF:
            part = _leaf(read.leaves[number])
            parts.append(part._replace(parameters=0) if roles.is_state(number) else part)
        elif type(op) is not Node or op.type.cls is type(None):
            parts.append(None)
        elif op.type.is_view:
            sources = sources_of_view(read, number)
            steps = tuple([f".of[{i}]" for i in range(len(sources))])
            through = text_of_function(op.aux.peek())
            parts.append(Part("module", printable(op.type.cls.__name__), tuple(sources), steps, through=through))
        else:
            parts.append(_node(op, children, parts, read))
    return parts


def _node(op: Node, children: tuple[int, ...], parts: list[Part | None], read: FlatDag) -> Part:
    kept = [
        (child, _step(key))
        for key, child in zip(op.keys, children, strict=True)
        if parts[child] is not None and getattr(key, "name", None) not in _OWN
    ]
    name = printable(op.type.cls.__name__)
    if op.type.convention == "variable" and len(kept) == 1 and read.records[kept[0][0]][0] is LEAF:
        held = parts[kept[0][0]]
        # A reference is an object of its own, which other variables may hold too.
        if held is not None and not isinstance(read.leaves[kept[0][0]], jax.Ref):
            return held._replace(name=name, has_identity=True)
    return Part(
        "container" if op.type.is_plain else "module",
        name,
        tuple([child for child, _ in kept]),
        tuple([step for _, step in kept]),
        has_identity=op.type.carries_identity,
    )


def _leaf(leaf: Any) -> Part:
    if not carries_identity(leaf):
        array = np.asarray(leaf)
        dtype = str(array.dtype) if isinstance(leaf, np.generic) else type(leaf).__name__
        return Part("number", "", (), (), (), dtype, int(is_inexact(leaf)), array.nbytes, has_identity=False)
    shape = tuple(leaf.shape)
    size = int(np.prod(shape, dtype=np.int64)) if is_inexact(leaf) else 0
    name = "NumPy" if isinstance(leaf, np.ndarray) else ""
    name = "abstract" if isinstance(leaf, jax.ShapeDtypeStruct) else name
    name = "Ref" if isinstance(leaf, jax.Ref) else name
    return Part("array", name, (), (), shape, printable(str(leaf.dtype)), size, nbytes_of(leaf))


def _step(key: Any) -> str:
    if type(key) is jtu.SequenceKey and key.idx < len(_NUMBERED):
        return _NUMBERED[key.idx]
    return printable(jtu.keystr((key,)))
