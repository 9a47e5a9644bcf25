"""The ties that the model of an optimizer had at `init`, and a check for those that it has lost since.

`init` gets the model, so the optimizer can remember its ties. A tie can get lost in an eager loop, or because an outer
`jax.jit` or `equinox.filter_jit` encloses a step that keeps ties: such a transform sees trees. From the outside the
step looks right, but every update trains two weights where there was one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.core import Tracer

from ..core._errors import definition_of_caller, report_untied
from ..core._locks import Lock
from ..core._printing import listed
from ..core._sharing import Rooted
from ..core._static_values import Static
from ..core._structure import LEAF, FlatDag, Node, Path, Record, Structure, intern
from ..ties._leaf_notes import note
from ..ties._policy_and_context import Policy, current_policy, walk_alone
from ..ties._ties_that_are_missing import Lost, LostLeaf, at, lost_leaf_ties, maximal, named, unsettled
from ..ties._what_loses_ties import Advice

# Most sharings that one optimizer remembers. A program has one, or a few in turn.
_MOST = 16


class Wording(NamedTuple):
    """Name of the model in an optimizer's messages, and the fixes that they offer: a sentence, and lines of code.

    Attributes:
        model: name of the model.
        around_modules: fix that keeps the ties of modules in a traced step.
        around_containers: fix that keeps the ties of lists and dicts in a traced step.
        eagerly: fix that keeps ties in an eager loop.
        meant: code that declares that the ties are meant to go.
        untied_state: fix for a state without the ties of the model, all in one text.
    """

    model: str
    around_modules: tuple[str, str]
    around_containers: tuple[str, str]
    eagerly: tuple[str, str]
    meant: tuple[str, str]
    untied_state: str


OF_OPTIMIZERS = Wording(
    "model",
    (
        "`jax.jit` and `equinox.filter_jit` around the whole step take a tied model apart; its counterpart does not:",
        "    step = sharedtree.jit(step)",
    ),
    (
        "To transforms, arrays in lists and dicts are values, also in a step under `sharedtree.jit`. Under this "
        "policy, which each transform needs, a tied one is one:",
        "    step = sharedtree.jit(step, policy=sharedtree.Policy(containers=True))",
    ),
    ("In an eager loop, this keeps ties:", "    model = sharedtree.apply_updates(model, updates)"),
    (
        "To say that it is meant, and to begin anew without ties:",
        "    model = sharedtree.untie(model)\n    state = optimizer.init(model)",
    ),
    "Change states with `sharedtree.tree.map`, which keeps ties, or begin anew:\n    state = optimizer.init(model)",
)
"""Messages of `sharedtree.optimizer`, whose user has a model, a state and an optimizer."""


class InitialTies:
    """Sharings of the models with which `init` of one optimizer was called. Bounded in size, and keeps no array alive.

    Args:
        wording: texts for the reports.
    """

    def __init__(self, wording: Wording = OF_OPTIMIZERS) -> None:
        self._wording = wording
        self._seen: tuple[Structure, ...] = ()
        self._reported: tuple[Structure, ...] = ()
        self._lock = Lock()

    def remember(self, model: Any) -> None:
        """Adds the sharing of a model that `init` was called with.

        Cost: a walk over its nodes.
        """
        shape = _without_values(walk_alone(model))
        with self._lock:
            self._seen = _with(self._seen, shape)

    def check(self, model: Any, state: Any) -> list[LostLeaf]:
        """Reports, once, the ties that a model has lost since `init`, or that the optimizer's state has and it has not.

        Args:
            model: the parameters, or a gradient.
            state: state of the optimizer.

        Returns:
            The lost ties, whether they are reported now, were reported before, or are meant to be lost. Empty if this
            sharing was reported before and the model has no tracers.

        Raises:
            UntiedError: under `Policy(on_untie="error")`.

        Cost: a walk over the nodes of both.
        """
        policy = current_policy()
        if policy.on_untie == "ignore":
            return []
        dag = walk_alone(model)
        sharing = _without_values(dag)
        is_reported = sharing in self._reported
        # An eager loop comes here at each step, so a sharing that was reported costs one walk.
        if is_reported and not any(isinstance(leaf, Tracer) for leaf in dag.leaves.values()):
            return []
        missing, when = self._missing(sharing), "when the optimizer was initialised"
        if not missing:
            missing, when = _tied_in_state(sharing, walk_alone(state)), "in the optimizer's state"
        if not missing or is_reported:
            return missing
        lost = unsettled(missing, dag.objects)
        if lost:
            self._report(maximal(lost), dag, when, policy)
            note(dag.objects[part] for tie in lost for part in tie.parts)
        # Losses that are meant, or that were reported elsewhere, are not reported for later models either.
        with self._lock:
            self._reported = _with(self._reported, sharing)
        return missing

    def _report(self, losses: Sequence[Lost], dag: FlatDag, when: str, policy: Policy) -> None:
        """Warns of lost ties, or raises, as the policy says.

        Args:
            losses: the lost ties.
            dag: the model, in which they are lost.
            when: end of the sentence "were one object …".
            policy: the policy.
        """
        names = [named(self._wording.model, lost.paths) for lost in losses]
        text = "; ".join(map(listed, names[:3])) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
        are = "two objects" if len(names) == 1 and len(names[0]) == 2 else "several objects"
        fact = f"{text} are {are} in the parameters of an update, but were one {when}. Each is updated by itself."
        ties = [tie for lost in losses for tie in lost.ties]
        in_containers = all(part in dag.outside for tie in ties for part in tie.parts)
        is_traced = any(isinstance(dag.objects[part], Tracer) for tie in ties for part in tie.parts)
        wording = self._wording
        around = wording.around_containers if in_containers else wording.around_modules
        advice = Advice(None, [around, wording.meant if is_traced else wording.eagerly])
        paths = [path for tie_paths in names for path in tie_paths]
        report_untied(
            policy.on_untie, definition_of_caller(), fact, advice.text, paths, count=len(losses), may_wait=True
        )

    def _missing(self, sharing: Structure) -> list[LostLeaf]:
        """Ties that a model has lost, compared with the closest model that `init` saw.

        Empty if `init` saw a model with this very sharing, or none with the same nodes and at least its ties.
        """
        missing: list[LostLeaf] = []
        if sharing in self._seen:
            return []
        for initial_sharing in self._seen:
            lost = _lost(initial_sharing, sharing)
            # Another tree, or one with ties that the initial one has not.
            if lost is None or _lost(sharing, initial_sharing):
                continue
            if not lost:
                return []
            missing = min(missing or lost, lost, key=len)
        return missing


def note_in_state(model: Any, state: Any, missing: Sequence[LostLeaf]) -> None:
    """Notes the slots of a state that have lost their ties because the model has, so that nothing reports them again.

    Args:
        model: the parameters, or a gradient.
        state: the new state, from the update of these parameters.
        missing: the ties that the model has lost.
    """
    sharing, state_dag = _without_values(walk_alone(model)), walk_alone(state)
    shape_numbers: dict[Any, int] = {}
    model_shape = _shapes(sharing.records, shape_numbers)[sharing.root]
    paths = dict.fromkeys(path for tie in missing for path in tie.paths)
    for record, shape in enumerate(_shapes(state_dag.records, shape_numbers)):
        if shape == model_shape and state_dag.holds_leaf[record]:
            note(state_dag.objects[at(state_dag, record, path)] for path in paths)


def _with(sharings: tuple[Structure, ...], sharing: Structure) -> tuple[Structure, ...]:
    """Moves a sharing to the end, or adds it there, and drops the oldest ones."""
    return (*[old for old in sharings if old is not sharing], sharing)[-_MOST:]


def _without_values(tree: FlatDag) -> Structure:
    """Sharing of a tree: its structure without static values, which are of no matter here."""
    records: list[Record] = []
    for op, children in tree.records:
        if type(op) is Node:
            records.append((Node(op.type, _NO_VALUE, op.keys), children))
        else:
            records.append((LEAF if op is LEAF else _NO_VALUE, children))
    return intern(tuple(records), tree.root)


_NO_VALUE = Static(None)


def _lost(initial: Rooted, current: Rooted) -> list[LostLeaf] | None:
    """Ties of leaves that one tree has and another has not. None if the trees differ in their nodes."""
    # Where one tree has a parameter, a gradient or a masked state may have nothing.
    return lost_leaf_ties(initial, current, lambda i, j: not initial.records[i][1] and not current.records[j][1])


def _tied_in_state(model: Structure, state: FlatDag) -> list[LostLeaf]:
    """Ties that the model has not, but that every tree with the model's shape in a state has."""
    # A bare array has no shape to look for.
    if not model.records[model.root][1]:
        return []
    shape_numbers: dict[Any, int] = {}
    model_shape = _shapes(model.records, shape_numbers)[model.root]
    common_ties: dict[tuple[Path, Path], LostLeaf] | None = None
    for record, shape in enumerate(_shapes(state.records, shape_numbers)):
        if shape == model_shape and state.holds_leaf[record]:
            ties = {tie.paths: tie for tie in _lost(state.below(record), model) or ()}
            if common_ties is None:
                common_ties = ties
            else:
                common_ties = {paths: tie for paths, tie in common_ties.items() if paths in ties}
    return list((common_ties or {}).values())


def _shapes(records: Sequence[Record], shape_numbers: dict[Any, int]) -> list[int]:
    """Returns a number for the shape of each record: equal for equal trees of nodes, whatever their leaves are.

    Args:
        records: the records.
        shape_numbers: class of a node and shapes of its children → number. New shapes are added. Numbers can be
            compared between calls with the same dict.
    """
    shapes: list[int] = []
    for op, children in records:
        key = (op.type.cls, *(shapes[child] for child in children)) if type(op) is Node and children else ()
        shapes.append(shape_numbers.setdefault(key, len(shape_numbers)))
    return shapes
