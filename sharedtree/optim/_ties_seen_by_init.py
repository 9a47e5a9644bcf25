"""The ties that an optimizer has seen, and the ones that its model has lost since.

An optimizer is made for a model by `init`, so it knows what was tied in it, wherever the tie was lost: in an eager
loop, or because an outer `jax.jit` or `equinox.filter_jit`, which sees trees, was put around a step that keeps ties.
From the outside such a step looks right, and every update trains two weights where there was one.
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

_MOST = 16  # sharings that one optimizer remembers; a program has one, or a few in turn


class Wording(NamedTuple):
    """What the messages of an optimizer call the model, and the code that they offer: each a sentence and lines.

    Attributes:
        model: the model, as its user calls it.
        around_modules: what keeps the ties of modules in a step that is traced.
        around_containers: what keeps those of lists and dicts there.
        eagerly: what keeps ties where nothing is traced.
        meant: how to say that the ties are meant to go.
        untied_state: what to do about a state that lacks ties of the model, all in one text.
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
"""Of `sharedtree.optimizer`, whose user has a model, a state and an optimizer."""


class InitialTies:
    """What was tied in the models that `init` of one optimizer has seen. Bounded, and it keeps no array alive.

    Args:
        wording: of what it reports.
    """

    def __init__(self, wording: Wording = OF_OPTIMIZERS) -> None:
        self._wording = wording
        self._seen: tuple[Structure, ...] = ()
        self._reported: tuple[Structure, ...] = ()
        self._lock = Lock()

    def remember(self, model: Any) -> None:
        """The model is one that the optimizer is for.

        Cost: a walk over its nodes.
        """
        shape = _without_values(walk_alone(model))
        with self._lock:
            self._seen = _with(self._seen, shape)

    def check(self, model: Any, state: Any) -> list[LostLeaf]:
        """Reports, once, what is untied in a model that was tied in one of those, or is in the optimizer's state.

        Args:
            model: the parameters, or a gradient.
            state: of the optimizer.

        Returns:
            What the model has lost, reported now, before, or meant; nothing where that was known and nothing is traced.

        Raises:
            UntiedError: under `Policy(on_untie="error")`.

        Cost: a walk over the nodes of both.
        """
        policy = current_policy()
        if policy.on_untie == "ignore":
            return []
        walked = walk_alone(model)
        plain = _without_values(walked)
        is_known = plain in self._reported
        if is_known and not any(isinstance(leaf, Tracer) for leaf in walked.leaves.values()):
            return []
        missing, when = self._missing(plain), "when the optimizer was initialised"
        if not missing:
            missing, when = _tied_in_state(plain, walk_alone(state)), "in the optimizer's state"
        if not missing or is_known:
            return missing
        lost = unsettled(missing, walked.objects)
        if lost:
            self._report(maximal(lost), walked, when, policy)
            note(walked.objects[part] for tie in lost for part in tie.parts)
        # What was meant, or was reported elsewhere, is not said of later models either.
        with self._lock:
            self._reported = _with(self._reported, plain)
        return missing

    def _report(self, losses: Sequence[Lost], walked: FlatDag, when: str, policy: Policy) -> None:
        names = [named(self._wording.model, lost.paths) for lost in losses]
        which = "; ".join(map(listed, names[:3])) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
        are = "two objects" if len(names) == 1 and len(names[0]) == 2 else "several objects"
        what = f"{which} are {are} in the parameters of an update, but were one {when}. Each is updated by itself."
        ties = [tie for lost in losses for tie in lost.ties]
        in_containers = all(part in walked.outside for tie in ties for part in tie.parts)
        is_traced = any(isinstance(walked.objects[part], Tracer) for tie in ties for part in tie.parts)
        wording = self._wording
        around = wording.around_containers if in_containers else wording.around_modules
        advice = Advice(None, [around, wording.meant if is_traced else wording.eagerly])
        paths = [path for own in names for path in own]
        report_untied(
            policy.on_untie, definition_of_caller(), what, advice.text, paths, count=len(losses), may_wait=True
        )

    def _missing(self, now: Structure) -> list[LostLeaf]:
        """What is lost if the model's sharing is one that `init` saw minus ties, and is not itself one of these."""
        missing: list[LostLeaf] = []
        if now in self._seen:
            return []
        for before in self._seen:
            lost = _lost(before, now)
            if lost is None or _lost(now, before):
                continue  # another tree, or one with ties of its own
            if not lost:
                return []
            missing = min(missing or lost, lost, key=len)
        return missing


def note_in_state(model: Any, state: Any, missing: Sequence[LostLeaf]) -> None:
    """Notes that the slots of a state have lost their ties because the model has: that need not be said as well.

    Args:
        model: the parameters, or a gradient.
        state: that the update of these has made.
        missing: the ties that the model has lost.
    """
    plain, walked = _without_values(walk_alone(model)), walk_alone(state)
    numbers: dict[Any, int] = {}
    wanted = _trees(plain.records, numbers)[plain.root]
    paths = dict.fromkeys(path for tie in missing for path in tie.paths)
    for number, tree in enumerate(_trees(walked.records, numbers)):
        if tree == wanted and walked.holds_leaf[number]:
            note(walked.objects[at(walked, number, path)] for path in paths)


def _with(shapes: tuple[Structure, ...], shape: Structure) -> tuple[Structure, ...]:
    return (*[other for other in shapes if other is not shape], shape)[-_MOST:]


def _without_values(tree: FlatDag) -> Structure:
    """A structure whose records say what is shared, and hold nothing static, which is of no matter here."""
    records = tuple(
        [
            (Node(op.type, _NOTHING, op.keys) if type(op) is Node else LEAF if op is LEAF else _NOTHING, children)
            for op, children in tree.records
        ]
    )
    return intern(records, tree.root)


_NOTHING = Static(None)


def _lost(left: Rooted, right: Rooted) -> list[LostLeaf] | None:
    # Where one tree has a parameter, a gradient or a masked state may have nothing.
    return lost_leaf_ties(left, right, lambda i, j: not left.records[i][1] and not right.records[j][1])


def _tied_in_state(model: Structure, state: FlatDag) -> list[LostLeaf]:
    """The ties that every tree of the model's shape in a state has, and the model has not."""
    if not model.records[model.root][1]:
        return []  # a bare array
    numbers: dict[Any, int] = {}
    wanted = _trees(model.records, numbers)[model.root]
    found: dict[tuple[Path, Path], LostLeaf] | None = None
    for number, tree in enumerate(_trees(state.records, numbers)):
        if tree == wanted and state.holds_leaf[number]:
            here = {tie.paths: tie for tie in _lost(state.below(number), model) or ()}
            found = here if found is None else {paths: tie for paths, tie in found.items() if paths in here}
    return list((found or {}).values())


def _trees(records: Sequence[Record], numbers: dict[Any, int]) -> list[int]:
    """For each record a number, equal for equal trees of nodes, whatever is at their ends."""
    trees: list[int] = []
    for op, children in records:
        key = (op.type.cls, *(trees[child] for child in children)) if type(op) is Node and children else ()
        trees.append(numbers.setdefault(key, len(numbers)))
    return trees
