"""Makes the description of a model in a file from the file's header: no class is looked up, and no array is read.

The header's *manifest* has one node for each object of the model. A node is a list: its kind, such as `"dict"` or
`"object"`, and then what that kind needs. A child is the number of a node, or a value that is written in place.
"""

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
from ._description import Description, Edge, Part, described

# Steps of a file that no path of the model has. Their children are static.
_LEFT_OUT = ("<key>", "<aux>", ".<attributes>", ".default_factory")


def description_of_file(manifest: Manifest) -> Description:
    """Makes the description of the model in a file, like that of the live model.

    Args:
        manifest: the manifest of the file.

    Static leaves and Python numbers are values in a file and have no part. Neither have containers that hold nothing
    else. Static fields that are containers of containers look like any others, and have one. State is recognised by the
    names of the libraries' own classes. So an array in a user's subclass of such a class counts as parameters.

    Cost: linear in the nodes and the references to them.
    """
    # Children come before their parents, so one pass is enough.
    parts: list[Part | None] = []
    step_texts: dict[str, str] = {}
    for node in manifest.nodes:
        parts.append(_part(manifest, node, parts, step_texts))
    for number in _state_in(manifest):
        part = parts[number]
        if part is not None and part.parameters:
            parts[number] = part._replace(parameters=0)
    # The root may be a value in place, or a node without a part.
    root = manifest.root if type(manifest.root) is int else len(parts)
    return described(parts, root, is_none=manifest.root is None)


def _state_in(manifest: Manifest) -> set[int]:
    """Returns the nodes that are state at all of their places.

    A node is state at a place below a class of state, or below an attribute that is marked as state.
    """
    # Whether it is state at the place → the nodes with such a place.
    visited: dict[bool, set[int]] = {True: set(), False: set()}
    stack = [(manifest.root, False)]
    while stack:
        number, is_state = stack.pop()
        if type(number) is not int or number in visited[is_state]:
            continue
        node = manifest.nodes[number]
        is_instance = node[0] in ("object", "registered")
        is_state = is_state or (is_instance and manifest.types[node[1]].name in STATE)
        visited[is_state].add(number)
        edges = list(steps(manifest, node))
        marked_steps = _steps_marked_as_state(manifest, edges) if is_instance else ()
        stack += [(child, is_state or step in marked_steps) for child, step in edges]
    return visited[True] - visited[False]


def _steps_marked_as_state(manifest: Manifest, edges: Sequence[tuple[Child, str]]) -> Collection[str]:
    """Returns the steps to the attributes of an instance that are state.

    Libraries such as `sharedtree.Module` keep an entry in each instance: a dict of the kinds of its attributes.

    Args:
        manifest: the manifest of the file.
        edges: children and steps of the instance.
    """
    for child, step in edges:
        if step.removeprefix(".") in STATE_ENTRIES and type(child) is int and manifest.nodes[child][0] == "dict":
            _, names, kinds = manifest.nodes[child]
            return [f".{name}" for name, kind in zip(names, kinds, strict=True) if kind == "state"]
    return ()


def _part(manifest: Manifest, node: Node, parts: list[Part | None], step_texts: dict[str, str]) -> Part | None:
    """Returns the part of a node. None if the node has no line and no box.

    Args:
        manifest: the manifest of the file.
        node: the node.
        parts: the parts of all earlier nodes, which include the children.
        step_texts: see `_edges`.
    """
    kind = node[0]
    if kind == "array":
        return _array(manifest.arrays[node[1]])
    if kind == "struct":
        return _abstract_array(manifest, node)
    # `inline_text` returns the text of a value, such as a function or a dtype, and None for nodes with children.
    if inline_text(manifest, node) is not None or kind not in _SHOWN:
        return None
    view = _view(manifest, node, parts)
    if view is not None:
        return view
    edges = [edge for edge in _edges(manifest, node, step_texts) if parts[edge.child] is not None]
    name = printable(node_text(manifest, node))
    # A variable of Flax NNX that holds one array is shown as that array, under the variable's class.
    if kind == "registered" and [edge.step for edge in edges] == [".value"]:
        value = parts[edges[0].child]
        if value is not None and value.kind == "array":
            return value._replace(name=name)
    is_class = kind in _OF_CLASSES
    has_identity = carries_identity(manifest, node)
    # A tuple of values only, for instance.
    if not edges and not is_class and not has_identity:
        return None
    return Part(
        "module" if is_class and has_identity else "container",
        name.removeprefix("empty "),
        tuple([edge.child for edge in edges]),
        tuple([edge.step for edge in edges]),
        has_identity=has_identity,
    )


