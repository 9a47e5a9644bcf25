"""Damages and forges files, and sees that loading them does no harm.

    python -m tests.serialise.fuzz --examples 100000 --seed 1
    python -m tests.serialise.fuzz --seed 1 --only 4711      one case again, with its traceback

Each case takes a good file, changes it in one to three ways, and opens it. Some ways leave the digests as they were,
and then the outcome is an error or the very model that was saved. Others repair the digests, as a forger would, and
then it is an error or some other model that is harmless: it can be saved and loaded again and is the same. Anything else
is a failure: an exception that is no `SharedTreeError`, a crash, more than ten seconds, an import, a file opened, a
process, a socket, code compiled, or more memory than the size of the file and 64 MiB.

The cases run in a child process, which is started again if it dies. Case `i` depends on the seed and on `i` only.
"""

import argparse
import base64
import contextlib
import copy
import dataclasses
import faulthandler
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax  # noqa: F401  -- files may name it, and are not to be blamed for its import

import sharedtree as st
from sharedtree.serialise import _container
from sharedtree.serialise._kinds import NODE_KINDS

from . import strategies
from .containers import START, forged
from .isomorphic import assert_isomorphic

SECONDS = 10
EXTRA_BYTES = 64 * 2**20
TRUSTED = (strategies.__name__,)

GADGETS = """
    os:system posix:system subprocess:Popen subprocess:run builtins:eval builtins:exec builtins:getattr builtins:open
    builtins:__import__ importlib:import_module runpy:run_path pickle:loads shutil:rmtree socket:socket ctypes:CDLL
    operator:attrgetter operator:methodcaller functools:reduce types:FunctionType types:CodeType numpy:load numpy:fromfile
    numpy:memmap numpy:frompyfunc numpy:vectorize jax.numpy:load jax.numpy:save jax.numpy:fromfile jax.numpy:vectorize
    jax:pure_callback jax.experimental:io_callback jax.debug:callback jax.lax:map jax:jit equinox:tree_deserialise_leaves
    equinox.internal:while_loop sharedtree:trust sharedtree:load __main__:main __main__:subprocess.Popen __main__:os.system
    __main__:__builtins__.eval pathlib:Path.unlink pathlib:Path.write_text numpy:ndarray.tofile jax._src.lazy_loader:importlib
    equinox.nn:Linear.__init__.__globals__ tests.serialise.strategies:functools.partial antigravity:fly this:s
    jax.tools.jax_to_ir:main tests.serialise.strategies:dataclasses.sys.modules optax._src.base:sys collections:abc.sys
""".split()
"""Names that a hostile file would like to be resolved."""

FRIENDS = (
    """
    jax.nn:relu jax.numpy:tanh equinox.nn:Linear equinox.nn:MLP builtins:dict builtins:list builtins:object jax:Array
    collections:Counter numpy:float32 numpy:ndarray builtins:slice pathlib:PosixPath equinox:Module equinox.nn:State
    equinox.nn:StateIndex jax.tree_util:Partial optax:ScaleByAdamState equinox:Enumeration functools:partial
""".split()
    + [
        f"{strategies.__name__}:{name}"
        for name in "Layer Layer.double Layer.make Pair Config Slotted Key Color Mode Level Registered activate make".split()
    ]
)
"""Names that are allowed, in places where they do not belong."""


