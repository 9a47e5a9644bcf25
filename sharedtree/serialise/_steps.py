"""The steps of paths in a manifest: what leads from a node to each of its children."""

from collections.abc import Iterator
from typing import Any

from ._manifest import Child, Manifest, operands
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

    The keys of dictionaries come before the values, as `<key>`.
    """
    kind = node[0]
    if kind in ("object", "wrapper"):
        entry = manifest.types[node[1]]
        yield from [(child, f".{name}") for child, name in zip(node[2], (*entry.fields, *entry.extra), strict=True)]
    elif kind in ("dict", "OrderedDict", "defaultdict"):
        yield from [(key, "<key>") for key in node[-2]]
        yield from [(value, f"[{_key_text(manifest, key)}]") for key, value in zip(node[-2], node[-1], strict=True)]
        if kind == "defaultdict":
            yield node[1], ".default_factory"
    elif kind == "registered":
        yield from [(child, f"[{i}]") for i, child in enumerate(node[3])]
        yield node[2], "<aux>"
    elif kind in ("partial", "Partial"):
        yield node[1], ".func"
        yield from [(child, f"[{i}]") for i, child in enumerate(node[2])]
        yield from [(child, f"[{_key_text(manifest, key)}]") for key, child in zip(node[3], node[4], strict=True)]
        if kind == "partial":
            yield node[5], ".<attributes>"
    else:
        names = iter(_SINGLE.get(kind, ()))
        for operand, value in operands(node):
            if operand == "children":
                yield from [(child, f"[{i}]") for i, child in enumerate(value)]
            elif operand == "child":
                yield value, next(names, f".<{kind}>")


def _key_text(manifest: Manifest, key: Child) -> str:
    return node_text(manifest, manifest.nodes[key]) if type(key) is int else atom_text(key, _MAX_KEY)
