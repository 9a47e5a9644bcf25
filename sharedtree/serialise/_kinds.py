"""The kinds of node that a manifest can hold, and what stands in each place of a node.

A node is a JSON list: its kind, then its operands. This table is all that the reader knows of a node before it builds
anything, so what does not fit it is refused early, and whatever passes can be built without a look at its form.
"""

from typing import Literal

Operand = Literal["child", "children", "steps", "type", "array", "text", "base64", "sizes", "flag"]
"""What can stand in a place of a node:

- `child`: an atom, or the index of an earlier node
- `children`: a list of those
- `steps`: a list of texts, each of which leads to a child: `.weight`, `[0]`
- `type`: an index into `types`
- `array`: an index into `arrays`
- `text`: a string
- `base64`: bytes, as a string
- `sizes`: a list of whole numbers, none negative
- `flag`: `true` or `false`
"""

NODE_KINDS: dict[str, tuple[Operand, ...]] = {
    # containers
    "tuple": ("children",),
    "list": ("children",),
    "set": ("children",),
    "frozenset": ("children",),
    "dict": ("children", "children"),
    "OrderedDict": ("children", "children"),
    "defaultdict": ("child", "children", "children"),
    "deque": ("child", "children"),
    # instances of classes
    "object": ("type", "children"),
    "wrapper": ("type", "children", "text"),
    "registered": ("type", "child", "children", "steps"),
    "enum": ("type", "child"),
    # arrays and what describes them
    "array": ("array",),
    "struct": ("sizes", "child", "flag", "child"),
    "key_dtype": ("text",),
    "treedef": ("child",),
    # things that are called
    "partial": ("child", "children", "children", "children", "child"),
    "Partial": ("child", "children", "children", "children"),
    "method": ("child", "text"),
    "bound": ("child", "text"),
    # values that hold others, and objects that hold nothing
    "bytearray": ("base64",),
    "slice": ("child", "child", "child"),
    "range": ("child", "child", "child"),
    "path": ("text", "child"),
    "marker": (),
    "leaf": (),
    # devices and shardings
    "device": ("text", "child"),
    "mesh": ("sizes", "children", "children", "children"),
    "abstract_mesh": ("sizes", "children", "children"),
    "spec": ("children", "child", "child"),
    "unconstrained": (),
    "named_sharding": ("child", "child", "child"),
    "single_device_sharding": ("child", "child"),
}

SAME_LENGTH: dict[str, tuple[int, int]] = {
    "dict": (1, 2),
    "OrderedDict": (1, 2),
    "defaultdict": (2, 3),
    "partial": (3, 4),
    "Partial": (3, 4),
    "abstract_mesh": (1, 2),
    "registered": (3, 4),
}
"""Two operands of a node that must have the same length."""

HASHED: dict[str, int] = {
    "set": 1,
    "frozenset": 1,
    "dict": 1,
    "OrderedDict": 1,
    "defaultdict": 2,
    "mesh": 2,
    "abstract_mesh": 2,
    "spec": 1,
}
"""The operand whose children are hashed."""

MAX_STEP = 400
"""How many characters a step may have: paths are made of them."""

MAX_NESTED = 1_000
"""How deep what is hashed or described as a treedef may be nested, and how many nodes that are not `DEEP` may lie
on one path: Python and JAX walk those with recursion in C."""

MAX_HASHED = 1_000_000
"""How many nodes and values all of that may have, beyond those of the manifest, when each is counted as often as it
occurs: hashing a DAG, and describing it, takes that long."""

MAX_COLLIDING = 100
"""How many keys of one dict, or members of one set, may have one hash."""

DEEP = frozenset({"tuple", "list", "dict", "object", "wrapper", "array"})
"""Kinds that may be nested without end: Python frees them without recursion."""
