"""Rows of Python's own containers and values that hold others."""

import collections
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from ..trust._names import RefusalError
from ._atoms import atom_text, encode_bytes, read_base64, short
from ._nodes import TEXT, Apart, Kind, Manifest, Node, Operand, Parts, child, children, require

_KEYS = children(is_walked=True)


def key_text(key: Any) -> str:
    """What leads to the value of a key, as JAX prints it. Texts that hold an address are left out: they vary."""
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001 -- only a text for people
        text = ""
    return f"[{text}]" if 0 < len(text) <= 80 and " at 0x" not in text else f"[<{type(key).__name__}>]"


# --- sets and mappings ------------------------------------------------------------------------------------------------


def _take_set(kind: str) -> Callable[[Any], Apart]:
    def build(done: list[Any]) -> Node:
        return [kind, sorted(done, key=json.dumps)]  # Python's own order of texts varies from run to run

    def take(obj: Any) -> Apart:
        members = tuple(obj)
        return Apart(members, [f"{{{i}}}" for i in range(len(members))], build, members)

    return take


def _build_set(cls: type) -> Callable[[Parts, Node], Any]:
    def build(parts: Parts, node: Node) -> Any:
        items = parts.children(node[1])
        parts.collisions.add(items)
        made = cls(items)
        require(len(made) == len(items), "a member occurs twice")
        return made

    return build


def _order(keys: list[Any]) -> Sequence[int]:
    """In which order JAX meets the values."""
    try:
        return sorted(range(len(keys)), key=keys.__getitem__)
    except (TypeError, ValueError):
        return range(len(keys))


def _take_mapping(kind: str) -> Callable[[Any], Apart]:
    def take(obj: Any) -> Apart:
        keys, values = list(obj), list(obj.values())
        count = len(keys)
        order = range(count) if kind == "OrderedDict" else _order(keys)
        factory = [obj.default_factory] if kind == "defaultdict" else []
        names = [key_text(key) for key in keys]
        paths = [*[names[i] for i in order], *[f"<key {name}>" for name in names], *[".default_factory"] * len(factory)]

        def build(done: list[Any]) -> Node:
            written: list[Any] = [None] * count
            for place, i in enumerate(order):
                written[i] = done[place]
            made = done[2 * count :]
            if made and made[0] is not None and type(made[0]) is not list:
                raise RefusalError(
                    "a `defaultdict` whose default factory is neither a class nor a function of a module",
                    "Write the factory with `def` at module level.",
                )
            return [kind, *made, done[count : 2 * count], written]

        return Apart([*[values[i] for i in order], *keys, *factory], paths, build, keys)

    return take


def _build_mapping(parts: Parts, node: Node) -> Any:
    keys = parts.children(node[-2])
    parts.collisions.add(keys)
    if node[0] == "defaultdict":
        factory = parts.child(node[1])
        require(factory is None or callable(factory), "its default factory is no class")
        made: dict[Any, Any] = collections.defaultdict(factory)
    else:
        made = {} if node[0] == "dict" else collections.OrderedDict()
    made.update(zip(keys, parts.children(node[-1]), strict=True))
    require(len(made) == len(keys), "a key occurs twice")
    return made


def _mapping(cls: type, *first: Operand) -> Kind:
    name, keyed = cls.__name__, len(first) + 1
    operands = (*first, _KEYS, children())
    is_deep = cls is dict
    return Kind(
        name, operands, (cls,), _take_mapping(name), _build_mapping, keyed=keyed, is_deep=is_deep, has_identity=True
    )


# --- values that hold others ------------------------------------------------------------------------------------------


def _build_deque(parts: Parts, node: Node) -> Any:
    maxlen, items = parts.child(node[1]), parts.children(node[2])
    require(maxlen is None or maxlen >= len(items), "it is longer than it may be")
    return collections.deque(items, maxlen)


def _take_path(obj: pathlib.PurePath) -> Apart:
    kind = type(obj).__name__
    return Apart((str(obj),), ("",), lambda done: ["path", kind, done[0]])


def _build_path(parts: Parts, node: Node) -> Any:
    require(node[1] in _PATHS, "it is no path")
    concrete, pure = _PATHS[node[1]]
    # A path of the other family of systems cannot be used here, only looked at.
    return (concrete if issubclass(type(pathlib.Path()), concrete) else pure)(parts.child(node[2]))


def _path_text(_: Manifest, node: Node) -> str | None:
    return short(f"{short(node[1])}({atom_text(node[2])})") if type(node[2]) is not int else None


_PATHS: dict[str, tuple[type, type]] = {
    "PosixPath": (pathlib.PosixPath, pathlib.PurePosixPath),
    "WindowsPath": (pathlib.WindowsPath, pathlib.PureWindowsPath),
    "PurePosixPath": (pathlib.PurePosixPath, pathlib.PurePosixPath),
    "PureWindowsPath": (pathlib.PureWindowsPath, pathlib.PureWindowsPath),
}


def _take_bytearray(obj: bytearray) -> Apart:
    return Apart((), (), lambda _: ["bytearray", encode_bytes(obj)[1]])


def _of_three(cls: type, *forms: str) -> Kind:
    operands = tuple(child(step, *forms) for step in (".start", ".stop", ".step"))
    return Kind(cls.__name__, operands, (cls,), inline=(f"{cls.__name__}(", ")"))


KINDS = (
    Kind(
        "tuple", (children(),), (tuple,), build=lambda parts, node: tuple(parts.children(node[1])), inline=("(", ")"),
        is_deep=True,
    ),
    Kind(
        "list", (children(),), (list,), build=lambda parts, node: parts.children(node[1]), is_deep=True,
        has_identity=True,
    ),
    Kind("set", (_KEYS,), (set,), _take_set("set"), _build_set(set), keyed=1, has_identity=True),
    Kind(
        "frozenset", (_KEYS,), (frozenset,), _take_set("frozenset"), _build_set(frozenset), keyed=1,
        inline=("frozenset({", "})"),
    ),
    _mapping(dict),
    _mapping(collections.OrderedDict),
    _mapping(collections.defaultdict, child(".default_factory", "null", "class", "function")),
    Kind(
        "deque", (child(".maxlen", "null", "int"), children()), (collections.deque,), build=_build_deque,
        has_identity=True,
    ),
    _of_three(slice),
    _of_three(range, "int"),
    Kind("path", (TEXT, child(".text", "text")), tuple(pure for pair in _PATHS.values() for pure in pair),
         _take_path, _build_path, inline=_path_text),
    Kind("bytearray", (Operand("base64"),), (bytearray,), _take_bytearray,
         lambda _, node: bytearray(read_base64(node[1])), has_identity=True),
    Kind("marker", (), (object,), build=lambda *_: object(), has_identity=True),
)  # fmt: skip
"""In the order of the table in `docs/format.md`."""
