"""One call, on the caller's side: all arguments are one graph, which is taken apart once and dealt in hands.

    f(Net(w, b), x)    walked    Arguments(Net(0, 1), 2)    leaves w b x
                       dealt     one hand [w, b, x], or one for each label
                       results   gathered from the hands in which they come, and put together

How a structure is dealt depends on what the transform does, on the structure, and on what is asked of each leaf (its
rank, whether it is inexact). So a *plan* is made once for these, and kept with the structure.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..core._call_arguments import Arguments
from ..core._distinct_leaves import distinct
from ..core._jax_internals import current_trace, with_enclosing
from ..core._pack_and_unpack import Rules, Tags, build, pack
from ..core._structure import Structure
from ..core._trees_taken_apart import Walked
from ..ties._leaf_notes import note, note_tied_values
from ._dealing_into_hands import Cut, Dealt, dealt
from ._hands import Deal, Hand, gathered
from ._leaf_labels import Treatment, distinct_labels
from ._meet_of_trees import Lowering

V = TypeVar("V")

MOST_PLANS = 64
"""That are kept with one structure. Others are made again; what JAX compares of them is equal."""


class Plan(NamedTuple):
    """How the leaves of a structure are dealt.

    Attributes:
        structure: what is put together from the hands: with the ties that are not cut.
        origins: for each of its records, that of the structure that was walked; None if they are the same.
        labels: what the transform does with each hand: one label for each treatment.
        deals: of each hand, which leaves it has.
        sources: of each hand, where these are among the leaves that were walked; None for all, in order.
        cuts: the ties that were cut.
    """

    structure: Structure
    origins: Sequence[int] | None
    labels: tuple[tuple[Any, ...], ...]
    deals: tuple[Deal, ...]
    sources: tuple[tuple[int, ...] | None, ...]
    cuts: Sequence[Cut]


class Dealing(NamedTuple):
    """What a transform does with arguments, as far as a plan depends on it.

    Attributes:
        title: what the transform is called in errors.
        treatments: (the arguments as walked) → what it does to them.
        key: what `treatments` depends on beside the structure; None if it is not to be remembered.
        asks: (the leaves) → what of them they depend on, if on anything; None if it is not to be remembered either.
        is_of_form: whether all else is the same for calls with as many arguments and with the same keywords.
        hands: the labels of the hands that there are in any case, in order; others come after them.
    """

    title: str
    treatments: Callable[[Walked], Sequence[Treatment]]
    key: Any = None
    asks: Callable[[Sequence[Any]], Any] | None = None
    hands: Sequence[tuple[Any, ...]] = ()
    is_of_form: bool = True


AS_ONE: Sequence[tuple[Any, ...]] = ((),)
"""The labels of the hands of a transform that treats all leaves alike."""


class Call:
    """A call that is under way.

    Args:
        arguments: as they were given.
        plan: how they were dealt.
        leaves: those that were walked.
        walked: everything that was, by the numbers before the cut.
        trace: the one that was active when the call began.

    Attributes:
        tree: the arguments, with the objects of the caller, by the numbers of what is put together inside.
        hands: what the transform is given.
        leaving: the labels of the hands of its result, where only the function's result tells them.
        told: what a trace has told of the arguments, for the adapter.
    """

    __slots__ = ("arguments", "hands", "leaves", "leaving", "plan", "told", "trace", "tree", "walked")

    def __init__(
        self, arguments: Arguments, plan: Plan, leaves: Sequence[Any], walked: Sequence[Any], trace: Any = None
    ) -> None:
        self.arguments = arguments
        self.walked = walked
        objects = walked if plan.origins is None else [walked[old] for old in plan.origins]
        self.tree = Walked.of(plan.structure, objects)
        self.plan = plan
        self.leaves = leaves
        self.leaving: list[Any] = []
        self.told: Any = None
        self.trace = current_trace() if trace is None else trace
        self.hands: list[Hand] = []

    def deal(self) -> "Call":
        """Deals the leaves in hands, of which the first knows of the call."""
        leaves = self.leaves
        self.hands = [
            Hand(list(leaves) if places is None else [leaves[place] for place in places], deal)
            for deal, places in zip(self.plan.deals, self.plan.sources, strict=True)
        ]
        for first in self.hands[:1]:
            first.deal = Deal(first.deal.structure, first.deal.numbers, self)
        return self

    @property
    def objects(self) -> Any:
        """What the records stand for."""
        return self.tree.objects

    def leaves_labelled(self, label: Any) -> set[int]:
        """The numbers of the leaves of which the first treatment makes this."""
        structure, found = self.plan.structure, set[int]()
        for labels, deal in zip(self.plan.labels, self.plan.deals, strict=True):
            if labels and labels[0] == label:
                places = range(structure.num_leaves) if deal.numbers is None else deal.numbers
                found.update([structure.leaf_numbers[place] for place in places])
        return found

    @property
    def cuts(self) -> list[Cut]:
        """The ties that were cut, with the objects of the caller."""
        return [cut.in_call(self.walked) for cut in self.plan.cuts]

    @property
    def statics(self) -> tuple[Any, ...]:
        """The static arguments, which follow the hands."""
        return self.arguments.statics

    @property
    def outer(self) -> Sequence[Any]:
        """The traces that were active when the call began, innermost first."""
        return with_enclosing(self.trace)

    def end(self) -> None:
        """What JAX keeps of the hands must keep none of the arguments alive."""
        for first in self.hands[:1]:
            first.deal.call = None

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def enter(arguments: Arguments, rules: Rules, dealing: Dealing) -> Call:
    """Takes arguments apart and deals them.

    Args:
        arguments: of the call.
        rules: of the policy.
        dealing: what the transform does with them.

    Raises:
        InconsistentSharingError: if a module that holds traced leaves would be treated in two ways.
        CycleError: if an object contains itself.
        SharingMismatchError: where an option does not fit the arguments.
    """
    tags = Tags()
    leaves, structure = pack(arguments, tags, rules)
    plan = plan_for(Walked.of(structure, tags.objects), structure, leaves, dealing)
    return Call(arguments, plan, leaves, tags.objects).deal()


def lowered(call: Call, how: Lowering, dealing: Dealing) -> Call:
    """The same call with other ties, and with static numbers traced.

    Args:
        call: as it was.
        how: what is to be packed instead.
        dealing: as before.
    """
    structure = how.structure(call.tree)
    tree = Walked.of(structure, [call.objects[old] for old in how.origins])
    leaves = list(tree.leaves.values())
    plan = plan_for(tree, structure, leaves, dealing)
    return Call(call.arguments, plan, leaves, tree.objects).deal()


def plan_for(tree: Walked, structure: Structure, leaves: Sequence[Any], dealing: Dealing) -> Plan:
    """How these leaves are dealt."""
    key = dealing.key
    if key is not None and dealing.asks is not None:
        answers = dealing.asks(leaves)
        key = None if answers is None else (key, answers)
    plan = None if key is None else structure.plans.get(key)
    if plan is None:
        plan = _new_plan(tree, structure, dealing)
        if key is not None:
            plan = keep(structure, key, plan)
    return plan


def keep(structure: Structure, key: Any, value: V) -> V:
    """Keeps something with a structure; of threads that do so at once, one wins."""
    value = structure.plans.setdefault(key, value)
    for old in list(structure.plans)[:-MOST_PLANS]:
        structure.plans.pop(old, None)
    return value


def call_of(known: Any) -> Any:
    """The call that a hand knows of: if it is done in C, made of what there is of it."""
    return Call(*known) if type(known) is tuple else known


def _new_plan(tree: Walked, structure: Structure, dealing: Dealing) -> Plan:
    treatments = dealing.treatments(tree)
    if not treatments:
        return Plan(structure, None, tuple(AS_ONE), (Deal(structure),), (None,), ())
    found = dealt(tree, structure, treatments, dealing.title)
    return _plan_of(found, tree, dealing.hands, len(treatments))


def _plan_of(found: Dealt, tree: Walked, hands: Sequence[tuple[Any, ...]], num_treatments: int) -> Plan:
    place = {number: i for i, number in enumerate(tree.leaf_numbers)}
    origins = range(len(tree.records)) if found.origins is None else found.origins
    sources = [place[origins[number]] for number in found.structure.leaf_numbers]
    labels = distinct_labels([*hands, *found.labels]) or [(None,) * num_treatments]
    if len(labels) <= 1 and found.origins is None:
        return Plan(found.structure, None, tuple(labels), (Deal(found.structure),), (None,), found.cuts)
    numbers = [tuple([i for i, own in enumerate(found.labels) if own == label]) for label in labels]
    return Plan(
        found.structure,
        found.origins,
        tuple(labels),
        tuple([Deal(found.structure, own) for own in numbers]),
        tuple([tuple([sources[i] for i in own]) for own in numbers]),
        found.cuts,
    )


def leave(
    hands: Sequence[Hand],
    given: Any = None,
    update: Callable[[int, Any], Any] | None = None,
) -> Any:
    """What the hands of one result are put together to: new nodes, but for those that are the caller's own.

    Args:
        hands: all of one tree.
        given: (number) → the caller's object.
        update: (number, new content) → the caller's object that gets it.
    """
    structure, leaves = hands[0].deal.structure, distinct(gathered(hands))
    table: list[Any] = []
    build(structure, leaves, table, given, update)
    if structure.is_noted:
        note(leaves[i] for i in structure.noted)
        note_tied_values(leaves[i] for i in structure.tied_values)
    return table[structure.root]
