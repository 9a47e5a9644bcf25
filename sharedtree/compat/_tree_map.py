"""`jax.tree_map` for treeo. It maps one object of a tree once, so that sharing survives.

treeo copies, filters, merges and initialises its trees with `jax.tree_map`. JAX's function would visit a shared module
once for each path, and make as many modules. Here a node that carries identity, and an array below such a node, is
mapped once with the same companions. The *companions* of an object are the objects at its path in the other trees.

    map(f, Model(a=layer, b=layer))         f sees layer.w once, and the result's a and b are one object
    map(f, Model(a, a), Model(b, c))        a has the companions b and c, so the result has two objects

All else is as in JAX: what counts as a leaf, the order of the calls, and the errors for trees that do not match, which
are raised before the first call. So there are two passes, as in JAX. Neither recurses. The first pass cuts the tree
into pieces: each piece is one node that carries identity, down to the next such nodes. The second pass calls the
function.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from ..core._by_identity import IdentitySet
from ..core._errors import CycleError
from ..core._node_types import carries_identity, node_type_of
from ..ties._list_ties import ties

AlignedObjects = tuple[Any, ...]
"""An object of the tree and its companions, one of each other tree."""

Key = tuple[int, ...]
"""Ids of an object and its companions, which are kept alive by the entries of a piece."""


class _Piece(NamedTuple):
    """Piece of the trees: a node that carries identity, down to the next such nodes.

    The outermost piece is another one: it holds everything outside modules, down to the modules.

    Attributes:
        treedef: treedef of the piece.
        entries: objects at the leaves of the treedef, with their companions.
        keys: for each entry, its key if it is a piece itself. None for a leaf of the tree.
    """

    treedef: Any
    entries: list[AlignedObjects]
    keys: list[Key | None]


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Maps a function over trees as `jax.tree.map` does. The result has the sharing of `tree`.

    Args:
        f: takes a leaf of `tree` and its companions. It is called once for an array that occurs several times below
            modules with the same companions.
        tree: any pytree.
        rest: trees of the same shape.
        is_leaf: takes a node. Returns True if the node counts as a leaf.

    Returns:
        A tree of new nodes.

    Raises:
        ValueError: if one of `rest` has another shape than `tree`.
        CycleError: if a module contains itself.

    Cost: one call of `jax.tree.flatten` for each node that carries identity. The stack does not limit the depth of
        modules, but it limits the depth of plain containers outside them, as in JAX.
    """
    try:
        outermost, pieces = _cut_up((tree, *rest), is_leaf)
    except ValueError:
        # In a tree with a cycle, JAX's function below would never end.
        _refuse_cycles(tree, *_cut_up((tree,), is_leaf))
        # The error names a path within a piece. JAX raises one with the path from the root.
        jax.tree.map(lambda *_: None, tree, *rest, is_leaf=is_leaf)
        raise
    _refuse_cycles(tree, outermost, pieces)
    return _call(f, outermost, pieces)


def _cut_up(roots: AlignedObjects, is_leaf: Callable[[Any], bool] | None) -> tuple[_Piece, dict[Key, _Piece]]:
    """Does the first pass.

    Returns:
        The outermost piece, and key → piece for all others.

    Raises:
        ValueError: if the trees have different shapes.
    """
    pieces: dict[Key, _Piece] = {}
    outermost = _cut(roots, is_leaf, outside=True)
    to_cut = [outermost]
    while to_cut:
        piece = to_cut.pop()
        for i, (objects, key) in enumerate(zip(piece.entries, piece.keys, strict=True)):
            if key is None or key in pieces:
                continue
            inner = _cut(objects, is_leaf)
            # `sharedtree` takes some classes apart that JAX does not know. Here they are leaves, as in JAX.
            if inner.treedef.num_leaves == 1 and jax.tree_util.treedef_is_leaf(inner.treedef):
                piece.keys[i] = None
                continue
            pieces[key] = inner
            to_cut.append(inner)
    return outermost, pieces


