"""The steps of paths in a manifest: what leads from a node to each of its children."""

from collections.abc import Iterator
from typing import Any

from ._manifest import Child, Manifest, operands
from ._nnx_objects import step_of
from ._texts import atom_text, node_text

_MAX_KEY = 400  # characters of a key in a path; with more, the paths below it would fill the memory

# What a node calls the children that stand in places of their own, in order.
_SINGLE = {
    "deque": (".maxlen",),
    "struct": (".dtype", ".sharding"),
    "treedef": (".tree",),
    "method": (".__self__",),
    "bound": (".__self__",),
    "slice": (".start", ".stop", ".step"),
    "range": (".start", ".stop", ".step"),
    "path": (".text",),
    "device": (".id",),
    "spec": (".unreduced", ".reduced"),
    "named_sharding": (".mesh", ".spec", ".memory_kind"),
    "single_device_sharding": (".device", ".memory_kind"),
}


def steps(manifest: Manifest, node: list[Any]) -> Iterator[tuple[Child, str]]:
    """The children of a node, each with what leads to it, as Python would write it where it can.

    The keys of dictionaries come before the values, as `<key>`. Nothing is made before it is asked for: what lies on
    the path to a node may have many children each.
    """
    kind = node[0]
    if kind in ("object", "wrapper"):
        entry = manifest.types[node[1]]
        for child, name in zip(node[2], (*entry.fields, *entry.extra), strict=True):
            yield child, step_of(name)
    elif kind in ("dict", "OrderedDict", "defaultdict"):
        for key in node[-2]:
            yield key, "<key>"
        for key, value in zip(node[-2], node[-1], strict=True):
            yield value, f"[{_key_text(manifest, key)}]"
        if kind == "defaultdict":
            yield node[1], ".default_factory"
    elif kind == "registered":
        yield from zip(node[3], node[4], strict=True)
        yield node[2], "<aux>"
    elif kind in ("partial", "Partial"):
        yield node[1], ".func"
        for i, child in enumerate(node[2]):
            yield child, f"[{i}]"
        for key, child in zip(node[3], node[4], strict=True):
            yield child, f"[{_key_text(manifest, key)}]"
        if kind == "partial":
            yield node[5], ".<attributes>"
    else:
        names = iter(_SINGLE.get(kind, ()))
        for operand, value in operands(node):
            if operand == "children":
                for i, child in enumerate(value):
                    yield child, f"[{i}]"
            elif operand == "child":
                yield value, next(names, f".<{kind}>")


def _key_text(manifest: Manifest, key: Child) -> str:
    return node_text(manifest, manifest.nodes[key]) if type(key) is int else atom_text(key, _MAX_KEY)
