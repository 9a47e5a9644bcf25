"""Ways to damage a file, and ways to forge one; and cases, each of them a file that was changed in a few ways."""

import contextlib
import dataclasses
import json
import random
import struct
from collections.abc import Callable

from .containers import START
from .drafts import Draft
from .good_files import Good
from .hostile_json import DTYPES, FRIENDS, GADGETS, ITEM_SIZES, edit_somewhere, node_of_any_kind, places
from .swaps import SWAPPED, UNDECLARED

Forgery = Callable[[random.Random, Draft], None]

# --- damage, which digests find -------------------------------------------------------------------------------------


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


# --- forgeries, whose digests are right -----------------------------------------------------------------------------


def edit_manifest(rng: random.Random, draft: Draft) -> None:
    edit_somewhere(rng, draft.manifest, len(draft.manifest.get("nodes", ())) if isinstance(draft.manifest, dict) else 3)


def add_nodes(rng: random.Random, draft: Draft) -> None:
    """Nodes of any kind after those that are there, the last of them in the root."""
    nodes = draft.manifest.get("nodes") if isinstance(draft.manifest, dict) else None
    if isinstance(nodes, list) and nodes:
        for _ in range(rng.randint(1, 3)):
            nodes.append(node_of_any_kind(rng, len(nodes) - 1))
        nodes.append(["tuple", [draft.manifest.get("root"), len(nodes) - 1]])
        draft.manifest["root"] = len(nodes) - 1


def redirect(rng: random.Random, draft: Draft) -> None:
    """References made dangling, cyclic, or to what is of the wrong kind."""
    there = [(node, key) for node, key in places(draft.manifest) if type(node[key]) is int]
    if there:
        node, key = rng.choice(there)
        node[key] = rng.choice([0, 1, -1, key if isinstance(key, int) else 0, node[key] + 1, rng.randrange(60), 2**62])


def name_gadgets(rng: random.Random, draft: Draft) -> None:
    there = [(n, k) for n, k in places(draft.manifest) if isinstance(n[k], str) and (":" in n[k] or k == "name")]
    name = rng.choice(GADGETS)
    if there and rng.random() < 0.7:
        node, key = rng.choice(there)
        node[key] = name if rng.random() < 0.7 else rng.choice(FRIENDS)
    else:
        there = [
            (n, k)
            for n, k in places(draft.manifest)
            if isinstance(n[k], list) and len(n[k]) == 2 and isinstance(n, list)
        ]
        if there:
            node, key = rng.choice(there)
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
    edit_somewhere(rng, draft.header, 3)


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
    edit_manifest, edit_manifest, add_nodes, add_nodes, redirect, name_gadgets, retype, retype, edit_header,
    edit_tensor, swap_tensors, swap_digests, duplicate_key, nest_deeply, edit_data, edit_text,
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


def make_case(number: int, seed: int, files: list[Good], ways: str = "any") -> Case:
    """The first cases are the smallest file, cut at every offset; the others are drawn.

    With the ways "swapped" or "undeclared", all are files whose manifests were changed by `SWAPPED` or `UNDECLARED`.
    """
    if ways != "any":
        return _swapped_case(random.Random(f"{seed}:{number}:{ways}"), files, ways)
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
    return _forged_case(rng, good, rng.choices(FORGED, k=rng.choice([1, 1, 1, 2, 3])), rng.random() < 0.9)


def _swapped_case(rng: random.Random, files: list[Good], ways: str) -> Case:
    forgeries = rng.choices(SWAPPED, k=rng.choice([1, 1, 2, 3, 5])) if ways == "swapped" else []
    if ways == "undeclared":
        forgeries = [*rng.choices(UNDECLARED, k=rng.choice([1, 1, 2])), *rng.choices(SWAPPED, k=rng.choice([0, 0, 1]))]
    return _forged_case(rng, rng.choice(files[1:5]), forgeries, True)


def _forged_case(rng: random.Random, good: Good, forgeries: list[Forgery], with_digests: bool) -> Case:
    draft = Draft(good.data)
    data = good.data
    for forgery in forgeries:
        with contextlib.suppress(
            TypeError, ValueError, KeyError, AttributeError, IndexError
        ):  # an earlier one left no sense
            forgery(rng, draft)
            data = draft.file(with_digests=with_digests)
    return Case(data, None, tuple(way.__name__ for way in forgeries))
