"""`jax.tree_map` as treeo gets it: what is one object in a tree is mapped once, so sharing survives.

treeo copies, filters, merges and initialises its trees with `jax.tree_map`, which would visit a shared module once for
each path and make as many. Here a node that carries identity, and an array below one, is visited once with the same
companions:

    map(f, Model(a=layer, b=layer))         f sees layer.w once, and the result's a and b are one object
    map(f, Model(a, a), Model(b, c))        a meets b and c, so the result has two

All else is JAX's: what counts as a leaf, the order of the calls, and the errors for trees that do not match, which are
raised before the first call. So there are two passes, as in JAX, neither of which recurses. The first cuts the tree
into pieces, each of which is one node that carries identity, down to the next ones; the second calls the function.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from ..core._by_identity import IdentitySet
from ..core._errors import CycleError
from ..core._node_types import carries_identity, node_type_of
from ..ties._list_ties import ties

Objects = tuple[Any, ...]
"""A value in the tree, and its companions in each of the rest."""

Key = tuple[int, ...]
"""The ids of objects, which a piece keeps alive."""


class _Piece(NamedTuple):
    """One node that carries identity, down to the next ones, or what is outside modules.

    Attributes:
        treedef: its shape.
        entries: what is at its leaves.
        keys: for each entry that is a piece of its own, its key.
    """

    treedef: Any
    entries: list[Objects]
    keys: list[Key | None]


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """`jax.tree.map`, with the sharing of `tree` in the result.

    Args:
        f: takes a leaf and what is at its path in each of `rest`. For an array that is met again below a module, with
            the same companions, it is not called again.
        tree: any pytree.
        rest: trees of its shape.
        is_leaf: nodes for which it is true are leaves.

    Returns:
        A tree of new nodes.

    Raises:
        ValueError: if one of `rest` has not the shape of `tree`.
        CycleError: if a module contains itself.

    Cost: one call of `jax.tree.flatten` for each node that carries identity. The depth of modules is not limited by
    the stack; that of plain containers outside modules is, as in JAX.
    """
    try:
        outermost, pieces = _cut_up((tree, *rest), is_leaf)
    except ValueError:
        _refuse_cycles(tree, *_cut_up((tree,), is_leaf))
        # JAX names the place where two trees differ, from the root.
        jax.tree.map(lambda *_: None, tree, *rest, is_leaf=is_leaf)
        raise
    _refuse_cycles(tree, outermost, pieces)
    return _call(f, outermost, pieces)


def _cut_up(roots: Objects, is_leaf: Callable[[Any], bool] | None) -> tuple[_Piece, dict[Key, _Piece]]:
    """The first pass: the piece outside modules, and those inside by their keys."""
    pieces: dict[Key, _Piece] = {}
    outermost = _cut(roots, is_leaf, outside=True)
    to_cut = [outermost]
    while to_cut:
        piece = to_cut.pop()
        for i, (objects, key) in enumerate(zip(piece.entries, piece.keys, strict=True)):
            if key is None or key in pieces:
                continue
            found = _cut(objects, is_leaf)
            if found.treedef.num_leaves == 1 and jax.tree_util.treedef_is_leaf(found.treedef):
                # A class that JAX does not take apart is a leaf to it.
                piece.keys[i] = None
                continue
            pieces[key] = found
            to_cut.append(found)
    return outermost, pieces


def _cut(objects: Objects, is_leaf: Callable[[Any], bool] | None, *, outside: bool = False) -> _Piece:
    top, *others = objects
    leaves = IdentitySet()
    is_first = not outside

    def stops(x: Any) -> bool:
        nonlocal is_first
        if is_first:
            # The piece before has asked about the node itself.
            is_first = False
            return False
        if is_leaf is not None and is_leaf(x):
            leaves.add(x)
            return True
        return _begins_a_piece(x, outside)

    found, treedef = jax.tree.flatten(top, is_leaf=stops)
    companions = [treedef.flatten_up_to(other) for other in others]
    entries = list(zip(found, *companions, strict=True))
    keys = [_key(entry) if entry[0] not in leaves and _begins_a_piece(entry[0], outside) else None for entry in entries]
    return _Piece(treedef, entries, keys)


def _begins_a_piece(x: Any, outside: bool) -> bool:
    node_type = node_type_of(x)
    return node_type is not None and (not node_type.is_plain if outside else node_type.carries_identity)


def _key(objects: Objects) -> Key:
    return tuple([id(obj) for obj in objects])  # alive in the entries of a piece


def _refuse_cycles(tree: Any, outermost: _Piece, pieces: dict[Key, _Piece]) -> None:
    """Raises if a piece contains itself, on which the second pass and JAX itself would never end."""
    done: set[Key] = set()
    opened: set[Key] = set()
    frames: list[tuple[Key | None, Iterator[Key | None]]] = [(None, iter(outermost.keys))]
    while frames:
        above, remaining = frames[-1]
        key = next((key for key in remaining if key is not None and key not in done), None)
        if key is None:
            frames.pop()
            if above is not None:
                opened.discard(above)
                done.add(above)
        elif key in opened:
            # This says where.
            ties(tree)
            raise CycleError("A module contains itself.", ())
        else:
            opened.add(key)
            frames.append((key, iter(pieces[key].keys)))


class _Frame(NamedTuple):
    piece: _Piece
    key: Key | None
    remaining: Iterator[tuple[Objects, Key | None]]
    results: list[Any]


def _call(f: Callable[..., Any], outermost: _Piece, pieces: dict[Key, _Piece]) -> Any:
    """The second pass: the function called on the leaves, from left to right, and the nodes made of what it returns."""
    made: dict[Key, Any] = {}
    frames: list[_Frame] = []

    def enter(piece: _Piece, key: Key | None) -> None:
        frames.append(_Frame(piece, key, zip(piece.entries, piece.keys, strict=True), []))

    enter(outermost, None)
    while True:
        frame = frames[-1]
        for objects, key in frame.remaining:
            if key is None:
                # An array in a module is one object with what it meets; everything else is a value.
                if frame.key is None or not carries_identity(objects[0]):
                    frame.results.append(f(*objects))
                    continue
                key = _key(objects)
                if key not in made:
                    made[key] = f(*objects)
                frame.results.append(made[key])
            elif key in made:
                frame.results.append(made[key])
            else:
                enter(pieces[key], key)
                break
        else:
            result = frame.piece.treedef.unflatten(frame.results)
            frames.pop()
            if frame.key is None:
                return result
            made[frame.key] = result
            frames[-1].results.append(result)
