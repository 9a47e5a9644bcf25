"""What a forger writes into a manifest or a header: names, values and nodes, which make sense by luck only."""

import base64
import copy
import random
from collections.abc import Callable
from typing import Any

from . import strategies
from .table import NODE_KINDS

GADGET_NAMES = """
    os:system posix:system subprocess:Popen subprocess:run builtins:eval builtins:exec builtins:getattr builtins:open
    builtins:__import__ importlib:import_module runpy:run_path pickle:loads shutil:rmtree socket:socket ctypes:CDLL
    operator:attrgetter operator:methodcaller functools:reduce types:FunctionType types:CodeType numpy:load
    numpy:fromfile numpy:memmap numpy:frompyfunc numpy:vectorize jax.numpy:load jax.numpy:save jax.numpy:fromfile
    jax.numpy:vectorize jax:pure_callback jax.experimental:io_callback jax.debug:callback jax.lax:map jax:jit
    equinox:tree_deserialise_leaves equinox.internal:while_loop sharedtree:trust sharedtree:load __main__:main
    __main__:subprocess.Popen __main__:os.system __main__:__builtins__.eval pathlib:Path.unlink pathlib:Path.write_text
    numpy:ndarray.tofile jax._src.lazy_loader:importlib equinox.nn:Linear.__init__.__globals__
    tests.serialise.strategies:functools.partial antigravity:fly this:s jax.tools.jax_to_ir:main
    tests.serialise.strategies:dataclasses.sys.modules optax._src.base:sys collections:abc.sys builtins:compile
    code:interact webbrowser:open pty:spawn timeit:timeit numpy:save numpy:apply_along_axis numpy:loadtxt
    numpy:genfromtxt jax.numpy:savez jax.numpy:frompyfunc jax.numpy:apply_along_axis jax.numpy:apply_over_axes
    jax.numpy:piecewise jax.numpy:fromfunction jax.numpy:from_dlpack numpy.testing:run_module_suite jax.debug:print
    jax:eval_shape jax:vmap jax.lax:scan jax.lax:while_loop jax.tree_util:tree_map jax.profiler:start_trace
    equinox:tree_serialise_leaves equinox:filter_pure_callback
"""
GADGETS = GADGET_NAMES.split()
"""Names that a hostile file would like to be resolved."""

FRIEND_NAMES = """
    jax.nn:relu jax.numpy:tanh equinox.nn:Linear equinox.nn:MLP builtins:dict builtins:list builtins:object jax:Array
    collections:Counter numpy:float32 numpy:ndarray builtins:slice pathlib:PosixPath equinox:Module equinox.nn:State
    equinox.nn:StateIndex jax.tree_util:Partial optax:ScaleByAdamState equinox:Enumeration functools:partial
"""
OWN = "Layer Layer.double Layer.make Pair Config Slotted Key Color Mode Level Registered activate make"
FRIENDS = [*FRIEND_NAMES.split(), *(f"{strategies.__name__}:{name}" for name in OWN.split())]
"""Names that are allowed, in places where they do not belong."""


ITEM_SIZES: dict[str, tuple[int, str]] = {
    "bool": (1, "BOOL"), "int8": (1, "I8"), "uint8": (1, "U8"), "int16": (2, "I16"), "uint16": (2, "U16"),
    "float16": (2, "F16"), "bfloat16": (2, "BF16"), "int32": (4, "I32"), "uint32": (4, "U32"),
    "float32": (4, "F32"), "int64": (8, "I64"), "uint64": (8, "U64"), "float64": (8, "F64"), ">float32": (4, "F32"),
    ">int16": (2, "I16"), "float8_e4m3fn": (1, "F8_E4M3"), "float8_e5m2": (1, "F8_E5M2"), "float8_e8m0fnu": (1, ""),
    "float4_e2m1fn": (1, ""), "float6_e2m3fn": (1, ""), "int1": (1, ""), "int2": (1, ""), "int4": (1, ""),
    "uint4": (1, ""), "complex64": (8, ""), "complex128": (16, ""), "datetime64[ns]": (8, ""),
    "timedelta64": (8, ""), ">datetime64[s]": (8, ""), "float0": (0, ""), "longdouble[x87]": (16, ""),
    "clongdouble[x87]": (32, ""), "object": (8, ""), "V8": (8, ""), "str_[3]": (12, ""),
}  # fmt: skip
"""Dtypes, how many bytes an item has, and what it is stored as if not as bytes."""

DTYPES = list(ITEM_SIZES)


def atom(rng: random.Random) -> Any:
    name = rng.choice(GADGETS) if rng.random() < 0.5 else rng.choice(FRIENDS)
    return rng.choice(
        [
            ["function", name], ["class", name], ["int", "-7f"], ["int", f"{2**62:x}"], ["float", "0x1.8p+1"],
            ["float", "nan:7ff8000000000001"], ["float", "0x1.8p+2000"], ["..."], ["str", "7aC9"],
            ["bytes", base64.b64encode(rng.randbytes(3)).decode()], ["dtype", rng.choice(DTYPES)],
            ["scalar", rng.choice(DTYPES), rng.randbytes(8).hex()], ["complex", "inf", "-inf"],
            ["dtype", "str_[999999999]"], ["scalar", "str_[1]", "ffffffff"], ["int", "f" * 5000],
        ]
    )  # fmt: skip


def json_value(rng: random.Random, nodes: int) -> Any:
    kind = rng.randrange(10)
    if kind < 3:
        return rng.choice(
            [0, 1, -1, 2, 3, 2**31, 2**62, 2**63, 2**64, rng.randrange(nodes + 2), rng.randrange(nodes + 2)]
        )
    if kind < 5:
        return atom(rng)
    if kind == 5:
        return rng.choice(["", "a", "\ud800", "sharedtree.manifest", "w" * 300, "0", *GADGETS, *FRIENDS, *DTYPES])
    if kind == 6:
        return rng.choice([None, True, False, 1.5, float("nan"), float("inf"), [], {}, [[]], {"a": 1}])
    if kind == 7:
        return rng.choice(list(NODE_KINDS))
    if kind == 8:
        return node_of_any_kind(rng, nodes)
    return [json_value(rng, nodes) for _ in range(rng.randrange(4))]


def node_of_any_kind(rng: random.Random, nodes: int) -> list[Any]:
    """A node whose operands are what their places ask for, and make sense by luck only."""
    kind = rng.choice(list(NODE_KINDS))

    def child() -> Any:
        return rng.randrange(nodes + 1) if rng.random() < 0.6 else rng.choice([None, True, "a", "", atom(rng)])

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


def places(tree: Any) -> list[tuple[Any, Any]]:
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


def edit_somewhere(rng: random.Random, tree: Any, nodes: int) -> None:
    there = places(tree)
    if not there:
        return
    node, key = rng.choice(there)
    how = rng.randrange(6)
    if how == 0:
        other, other_key = rng.choice(there)
        node[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(node[key])
    elif how == 1:
        del node[key]
    elif how == 2 and isinstance(node, list):
        node.insert(key, copy.deepcopy(node[key]))
    elif how == 3 and isinstance(node, dict):
        node[rng.choice(["extra", "missing", "version", "weak", "key", "fields", "x", ""])] = json_value(rng, nodes)
    elif isinstance(node[key], int) and rng.random() < 0.5:
        node[key] += rng.choice([-1, 1, 2**31])
    else:
        node[key] = json_value(rng, nodes)
