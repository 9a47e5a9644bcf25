"""Where control flow joins two trees that may differ in sharing: a carry that goes in and out, the results of branches.

The transform wants one structure on both sides. What is a tie of modules on one side must be one on the other. Arrays
and mutable containers alias by accident (a state that begins as `State(zeros, zeros)`), so of their ties those hold
that both sides have, the *meet*: what goes in is cut, once, and the function is traced again (`_lowering`). A tie that
only the result has needs no second trace: the leaf goes out twice.

A static number that comes out as an array, or as another number, becomes a traced leaf, as vanilla JAX has it.

    goes in           comes out         joined
    State(z, z)       State(a, b)       State(·, ·), two leaves: z and z go in
    State(y, z)       State(a, a)       State(·, ·): a and a come out
    Net(w, steps=0)   Net(w, steps=1)   Net(·, ·): 0 goes in as a leaf
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax import tree_util as jtu

from .._errors import SharingMismatchError
from .._graph import Tags, walk
from .._node_types import PYTHON_NUMBERS, is_module
from .._packed import Packed
from .._sharing import Mismatch, Shape, name_of, pairs
from .._statics import Static, shown_beside
from .._structure import LEAF, Node, Op, Record
from ._crossed import Graph
from ._packing import OUTSIDE

Name = tuple[int, int]
"""A record of what goes in and one of what comes out; or -1 where there is none."""


class Joined(NamedTuple):
    """Two graphs, record by record.

    Attributes:
        met: each pair of records that a path leads to, in the order of a walk.
        is_cut: whether something that goes in as one comes out as two.
        promoted: the records going in whose static numbers become traced leaves.
    """

    met: Sequence[Name]
    is_cut: bool
    promoted: frozenset[int]

    @property
    def fits(self) -> bool:
        """Whether what goes in can stay as it is."""
        return not self.is_cut and not self.promoted


class Words(NamedTuple):
    """What the two sides are called in errors: `when an iteration begins`, `in the result of the first branch`.

    Attributes:
        transform: what joins them.
        before: the one.
        after: the other.
        are_peers: whether neither comes before the other, so that a tie which one of them lacks is the same fault.
    """

    transform: str
    before: str
    after: str
    are_peers: bool = False


def joined(before: Graph, after: Graph, words: Words, *, exact: bool = False) -> Joined:
    """Compares what goes in with what comes out.

    Args:
        before: what goes in.
        after: what comes out.
        words: what they are called.
        exact: what goes in cannot be packed in another way, so no tie of it may be lost, and no static number change.

    Raises:
        SharingMismatchError: if their classes or static values differ, or a tie of modules.
    """
    left, right = before.shape, after.shape
    promoted: set[int] = set()

    def agree(i: int, j: int) -> bool:
        op, other = left.records[i][0], right.records[j][0]
        if op is LEAF or type(op) is Static:
            return other is LEAF or type(other) is Static
        return False

    met: list[Name] = []
    of_left: dict[int, list[tuple[int, str]]] = {}
    of_right: dict[int, list[tuple[int, str]]] = {}
    for pair in pairs(left, right, agree):
        path = jtu.keystr(pair.path)
        if isinstance(pair, Mismatch):
            _raise_other_shape(path, pair.left, pair.right, words)
        i, j = pair.left, pair.right
        op, other = left.records[i][0], right.records[j][0]
        if op != other:
            _require_numbers(path, op, other, words, exact=exact)
            if type(op) is Static:
                promoted.add(i)
        met.append((i, j))
        of_left.setdefault(i, []).append((j, path))
        of_right.setdefault(j, []).append((i, path))
    holds_leaf = holding_leaves(left.records)
    is_cut = False
    for i, ends in of_left.items():
        if len(ends) > 1:
            op, leaf = left.records[i][0], before.leaves.get(i)
            if exact or (holds_leaf[i] and _is_firm(op, leaf)):
                _raise_other_ties(ends, op, leaf, words, lost=True)
            is_cut = True
    for ends in of_right.values():
        i = ends[0][0]
        op, leaf = left.records[i][0], before.leaves.get(i)
        if len(ends) > 1 and holds_leaf[i] and _is_firm(op, leaf):
            _raise_other_ties(ends, op, leaf, words, lost=False)
    return Joined(met, is_cut, frozenset(promoted))


def holding_leaves(records: Sequence[Record]) -> list[bool]:
    """Which records hold a traced leaf, or are one."""
    found: list[bool] = []
    for op, children in records:
        found.append(op is LEAF or any(found[child] for child in children))
    return found


def leaves_like(before: Graph, after: Graph, found: Joined) -> dict[int, Any]:
    """What comes out for each traced leaf that goes in."""
    end = dict(reversed(found.met))
    records = after.records
    result: dict[int, Any] = {}
    for i in before.leaves:
        if i in end:
            op = records[end[i]][0]
            result[i] = op.thaw() if type(op) is Static else after.leaves[end[i]]
    return result


def packed_as(result: Any, before: Any, leaves: Mapping[int, Any]) -> Any:
    """A packed result with the structures of what went in.

    Args:
        result: what comes out.
        before: what went in, with modules in the same places.
        leaves: of the result, by the records of what went in.
    """

    def like(item: Any, model: Any) -> Any:
        if type(item) is not Packed:
            return item
        return Packed([leaves[number] for number in model.structure.leaf_numbers], model.structure)

    return jtu.tree_map(like, result, before, is_leaf=lambda item: type(item) is Packed)


def require_same_containers(before: Any, after: Any, name: str, words: Words) -> bool:
    """Whether two trees are alike outside modules, so that their modules can be compared.

    Raises:
        SharingMismatchError: if not, and a module is in one of them. Otherwise the transform itself says it best.
    """
    (items, records, root), (others, others_records, other_root) = (walk(t, Tags(), OUTSIDE) for t in (before, after))
    at, other_at = (dict(_items(r, i)) for r, i in ((records, items), (others_records, others)))

    asked = 0, 0

    def agree(i: int, j: int) -> bool:
        nonlocal asked
        asked = i, j
        return i in at and j in other_at and is_module(at[i]) == is_module(other_at[j])

    for pair in pairs(Shape(records, root), Shape(others_records, other_root), agree):
        if isinstance(pair, Mismatch):
            left, right = _module_named(at.get(asked[0])), _module_named(other_at.get(asked[1]))
            left, right = left or pair.left, right or pair.right
        else:
            op, other = records[pair.left][0], others_records[pair.right][0]
            if op == other:
                continue
            left, right = described(op, other), described(other, op)
        if not any(map(is_module, (*items, *others))):
            return False
        _raise_other_shape(name + jtu.keystr(pair.path), left, right, words)
    return True


def _module_named(item: Any) -> str | None:
    """What a module outside is called in errors, packed or not; None for anything else."""
    if type(item) is Packed:
        structure = item.structure
        op = structure.records[structure.root - structure.base][0] if structure.root >= structure.base else None
        return f"a `{op.type.cls.__name__}`" if type(op) is Node else "a module"
    return f"a `{type(item).__name__}`" if is_module(item) else None


def _items(records: Iterable[Record], items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    each = iter(items)
    return ((number, next(each)) for number, (op, _) in enumerate(records) if op is LEAF)


def _is_firm(op: Op, leaf: Any) -> bool:
    """Whether a tie is one of modules, or of references, which do not alias by accident."""
    return (type(op) is Node and not op.type.is_plain) or isinstance(leaf, jax.Ref)


def _require_numbers(path: str, op: Op, other: Op, words: Words, *, exact: bool) -> None:
    """Raises unless a static number becomes a traced leaf, or the other way round; the first only if not exact."""
    one, two = (each.peek() if type(each) is Static else 0 for each in (op, other))
    is_fixed = type(op) is Node or (exact and type(op) is Static)
    if is_fixed or type(one) not in PYTHON_NUMBERS or type(two) not in PYTHON_NUMBERS:
        _raise_other_shape(path, described(op, other), described(other, op), words)


def described(op: Op, other: Op) -> str:
    """What a record is, with its static data, for errors that name another one beside it."""
    if type(op) is not Node:
        return name_of(op)
    data = "keys" if issubclass(op.type.cls, dict) else "static data"
    of_other = other.aux.peek() if type(other) is Node and op.type.cls is other.type.cls else None
    return f"a `{op.type.cls.__name__}` with the {data} {shown_beside(op.aux.peek(), of_other)}"


def _raise_other_shape(path: str, left: str, right: str, words: Words) -> NoReturn:
    raise SharingMismatchError(
        f"`{words.transform}` joins two trees that differ at `{path}`: {words.before} it is {left}, {words.after} "
        f"{right}.\n"
        "What is not traced is part of the structure, which must be the same on both sides. What changes can be an "
        "array:\n"
        "    steps: jax.Array                   # not: eqx.field(static=True)",
        (path,),
    )


def _raise_other_ties(ends: Sequence[tuple[int, str]], op: Op, leaf: Any, words: Words, *, lost: bool) -> NoReturn:
    paths = [path for _, path in ends[:2]]
    of_leaf = "`jax.Ref`" if isinstance(leaf, jax.Ref) else "array"
    what = f"`{op.type.cls.__name__}`" if type(op) is Node else of_leaf
    one, two = (words.before, words.after) if lost else (words.after, words.before)
    fix = (
        "Keep the tie, for example with\n"
        "    model = sharedtree.tree.map(f, model)\n"
        "    model = sharedtree.retie(model, like=before)\n"
        "or undo it before:\n"
        "    model = sharedtree.untie(model)"
        if lost or words.are_peers
        else "Tie them before, or return two objects:\n    model = sharedtree.untie(model)"
    )
    raise SharingMismatchError(
        f"`{words.transform}` joins two trees that differ in sharing: `{paths[0]}` and `{paths[1]}` are one {what} "
        f"{one}, but two {two}.\n{fix}",
        paths,
    )
