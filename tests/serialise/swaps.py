"""Ways to change a manifest that leave it one that makes sense at first sight.

Bytes changed at random, and JSON, are refused at the door. Here each place gets what its place asks for, but of another
node: ids, kinds, names, operands.
"""

import random
from typing import Any

from .dags import SHARED, TYPES
from .drafts import Draft
from .hostile_json import places
from .table import NODE_KINDS


def _nodes_of(draft: Draft) -> list[list[Any]]:
    nodes = draft.manifest["nodes"]
    return [node for node in nodes if isinstance(node, list) and node and node[0] in NODE_KINDS]


def _operands_of(draft: Draft, *kinds: str) -> list[tuple[list[Any], int]]:
    """Every place in the nodes in which an operand of some kinds stands."""
    return [
        (node, i)
        for node in _nodes_of(draft)
        for i, operand in enumerate(NODE_KINDS[node[0]], 1)
        if operand in kinds and i < len(node)
    ]


def swap_operands(rng: random.Random, draft: Draft) -> None:
    """Two operands of one sort exchanged between nodes of any kind."""
    sort = rng.choice(["child", "children", "steps", "type", "text", "sizes", "flag", "array"])
    there = _operands_of(draft, sort)
    if len(there) > 1:
        (a, i), (b, j) = rng.sample(there, 2)
        a[i], b[j] = b[j], a[i]


def swap_children(rng: random.Random, draft: Draft) -> None:
    """Two children of any nodes exchanged, or one of them written in the place of the other: more sharing, and less."""
    there: list[tuple[list[Any], int]] = _operands_of(draft, "child")
    for node, i in _operands_of(draft, "children"):
        there += [(node[i], k) for k in range(len(node[i]))]
    if len(there) > 1:
        (a, i), (b, j) = rng.sample(there, 2)
        a[i], b[j] = (b[j], a[i]) if rng.random() < 0.6 else (b[j], b[j])


def swap_kinds(rng: random.Random, draft: Draft) -> None:
    """Two nodes get each other's kind, or one gets another kind with as many operands of the same sorts."""
    nodes = _nodes_of(draft)
    node = rng.choice(nodes)
    alike = [kind for kind, sorts in NODE_KINDS.items() if sorts == NODE_KINDS[node[0]] and kind != node[0]]
    if alike and rng.random() < 0.6:
        node[0] = rng.choice(alike)
    else:
        other = rng.choice(nodes)
        node[0], other[0] = other[0], node[0]


def swap_nodes(rng: random.Random, draft: Draft) -> None:
    """Two nodes exchanged, with their operands: who referred to one refers to the other."""
    nodes = draft.manifest["nodes"]
    i, j = rng.randrange(len(nodes)), rng.randrange(len(nodes))
    nodes[i], nodes[j] = nodes[j], nodes[i]


def swap_names(rng: random.Random, draft: Draft) -> None:
    """Names of classes, functions, fields, methods, implementations exchanged."""
    there = [(entry, key) for entry in draft.manifest["types"] for key in entry if key in ("name", "kind", "fields")]
    there += [(n, k) for n, k in places(draft.manifest["nodes"]) if type(n[k]) is list and n[k][:1] == ["class"]]
    there += [(n, k) for n, k in places(draft.manifest["nodes"]) if type(n[k]) is list and n[k][:1] == ["function"]]
    there += _operands_of(draft, "text")
    if len(there) > 1:
        a, i = rng.choice(there)
        b, j = rng.choice([(b, j) for b, j in there if type(b[j]) is type(a[i])])
        a[i], b[j] = b[j], a[i]


def swap_arrays(rng: random.Random, draft: Draft) -> None:
    """What the manifest says of two arrays exchanged, in part or whole."""
    arrays = draft.manifest["arrays"]
    if len(arrays) > 1:
        a, b = rng.sample(arrays, 2)
        key = rng.choice(["tensor", "dtype", "shape", "kind", "weak", "key"])
        a[key], b[key] = b.get(key, False), a.get(key, False)