ITEM_SIZES: dict[str, tuple[int, str]] = {
    "bool": (1, "BOOL"), "int8": (1, "I8"), "uint8": (1, "U8"), "int16": (2, "I16"), "uint16": (2, "U16"),
    "float16": (2, "F16"), "bfloat16": (2, "BF16"), "int32": (4, "I32"), "uint32": (4, "U32"), "float32": (4, "F32"),
    "int64": (8, "I64"), "uint64": (8, "U64"), "float64": (8, "F64"), ">float32": (4, "F32"), ">int16": (2, "I16"),
    "float8_e4m3fn": (1, "F8_E4M3"), "float8_e5m2": (1, "F8_E5M2"), "float8_e8m0fnu": (1, ""), "float4_e2m1fn": (1, ""),
    "float6_e2m3fn": (1, ""), "int1": (1, ""), "int2": (1, ""), "int4": (1, ""), "uint4": (1, ""), "complex64": (8, ""),
    "complex128": (16, ""), "datetime64[ns]": (8, ""), "timedelta64": (8, ""), ">datetime64[s]": (8, ""), "float0": (0, ""),
    "longdouble[x87]": (16, ""), "clongdouble[x87]": (32, ""), "object": (8, ""), "V8": (8, ""), "str_[3]": (12, ""),
}  # fmt: skip
"""Dtypes, how many bytes an item has, and what it is stored as if not as bytes."""

DTYPES = list(ITEM_SIZES)


# --- good files ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Good:
    """A model, and the file that holds it."""

    tree: Any
    data: bytes


def _tied() -> Any:
    shared = {"w": jnp.arange(6.0).reshape(2, 3), "n": np.arange(16.0)}
    layer = strategies.make(strategies.Layer, weight=shared, child=[shared, (1, None)], activation=jax.nn.relu)
    return [layer, layer, layer.double, {"again": layer}]


def _values() -> Any:
    return [
        {1: {strategies.Key(2)}, "x": strategies.Mode.LOG, (1, "a"): strategies.Color.RED, None: -0.0},
        [2**100, float("nan"), 1j, "\ud83d", b"\xff", ..., slice(1, None), range(5), frozenset({1, 2})],
        strategies.Pair(1, strategies.make(strategies.Slotted, a=1, b=2)),
        strategies.Registered((np.ones(2), 3), ["aux"]),
        strategies.make(strategies.Config, rate=[1.5], steps=3, scale=1, derived=None, undeclared=2),
        jax.tree_util.Partial(jnp.add, 1, x=2),
        jax.tree_util.tree_structure([1, {"a": 2}]),
        jax.ShapeDtypeStruct((2,), jnp.float32),
        jax.sharding.PartitionSpec("x"),
        np.float32(2),
        np.dtype(">i2"),
        object(),
        bytearray(b"ab"),
    ]


def _arrays() -> Any:
    names = "bool int8 uint16 int32 float16 float32 float64 complex64 complex128 >f4 M8[ns]".split()
    dtypes = [np.dtype(name) for name in names] + [np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.int4)]
    of_numpy = [np.ones((2, 2)).astype(dtype) for dtype in dtypes]
    return [
        of_numpy,
        jnp.zeros((0, 3)),
        jnp.float32(1),
        jnp.asarray(2.0),
        jax.random.key(1),
        jnp.arange(64, dtype="i4"),
    ]


def _state() -> Any:
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")


def good_files() -> list[Good]:
    """Small ones, since most changes should hit something that matters."""
    trees = [{"w": np.arange(3, dtype=np.int32)}, _tied(), _values(), _arrays(), _state(), 7]
    files = [Good(tree, st.to_bytes(tree)) for tree in trees]
    with mock.patch.object(_container, "MAX_INLINE_MANIFEST", 0):  # a manifest in a tensor
        files.append(Good(trees[1], st.to_bytes(trees[1])))
    return files


# --- ways to change a file -----------------------------------------------------------------------------------------


