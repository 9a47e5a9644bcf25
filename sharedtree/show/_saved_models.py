"""The description of a model in a file, from its header: no class is looked up, and no array is read."""

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core._printing import printable
from ..serialise.arrays._dtypes import dtype_named
from ..serialise.arrays._placing import ArrayEntry, key_dtype
from ..serialise.trust._allow_list import STATE, STATE_ENTRIES
from ..serialise.values._all_kinds_of_nodes import KINDS, inline_text, node_text, steps
from ..serialise.values._nodes import Child, Manifest, Node
from ..serialise.values._paths import array_nbytes, carries_identity
from ._description import Description, Part

_LEFT_OUT = ("<key>", "<aux>", ".<attributes>", ".default_factory")


def description_of_file(manifest: Manifest) -> Description:
    """Describes what a file holds, as the model itself is described.

    Args:
        manifest: of the file.

    What is static in a model, and Python numbers, are values in a file, and are left out; so are containers that hold
    nothing else. Static fields that are containers of containers cannot be told from others. State is told by the names
    of the libraries' own classes, so that in a class of the user's that inherits from one counts as parameters.

    Cost: linear in the nodes and the references to them.
    """
    parts: list[Part | None] = []
    known: dict[str, str] = {}
    for node in manifest.nodes:
        parts.append(_part(manifest, node, parts, known))
    for number in _state_in(manifest):
        part = parts[number]
        if part is not None and part.parameters:
            parts[number] = part._replace(parameters=0)
    root = manifest.root if type(manifest.root) is int else len(parts)
    if root == len(parts) or parts[root] is None:
        parts.append(Part("container", "a value without arrays", has_identity=False))
        root = len(parts) - 1
    return Description(parts, root)


def _state_in(manifest: Manifest) -> set[int]:
    """The nodes that are state wherever they are: below a class of state, or an attribute that is marked as state."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    stack = [(manifest.root, False)]
    while stack:
        number, is_state = stack.pop()
        if type(number) is not int or number in found[is_state]:
            continue
        node = manifest.nodes[number]
        is_instance = node[0] in ("object", "registered")
        is_state = is_state or (is_instance and manifest.types[node[1]].name in STATE)
        found[is_state].add(number)
        below = list(steps(manifest, node))
        marked = _marked_as_state(manifest, below) if is_instance else ()
        stack += [(child, is_state or step in marked) for child, step in below]
    return found[True] - found[False]


def _marked_as_state(manifest: Manifest, below: Sequence[tuple[Child, str]]) -> Collection[str]:
    """The steps to the attributes of an instance that its own entry says are state."""
    for child, step in below:
        if step.removeprefix(".") in STATE_ENTRIES and type(child) is int and manifest.nodes[child][0] == "dict":
            _, names, kinds = manifest.nodes[child]
            return [f".{name}" for name, kind in zip(names, kinds, strict=True) if kind == "state"]
    return ()


def _part(manifest: Manifest, node: Node, parts: list[Part | None], known: dict[str, str]) -> Part | None:
    kind = node[0]
    if kind == "array":
        return _array(manifest.arrays[node[1]])
    if kind == "struct":
        return _abstract(manifest, node)
    if inline_text(manifest, node) is not None or kind not in _SHOWN:
        return None
    view = _view(manifest, node, parts)
    if view is not None:
        return view
    kept = [(child, step) for child, step in _ways(manifest, node, known) if parts[child] is not None]
    name = printable(node_text(manifest, node))
    if kind == "registered" and [step for _, step in kept] == [".value"]:
        held = parts[kept[0][0]]
        if held is not None and held.kind == "array":
            return held._replace(name=name)
    is_class = kind in _OF_CLASSES
    has_identity = carries_identity(manifest, node)
    if not kept and not is_class and not has_identity:
        return None
    return Part(
        "module" if is_class and has_identity else "container",
        name.removeprefix("empty "),
        tuple([child for child, _ in kept]),
        tuple([step for _, step in kept]),
        has_identity=has_identity,
    )


def _view(manifest: Manifest, node: Node, parts: list[Part | None]) -> Part | None:
    """A view, if the file has it as `save` writes one."""
    if node[0] != "registered" or manifest.types[node[1]].name != "sharedtree:View":
        return None
    children = [child for child, step in steps(manifest, node) if step == ".of"]
    if len(children) != 1 or type(children[0]) is not int or manifest.nodes[children[0]][0] != "tuple":
        return None
    entries = [child for child, _ in steps(manifest, manifest.nodes[children[0]])]
    sources = [child for child in entries if type(child) is int and parts[child] is not None]
    if len(sources) != len(entries):
        return None
    places = tuple([f".of[{i}]" for i in range(len(sources))])
    through = node[2]
    text = through[1].rpartition(":")[2] if type(through) is list else "partial"
    return Part("module", "View", tuple(sources), places, through=printable(text) or "function")


_OF_CLASSES = frozenset({"object", "wrapper", "registered", "Partial"})

_SHOWN = _OF_CLASSES | {"tuple"} | {kind.name for kind in KINDS.values() if kind.has_identity}


def _ways(manifest: Manifest, node: Node, known: dict[str, str]) -> list[tuple[int, str]]:
    """The children that are nodes, in JAX's order, with the steps as they are printed.

    Args:
        manifest: of the file.
        node: one of its nodes.
        known: the steps so far, each text once, for a small file can have a great many places.
    """
    ways = [(child, step) for child, step in steps(manifest, node) if step not in _LEFT_OUT]
    if node[0] in _SORTED:
        keys = [_sort_key(key) for key in node[-2]]
        if len(set(map(type, keys))) == 1 and None not in keys and len(keys) == len(ways):
            ways = [way for _, way in sorted(zip(keys, ways, strict=True), key=lambda each: each[0])]
    return [(child, known.setdefault(step, printable(step))) for child, step in ways if type(child) is int]


_SORTED = ("dict", "defaultdict")


def _sort_key(key: Child) -> Any:
    """By what JAX sorts the keys of a dictionary, as far as texts and numbers go."""
    if type(key) is str:
        return key
    return int(key[1], 16) if type(key) is list and key[0] == "int" and len(key[1]) < _LONGEST_KEY else None


_LONGEST_KEY = 1_000


def _array(entry: ArrayEntry) -> Part:
    nbytes = array_nbytes(entry)
    if entry.key is not None:
        dtype = str(key_dtype(entry.key))
        return Part("array", "", (), (), entry.shape[:-1], printable(dtype), 0, nbytes)
    dtype = dtype_named(entry.dtype)
    name = "NumPy" if entry.kind == "numpy" else ""
    return Part("array", name, (), (), entry.shape, printable(entry.dtype), _trainable(entry.shape, dtype), nbytes)


def _abstract(manifest: Manifest, node: Node) -> Part:
    shape, below = tuple(node[1]), node[2]
    text = manifest.nodes[below] if type(below) is int else below
    name = str(text[1])
    if text[0] == "key_dtype":
        dtype = key_dtype(name)
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        return Part("array", "abstract", (), (), shape, printable(str(dtype)), 0, nbytes)
    dtype = dtype_named(name)
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    return Part("array", "abstract", (), (), shape, printable(name), _trainable(shape, dtype), size)


def _trainable(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    """The numbers of an array, if they can be differentiated. A file may claim any shape."""
    return int(np.prod(shape, dtype=object)) if jnp.issubdtype(dtype, np.inexact) else 0
