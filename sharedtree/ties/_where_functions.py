"""Asks a user's `where` function, such as `lambda m: m.head.weight`, which nodes of a tree it means.

An object may stand at several places of a tree, as every `None`, small number and string does. So the objects that
`where` returns for the tree itself do not say which places are meant. Therefore `where` is called two or three times:

1. on *stand-ins*: a copy of the tree with a marker in the place of each leaf. Each node and each marker in the copy
   stands for one node or leaf of the tree, so the answer is clear. A `None` stays a `None`, so that tests such as
   `x.bias is not None` have the same result as on the tree, and `jax.tree.leaves` leaves it out.
2. if the answer is or holds a `None`, on stand-ins in which each `None`, too, is a marker, to learn its place.
3. on the tree itself, where it must return the objects at the places that the answer on stand-ins named. A `where` that
   looks at leaves, for example with `equinox.is_array`, returns other objects.

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
    """The nodes that a `where` function names.

    Attributes:
        records: numbers of their records, in the order of the answer.
        is_single: True if the function returned one node, not a sequence of nodes.
    """

    records: list[int]
    is_single: bool


class WhereTree:
    """A tree about which `where` functions are asked. The stand-ins are made once for all functions.

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
        """Asks a function which records it means, and returns their numbers.

        Args:
            where: the function.
            name: name of the parameter to which the user passed the function, for errors.
            root: number of the record on whose object the function is called. None for the whole tree.
            none_fix: path of a `None` → the fix for an answer with an unclear `None`. None for an error without a fix.

        Raises:
            SharingMismatchError: if the function returns an object that is not in the tree, computes with a leaf, or
                returns other nodes for the tree than for stand-ins.
        """
        question = _Question(self._tree, self._tree.root if root is None else root, where, name)
        # 1. Call the function on stand-ins.
        answer = question.answer_on(self._stand_ins)
        # 2. If it returned a `None`, call it on stand-ins in which each `None` is a marker.
        if None in answer.entries:
            answer = question.with_every_none_named(answer, self._stand_ins_with_marked_nones, none_fix)
        records = [number for number in answer.entries if number is not None]
        # 3. Call it on the tree itself, to check the answer.
        question.require_same_places(answer, records, self._numbers)
        return Answer(records, answer.is_single)

    @functools.cached_property
    def _stand_ins(self) -> "_StandIns":
        return _stand_ins(self._tree.records, none_as_marker=False)

    @functools.cached_property
    def _stand_ins_with_marked_nones(self) -> "_StandIns":
        return _stand_ins(self._tree.records, none_as_marker=True)

    @functools.cached_property
    def _numbers(self) -> IdentityDict[int]:
        """Object of the tree → number of its record."""
        return IdentityDict((obj, number) for number, obj in enumerate(self._tree.objects))


class _Marker:
    """Stands for a leaf, or for a `None`. It has no attributes of an array, because `where` must not look at values."""

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
    """Stands for an empty tuple: Python has only one, which would not say its place. JAX takes it for a node, too."""

    __slots__ = ()


jtu.register_pytree_node(_EmptyTuple, lambda _: ((), None), lambda *_: _EmptyTuple())


class _StandIns(NamedTuple):
    """Stand-ins for all records of a tree.

    Attributes:
        objects: number of a record → its stand-in. The stand-in of a `None` may be `None` itself.
        numbers: stand-in → number of its record. `None` is no key.
    """

    objects: list[Any]
    numbers: IdentityDict[int]


def _stand_ins(records: Sequence[Record], *, none_as_marker: bool) -> _StandIns:
    """Makes one stand-in for each record. So the stand-in of the root has the ties of the tree.

    Args:
        records: the records of the tree.
        none_as_marker: True to replace each `None` by a marker, False to keep it.
    """
    stand_ins = _StandIns([], IdentityDict())
    for number, (op, children) in enumerate(records):
        assert type(op) not in (Given, Update)
        stand_in: Any = _Marker(number)
        if type(op) is Node and op.type.cls is type(None):
            if not none_as_marker:
                stand_ins.objects.append(None)
                continue
        elif type(op) is Node and op.type.cls is tuple and not children:
            stand_in = _EmptyTuple()
        elif type(op) is Node:
            node = op.type.put_together(op.aux.thaw(), [stand_ins.objects[child] for child in children])
            # A class may have one instance only, or its unflatten function may return a child. Such an object has two
            # places, so the marker stays in the place of the node.
            if node not in stand_ins.numbers and node is not None:
                stand_in = node
        stand_ins.objects.append(stand_in)
        stand_ins.numbers[stand_in] = number
    return stand_ins


