"""Function transformers of which nothing is known but that: what they do with arguments and results is theirs.

They get their arguments as they stand: the plain containers, and in them a hand for each outermost module, of which the
first holds what is shared. They may hand back what the function returned, something like the arguments, or both, in any
nesting; so the hands of the arguments are told by their class.

    T(f)([Net(w), Net(w)], x)     T gets     f' and ([Operand([w]), Operand([])], x)

What they do to each argument is hidden, unless they were registered as treating all alike.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ..core._by_identity import IdentityDict
from ..core._call_arguments import Arguments, LeafPath
from ..core._distinct_leaves import distinct
from ..core._errors import SharingMismatchError
from ..core._node_types import is_module, node_type_of
from ..core._pack_and_unpack import Rules, Tags, build, pack, walked
from ..core._prefix_trees import Branch
from ..core._static_values import Static
from ..core._structure import LEAF, Node, Structure, intern
from ..core._trees_taken_apart import Walked, with_paths
from ..ties._leaf_notes import are_tied_values_known, hand_on
from ..ties._policy_and_context import Policy
from ._argument_names import Names
from ._caller_side import Call, Plan
from ._dealing_into_hands import Dealt, dealt, with_notes
from ._function_side import Inside, Received
from ._function_transform import FunctionTransform
from ._hands import Deal, Hand
from ._in_place import Changes, conventions, rules_for_state
from ._leaf_labels import Treatment
from ._pass_through import is_object_outside
from .checks._tied_values import report_tied_values


class Operand(Hand):
    """A hand of the arguments, of a transform that may hand back something like it."""

    __slots__ = ()


jtu.register_pytree_with_keys(
    Operand,
    lambda hand: (with_paths(hand.leaves, hand.paths), hand.deal),
    lambda deal, leaves: Operand(tuple(leaves), deal),
    lambda hand: (hand.leaves, hand.deal),
)


class Spread(NamedTuple):
    """A tree with hands in place of its outermost objects, and where each of them was."""

    tree: Any
    found: list[tuple[Any, Hand]]


def spread(tree: Any, tags: Tags, rules: Rules, make: type[Hand] = Hand) -> Spread:
    """Takes the outermost objects of a tree apart, in one numbering, and leaves the rest as it stands."""

    def is_object(obj: Any) -> bool:
        return is_object_outside(obj, containers=rules.containers)

    leaves, treedef = jtu.tree_flatten_with_path(tree, is_leaf=is_object)
    found: list[tuple[Any, Hand]] = []
    items: list[Any] = []
    for path, leaf in leaves:
        item = leaf
        if is_object(leaf):
            own, structure = pack(leaf, tags, rules)
            item = make(own, Deal(structure))
            found.append((path, item))
        items.append(item)
    return Spread(treedef.unflatten(items), found)


def _is_hand(item: Any) -> bool:
    return isinstance(item, Hand)


def _in_one(hands: Sequence[tuple[str, Structure]], objects: Any) -> Walked:
    """Hands of one numbering as one tree, below a node from which paths begin with what they are called."""
    whole = node_type_of(())
    assert whole is not None
    records = [record for _, structure in hands for record in structure.records]
    roots = tuple([structure.root for _, structure in hands])
    top = Node(whole, Static(None), tuple([LeafPath(text) for text, _ in hands]))
    return Walked([*records, (top, roots)], len(records), [*objects, None])


class OpaqueTransform(FunctionTransform):
    """A transform that treats all arguments alike, and of which nothing else is known."""

    def check_options(self) -> None:
        """Refuses options that reach inside a module: how they are to be translated is not known."""
        for name, option in self.options.items():
            if any(map(is_module, jtu.tree_leaves(option, is_leaf=is_module))):
                raise TypeError(
                    f"`{name}` of `{self.transform_name}` reaches inside a module, and no adapter says how to "
                    "translate it to the leaves that the transform sees. Give one value for the whole module, or say "
                    "which known transform has the same options:\n"
                    "    sharedtree.register_transform(transform, jax.vmap)"
                )
        super().check_options()

    def called(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """As the base, with the arguments as they stand."""
        if are_tied_values_known():  # which are bare: the function does not see that they were one
            arguments = walked(self.arguments(args, kwargs), self.rules(policy))
            report_tied_values(arguments, self.names, self.transform_name, policy)
        spreads, call = self._spread(args, kwargs, policy)
        made = self._made.get(policy)
        if made is None:
            made = self._made.setdefault(policy, self.transform(self.inner(policy), **self.options))
        with call:
            own = dict(zip([*range(len(args)), *sorted(kwargs)], [each.tree for each in spreads], strict=True))
            try:
                result = made(*[own[i] for i in range(len(args))], **{name: own[name] for name in kwargs})
            except Exception as error:
                self.explain(error, lambda: call)
                raise
        operands = {hand.structure: hand.leaves for each in spreads for _, hand in each.found}
        if not policy.in_place:
            return put_together(result, operands)
        changes = Changes(call, self.transform_name)
        made = put_together(result, operands, call.objects.__getitem__, changes.update)
        changes.commit()
        return made[1]

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """As the base, of the outermost objects."""
        return self._spread(args, kwargs, policy)[1]

    def _spread(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> tuple[list[Spread], Call]:
        names = [*self.names.of(len(args)), *sorted(kwargs)]
        tags, rules = Tags(), self.rules(policy)
        values = [*args, *[kwargs[name] for name in sorted(kwargs)]]
        spreads = [spread(value, tags, rules, Operand) for value in values]
        in_order = [(name, path, hand) for name, own in zip(names, spreads, strict=True) for path, hand in own.found]
        tree = _in_one([(n + jtu.keystr(path), hand.structure) for n, path, hand in in_order], tags.objects)
        structure, walked = intern(tuple(tree.records), tree.root), tree.objects
        parted = self.parted(Walked.of(structure, walked), [name for name, _, _ in in_order])
        plan = Plan(structure, None, (), (), (), ())
        if parted is not None:
            plan = Plan(parted.structure, parted.origins, (), (), (), parted.cuts)
        arguments = Arguments(tuple(names[: len(args)]), args, kwargs)
        first = next((hand for own in spreads for _, hand in own.found), None)
        call = Call(arguments, plan, list(tree.leaves.values()), walked)
        if plan.origins is not None:
            _deal_anew([hand for _, _, hand in in_order], call.tree)
        if first is not None:
            first.deal = Deal(first.structure, None, call)
        call.hands = [first] if first is not None else []
        return spreads, call

    def parted(self, tree: Walked, names: Sequence[str]) -> Dealt | None:
        """The outermost objects with ties cut; None if none are.

        Args:
            tree: all of them.
            names: for each the argument that it is in.
        """
        return None

    def call_inside(self, policy: Policy, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """As the base, with what is returned as it stands, too."""
        inside = Inside(self.terms(policy), function)
        received, own, named = _received(args, kwargs, self.names)
        result = inside.call_with(received, own, named)
        tree = inside.walked(((received.arguments, result)) if policy.in_place else result)
        inside.check_walked(tree, is_with_state=bool(policy.in_place))
        rules, tags = inside.forbidding(inside.terms.rules), Tags()
        if not policy.in_place:
            return _with_notes(spread(result, tags, rules).tree)
        rules = rules_for_state(rules, received.tree, lambda _: False)
        around = conventions(received.tree, rules)
        state = [
            Hand(leaves, Deal(structure))
            for number in (rules.updated or IdentityDict[int]()).values()
            for leaves, structure in [
                pack(received.tree.objects[number], tags, rules._replace(convention=around[number]))
            ]
        ]
        return _with_notes((state, spread(result, tags, rules).tree))


def _with_notes(tree: Any) -> Any:
    for hand in filter(_is_hand, jtu.tree_leaves(tree, is_leaf=_is_hand)):
        hand.deal = Deal(with_notes(hand.structure, hand.leaves))
    return tree


def _received(
    args: Sequence[Any], kwargs: dict[str, Any], names: Names
) -> tuple[Received, Sequence[Any], dict[str, Any]]:
    """What was spread, put together, by positions and by keyword."""
    keywords = sorted(kwargs)
    texts = [*names.of(len(args)), *keywords]
    each: list[tuple[str, Hand]] = []
    for text, value in zip(texts, [*args, *[kwargs[name] for name in keywords]], strict=True):
        found, _ = jtu.tree_flatten_with_path(value, is_leaf=_is_hand)
        each += [(text + jtu.keystr(path), hand) for path, hand in found if _is_hand(hand)]
    table: list[Any] = []
    roots: IdentityDict[Any] = IdentityDict()
    in_order: list[tuple[str, Structure]] = []
    for group in _groups([hand for _, hand in each]):
        start = len(table)
        own: list[Any] = []
        for hand in sorted(group, key=lambda hand: hand.structure.base):
            build(hand.structure, hand.leaves, own)
        table += own
        for hand in group:
            roots[hand] = own[hand.structure.root]
        if start == 0:
            in_order = [(text, hand.structure) for text, hand in each if any(hand is one for one in group)]
    in_order.sort(key=lambda item: item[1].base)
    is_whole = sum(len(structure.records) for _, structure in in_order) == len(table)
    tree = _in_one(in_order, table) if is_whole else Walked((), 0)
    call = next((hand.deal.call for _, hand in each if hand.deal.call is not None), None)

    def entered(tree: Any) -> Any:
        return jtu.tree_map(lambda item: roots[item] if _is_hand(item) else item, tree, is_leaf=_is_hand)

    own_args, own_kwargs = [entered(arg) for arg in args], {name: entered(kwargs[name]) for name in kwargs}
    arguments = Arguments(names.of(len(args)), own_args, own_kwargs)
    return Received(tree, arguments, call if is_whole else None), own_args, own_kwargs


def put_together(
    result: Any,
    operands: dict[Structure, Sequence[Any]],
    given: Callable[[int], Any] | None = None,
    update: Callable[[int, Any], Any] | None = None,
) -> Any:
    """Puts what a transform returned together, at every depth.

    Args:
        result: what it returned.
        operands: the structures of the arguments' hands, in the order in which they were numbered, and their leaves.
        given: (number) → the caller's object, for what the function returned.
        update: likewise.

    Raises:
        SharingMismatchError: if the transform kept a part of the function's results, and another part shares an object
            with what it left out.
    """
    items, treedef = jtu.tree_flatten(result, is_leaf=_is_hand)
    places = [i for i, item in enumerate(items) if _is_hand(item)]
    for kind in (Operand, Hand):
        own = [items[i] for i in places if type(items[i]) is kind]
        made: IdentityDict[Any] = IdentityDict()
        for group in _groups(own):
            leaves_of = {hand.structure: hand.leaves for hand in group}
            each = list(operands) if kind is Operand else sorted(leaves_of, key=lambda s: s.base)
            rest = iter(distinct([_inside(leaf, operands) for s in each for leaf in leaves_of.get(s, ())]))
            table: list[Any] = []
            for structure in each:
                _require_no_gap(structure, len(table))
                table.extend([None] * (structure.base - len(table)))
                missing = structure not in leaves_of
                leaves = [None if missing else next(rest) for _ in range(structure.num_leaves)]
                if kind is Operand and not missing:
                    hand_on(operands[structure], leaves)
                build(structure, leaves, table, given, update)
            for hand in group:
                made[hand] = table[hand.structure.root]
        for i in places:
            if type(items[i]) is kind:
                items[i] = made[items[i]]
    return treedef.unflatten(items)


def _inside(leaf: Any, operands: dict[Structure, Sequence[Any]]) -> Any:
    """A leaf, which may be a tree with hands of its own."""
    return leaf if node_type_of(leaf) is None else put_together(leaf, operands)


def _groups(hands: Sequence[Hand]) -> Iterator[list[Hand]]:
    """Cuts hands into runs that were packed in one numbering: in one, no two begin to count at one number."""
    group: list[Hand] = []
    starts: set[int] = set()
    for hand in hands:
        start = hand.structure.base
        if hand.structure.records and start in starts:
            yield group
            group, starts = [], set()
        if hand.structure.records:
            starts.add(start)
        group.append(hand)
    if group:
        yield group


def _require_no_gap(structure: Structure, start: int) -> None:
    """Raises if a structure refers to records before it that were not built."""
    if start == structure.base:
        return
    numbers = [child for _, children in structure.records for child in children if child < structure.base]
    if structure.root < structure.base or any(number >= start for number in numbers):
        raise SharingMismatchError(
            "The transform returned a part of what the function returned, and an object in it is shared with a part "
            "that was left out. Let the function return what belongs together as one value:\n"
            "    return sharedtree.Dag((model, shared))"
        )


class UnregisteredTransform(OpaqueTransform):
    """A transform that nothing is known about: what it does to each argument is hidden, so none may be tied to another.

    Ties inside one argument are kept, those of arrays between arguments are cut. A vmap with `in_axes=(0, None)` hidden
    in a lambda would otherwise map one occurrence of a module and not the other, and silently compute something else.
    """

    writes = False

    def called(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """As the base; refuses mutation, whose results would have no place."""
        if policy.in_place:
            raise ValueError(
                f"`in_place=True` adds to what a function returns, which `{self.transform_name}` may not "
                "stand: it is not registered. Say that it is a plain function transformer:\n"
                "    sharedtree.register_transform(transform)"
            )
        return super().called(args, kwargs, policy)

    def parted(self, tree: Walked, names: Sequence[str]) -> Dealt | None:
        """As the base: each argument might be treated in its own way.

        Raises:
            InconsistentSharingError: if one module is in several.
        """
        treatment = Treatment(
            "arguments",
            Branch(tuple(names)),
            lambda label: isinstance(label, str),
            describe=lambda name: f"in `{name}`, whose treatment is not known",
            is_known=False,
            advice=lambda _: (
                "The transform is not registered, so it may treat these arguments differently without "
                "a way to tell. If it treats all arguments alike, say so, once:\n"
                "    sharedtree.register_transform(transform)\n"
                "or, if it is some other transform with options of its own:\n"
                "    sharedtree.register_transform(transform, jax.vmap)\n"
            ),
        )
        return dealt(tree, tree.structure, [treatment], self.transform_name)


def _deal_anew(hands: Sequence[Hand], tree: Walked) -> None:
    """Gives hands the structures that they have in a tree numbered anew, each what those before it have not."""
    base = 0
    for hand, root in zip(hands, tree.records[tree.root][1], strict=True):
        stop = max(base, root + 1)
        own = tuple(tree.records[base:stop])
        hand.leaves = [tree.objects[n] for n, (op, _) in enumerate(own, base) if op is LEAF]
        hand.deal = Deal(intern(own, root, base))
        base = stop