def _cut(objects: AlignedObjects, is_leaf: Callable[[Any], bool] | None, *, outside: bool = False) -> _Piece:
    """Cuts one piece out of the trees.

    Args:
        objects: the node at which the piece begins, and its companions.
        is_leaf: see `tree_map`.
        outside: True for the outermost piece. It goes through containers outside modules and ends at modules. Other
            pieces also end at mutable containers, which carry identity inside modules.

    Raises:
        ValueError: if the companions have another shape than the node.
    """
    node, *companions = objects
    leaves = IdentitySet()
    is_first = not outside

    def is_end(x: Any) -> bool:
        """Returns True for a node at which the piece ends."""
        nonlocal is_first
        # The first call is for the node at which the piece begins. `is_leaf` was asked about it in the piece above.
        if is_first:
            is_first = False
            return False
        if is_leaf is not None and is_leaf(x):
            leaves.add(x)
            return True
        return _begins_a_piece(x, outside)

    entries_of_node, treedef = jax.tree.flatten(node, is_leaf=is_end)
    entries_of_companions = [treedef.flatten_up_to(companion) for companion in companions]
    entries = list(zip(entries_of_node, *entries_of_companions, strict=True))
    keys: list[Key | None] = []
    for entry in entries:
        is_piece = entry[0] not in leaves and _begins_a_piece(entry[0], outside)
        keys.append(_key(entry) if is_piece else None)
    return _Piece(treedef, entries, keys)


def _begins_a_piece(x: Any, outside: bool) -> bool:
    """Returns True for a node that carries identity. Outside modules, that is any node but a plain container."""
    node_type = node_type_of(x)
    return node_type is not None and (not node_type.is_plain if outside else node_type.carries_identity)


def _key(objects: AlignedObjects) -> Key:
    """Returns the key of an entry of a piece. The piece keeps the objects alive."""
    return tuple([id(obj) for obj in objects])


def _refuse_cycles(tree: Any, outermost: _Piece, pieces: dict[Key, _Piece]) -> None:
    """Returns if no piece contains itself. Otherwise the second pass, and JAX itself, would never end.

    Args:
        tree: the whole tree, for the error.
        outermost: see `_cut_up`.
        pieces: see `_cut_up`.

    Raises:
        CycleError: if a piece contains itself.
    """
    # A search in depth. `open_keys` are the pieces on the way from the root to the current one.
    done: set[Key] = set()
    open_keys: set[Key] = set()
    # Each frame is a piece with the keys in it that are still to be looked at.
    frames: list[tuple[Key | None, Iterator[Key | None]]] = [(None, iter(outermost.keys))]
    while frames:
        current, remaining = frames[-1]
        key = next((key for key in remaining if key is not None and key not in done), None)
        # All pieces below the current one are done.
        if key is None:
            frames.pop()
            if current is not None:
                open_keys.discard(current)
                done.add(current)
        elif key in open_keys:
            # Raises the error with the path of the cycle. The next line is for a cycle that `ties` does not see.
            ties(tree)
            raise CycleError("A module contains itself.", ())
        else:
            open_keys.add(key)
            frames.append((key, iter(pieces[key].keys)))


class _OpenPiece(NamedTuple):
    """A piece that the second pass is in.

    Attributes:
        piece: the piece.
        key: its key. None for the outermost piece.
        remaining: its entries, with their keys, still to be mapped.
        results: results of the entries so far.
    """

    piece: _Piece
    key: Key | None
    remaining: Iterator[tuple[AlignedObjects, Key | None]]
    results: list[Any]


def _call(f: Callable[..., Any], outermost: _Piece, pieces: dict[Key, _Piece]) -> Any:
    """Does the second pass: calls the function on all leaves, from left to right, and makes the nodes of the result.

    Args:
        f: see `tree_map`.
        outermost: see `_cut_up`.
        pieces: see `_cut_up`.
    """
    # Key → result, of pieces and of arrays below modules.
    results: dict[Key, Any] = {}
    frames: list[_OpenPiece] = []

    def push(piece: _Piece, key: Key | None) -> None:
        """Begins with a piece."""
        frames.append(_OpenPiece(piece, key, zip(piece.entries, piece.keys, strict=True), []))

    push(outermost, None)
    while True:
        frame = frames[-1]
        for objects, key in frame.remaining:
            # A leaf of the tree.
            if key is None:
                # Outside modules, everything is a value: `f` is called for each occurrence.
                if frame.key is None or not carries_identity(objects[0]):
                    frame.results.append(f(*objects))
                    continue
                array_key = _key(objects)
                if array_key not in results:
                    results[array_key] = f(*objects)
                frame.results.append(results[array_key])
            # A piece that is done already.
            elif key in results:
                frame.results.append(results[key])
            # A new piece. This one goes on when the new one is done.
            else:
                push(pieces[key], key)
                break
        # All entries of the piece are done.
        else:
            result = frame.piece.treedef.unflatten(frame.results)
            frames.pop()
            if frame.key is None:
                return result
            results[frame.key] = result
            frames[-1].results.append(result)
