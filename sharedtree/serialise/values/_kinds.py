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

SHARDINGS = frozenset({"named_sharding", "single_device_sharding"})
_OR_TEXT = frozenset({"null", "text"})

FORMS: dict[str, dict[int, frozenset[str]]] = {
    "defaultdict": {1: frozenset({"null", "class", "function"})},
    "deque": {1: frozenset({"null", "int"})},
    "enum": {2: frozenset({"text", "int"})},
    "struct": {2: frozenset({"dtype", "key_dtype"}), 4: SHARDINGS | {"null"}},
    "partial": {3: frozenset({"text"}), 5: frozenset({"null", "dict"})},
    "Partial": {3: frozenset({"text"})},
    "range": dict.fromkeys((1, 2, 3), frozenset({"int"})),
    "path": {2: frozenset({"text"})},
    "device": {2: frozenset({"int"})},
    "mesh": {3: frozenset({"int"}), 4: frozenset({"text"})},
    "abstract_mesh": {3: frozenset({"text"})},
    "spec": dict.fromkeys((2, 3), frozenset({"null", "frozenset"})),
    "named_sharding": {1: frozenset({"mesh", "abstract_mesh"}), 2: frozenset({"spec"}), 3: _OR_TEXT},
    "single_device_sharding": {1: frozenset({"device"}), 2: _OR_TEXT},
}
"""What the children in an operand may be, where not all may: `null`, `text`, the tag of an atom, or the kind of a node.
What builds the others from their parts would print in its error whatever else it is given, and a DAG of 2^60 paths
takes for ever to print."""

WALKED: dict[str, tuple[int, ...]] = {
    "set": (1,),
    "frozenset": (1,),
    "dict": (1,),
    "OrderedDict": (1,),
    "defaultdict": (2,),
    "mesh": (2,),
    "abstract_mesh": (2,),
    "spec": (1, 2, 3),
    "named_sharding": (1, 2),
    "treedef": (1,),
    "registered": (2,),
}
"""The operands whose children are hashed or walked as trees by Python, by JAX, or by the unflatten functions of
classes: those of `FrozenDict` and `equinox.nn.State` hash their aux data."""

MAX_STEP = 400
"""How many characters a step may have: paths are made of them."""

MAX_NAME = 1_000
"""How many characters the name of a class, function, method or field may have: it is shown wherever it is used."""

MAX_NESTED = 1_000
"""How deep what is hashed or described as a treedef may be nested, and how many nodes that are not `DEEP` may lie
on one path: Python and JAX walk those with recursion in C."""

MAX_HASHED = 1_000_000
"""How many nodes and values all of that may have, beyond those of the manifest, when each is counted as often as it
occurs: hashing a DAG, and describing it, takes that long."""

MAX_COLLIDING = 100
"""How many keys of one dict, or members of one set, may have one hash."""

MAX_COLLISIONS = 50_000
"""How many pairs of keys of one dict, or members of one set, may have one hash in all of a file, beyond the number of
its keys and members: each pair may be compared."""

DEEP = frozenset({"tuple", "list", "dict", "object", "wrapper", "array"})
"""Kinds that may be nested without end: Python frees them without recursion."""
