"""Asking a user's `where` function which nodes of a tree it means.

An object may stand at several places of a tree, as every `None`, small number and string does, so what `where` returns
for the tree itself does not say which place is meant. It is hence asked two or three times:

1. on *stand-ins*: the tree with a marker for each leaf, whose nodes are new nodes of their own class. Each is an object
   of its own, so what `where` returns can be recognised. A `None` stays a `None`, so that `x.bias is not None` is true
   where it is true of the tree, and `jax.tree.leaves` leaves it out.
2. if the answer is or holds a `None`, on stand-ins in which each `None`, too, is a marker: which of them is meant?
3. on the tree itself, where it must return the objects at the places that were named. A `where` that looks at leaves,
   as one does that filters by `equinox.is_array`, returns others.

tree                       [Linear(w, None), Linear(w, b)]
stand-ins                  [Linear(<0>, None), Linear(<0>, <2>)]
lambda m: m[1].bias        1. <2>       3. b
lambda m: m[0].bias        1. None      2. <1>, of [Linear(<0>, <1>), Linear(<0>, <2>)]      3. None
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ..core._by_identity import IdentityDict
from ..core._errors import SharingMismatchError
from ..core._node_types import node_type_of
from ..core._printing import name_of_class, shown
from ..core._static_values import Static
from ..core._structure import FlatDag, Given, Node, Record, Update

NoneFix = Callable[[str], str]
"""The path of a `None` → a line of code that names it."""


class Answer(NamedTuple):
    """What a `where` function names.

    Attributes:
        records: the numbers of the records, in the order of the answer.
        is_single: whether it returned one node, and not a sequence.
    """

    records: list[int]
    is_single: bool


class WhereTree:
    """A tree of which `where` functions are asked.

    Args:
        tree: the tree, with the object of each record.
    """

    def __init__(self, tree: FlatDag) -> None:
        self._tree = tree

    def named_by(
        self,
        where: Callable[[Any], Any],
        name: str = "where",
        *,
        root: int | None = None,
        none_fix: NoneFix | None = None,
    ) -> Answer:
        """Asks a function which records it means.

        Args:
            where: the function.
            name: what the user calls it.
            root: the record of the part that it takes; by default the whole tree.
            none_fix: how the caller can be told that a `None` counts as a leaf.

        Raises:
            SharingMismatchError: if it returns what is not in the tree, computes with a leaf or depends on leaves.
        """
        asked = _Question(self._tree, self._tree.root if root is None else root, where, name)
        answer = asked.answer_on(self._stand_ins)
        if None in answer.entries:
            answer = asked.with_every_none_named(answer, self._stand_ins_for_none_too, none_fix)
        records = [number for number in answer.entries if number is not None]
        asked.require_same_places(answer, records, self._numbers)
        return Answer(records, answer.is_single)

    @functools.cached_property
    def _stand_ins(self) -> "_StandIns":
        return _stand_ins(self._tree.records, none_as_marker=False)

    @functools.cached_property
    def _stand_ins_for_none_too(self) -> "_StandIns":
        return _stand_ins(self._tree.records, none_as_marker=True)

    @functools.cached_property
    def _numbers(self) -> IdentityDict[int]:
        return IdentityDict((obj, number) for number, obj in enumerate(self._tree.objects))


class _Marker:
    """Stands for a leaf. It has no attributes of an array, for `where` must not look at values."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __getitem__(self, index: Any) -> "_Marker":
        # `variable[...]` is how Flax NNX 0.12 reads the array of a variable; it is the very array.
        if index is ...:
            return self
        raise TypeError(f"'{_Marker.__name__}' object is not subscriptable")

    def __repr__(self) -> str:
        return f"<leaf {self.number}>"


class _EmptyTuple(tuple[()]):
    """Stands for an empty tuple, of which Python has only one. To JAX it is a node without children, too."""

    __slots__ = ()


jtu.register_pytree_node(_EmptyTuple, lambda _: ((), None), lambda *_: _EmptyTuple())


