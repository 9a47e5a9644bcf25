"""In which order the members of a set are written: one that depends on what they are, and on nothing else.

Python's own order varies from process to process, and with it the numbers of the nodes. A member that is no atom is
told by a digest of what it would be written as, in which a child that is a node stands by its own digest:

    {"a", ("b", 1)}    →    "a" by its text, the tuple by the digest of ["tuple", ["b", ["int", "1"]]]

Members that are written alike, such as two objects that are equal only to themselves, keep the order in which they
come.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from ._kinds import operands
from ._nodes import Child, Node

_SETS = ("set", "frozenset")


def extend_digests(digests: list[str], nodes: Sequence[Node], types: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Adds the digests of those nodes that have none yet. They do not depend on how nodes are numbered."""
    for node in nodes[len(digests) :]:  # children stand before their parents
        told: list[Any] = [node[0]]
        for operand, value in operands(node):
            if operand.type == "child":
                told.append(_told(value, digests))
            elif operand.type == "children":
                below = [_told(child, digests) for child in value]
                told.append(sorted(below) if node[0] in _SETS else below)
            elif operand.type == "type":
                told.append(types[value])
            elif operand.type == "array":
                told.append({key: about for key, about in arrays[value].items() if key != "tensor"})
            else:
                told.append(value)
        digests.append(hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest())


def _told(child: Child, digests: Sequence[str]) -> str:
    return f"node {digests[child]}" if type(child) is int else json.dumps(child)