class _AnswerOnStandIns(NamedTuple):
    """The answer of a `where` function for stand-ins.

    Attributes:
        entries: number of the record of each stand-in in the answer, and None for each `None`.
        is_single: True if the answer is a single entry, not a container of entries.
        treedef: the JAX treedef of the answer, with the entries as leaves.
    """

    entries: list[int | None]
    is_single: bool
    treedef: Any


class _Question(NamedTuple):
    """One `where` function, to be asked about one tree.

    Attributes:
        tree: the whole tree, with its objects.
        root: number of the record on whose object, or stand-in, the function is called.
        where: the function.
        name: name of the parameter to which the user passed the function, for errors.
    """

    tree: FlatDag
    root: int
    where: Callable[[Any], Any]
    name: str

    def answer_on(self, stand_ins: _StandIns) -> _AnswerOnStandIns:
        """Calls the function on stand-ins, and looks up the records of the stand-ins that it returns.

        Raises:
            SharingMismatchError: if the function computes with a leaf or returns an object that is no stand-in.
        """
        try:
            answer = self.where(stand_ins.objects[self.root])
        except AttributeError as error:
            if type(error.obj) is not _Marker:
                raise
            fact = f"takes `.{error.name}` of a leaf, but must return nodes of the tree as they are"
            raise self._refusal(fact) from None
        except TypeError as error:
            # Errors of Python name the class, those of JAX may print the object.
            if not any(text in str(error) for text in (_Marker.__name__, "<leaf ")):
                raise
            raise self._refusal("computes with a leaf, but must return nodes of the tree as they are") from None

        # The answer is one entry or a container of entries. A node of the tree is one entry, although JAX would take it
        # apart.
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

        Args:
            answer: the answer on stand-ins, with at least one `None`.
            stand_ins: stand-ins with a marker for each `None`.
            none_fix: path of a `None` → the fix for an unclear answer. None for an error without a fix.

        Returns:
            The new answer, which has the number of a record in place of each `None`.

        Raises:
            SharingMismatchError: if the tree has no `None`, or the two answers differ in any other way.
        """
        # Numbers of the records below the root that are `None`.
        nones = [number for number in self.tree.below(self.root).first_paths if self._is_none(number)]
        if not nones:
            raise self._refusal("returned `None`, which is not part of the tree it was given")
        try:
            named = self.answer_on(stand_ins)
        except Exception as error:  # noqa: BLE001 -- a user's function may raise anything on a stand-in for a `None`
            raise self._unclear_none(nones, none_fix) from error
        if len(named.entries) != len(answer.entries):
            raise self._unclear_none(nones, none_fix)
        # A `None` that is still there was made by the function itself.
        if None in named.entries:
            raise self._refusal("returned a `None` that is not part of the tree it was given")
        for number, new_number in zip(answer.entries, named.entries, strict=True):
            is_named_none = number is None and new_number is not None and self._is_none(new_number)
            if number != new_number and not is_named_none:
                raise self._unclear_none(nones, none_fix)
        return named

    def require_same_places(self, answer: _AnswerOnStandIns, records: list[int], numbers: IdentityDict[int]) -> None:
        """Calls the function on the tree itself, and raises unless it returns the objects at the same places.

        Args:
            answer: the answer on stand-ins.
            records: numbers of the records in the answer.
            numbers: object of the tree → number of its record.

        Raises:
            SharingMismatchError: if the function returns other objects than those at the places in the first answer.
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
        """Returns True if a record of the tree is a `None`."""
        op = self.tree.records[number][0]
        return type(op) is Node and op.type.cls is type(None)

    def _is_at(self, obj: Any, number: int, numbers: IdentityDict[int]) -> bool:
        """Returns True if an object is that of a record, or an equal node that a flatten function has made anew.

        Args:
            obj: an object in the result of the function.
            number: number of the record.
            numbers: object of the tree → number of its record.
        """
        pairs = [(obj, number)]
        while pairs:
            obj, number = pairs.pop()
            if obj is self.tree.objects[number]:
                continue
            # Some flatten functions make children anew on each call, such as a dict of some attributes. A child made
            # by another call is no object of the tree, so it is compared by its parts.
            op, children = self.tree.records[number]
            if type(op) is not Node or type(obj) is not op.type.cls or obj in numbers:
                return False
            parts, aux = op.type.take_apart(obj)
            if len(parts) != len(children) or Static(aux) != op.aux:
                return False
            pairs.extend(zip(parts, children, strict=True))
        return True

    def _refusal(self, fact: str) -> SharingMismatchError:
        """Makes the error for a function that returns or does something else than naming nodes.

        Args:
            fact: says what it does, as a predicate, such as "computes with a leaf".
        """
        return SharingMismatchError(
            f"`{self.name}` {fact}.\n"
            f"sharedtree calls `{self.name}` with a placeholder without a value for each leaf. Return modules or "
            "leaves of the tree, and do not compute with them:\n"
            f"    {self.name}=lambda m: (m.embed.weight, m.head.weight)"
        )

    def _unclear_none(self, nones: list[int], none_fix: NoneFix | None) -> SharingMismatchError:
        """Makes the error for an answer with a `None` that may be any of several.

        Args:
            nones: numbers of the records of all `None`s.
            none_fix: path of a `None` → the fix as a line of code.
        """
        paths = [self.tree.below(self.root).text(number) for number in nones]
        message = (
            f"`{self.name}` returned `None`, and it is not clear which one in the tree it means, since `None` is one "
            "object in all of Python.\n"
            f"Name {'it' if len(paths) == 1 else 'each'} by its path"
        )
        if none_fix is None:
            return SharingMismatchError(f"{message}.", paths)
        return SharingMismatchError(f"{message}, and let `None` count as a leaf:\n{none_fix(paths[0])}", paths)

    def _depends_on_leaves(self, records: list[int], number: int | None) -> SharingMismatchError:
        """Makes the error for a function that answers differently for stand-ins and for the tree.

        Args:
            records: numbers of the records in the answer for stand-ins.
            number: the first of them that is another object in the answer for the tree, None if the two answers have
                different shapes.
        """
        subtree = self.tree.below(self.root)
        if number is None:
            fact = f"{len(records)} objects for placeholders in the place of the leaves, and others for the leaves"
        else:
            place = subtree.text(number) or "the whole tree"
            fact = f"`{place}` for placeholders in the place of the leaves, and another object for the leaves"
        return SharingMismatchError(
            f"`{self.name}` must not depend on the leaves of the tree, but it returns {fact}.\n"
            f"sharedtree calls `{self.name}` with placeholders, so it can use the structure of the tree only. If it "
            "needs the values of leaves, let it read them from `model`, beside the leaves of its argument:\n"
            f"    {self.name} = lambda m: [leaf for leaf, value in zip(jax.tree.leaves(m), jax.tree.leaves(model)) if "
            "isinstance(value, jax.Array)]",
            () if number is None else (subtree.text(number),),
        )


def require_where(where: Any, tree: Any, fix: str) -> None:
    """Raises an error if `where` is no function of a tree, as when the two were passed in the wrong order.

    Args:
        where: the argument in the place of the function.
        tree: the argument in the place of the tree.
        fix: a correct call, as a line of code.

    Raises:
        TypeError: with the fix.
    """
    # A module may be callable and a tree, so a callable `where` is refused only if the two look swapped: `where` is a
    # node, and `tree` is a plain function.
    if callable(where) and not (node_type_of(where) is not None and node_type_of(tree) is None and callable(tree)):
        return
    if callable(tree) and node_type_of(tree) is None:
        raise TypeError(
            f"The arguments are in the wrong order: `where` is {shown(where)}, and the tree is a function. Swap them:\n"
            f"{fix}"
        )
    raise TypeError(
        f"`where` must be a function that takes the tree and returns parts of it, but is {shown(where)}:\n{fix}"
    )