def _view(manifest: Manifest, node: Node, parts: list[Part | None]) -> Part | None:
    """Returns the part of a view. None if the node is no view, or is not as `save` writes one.

    A view is a registered object with one tuple `.of`: the arrays that it is computed from.
    """
    if node[0] != "registered" or manifest.types[node[1]].name != "sharedtree:View":
        return None
    children = [child for child, step in steps(manifest, node) if step == ".of"]
    if len(children) != 1 or type(children[0]) is not int or manifest.nodes[children[0]][0] != "tuple":
        return None
    entries = [child for child, _ in steps(manifest, manifest.nodes[children[0]])]
    sources = [child for child in entries if type(child) is int and parts[child] is not None]
    if len(sources) != len(entries):
        return None
    source_steps = tuple([f".of[{i}]" for i in range(len(sources))])
    # A function by its name is a list such as ["function", "jax.numpy:transpose"].
    function = node[2]
    text = function[1].rpartition(":")[2] if type(function) is list else "partial"
    return Part("module", "View", tuple(sources), source_steps, through=printable(text) or "function")


# Kinds of nodes that are instances of a class.
_OF_CLASSES = frozenset({"object", "wrapper", "registered", "Partial"})

# Kinds of nodes that may have a part: instances and containers.
_SHOWN = _OF_CLASSES | {"tuple"} | {kind.name for kind in KINDS.values() if kind.has_identity}


def _edges(manifest: Manifest, node: Node, step_texts: dict[str, str]) -> list[Edge]:
    """Returns the edges from a node to the children that are nodes, in JAX's order.

    Args:
        manifest: the manifest of the file.
        node: one of its nodes.
        step_texts: step as the file has it → text to print. Each text is kept once, since a small file can have a great
            many places. New ones are added.
    """
    edges = [(child, step) for child, step in steps(manifest, node) if step not in _LEFT_OUT]
    # JAX sorts the keys of a dict. If they cannot be compared, they stay in the order of the file.
    if node[0] in _SORTED:
        keys = [_sort_key(key) for key in node[-2]]
        if len(set(map(type, keys))) == 1 and None not in keys and len(keys) == len(edges):
            edges = [
                edge for _, edge in sorted(zip(keys, edges, strict=True), key=lambda key_and_edge: key_and_edge[0])
            ]
    return [Edge(child, step_texts.setdefault(step, printable(step))) for child, step in edges if type(child) is int]


# Kinds of nodes whose keys JAX sorts.
_SORTED = ("dict", "defaultdict")


def _sort_key(key: Child) -> Any:
    """Returns the text or integer by which JAX sorts a key of a dict. None for keys of other types.

    An integer key is a list of `"int"` and hexadecimal digits. A file may claim any number of digits, so long ones are
    not read.
    """
    if type(key) is str:
        return key
    return int(key[1], 16) if type(key) is list and key[0] == "int" and len(key[1]) < _LONGEST_KEY else None


_LONGEST_KEY = 1_000


def _array(entry: ArrayEntry) -> Part:
    """Returns the part of an array or a PRNG key."""
    nbytes = array_nbytes(entry)
    if entry.key is not None:
        # The last axis of the stored array is the data of one key, which is no axis of the key array.
        dtype = str(key_dtype(entry.key))
        return Part("array", "", shape=entry.shape[:-1], dtype=printable(dtype), nbytes=nbytes)
    dtype = dtype_named(entry.dtype)
    name = "NumPy" if entry.kind == "numpy" else ""
    text, parameters = printable(entry.dtype), _num_parameters(entry.shape, dtype)
    return Part("array", name, shape=entry.shape, dtype=text, parameters=parameters, nbytes=nbytes)


def _abstract_array(manifest: Manifest, node: Node) -> Part:
    """Returns the part of a `jax.ShapeDtypeStruct`, whose node has a shape and a dtype."""
    shape, child = tuple(node[1]), node[2]
    # The dtype is a node of its own or a value in place.
    dtype_node = manifest.nodes[child] if type(child) is int else child
    name = str(dtype_node[1])
    if dtype_node[0] == "key_dtype":
        dtype = key_dtype(name)
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        return Part("array", "abstract", shape=shape, dtype=printable(str(dtype)), nbytes=nbytes)
    dtype = dtype_named(name)
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    text, parameters = printable(name), _num_parameters(shape, dtype)
    return Part("array", "abstract", shape=shape, dtype=text, parameters=parameters, nbytes=nbytes)


def _num_parameters(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    """Returns the number of entries of an array, or 0 if its dtype cannot be differentiated.

    A file may claim any shape, so the product is taken in Python integers, which cannot overflow.
    """
    return int(np.prod(shape, dtype=object)) if jnp.issubdtype(dtype, np.inexact) else 0
