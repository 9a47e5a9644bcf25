"""Makes the description of a model in a file from the file's header: no class is looked up, and no array is read.

The header's *manifest* has one node for each object of the model. A node is a list: its kind, such as `"dict"` or
`"object"`, and then what that kind needs. A child is the number of a node, or a value that is written in place.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core._node_types import Role, role_in_files
from ..core._printing import printable
from ..libraries._flax_linen import roles_by_step
from ..serialise.arrays._dtypes import dtype_named
from ..serialise.arrays._placing import ArrayEntry, key_dtype
from ..serialise.trust._allow_list import OPTIMIZER_STATE, STATE, STATE_ENTRIES
from ..serialise.values._all_kinds_of_nodes import KINDS, inline_text, node_text, steps
from ..serialise.values._nodes import Child, Manifest, Node
from ..serialise.values._paths import array_nbytes, carries_identity
from ._description import Description, Edge, Part, Use, described

# Steps of a file that no path of the model has. Their children are static.
_LEFT_OUT = ("<key>", "<aux>", ".<attributes>", ".default_factory")


def description_of_file(manifest: Manifest) -> Description:
    """Makes the description of the model in a file, like that of the live model.

    Args:
        manifest: the manifest of the file.

    Static leaves and Python numbers are values in a file and have no part. Neither have containers that hold nothing
    else. Static fields that are containers of containers look like any others, and have one. State is recognised by the
    names of the libraries' own classes, and a `TrainState` by its attributes. So an array in a user's subclass of a
    class of state counts as parameters.

    Cost: linear in the nodes and the references to them.
    """
    # Children come before their parents, so one pass is enough.
    parts: list[Part | None] = []
    step_texts: dict[str, str] = {}
    for node in manifest.nodes:
        parts.append(_part(manifest, node, parts, step_texts))
    for number, role in _roles_in(manifest).items():
        part = parts[number]
        if part is not None and (role == "state" or role == "optimizer state"):
            parts[number] = part._replace(use=role)
    # The root may be a value in place, or a node without a part.
    root = manifest.root if type(manifest.root) is int else len(parts)
    return described(parts, root, is_none=manifest.root is None)


def _roles_in(manifest: Manifest) -> dict[int, Role | None]:
    """Returns node → its role, None for a node that is no state.

    A node is state at a place below a class of state, or below an attribute that is marked as state. A node may have
    several places with different roles. Then None wins over "state", and "state" over "optimizer state".
    """
    # Role at a place → the nodes with such a place. The first role with a node wins.
    visited: dict[Role | None, set[int]] = {None: set(), "state": set(), "optimizer state": set()}
    stack: list[tuple[Child, Role | None]] = [(manifest.root, None)]
    while stack:
        number, role = stack.pop()
        if type(number) is not int or number in visited[role]:
            continue
        node = manifest.nodes[number]
        is_instance = node[0] in ("object", "registered")
        if role is None and is_instance:
            role = _role_of_class(manifest.types[node[1]].name)
        visited[role].add(number)
        edges = list(steps(manifest, node))
        # Everything below state is state of the same kind.
        roles_below = _roles_of_attributes(manifest, edges) if role is None and is_instance else {}
        for child, step in edges:
            stack.append((child, role if role is not None else roles_below.get(step)))
    roles: dict[int, Role | None] = {}
    for role, numbers in visited.items():
        for number in numbers:
            roles.setdefault(number, role)
    return roles


def _role_of_class(name: str) -> Role | None:
    """Returns the role of all that is below an instance of a class. None if its name does not say that it is state."""
    if name in STATE:
        return "state"
    if name in OPTIMIZER_STATE:
        return "optimizer state"
    return role_in_files(name)


def _roles_of_attributes(manifest: Manifest, edges: Sequence[tuple[Child, str]]) -> dict[str, Role | None]:
    """Returns step → role for the attributes of an instance that are state.

    Libraries such as `sharedtree.Module` keep an entry in each instance: a dict of the kinds of its attributes. Others
    are known by their attributes.

    Args:
        manifest: the manifest of the file.
        edges: children and steps of the instance.
    """
    for child, step in edges:
        if step.removeprefix(".") in STATE_ENTRIES and type(child) is int and manifest.nodes[child][0] == "dict":
            _, names, kinds = manifest.nodes[child]
            return {f".{name}": "state" for name, kind in zip(names, kinds, strict=True) if kind == "state"}
    return roles_by_step([step for _, step in edges])


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
        shape, dtype = entry.shape[:-1], printable(str(key_dtype(entry.key)))
        return Part("array", "", shape=shape, dtype=dtype, numbers=_num_elements(shape), nbytes=nbytes)
    name = "NumPy" if entry.kind == "numpy" else ""
    return _array_of_numbers(name, entry.shape, entry.dtype, nbytes)


def _abstract_array(manifest: Manifest, node: Node) -> Part:
    """Returns the part of a `jax.ShapeDtypeStruct`, whose node has a shape and a dtype."""
    shape, child = tuple(node[1]), node[2]
    # The dtype is a node of its own or a value in place.
    dtype_node = manifest.nodes[child] if type(child) is int else child
    name, numbers = str(dtype_node[1]), _num_elements(shape)
    if dtype_node[0] == "key_dtype":
        dtype = key_dtype(name)
        nbytes = numbers * dtype.itemsize
        return Part("array", "abstract", shape=shape, dtype=printable(str(dtype)), numbers=numbers, nbytes=nbytes)
    return _array_of_numbers("abstract", shape, name, numbers * dtype_named(name).itemsize)


def _array_of_numbers(name: str, shape: tuple[int, ...], dtype: str, nbytes: int) -> Part:
    """Returns the part of an array that is no array of keys. Its numbers are parameters if they can be differentiated.

    Args:
        name: name of the part.
        shape: shape of the array.
        dtype: name of its dtype.
        nbytes: number of its bytes.
    """
    use: Use = "parameter" if jnp.issubdtype(dtype_named(dtype), np.inexact) else "other"
    numbers = _num_elements(shape)
    return Part("array", name, shape=shape, dtype=printable(dtype), numbers=numbers, use=use, nbytes=nbytes)


def _num_elements(shape: tuple[int, ...]) -> int:
    """Returns the number of elements of an array. A file may claim any shape, so Python's integers are multiplied."""
    return math.prod(shape)
