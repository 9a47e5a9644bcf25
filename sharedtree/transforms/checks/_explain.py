"""`explain`: what a wrapped function does with each leaf of its arguments, and why it was traced the last time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import tree_util as jtu

from ...core._comparison import described
from ...core._flat_dags import FlatDag
from ...core._sharing import Mismatch, lost_ties, pairs
from ...core._static_values import Static, shown_beside
from ...core._structure import LEAF, Node
from ...ties._list_ties import can_be_tied
from ...ties._policy_and_context import current_policy
from .._function_and_options import TransformedModule
from .._function_transform import FunctionTransform
from .._leaf_labels import Outcomes, Treatment
from ._retracing import Trace


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """What happens to the leaf at one path, or to a shared module or container at a later one.

    Attributes:
        path: where it is, beginning with the name of the argument.
        kind: `"traced"` or `"static"`; `"module"` or `"container"` if it holds what was reported at its first path.
        value: dtype and shape of an array, the class of a module or container, else the value.
        tied_to: the first path of the object, if this is another one.
        treatment: what the transform does to it (`"donated"`, `"differentiated"`, `"in_axes 0"`), or nothing.
    """

    path: str
    kind: str
    value: str
    tied_to: str
    treatment: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found. Prints as a table.

    Attributes:
        leaves: one entry for each path of each leaf inside modules, tied modules entered once; and one for each later
            path of a tied module or container.
        num_traces: how often the function was traced.
        retraced: what was different when it was traced the last time; empty if it was traced at most once.
    """

    leaves: tuple[LeafReport, ...]
    num_traces: int
    retraced: tuple[str, ...]

    def __str__(self) -> str:
        header = ("path", "", "value", "tied to", "treatment")
        rows = [header, *((r.path, r.kind, r.value, r.tied_to, r.treatment) for r in self.leaves)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.append(f"traced {self.num_traces} times" if self.num_traces != 1 else "traced once")
        if self.retraced:
            lines.append("the last time because")
            lines += [f"  {reason}" for reason in self.retraced]
        return "\n".join(lines)


def explain(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Says what a wrapped function does with each leaf of these arguments, and why it was traced the last time.

    Args:
        f: a function that `preserve_identities` returned, or one of the ready-made transforms.
        args: arguments of the function. It is not called.
        kwargs: keyword arguments of the function.

    Raises:
        TypeError: if `f` is not such a function.
        InconsistentSharingError: if the arguments would raise it in a call.

    Cost: a walk over the arguments.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, sharedtree as st
        >>> class Net(eqx.Module):
        ...     embed: jax.Array
        ...     head: jax.Array
        ...     scale: float
        >>> f = st.jit(lambda net: net.embed * net.scale, donate_argnums=0)
        >>> w = jnp.ones(2)
        >>> print(st.explain(f, Net(w, w, 2.0)))
        path               value       tied to    treatment
        net.embed  traced  float32[2]             donated
        net.head   traced  float32[2]  net.embed  donated
        net.scale  static  2.0
        traced 0 times
    """
    if isinstance(f, TransformedModule):
        f = f.wrapper()
    if not isinstance(f, FunctionTransform):
        raise TypeError(
            "`explain` takes a function that was wrapped by `preserve_identities`:\n"
            "    sharedtree.explain(sharedtree.jit(f), model)"
        )
    policy = current_policy(f.policy)
    with f.enter(args, kwargs, policy) as call:
        tree = call.tree
        treatments = _treatments(tree, f.grouping(policy, call.arguments).treatments(tree))
    first: dict[int, str] = {}
    rows: list[LeafReport] = []
    for number, path in tree.edges():
        text, node, obj = jtu.keystr(path), tree.node(number), tree.objects[number]
        before = first.setdefault(number, text)
        tied_to = before if before != text else ""
        if node is None:
            kind = "traced" if tree.records[number][0] is LEAF else "static"
            rows.append(LeafReport(text, kind, described(obj), tied_to, treatments.get(number, "")))
        elif tied_to and can_be_tied(node):
            kind = "container" if node.type.is_plain else "module"
            rows.append(LeafReport(text, kind, type(obj).__name__, tied_to, ""))
    traces = f.traces
    return Explanation(tuple(rows), traces.count, tuple(_differences(traces.before_last, traces.last)))


def _treatments(tree: FlatDag, treatments: Sequence[Treatment]) -> dict[int, str]:
    """What the transform does to each traced leaf, if it is worth a word."""
    found: dict[int, list[str]] = {}
    for treatment in treatments:
        outcomes = Outcomes(tree, treatment)
        for visit in outcomes.visits() if treatment.is_known else ():
            if tree.records[visit.record][0] is LEAF:
                words = outcomes.description(visit)
                if not words.startswith("not ") and words not in found.setdefault(visit.record, []):
                    found[visit.record].append(words)
    return {number: ", ".join(words) for number, words in found.items()}


def _differences(old: Trace | None, new: Trace | None) -> list[str]:
    """What distinguishes the arguments of two traces."""
    if old is None or new is None:
        return []

    def agree(i: int, j: int) -> bool:
        op, other = old.arguments.records[i][0], new.arguments.records[j][0]
        return type(op) is type(other) and type(op) is not Node

    given, given_now = old.names, new.names
    reasons = [f"`{name}` was given and is missing" for name in given if name not in {*given_now, *new.static}]
    reasons += [f"`{name}` was missing and is given" for name in given_now if name not in {*given, *old.static}]
    for pair in pairs(old.arguments, new.arguments, agree) if given == given_now else ():
        text = jtu.keystr(pair.path)
        if isinstance(pair, Mismatch):
            reasons.append(f"`{text}` was {pair.left} and is {pair.right}")
            continue
        op, other = old.arguments.records[pair.left][0], new.arguments.records[pair.right][0]
        if op is LEAF:
            was, is_now = old.leaves[pair.left], new.leaves[pair.right]
            reasons += [f"`{text}` was {was} and is {is_now}"] if was != is_now else []
        elif type(op) is Static and op != other:
            was, is_now = (each.peek() if type(each) is Static else each for each in (op, other))
            reasons.append(f"`{text}` was {shown_beside(was, is_now)} and is {shown_beside(is_now, was)}")
        elif op != other and pair.path:
            was, is_now = (each.aux.peek() if type(each) is Node else each for each in (op, other))
            old_data, new_data = shown_beside(was, is_now), shown_beside(is_now, was)
            reasons.append(f"static data of `{text}` was {old_data} and is {new_data}")
    for left, right, what in ((old, new, "two objects now"), (new, old, "one object now")):
        lost = lost_ties(left.arguments, right.arguments, lambda *_: True)
        for tie in () if isinstance(lost, Mismatch) else lost:
            if can_be_tied(left.arguments.records[tie.record][0]):
                one, two = map(jtu.keystr, tie.paths)
                reasons.append(f"`{one}` and `{two}` are {what}")
    for path in {**old.static, **new.static}:
        was, is_now = old.static.get(path, "missing"), new.static.get(path, "missing")
        if was != is_now:
            reasons.append(f"`{path}` was {was} and is {is_now}")
    return reasons or ["the placement of arguments or the configuration of JAX changed, or its caches were cleared"]


for _type in (Explanation, LeafReport):
    _type.__module__ = __name__.partition(".checks")[0]  # under which they are printed, pickled and documented