class Draft:
    """A file taken apart, to be changed and put together again."""

    def __init__(self, data: bytes) -> None:
        (length,) = struct.unpack("<Q", data[:8])
        self.header: dict[str, Any] = json.loads(data[8 : 8 + length])
        self.data = bytearray(data[8 + length :])
        own = self.header["__metadata__"]["sharedtree"]
        self.is_spilled = own == "tensor"
        if self.is_spilled:
            start, stop = self.header["sharedtree.manifest"]["data_offsets"]
            own = self.data[start:stop].decode()
            del self.data[start:]
        self.manifest: Any = json.loads(own)
        self.manifest_text: str | None = None  # in place of the manifest, if it is set
        self.edit_text: Callable[[str], str] = lambda text: text

    @property
    def tensors(self) -> dict[str, Any]:
        return {
            name: entry for name, entry in self.header.items() if name not in ("__metadata__", "sharedtree.manifest")
        }

    def file(self, *, with_digests: bool) -> bytes:
        """The bytes, the header's digest being right; those of the data too if asked for."""
        text = (
            self.manifest_text if self.manifest_text is not None else json.dumps(self.manifest, separators=(",", ":"))
        )
        data = bytes(self.data)
        if self.is_spilled:
            raw = text.encode("utf-8", "replace")
            start = len(data)
            self.header["sharedtree.manifest"] = {
                "dtype": "U8",
                "shape": [len(raw)],
                "data_offsets": [start, start + len(raw)],
            }
            data += raw
        metadata = self.header.get("__metadata__")
        if isinstance(metadata, dict):
            if not self.is_spilled:
                metadata["sharedtree"] = text
            if with_digests or self.is_spilled:
                metadata["sharedtree.digests"] = _digests(self.header, data)
        return forged(self.edit_text(json.dumps(self.header, separators=(",", ":"))), data)


def _digests(header: dict[str, Any], data: bytes) -> str:
    digests = ""
    for name, entry in header.items():
        try:
            start, stop = entry["data_offsets"]
            if name != "__metadata__" and 0 <= start < stop <= len(data):
                digests += f"{zlib.crc32(data[start:stop]):08x}"
        except (TypeError, ValueError, KeyError):
            continue
    return digests