def resize(rng: random.Random, draft: Draft) -> None:
    """One child, step or size more or fewer."""
    there = [(node, i) for node, i in _operands_of(draft, "children", "steps", "sizes") if type(node[i]) is list]
    if there:
        node, i = rng.choice(there)
        held = node[i]
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held)))
        else:
            held.append(rng.choice(held) if held else rng.randrange(1 + len(draft.manifest["nodes"])))


def unfold(rng: random.Random, draft: Draft) -> None:
    """A DAG of 2^60 paths in the place of some child."""
    nodes = draft.manifest["nodes"]
    there = [(node, i) for node, i in _operands_of(draft, "child", "children") if node[i]]
    if not there:
        return
    node, i = rng.choice(there)
    how = rng.choice(list(SHARED))
    types = draft.manifest["types"]
    added = [["tuple", []]]
    for _ in range(60):
        added += SHARED[how](len(added) - 1)
    for new in added:  # whose types and children have other numbers here
        for k, operand in enumerate(NODE_KINDS[new[0]], 1):
            if operand == "type":
                new[k] += len(types)
    types += [dict(entry) for entry in TYPES]
    for other, k in _operands_of(draft, "child", "children"):
        other[k] = _moved(other[k], len(added))
    draft.manifest["root"] = _moved(draft.manifest["root"], len(added))
    nodes[:0] = added
    node[i] = [len(added) - 1] * len(node[i]) if type(node[i]) is list and node[i][:1] != ["int"] else len(added) - 1


def _moved(child: Any, by: int) -> Any:
    if type(child) is int:
        return child + by
    return [_moved(each, by) for each in child] if type(child) is list else child


NAMES = [
    "_repr_html_", "_repr_mimebundle_", "_repr_pretty_", "_ipython_display_", "_ipython_key_completions_",
    "__array__", "__array_interface__", "__array_ufunc__", "__array_function__", "__jax_array__", "__call__",
    "__class__", "__dict__", "__get__", "__iter__", "__len__", "__reduce_ex__", "__getattr__", "__rich__",
    "__html__", "__dlpack__", "__treescope_repr__", "__wrapped__", "__signature__", "__annotations__", "__name__",
    "__doc__", "__module__", "__sharedtree_migrate__", "_asdict", "_replace", "tolist", "to_json", "for_json",
    "to_dict", "_fields", "_field_metadata", "_pytree__nodes", "_sharedtree_kinds", "cache", "shape", "dtype",
    "keys", "items", "weight", "child", "a", "rate", "x.y", "def", "0", "é",
]  # fmt: skip


def set_undeclared(rng: random.Random, draft: Draft) -> None:
    """An attribute that a class may not declare, on all instances of a type, or on a partial."""
    nodes, name = draft.manifest["nodes"], rng.choice(NAMES)
    values = [["function", "jax.nn:relu"], ["function", "jax.numpy:add"], ["class", "jax.numpy:float32"], "text", None]
    value = rng.choice(values)
    partials = [node for node in _nodes_of(draft) if node[0] == "partial"]
    if partials and rng.random() < 0.3:
        for other, k in _operands_of(draft, "child", "children"):
            other[k] = _moved(other[k], 1)
        draft.manifest["root"] = _moved(draft.manifest["root"], 1)
        nodes.insert(0, ["dict", [name], [value]])
        rng.choice(partials)[5] = 0
        return
    number = rng.choice([i for i, entry in enumerate(draft.manifest["types"]) if "fields" in entry])
    entry, where = draft.manifest["types"][number], rng.choice(["extra", "extra", "fields", "missing"])
    entry.setdefault(where, []).append(name)
    place = len(entry["fields"]) if where == "fields" else len(entry["fields"]) + len(entry.get("extra", ()))
    for node in _nodes_of(draft):
        if where != "missing" and node[0] in ("object", "wrapper") and node[1] == number:
            node[2].insert(place - 1, value)


UNDECLARED = [set_undeclared]

SWAPPED = [
    swap_operands, swap_operands, swap_children, swap_children, swap_kinds, swap_nodes, swap_names, swap_arrays, resize,
    unfold,
]  # fmt: skip
