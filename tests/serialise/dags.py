"""Small files that hold a DAG of 2^60 paths somewhere, and files that grow: each kind of node in each place of another.

A file is a list of nodes. `SAMPLES` has one of each kind, `SHARED` the ways in which a node can hold another one twice.
"""

from collections.abc import Callable, Iterator
from typing import Any

from . import strategies
from .containers import file_of
from .table import NODE_KINDS, SAME_LENGTH

Nodes = list[list[Any]]

HERE = strategies.__name__

TYPES = [
    {"name": f"{HERE}:Layer", "kind": "module", "fields": ["weight", "child", "activation"]},
    {"name": f"{HERE}:Pair", "kind": "namedtuple", "fields": ["first", "second"]},
    {"name": f"{HERE}:Slotted", "kind": "dataclass", "fields": ["a", "b"]},
    {"name": f"{HERE}:Registered", "kind": "registered"},
    {"name": f"{HERE}:Color", "kind": "enum"},
    {"name": f"{HERE}:Config", "kind": "dataclass", "fields": ["rate", "steps", "derived"]},
    {"name": "equinox.nn:State", "kind": "registered"},
]
LAYER, PAIR, SLOTTED, REGISTERED, COLOR, CONFIG, STATE = range(len(TYPES))

RELU = ["function", "jax.nn:relu"]

SAMPLES: dict[str, Callable[[int], Nodes]] = {
    "tuple": lambda at: [["tuple", ["a"]]],
    "list": lambda at: [["list", ["a"]]],
    "set": lambda at: [["set", ["a"]]],
    "frozenset": lambda at: [["frozenset", ["a"]]],
    "dict": lambda at: [["dict", ["a"], ["b"]]],
    "OrderedDict": lambda at: [["OrderedDict", ["a"], ["b"]]],
    "defaultdict": lambda at: [["defaultdict", ["class", "builtins:list"], ["a"], ["b"]]],
    "deque": lambda at: [["deque", None, ["a"]]],
    "object": lambda at: [["object", LAYER, ["w", "c", RELU]]],
    "wrapper": lambda at: [["wrapper", LAYER, ["w", "c", RELU], "activation"]],
    "registered": lambda at: [["registered", REGISTERED, "x", ["a"], ["[0]"]]],
    "enum": lambda at: [["enum", COLOR, "RED"]],
    "struct": lambda at: [["struct", [2], ["dtype", "float32"], False, None]],
    "key_dtype": lambda at: [["key_dtype", "threefry2x32"]],
    "treedef": lambda at: [["leaf"], ["tuple", [at]], ["treedef", at + 1]],
    "partial": lambda at: [["partial", RELU, ["a"], ["x"], ["b"], None]],
    "Partial": lambda at: [["Partial", RELU, ["a"], ["x"], ["b"]]],
    "method": lambda at: [["object", LAYER, ["w", "c", RELU]], ["method", at, "double"]],
    "bound": lambda at: [["object", LAYER, ["w", "c", RELU]], ["bound", at, "double"]],
    "bytearray": lambda at: [["bytearray", "YWI="]],
    "slice": lambda at: [["slice", None, "a", None]],
    "range": lambda at: [["range", ["int", "0"], ["int", "3"], ["int", "1"]]],
    "path": lambda at: [["path", "PurePosixPath", "a"]],
    "marker": lambda at: [["marker"]],
    "mesh": lambda at: [["mesh", [1], ["x"], [["int", "0"]], ["Auto"]]],
    "abstract_mesh": lambda at: [["abstract_mesh", [1], ["x"], ["Auto"]]],
    "spec": lambda at: [["spec", ["x"], None, None]],
    "unconstrained": lambda at: [["unconstrained"]],
    "named_sharding": lambda at: [
        ["mesh", [1], ["x"], [["int", "0"]], ["Auto"]],
        ["spec", ["x"], None, None],
        ["named_sharding", at, at + 1, None],
    ],
}
"""How many nodes there are before → the nodes of a sample, which is the last of them."""

SHARED: dict[str, Callable[[Any], Nodes]] = {
    "tuple": lambda x: [["tuple", [x, x]]],
    "list": lambda x: [["list", [x, x]]],
    "dict": lambda x: [["dict", ["a", "b"], [x, x]]],
    "OrderedDict": lambda x: [["OrderedDict", ["a", "b"], [x, x]]],
    "defaultdict": lambda x: [["defaultdict", None, ["a", "b"], [x, x]]],
    "deque": lambda x: [["deque", None, [x, x]]],
    "module": lambda x: [["object", LAYER, [x, x, None]]],
    "module, statically": lambda x: [["object", LAYER, [None, x, x]]],
    "namedtuple": lambda x: [["object", PAIR, [x, x]]],
    "dataclass": lambda x: [["object", CONFIG, [x, x, None]]],
    "frozen dataclass": lambda x: [["object", SLOTTED, [x, x]]],
    "registered": lambda x: [["registered", REGISTERED, None, [x, x], ["[0]", "[1]"]]],
    "aux": lambda x: [["registered", REGISTERED, x, [x], ["[0]"]]],
    "Partial": lambda x: [["Partial", RELU, [x, x], [], []]],
    "partial": lambda x: [["partial", RELU, [x, x], [], [], None]],
    "slice": lambda x: [["slice", x, x, None]],
}
"""A child → a node that holds it twice."""


def typed_file(nodes: Nodes, types: Any = TYPES, **changes: Any) -> bytes:
    """A file whose nodes may be instances of `TYPES`."""
    return file_of(nodes, types=types, **changes)


def dag(how: str, depth: int) -> Nodes:
    """Nodes of which the last holds the one before twice, and so on."""
    nodes: Nodes = [["tuple", []]]
    while len(nodes) <= depth:
        nodes += SHARED[how](len(nodes) - 1)
    return nodes


def places() -> Iterator[tuple[str, int]]:
    """Every operand of every kind in which a child can stand."""
    for kind, operands in NODE_KINDS.items():
        for i, operand in enumerate(operands, 1):
            if operand in ("child", "children") and kind in SAMPLES:
                yield kind, i


def with_dag_in(kind: str, place: int, how: str, depth: int = 60) -> bytes:
    """A file that has a sample of a kind in which a DAG stands in the place of an operand, or in each of its places."""
    nodes = dag(how, depth)
    top = len(nodes) - 1
    nodes += SAMPLES[kind](len(nodes))
    sample = nodes[-1]
    held = sample[place]
    if type(held) is list and NODE_KINDS[kind][place - 1] == "children":
        sample[place] = [top] * len(held) if kind not in ("set", "frozenset") else [top]
        if kind in ("object", "wrapper"):
            sample[place] = [None, top, top] if kind == "object" else [None, top, RELU]
        assert kind not in SAME_LENGTH or len(sample[place]) == len(held)
    else:
        sample[place] = top
    last = len(nodes) - 1
    nodes.append(["list", [last, last, "a"]])
    return typed_file(nodes)