def flip_bit(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(8 * len(data))
    return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    at, count = rng.randrange(len(data)), rng.randint(1, 8)
    return data[:at] + rng.randbytes(count) + data[at + count :]


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice([rng.randbytes(rng.randint(1, 70)), bytes(rng.randint(1, 70)), b" " * 64]) + data[at:]


def delete(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.choice([1, 2, 8, 64]) :]


def blank(rng: random.Random, data: bytes) -> bytes:
    at, count = rng.randrange(len(data)), rng.randint(1, 4096)
    return (data[:at] + bytes(count) + data[at + count :])[: len(data)]


def swap_blocks(rng: random.Random, data: bytes) -> bytes:
    a, b, c = sorted(rng.choices(range(len(data) + 1), k=3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def change_length(rng: random.Random, data: bytes) -> bytes:
    length = rng.choice(
        [0, 1, 2**31, 2**62, 2**63, 2**64 - 1, 100_000_000, len(data), len(data) - 8, rng.randrange(2**14)]
    )
    return struct.pack("<Q", length) + data[8:]


RAW = [flip_bit, change_bytes, truncate, insert, delete, blank, swap_blocks, change_length]


def _atom(rng: random.Random) -> Any:
    name = rng.choice(GADGETS) if rng.random() < 0.5 else rng.choice(FRIENDS)
    return rng.choice(
        [
            ["function", name], ["class", name], ["int", "-7f"], ["int", f"{2**62:x}"], ["float", "nan:7ff8000000000001"],
            ["float", "0x1.8p+1"], ["float", "0x1.8p+2000"], ["bytes", base64.b64encode(rng.randbytes(3)).decode()],
            ["dtype", rng.choice(DTYPES)], ["scalar", rng.choice(DTYPES), rng.randbytes(8).hex()], ["..."], ["str", "7aC9"],
            ["complex", "inf", "-inf"], ["dtype", "str_[999999999]"], ["scalar", "str_[1]", "ffffffff"], ["int", "f" * 5000],
        ]
    )  # fmt: skip


def _json(rng: random.Random, nodes: int) -> Any:
    kind = rng.randrange(10)
    if kind < 3:
        return rng.choice(
            [0, 1, -1, 2, 3, 2**31, 2**62, 2**63, 2**64, rng.randrange(nodes + 2), rng.randrange(nodes + 2)]
        )
    if kind < 5:
        return _atom(rng)
    if kind == 5:
        return rng.choice(["", "a", "\ud800", "sharedtree.manifest", "w" * 300, "0", *GADGETS, *FRIENDS, *DTYPES])
    if kind == 6:
        return rng.choice([None, True, False, 1.5, float("nan"), float("inf"), [], {}, [[]], {"a": 1}])
    if kind == 7:
        return rng.choice(list(NODE_KINDS))
    if kind == 8:
        return _node(rng, nodes)
    return [_json(rng, nodes) for _ in range(rng.randrange(4))]


def _node(rng: random.Random, nodes: int) -> list[Any]:
    """A node whose operands are what their places ask for, and make sense by luck only."""
    kind = rng.choice(list(NODE_KINDS))

    def child() -> Any:
        return rng.randrange(nodes + 1) if rng.random() < 0.6 else rng.choice([None, True, "a", "", _atom(rng)])

    makers: dict[str, Callable[[], Any]] = {
        "child": child,
        "children": lambda: [child() for _ in range(rng.randrange(4))],
        "type": lambda: rng.randrange(4),
        "array": lambda: rng.randrange(4),
        "text": lambda: rng.choice(["__init__", "double", "rbg", "cpu", "PosixPath", "__call__", "__reduce__", "x"]),
        "base64": lambda: "YWI=",
        "sizes": lambda: rng.choices([0, 1, 2, 2**31, 2**62], k=rng.randrange(3)),
        "flag": lambda: rng.random() < 0.5,
    }
    return [kind, *(makers[operand]() for operand in NODE_KINDS[kind])]


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every place in nested lists and objects, as the container and the key."""
    stack, found = [tree], []
    while stack:
        node = stack.pop()
        for key, value in list(
            enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, dict) else ()
        ):
            found.append((node, key))
            stack.append(value)
    return found


def _edit_somewhere(rng: random.Random, tree: Any, nodes: int) -> None:
    places = _places(tree)
    if not places:
        return
    node, key = rng.choice(places)
    how = rng.randrange(6)
    if how == 0:
        other, other_key = rng.choice(places)
        node[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(node[key])
    elif how == 1:
        del node[key]
    elif how == 2 and isinstance(node, list):
        node.insert(key, copy.deepcopy(node[key]))
    elif how == 3 and isinstance(node, dict):
        node[rng.choice(["extra", "missing", "version", "weak", "key", "fields", "x", ""])] = _json(rng, nodes)
    elif isinstance(node[key], int) and rng.random() < 0.5:
        node[key] += rng.choice([-1, 1, 2**31])
    else:
        node[key] = _json(rng, nodes)


def edit_manifest(rng: random.Random, draft: Draft) -> None:
    _edit_somewhere(
        rng, draft.manifest, len(draft.manifest.get("nodes", ())) if isinstance(draft.manifest, dict) else 3
    )


def add_nodes(rng: random.Random, draft: Draft) -> None:
    """Nodes of any kind after those that are there, the last of them in the root."""
    nodes = draft.manifest.get("nodes") if isinstance(draft.manifest, dict) else None
    if isinstance(nodes, list) and nodes:
        for _ in range(rng.randint(1, 3)):
            nodes.append(_node(rng, len(nodes) - 1))
        nodes.append(["tuple", [draft.manifest.get("root"), len(nodes) - 1]])
        draft.manifest["root"] = len(nodes) - 1


def redirect(rng: random.Random, draft: Draft) -> None:
    """References made dangling, cyclic, or to what is of the wrong kind."""
    places = [(node, key) for node, key in _places(draft.manifest) if type(node[key]) is int]
    if places:
        node, key = rng.choice(places)
        node[key] = rng.choice([0, 1, -1, key if isinstance(key, int) else 0, node[key] + 1, rng.randrange(60), 2**62])


def name_gadgets(rng: random.Random, draft: Draft) -> None:
    places = [(n, k) for n, k in _places(draft.manifest) if isinstance(n[k], str) and (":" in n[k] or k == "name")]
    name = rng.choice(GADGETS)
    if places and rng.random() < 0.7:
        node, key = rng.choice(places)
        node[key] = name if rng.random() < 0.7 else rng.choice(FRIENDS)
    else:
        places = [
            (n, k)
            for n, k in _places(draft.manifest)
            if isinstance(n[k], list) and len(n[k]) == 2 and isinstance(n, list)
        ]
        if places:
            node, key = rng.choice(places)
            node[key] = [rng.choice(["class", "function"]), name]


def retype(rng: random.Random, draft: Draft) -> None:
    """Another dtype, kind or shape of one array, about which header and manifest agree."""
    array = rng.choice(draft.manifest["arrays"])
    tensor = draft.header[array["tensor"]]
    start, stop = tensor["data_offsets"]
    how = rng.randrange(4)
    if how == 0:
        array["kind"] = rng.choice(["jax", "numpy"])
    elif how == 1:
        array[rng.choice(["weak", "key"])] = rng.choice([True, False, "rbg", "threefry2x32", "unsafe_rbg", "mine"])
    else:
        name = rng.choice(DTYPES)
        size, stored_as = ITEM_SIZES[name]
        count = (stop - start) // size if size else rng.choice([0, 1, 2**40, 2**62])
        shape = rng.choice([[count], [1, count], [count, 1, 1], [2, count // 2], [0, 2**62], [2**31, 2**31, 0]])
        array |= {"dtype": name, "shape": shape, "kind": rng.choice(["jax", "numpy"])}
        tensor |= {"dtype": stored_as or "U8", "shape": shape if stored_as else [*shape, size]}


def edit_header(rng: random.Random, draft: Draft) -> None:
    _edit_somewhere(rng, draft.header, 3)


def edit_tensor(rng: random.Random, draft: Draft) -> None:
    if draft.tensors:
        entry = draft.header[rng.choice(list(draft.tensors))]
        if isinstance(entry, dict):
            key = rng.choice(["dtype", "shape", "data_offsets"])
            numbers = [0, 1, 2, 3, 4, 2**31, 2**62, 2**63 - 1, -1, 1.0, True]
            entry[key] = {
                "dtype": rng.choice(["F32", "U8", "C64", "F4", "BOOL", "F64", "I8", "f32", "", 3]),
                "shape": rng.choices(numbers, k=rng.choice([0, 1, 2, 3, 70])),
                "data_offsets": rng.choices(numbers, k=2),
            }[key]


def swap_tensors(rng: random.Random, draft: Draft) -> None:
    """Offsets, or whole entries, of two tensors exchanged; or their order."""
    names = list(draft.tensors)
    if len(names) > 1:
        a, b = rng.sample(names, 2)
        first, second = draft.header[a], draft.header[b]
        how = rng.randrange(3)
        if how == 0 and isinstance(first, dict) and isinstance(second, dict):
            first["data_offsets"], second["data_offsets"] = second.get("data_offsets"), first.get("data_offsets")
        elif how == 1:
            draft.header[a], draft.header[b] = second, first
        else:
            draft.header[a] = draft.header.pop(a)


def swap_digests(rng: random.Random, draft: Draft) -> None:
    metadata = draft.header["__metadata__"]
    digits = metadata.get("sharedtree.digests") if isinstance(metadata, dict) else None
    if isinstance(digits, str) and len(digits) >= 16:
        each = [digits[i : i + 8] for i in range(0, len(digits), 8)]
        rng.shuffle(each)
        metadata["sharedtree.digests"] = "".join(each)[: len(digits) - rng.choice([0, 0, 0, 1, 8])]


def duplicate_key(rng: random.Random, draft: Draft) -> None:
    """In the header's text or the manifest's, which objects in memory cannot have."""

    def twice(text: str) -> str:
        opened = [i for i, c in enumerate(text) if c == "{" and text[i + 1 : i + 2] == '"' and i]
        if not opened:
            return text
        at = rng.choice(opened) + 1
        _, end = json.JSONDecoder().raw_decode(text, at)
        return text[:at] + text[at:end] + ":" + rng.choice(["1", "null", "[]", '"a"']) + "," + text[at:]

    if rng.random() < 0.5:
        draft.edit_text = twice
    else:
        draft.manifest_text = twice(" " + json.dumps(draft.manifest))


def nest_deeply(rng: random.Random, draft: Draft) -> None:
    depth = rng.choice([900, 10_000, 100_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ("[[],", "]")])
    bomb = opening * depth + rng.choice(["1", "null"]) + (closing * depth if rng.random() < 0.7 else "")
    if rng.random() < 0.4:
        draft.edit_text = lambda text: text[:-1] + f',"deep":{bomb}}}'
    elif rng.random() < 0.5:
        draft.manifest_text = json.dumps(draft.manifest).replace("null", bomb, 1)
    else:
        nodes = draft.manifest.get("nodes") if isinstance(draft.manifest, dict) else None
        if isinstance(nodes, list):
            kind = rng.choice(["tuple", "list", "set", "frozenset", "dict", "Partial", "treedef", "method", "slice"])
            depth = rng.choice([500, 2_000, 30_000])
            for _ in range(depth):
                below = len(nodes) - 1
                nodes.append(
                    {
                        "dict": ["dict", [rng.choice([below, "a"])], [below]],
                        "Partial": ["Partial", ["function", "jax.numpy:add"], [below], [], []],
                        "treedef": ["treedef", below],
                        "method": ["method", below, "x"],
                        "slice": ["slice", below, below, below],
                    }.get(kind, [kind, [below]])
                )
            draft.manifest["root"] = len(nodes) - 1


def edit_data(rng: random.Random, draft: Draft) -> None:
    if draft.data:
        at = rng.randrange(len(draft.data))
        new = rng.randbytes(rng.randint(1, 16))[: len(draft.data) - at]
        draft.data[at : at + len(new)] = new


def edit_text(rng: random.Random, draft: Draft) -> None:
    """The header's text changed as text, behind where a container is recognised."""

    def edited(text: str) -> str:
        at = rng.randrange(len(START) + 8, len(text))
        new = rng.choice(["", '"', "\\", "{", "}", ",", "\x00", "é", "1e999", "9" * 5000, "[", "NaN", "\ud800"])
        return text[:at] + new + text[at + rng.randrange(3) :]

    draft.edit_text = lambda text: edited(text).encode("utf-8", "surrogatepass")  # type: ignore[assignment, return-value]


FORGED = [
    edit_manifest, edit_manifest, add_nodes, add_nodes, redirect, name_gadgets, retype, retype, edit_header, edit_tensor,
    swap_tensors, swap_digests, duplicate_key, nest_deeply, edit_data, edit_text,
]  # fmt: skip


def splice(rng: random.Random, files: list[Good]) -> bytes:
    """The header of one file before the data of another, or half of one behind half of another."""
    a, b = rng.choice(files).data, rng.choice(files).data
    if rng.random() < 0.5:
        return a[: rng.randrange(len(a))] + b[rng.randrange(len(b)) :]
    (head,), (other,) = struct.unpack("<Q", a[:8]), struct.unpack("<Q", b[:8])
    return a[: 8 + head] + b[8 + other :]


@dataclasses.dataclass(frozen=True)
class Case:
    """A changed file. `original` is what it must hold if it loads; None if it may be anything harmless."""

    data: bytes
    original: Good | None
    ways: tuple[str, ...]


def make_case(number: int, seed: int, files: list[Good]) -> Case:
    """The first cases are the smallest file, cut at every offset; the others are drawn."""
    if number < len(files[0].data):
        return Case(files[0].data[:number], files[0], (f"the first {number} bytes",))
    rng = random.Random(f"{seed}:{number}")
    good = rng.choice(files)
    how = rng.random()
    if how < 0.03:
        return Case(splice(rng, files), None, ("splice",))
    if how < 0.3:
        ways, data = rng.choices(RAW, k=rng.choice([1, 1, 2])), good.data
        for way in ways:
            data = way(rng, data) if data else data
        return Case(data, good, tuple(way.__name__ for way in ways))
    draft = Draft(good.data)
    forgeries = rng.choices(FORGED, k=rng.choice([1, 1, 1, 2, 3]))
    with_digests = rng.random() < 0.9
    data = good.data
    for forgery in forgeries:
        with contextlib.suppress(
            TypeError, ValueError, KeyError, AttributeError, IndexError
        ):  # an earlier one left no sense
            forgery(rng, draft)
            data = draft.file(with_digests=with_digests)
    return Case(data, None, tuple(way.__name__ for way in forgeries))


# --- what must not happen ------------------------------------------------------------------------------------------

WATCHED = ("import", "open", "exec", "compile", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "marshal.", "pickle.",
           "code.", "mmap.", "tempfile.", "urllib.", "webbrowser.", "signal.", "sys.settrace", "sys.setprofile",
           "function.__new__", "sys.unraisablehook")  # fmt: skip

_events: list[str] = []
_is_watching = False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_watching and event.startswith(WATCHED):
        _events.append(f"{event}{arguments!r}"[:300])


@contextlib.contextmanager
def _watched():
    global _is_watching
    _events.clear()
    _is_watching = True
    try:
        yield
    finally:
        _is_watching = False


@contextlib.contextmanager
def _with_limited_memory(nbytes: int):
    """No more address space than there is now and `nbytes`. Where there is no such limit, none is set."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _memory_error_in(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _operations(like: Any) -> list[tuple[str, Callable[[bytes], Any]]]:
    """What a user does with a file; the first returns what it holds."""
    return [
        ("load", lambda data: st.from_bytes(data, trusted=TRUSTED)),
        ("mapped", lambda data: st.from_bytes(data, trusted=TRUSTED, mmap=True)),
        ("unverified", lambda data: st.from_bytes(data, trusted=TRUSTED, verify=False)),
        ("untrusted", st.from_bytes),
        ("audit", lambda data: str(st.audit(data, trusted=TRUSTED))),
        ("verify", st.verify),
        ("inspect", lambda data: str(st.inspect(data))),
        ("select", lambda data: st.from_bytes(data, trusted=TRUSTED, select="[0]")),
        ("like", lambda data: st.from_bytes(data, trusted=TRUSTED, like=like, strict=False)),
    ]


def judge(
    case: Case, operation: Callable[[bytes], Any], *, gives_model: bool = True, is_checked: bool = True
) -> tuple[str, str | None]:
    """Opens a file.

    Args:
        case: what to open.
        operation: how.
        gives_model: whether the operation returns the whole model.
        is_checked: whether it looks at the digests of all data, so that nothing but the original may come out.

    Returns:
        "refused", "opened" or "failed", and what went wrong if something did.
    """
    result, raised = None, None
    with _with_limited_memory(len(case.data) + EXTRA_BYTES), _watched():
        try:
            result = operation(case.data)
        except Exception as error:
            raised = error
    if _events:
        return "failed", f"it did what no file may make it do: {_events}"
    if raised is not None:
        if isinstance(raised, st.SharedTreeError) and str(raised) and not _memory_error_in(raised):
            return "refused", None
        return "failed", f"{type(raised).__name__}: {raised}\n{''.join(traceback.format_exception(raised, limit=-4))}"
    if not gives_model:
        return "opened", None
    try:
        if case.original is not None and is_checked:
            assert_isomorphic(case.original.tree, result)
        elif (
            case.original is None and "nest_deeply" not in case.ways
        ):  # the oracle visits what is shared again and again
            again = st.from_bytes(st.to_bytes(result), trusted=TRUSTED)
            assert_isomorphic(result, again)
    except Exception as error:
        what = (
            "another model came out" if case.original is not None else "a model came out that does not survive saving"
        )
        return "failed", f"{what}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
    return "opened", None


def run_cases(start: int, stop: int, seed: int, progress: int | None = None, operations: Any = None) -> None:
    """Runs cases in this process and prints a line of JSON for each failure, and one with counts at the end."""
    files = good_files()
    operations = operations or _operations(files[1].tree)
    for good in files:  # whatever JAX imports and compiles at first use
        for _, operation in operations:
            with contextlib.suppress(st.SharedTreeError):
                operation(good.data)
    for library in ("flax", "chex", "treex", "lineax", "diffrax", "optimistix", "jax.experimental.sparse"):
        if library not in sys.modules:
            sys.modules[library] = None  # type: ignore[assignment]  -- files may name it, and its import is no failure
    st.from_bytes(st.to_bytes([jax.random.key(0, impl=impl) for impl in ("rbg", "unsafe_rbg")]))
    faulthandler.enable()
    sys.addaudithook(_watch)
    outcomes = {"refused": 0, "opened": 0, "failed": 0}
    for number in range(start, stop):
        if progress is not None:
            os.pwrite(progress, struct.pack("<Q", number), 0)
        case = make_case(number, seed, files)
        rng = random.Random(number)
        name, operation = operations[0] if rng.random() < 0.6 else rng.choice(operations)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            outcome, problem = judge(
                case, operation, gives_model=name in ("load", "mapped", "unverified"), is_checked=name != "unverified"
            )
        finally:
            faulthandler.cancel_dump_traceback_later()
        outcomes[outcome] += 1
        if problem:
            print(json.dumps({"case": number, "ways": case.ways, "operation": name, "problem": problem}), flush=True)
    print(json.dumps(outcomes), flush=True)


_NOT_BEGUN = 2**64 - 1


def run(
    examples: int, seed: int, start: int = 0, max_failures: int = 20
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Runs cases in child processes.

    Returns:
        The failures, and how many cases were refused, parsed and failed.
    """
    failures: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    stop = start + examples
    with tempfile.TemporaryFile() as progress:
        while start < stop and len(failures) < max_failures:
            os.pwrite(progress.fileno(), struct.pack("<Q", _NOT_BEGUN), 0)
            child = subprocess.run(
                [sys.executable, "-m", __spec__.name if __spec__ else "tests.serialise.fuzz", "--child"]
                + [str(start), str(stop), str(seed), str(progress.fileno())],
                pass_fds=[progress.fileno()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "MALLOC_ARENA_MAX": "1", "JAX_PLATFORMS": "cpu"},
            )
            lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
            failures += [line for line in lines if "case" in line]
            for line in lines:
                if "case" not in line:
                    counts = {key: counts.get(key, 0) + value for key, value in line.items()}
            if child.returncode == 0:
                break
            (died,) = struct.unpack("<Q", os.pread(progress.fileno(), 8, 0))
            if died == _NOT_BEGUN:
                raise RuntimeError(f"The good files cannot be opened:\n{child.stderr}")
            failures.append(
                {"case": died, "problem": f"the process ended with {child.returncode}:\n{child.stderr[-3000:]}"}
            )
            start = died + 1
    return failures, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, help="one case, in this process")
    parser.add_argument("--max-failures", type=int, default=20)
    parser.add_argument("--child", nargs=4, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        start, stop, seed, progress = options.child
        run_cases(start, stop, seed, progress)
        return 0
    if options.only is not None:
        case = make_case(options.only, options.seed, good_files())
        print(case.ways, len(case.data), "bytes")
        print(st.from_bytes(case.data, trusted=TRUSTED))
        return 0
    failures, counts = run(options.examples, options.seed, options.start, options.max_failures)
    for failure in failures:
        print(f"case {failure['case']}: {failure.get('ways')} {failure.get('operation')}\n    {failure['problem']}")
    print(f"seed {options.seed}: {counts}, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
