"""The native walk, and the structures that it knows again.

It describes a tree by a key (see `_native.c`), and a table leads from keys to structures. What it has not seen before
is walked in Python, which makes the structure or raises the error. The key that is kept for that structure is written
from what the walk in Python read, and not from the tree, which another thread may have changed meanwhile.

A key lives as long as its structure. Structures are held weakly. The latest are kept until all garbage is collected,
if their keys keep nothing alive that would go before, so that a loop that drops each need not start anew each time.
"""

import functools
import gc
import operator
import sys
import types
import weakref
from typing import Any

import numpy as np
from jax import tree_util as jtu

from . import _classes_in_native_walk, _native_or_python, _walk
from ._by_identity import IdentitySet
from ._library_rows import LIBRARIES
from ._locks import Lock
from ._structure import Path, Structure, edges, intern, statics_of
from ._walk import Reading, Rules

MAX_KEYS = 4_096
"""Of a module whose static values are new objects each time, each walk gives a new key. When there are more, all go."""

MAX_KEPT = 256
MAX_KEPT_RECORDS = 100_000
"""How many structures are kept, and how many records they have together."""

MAX_KEPT_EXACT = 8
"""How many structures are kept that have the static objects of a user."""

_entries: dict[bytes, weakref.ref[Structure]] = {}

_native_or_python.start(lambda: _classes_in_native_walk.start(_entries))

native: Any = _native_or_python.native

_lock = Lock()
_kept: tuple[Structure, ...] = ()  # the latest last
_kept_exact: tuple[Structure, ...] = ()  # likewise


def natively(tree: Any, tags: Any, rules: Rules, prefix: str) -> tuple[list[Any], Structure] | None:
    """Packs a tree as `_walk.walk` does; None if the native walk is not in use or cannot follow these rules."""
    if native is None or rules.is_leaf is not None or not rules.are_structs_traced:
        return None
    if rules.given or rules.updated or rules.given_copies:
        return None
    if rules.on_static is not None:
        return _checked(tree, tags, rules, prefix)
    found = native.walk(tree, tags, flags_of(rules), _entries)
    return _first_met(tree, tags, rules, prefix) if found is None else found


def flags_of(rules: Rules) -> int:
    """The rules that the native walk can follow, as a number: bits in the order that C has, and the convention."""
    truths = rules.containers | rules.arrays << 1 | rules.values << 2 | rules.filtered << 3 | rules.is_exact << 4
    return truths | _classes_in_native_walk.NUMBERS[rules.convention] << 8


def write_natively(pending: list[Any]) -> bool:
    """Writes contents into objects, in turn, all or nothing. False if that is left to Python."""
    return native is not None and native.write_back(pending)


def _checked(tree: Any, tags: Any, rules: Rules, prefix: str) -> tuple[list[Any], Structure] | None:
    """As `natively` under a rule for static values; None where what the structure has may not be what the tree has.

    Before a value is checked, no structure may get it, nor stand for it because it is equal. So the structure has to be
    known, and its static values such that are equal only if they are the same.
    """
    start = len(tags.objects)
    found = native.walk(tree, tags, flags_of(rules), _entries)
    if found is None:
        return None
    structure = found[1]
    statics = list(statics_of(structure))
    if not all(static.is_settled for _, static in statics):
        tags.forget(start)
        return None
    assert rules.on_static is not None
    first: dict[int, Path] = {}

    def path(number: int) -> str:
        if not first:
            for each, way in edges(structure.records, [((), structure.root)], structure.base):
                first.setdefault(each, way)
        return prefix + jtu.keystr(first[number])

    for number, static in statics:
        rules.on_static(static.peek(), functools.partial(path, number))
    return found


def _first_met(tree: Any, tags: Any, rules: Rules, prefix: str) -> tuple[list[Any], Structure]:
    base = len(tags.objects)
    reading = Reading()
    leaves, records, root = _walk.walk(tree, tags, rules, prefix, reading)
    _classes_in_native_walk.look_again(records)
    structure = intern(records, root, base)
    try:
        key, pins, settled = native.key_of(reading.visited, flags_of(rules), base)
    except Exception:  # noqa: BLE001 -- what has no key is walked in Python each time
        return leaves, structure
    for pin, cls in zip(pins[::2], pins[1::2], strict=True):
        # A structure that says another class than the key would be wrong for all who have that key.
        noted = reading.static_memo.classes.get(id(pin))  # alive in `pins`
        if cls is not _classes_in_native_walk.Token and noted is not cls:
            return leaves, structure
    held = [native.hold(tuple(settled))] if settled else []
    _remember(key, structure, (*IdentitySet(pins[::2]), *held))
    return leaves, structure


def _remember(key: bytes, structure: Structure, pins: tuple[Any, ...]) -> None:
    entries = _entries  # for the end of the process, when this file's names go before the last structure
    entry = weakref.ref(structure, lambda _: entries.pop(key, None))
    gone: list[Any] = []  # dies when the lock is free
    with _lock:
        if len(_entries) >= MAX_KEYS:
            for known in [each() for each in list(_entries.values())]:
                if known is not None:
                    gone.append(known.pins)
                    known.pins = {}
            _entries.clear()
            native.forget_keys()  # while all that is in them by address is alive in `gone`
        # What the key has by address lives as long as the structure; in the table it would live for ever if it leads to
        # that.
        structure.pins[key] = pins
        _entries[key] = entry
    if len(structure.records) <= MAX_KEPT_RECORDS:
        if structure.objects:
            _keep_exact(structure)
        elif all(_is_there_anyway(pin) for pin in pins):
            _keep(structure)


def _keep(structure: Structure) -> None:
    global _kept  # noqa: PLW0603 -- replaced by one assignment, which threads cannot tear
    kept, records = [structure], len(structure.records)
    for each in reversed(_kept):
        records += len(each.records)
        if records > MAX_KEPT_RECORDS or len(kept) == MAX_KEPT:
            break
        if each is not structure:
            kept.append(each)
    _kept = tuple(reversed(kept))


def _keep_exact(structure: Structure) -> None:
    """Keeps a structure that has a user's own static objects, of which no cache of JAX's has any.

    Without this, each eager function would walk a model with a config in Python. So the static objects of the latest
    few models may outlive these, until all garbage is collected.
    """
    global _kept_exact  # noqa: PLW0603 -- as above
    _kept_exact = (*[other for other in _kept_exact if other is not structure], structure)[-MAX_KEPT_EXACT:]


def _let_go(phase: str, info: dict[str, int]) -> None:
    """Called by the garbage collector."""
    global _kept, _kept_exact  # noqa: PLW0603 -- as above
    if phase == "start" and info["generation"] == 2:
        _kept = _kept_exact = ()


if native is not None:
    gc.callbacks.append(_let_go)


_HELD_ANYWAY = (np.dtype, *[cls for library in LIBRARIES for cls in library.held_anyway])


def _is_there_anyway(value: Any) -> bool:
    """Whether keeping a value keeps nothing else alive: what its module holds, a function without data, a dtype."""
    if isinstance(value, _HELD_ANYWAY):
        return True
    try:
        module = sys.modules.get(value.__module__)
        if module is None:
            return False
        if type(value) is types.FunctionType and value.__globals__ is module.__dict__:
            return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__)
        return operator.attrgetter(value.__qualname__)(module) is value
    except Exception:  # noqa: BLE001 -- whatever a user's attributes do
        return False