class _StandIns(NamedTuple):
    """A stand-in for each record.

    Attributes:
        objects: by the numbers of the records. A `None` that stands for itself is one object for several.
        numbers: stand-in → record. A `None` has none.
    """

    objects: list[Any]
    numbers: IdentityDict[int]


def _stand_ins(records: Sequence[Record], *, none_as_marker: bool) -> _StandIns:
    """Makes the stand-ins, shared as the records are shared."""
    made = _StandIns([], IdentityDict())
    for number, (op, children) in enumerate(records):
        assert type(op) not in (Given, Update)
        stand_in: Any = _Marker(number)
        if type(op) is Node and op.type.cls is type(None):
            if not none_as_marker:
                made.objects.append(None)
                continue
        elif type(op) is Node and op.type.cls is tuple and not children:
            stand_in = _EmptyTuple()
        elif type(op) is Node:
            node = op.type.put_together(op.aux.thaw(), [made.objects[child] for child in children])
            # A class may have one instance only, or return a child instead of a node.
            if node not in made.numbers and node is not None:
                stand_in = node
        made.objects.append(stand_in)
        made.numbers[stand_in] = number
    return made


class _AnswerOnStandIns(NamedTuple):
    """What a `where` function returned for stand-ins.

    Attributes:
        entries: the record of each stand-in that it returned, and None for each `None`.
        is_single: whether it is a single entry.
        treedef: how the entries lie in the answer.
    """

    entries: list[int | None]
    is_single: bool
    treedef: Any


class _Question(NamedTuple):
    """A `where` function, what it is called, and the tree and the root of the part that it is asked of."""

    tree: FlatDag
    root: int
    where: Callable[[Any], Any]
    name: str

    def answer_on(self, stand_ins: _StandIns) -> _AnswerOnStandIns:
        try:
            answer = self.where(stand_ins.objects[self.root])
        except AttributeError as error:
            if type(error.obj) is not _Marker:
                raise
            fact = f"takes `.{error.name}` of a leaf, but is called on a stand-in without values"
            raise self._refusal(fact) from None
        except TypeError as error:
            # Python's own say the class, JAX's may print the object.
            if not any(text in str(error) for text in (_Marker.__name__, "<leaf ")):
                raise
            raise self._refusal("computes with a leaf, but is called on a stand-in without values") from None

        def is_entry(obj: Any) -> bool:
            return obj is None or obj in stand_ins.numbers

        parts, treedef = jtu.tree_flatten(answer, is_leaf=is_entry)
        entries: list[int | None] = []
        for part in parts:
            if not is_entry(part):
                raise self._refusal(f"returned a `{name_of_class(part)}` that is not part of the tree it was given")
            entries.append(stand_ins.numbers.get(part))
        return _AnswerOnStandIns(entries, is_entry(answer), treedef)

    def with_every_none_named(
        self, answer: _AnswerOnStandIns, stand_ins: _StandIns, none_fix: NoneFix | None
    ) -> _AnswerOnStandIns:
        """Asks again with a marker for each `None`, to learn which of them are meant.

        Raises:
            SharingMismatchError: if the new answer is not the first one with a `None` of the tree for each `None`.
        """
        nones = [number for number in self.tree.below(self.root).first_paths if self._is_none(number)]
        if not nones:
            raise self._refusal("returned `None`, which is not part of the tree it was given")
        try:
            named = self.answer_on(stand_ins)
        except Exception as error:  # noqa: BLE001 -- whatever a user's function says of a stand-in for a `None`
            raise self._unclear_none(nones, none_fix) from error
        if len(named.entries) == len(answer.entries) and None in named.entries:
            raise self._refusal("returned a `None` that is not part of the tree it was given")
        if len(named.entries) != len(answer.entries) or not all(
            before == number or (before is None and number is not None and self._is_none(number))
            for before, number in zip(answer.entries, named.entries, strict=True)
        ):
            raise self._unclear_none(nones, none_fix)
        return named

    def require_same_places(self, answer: _AnswerOnStandIns, records: list[int], numbers: IdentityDict[int]) -> None:
        """Asks the tree itself.

        Args:
            answer: what was returned for stand-ins.
            records: the records that it names.
            numbers: object of the tree → a record that it is.

        Raises:
            SharingMismatchError: if it returns other objects than those at the places that it named.
        """
        returned = self.where(self.tree.objects[self.root])
        try:
            entries = answer.treedef.flatten_up_to(returned)
        except (TypeError, ValueError, KeyError):
            raise self._depends_on_leaves(records, None) from None
        for obj, number in zip(entries, records, strict=True):
            if not self._is_at(obj, number, numbers):
                raise self._depends_on_leaves(records, number)

    def _is_none(self, number: int) -> bool:
        op = self.tree.records[number][0]
        return type(op) is Node and op.type.cls is type(None)

    def _is_at(self, obj: Any, number: int, numbers: IdentityDict[int]) -> bool:
        """Whether an object is what a record stands for."""
        pairs = [(obj, number)]
        while pairs:
            obj, number = pairs.pop()
            if obj is self.tree.objects[number]:
                continue
            # Some flatten functions make children anew on each call, such as a dict of a part of the attributes. What
            # was made for another call is no object of the tree, so it is compared by its parts.
            op, children = self.tree.records[number]
            if type(op) is not Node or type(obj) is not op.type.cls or obj in numbers:
                return False
            parts, aux = op.type.take_apart(obj)
            if len(parts) != len(children) or Static(aux) != op.aux:
                return False
            pairs.extend(zip(parts, children, strict=True))
        return True

    def _refusal(self, fact: str) -> SharingMismatchError:
        return SharingMismatchError(
            f"`{self.name}` {fact}.\nReturn nodes or leaves of the tree itself, and do not compute with them:\n"
            f"    {self.name}=lambda m: (m.embed.weight, m.head.weight)"
        )

    def _unclear_none(self, nones: list[int], none_fix: NoneFix | None) -> SharingMismatchError:
        paths = [self.tree.below(self.root).text(number) for number in nones]
        message = (
            f"`{self.name}` returned a `None`, and which one cannot be told: it answers otherwise where each `None` of "
            "the tree is an object of its own.\n"
            f"`None` is one object in all of Python. Name {'the one' if len(paths) == 1 else 'each'} by its path"
        )
        if none_fix is None:
            return SharingMismatchError(f"{message}.", paths)
        return SharingMismatchError(f"{message}, and let it count as a leaf:\n{none_fix(paths[0])}", paths)

    def _depends_on_leaves(self, records: list[int], number: int | None) -> SharingMismatchError:
        below = self.tree.below(self.root)
        if number is None:
            fact = f"{len(records)} nodes where leaves are stand-ins, and something else for the tree itself"
        else:
            place = below.text(number) or "the whole tree"
            fact = f"`{place}` where leaves are stand-ins, and another object for the tree itself"
        return SharingMismatchError(
            f"`{self.name}` must not depend on the leaves of the tree, but it returns {fact}.\n"
            f"`{self.name}` says where nodes are, so it must use just the structure of the tree. What it asks about "
            "leaves, it can ask about those of the model:\n"
            f"    {self.name} = lambda m: [leaf for leaf, value in zip(jax.tree.leaves(m), jax.tree.leaves(model)) "
            "if isinstance(value, jax.Array)]",
            () if number is None else (below.text(number),),
        )


def require_where(where: Any, tree: Any, fix: str) -> None:
    """Raises if `where` is no function of a tree, as when it and the tree were given in the wrong order.

    Args:
        where: what should be the function.
        tree: what should be the tree.
        fix: the call as it should be, as a line of code.

    Raises:
        TypeError: with the fix.
    """
    # A module may be both, callable and a tree; a function is no tree.
    if callable(where) and not (node_type_of(where) is not None and node_type_of(tree) is None and callable(tree)):
        return
    raise TypeError(
        f"`where` is a function that takes the tree and returns nodes of it, not {shown(where)}, and the tree is "
        f"{shown(tree)}. Give each in its place:\n{fix}"
    )
