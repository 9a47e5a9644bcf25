"""`explain`: what a wrapped function does with each leaf of its arguments, and why it was traced the last time.

path       kind    value       tied to    handled as
net.embed  traced  float32[2]             donated
net.head   traced  float32[2]  net.embed  donated
net.scale  static  2.0
traced 0 times

A *record* is the number of an object in a flat DAG: the flattened arguments of a call. A *view* is a node for a value
that is computed from other leaves of the tree, such as a transposed weight.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import tree_util as jtu

from ...core._comparison import short_text
from ...core._printing import shown
from ...core._sharing import Mismatch, lost_ties, pairs
from ...core._static_values import Static, distinguishing_text
from ...core._structure import LEAF, FlatDag, Node
from ...ties._list_ties import can_be_tied, text_of_view
from ...ties._policy_and_context import current_policy
from .._function_and_options import TransformedModule
from .._function_transform import FunctionTransform
from .._leaf_labels import Outcomes, Treatment
from ._retracing import Trace


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """One row of `explain`: a leaf at one path, or a tied module or container at a path other than its first.

    Attributes:
        path: the path, beginning with the name of the argument.
        kind: `"traced"` or `"static"` for a leaf, `"module"` or `"container"` for a tied node, `"view"` for a view.
            Leaves of a tied module have rows at its first path only. An array below a view has a row there only if it
            has no other path.
        value: dtype and shape of an array, class of a module or container. For a view, its function and the paths of
            the arrays. Otherwise the value itself.
        tied_to: the first path of the object. Empty if this row is at the first path.
        treatment: the transform's treatment of a leaf (`"donated"`, `"differentiated"`, `"in_axes 0"`). Empty if the
            transform treats the leaf in no special way.
    """

    path: str
    kind: str
    value: str
    tied_to: str
    treatment: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The answer of `explain`. `str` makes a table of it.

    Attributes:
        leaves: the rows: one for each path of each leaf, and one for each further path of a tied module or container.
            The leaves of a tied module have rows at its first path only.
        num_traces: how often the function was traced.
        retraced: sentences about the differences between the last two traces. Empty if there were fewer than two.
    """

    leaves: tuple[LeafReport, ...]
    num_traces: int
    retraced: tuple[str, ...]

    def __str__(self) -> str:
        """Formats the table, with the number of traces and the reasons for the last one below it."""
        header = ("path", "kind", "value", "tied to", "handled as")
        rows = [header, *((row.path, row.kind, row.value, row.tied_to, row.treatment) for row in self.leaves)]
        # Each column is as wide as its widest cell.
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines: list[str] = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        lines.append(f"traced {self.num_traces} times" if self.num_traces != 1 else "traced once")
        if self.retraced:
            lines.append("the last time because")
            lines += [f"  {reason}" for reason in self.retraced]
        return "\n".join(lines)


def explain(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Explains what a wrapped function does with each leaf of its arguments, and why it was traced the last time.

    Args:
        f: a function returned by `preserve_identities` or by one of the ready-made transforms.
        args: arguments of the function. It is not called.
        kwargs: keyword arguments of the function.

    Raises:
        TypeError: if `f` is no such function.
        InconsistentSharingError: if a call with these arguments would raise it.

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
        path       kind    value       tied to    handled as
        net.embed  traced  float32[2]             donated
        net.head   traced  float32[2]  net.embed  donated
        net.scale  static  2.0
        traced 0 times
    """
    if isinstance(f, TransformedModule):
        f = f.wrapper()
    if not isinstance(f, FunctionTransform):
        raise TypeError(
            f"`explain` was given {shown(f)}, which is not wrapped by a transform of sharedtree. Wrap it:\n"
            "    sharedtree.explain(sharedtree.jit(f), model)"
        )
    policy = current_policy(f.policy)
    # Flattens the arguments as a call of `f` would, and groups their leaves by label.
    with f.enter(args, kwargs, policy) as call:
        tree = call.tree
        # Only calls made by the C extension have no grouping.
        assert call.grouping is not None
        treatments = _treatments(tree, call.grouping.treatments(tree))
    # Record → its first path, as text.
    first_texts: dict[int, str] = {}
    rows: list[LeafReport] = []
    # Paths of the views.
    view_texts: set[str] = set()
    is_below_view = False
    # Yields one path for each edge of the DAG. The children of a record are visited once, at its first path, so the
    # leaves of a tied module come once.
    for record, path in tree.edges():
        text, node, obj = jtu.keystr(path), tree.node(record), tree.objects[record]
        # The edges below views come last. So all edges after the first of them are below views.
        is_below_view = is_below_view or (bool(view_texts) and jtu.keystr(path[:-1]) in view_texts)
        if is_below_view and record in first_texts:
            # The row of the view names this path already.
            continue
        first_text = first_texts.setdefault(record, text)
        if node is not None and node.type.is_view:
            view_texts.add(text)
            rows.append(LeafReport(text, "view", text_of_view(tree, record), "", ""))
            continue
        # A leaf has a row for each path. A node has a row only at the further paths of a tie.
        tied_to = first_text if first_text != text else ""
        if node is None:
            kind = "traced" if tree.records[record][0] is LEAF else "static"
            rows.append(LeafReport(text, kind, short_text(obj), tied_to, treatments.get(record, "")))
        elif tied_to and can_be_tied(node):
            kind = "container" if node.type.is_plain else "module"
            rows.append(LeafReport(text, kind, type(obj).__name__, tied_to, ""))
    traces = f.traces
    return Explanation(tuple(rows), traces.count, tuple(_differences(traces.before_last, traces.last)))


def _treatments(tree: FlatDag, treatments: Sequence[Treatment]) -> dict[int, str]:
    """Returns, for each traced leaf, its treatments in words, without negative ones such as "not donated".

    Args:
        tree: the arguments.
        treatments: the treatments of a transform, such as one for the donated arguments and one for the axes.
    """
    descriptions: dict[int, list[str]] = {}
    for treatment in treatments:
        outcomes = Outcomes(tree, treatment)
        # A visit is a record with the labels that lead to it. A record with two labels has two visits.
        for visit in outcomes.visits() if treatment.is_transform_known else ():
            if tree.records[visit.record][0] is LEAF:
                description = outcomes.description(visit)
                if not description.startswith("not ") and description not in descriptions.setdefault(visit.record, []):
                    descriptions[visit.record].append(description)
    return {record: ", ".join(words) for record, words in descriptions.items()}


def _differences(old: Trace | None, new: Trace | None) -> list[str]:
    """Returns a sentence for each difference between the arguments of two traces.

    Args:
        old: the trace before the last one. None if there is none, and then the list is empty.
        new: the last trace. None if there is none.
    """
    if old is None or new is None:
        return []

    def agree(i: int, j: int) -> bool:
        """Returns True for two traced leaves and for two static leaves. `pairs` asks if they are not alike nodes."""
        old_op, new_op = old.arguments.records[i][0], new.arguments.records[j][0]
        return type(old_op) is type(new_op) and type(old_op) is not Node

    # Arguments that only one of the calls has.
    old_names, new_names = old.names, new.names
    all_old, all_new = {*old_names, *old.static}, {*new_names, *new.static}
    reasons = [f"`{name}` was given and is missing" for name in old_names if name not in all_new]
    reasons += [f"`{name}` was missing and is given" for name in new_names if name not in all_old]
    # Nodes, types of leaves, static leaves and auxiliary data. `pairs` walks both DAGs at once. It yields the two
    # records at each path, or a `Mismatch` with a description of each side if no walk below them is possible.
    for pair in pairs(old.arguments, new.arguments, agree) if old_names == new_names else ():
        text = jtu.keystr(pair.path)
        if isinstance(pair, Mismatch):
            reasons.append(f"`{text}` was {pair.left} and is {pair.right}")
            continue
        old_op, new_op = old.arguments.records[pair.left][0], new.arguments.records[pair.right][0]
        if old_op is LEAF:
            was, is_now = old.leaves[pair.left], new.leaves[pair.right]
            reasons += [f"`{text}` was {was} and is {is_now}"] if was != is_now else []
        elif type(old_op) is Static and old_op != new_op:
            was, is_now = (op.peek() if type(op) is Static else op for op in (old_op, new_op))
            reasons.append(f"`{text}` was {distinguishing_text(was, is_now)} and is {distinguishing_text(is_now, was)}")
        elif old_op != new_op and pair.path:
            # Two nodes of one class with different auxiliary data. The root is no object of the user's: it has no path.
            was, is_now = (op.aux.peek() if type(op) is Node else op for op in (old_op, new_op))
            old_data, new_data = distinguishing_text(was, is_now), distinguishing_text(is_now, was)
            reasons.append(f"static data of `{text}` was {old_data} and is {new_data}")
    # Ties: those that the old arguments have and the new ones lack, and the reverse. `lost_ties` returns a `Mismatch`
    # if the nodes of the two trees differ, which is reported above.
    for left, right, are_now in ((old, new, "two objects now"), (new, old, "one object now")):
        # Any two leaves match. Only the sharing counts here.
        lost = lost_ties(left.arguments, right.arguments, lambda *_: True)
        for tie in () if isinstance(lost, Mismatch) else lost:
            if can_be_tied(left.arguments.records[tie.record][0]):
                first_path, second_path = map(jtu.keystr, tie.paths)
                reasons.append(f"`{first_path}` and `{second_path}` are {are_now}")
    # Static arguments.
    for path in {**old.static, **new.static}:
        was, is_now = old.static.get(path, "missing"), new.static.get(path, "missing")
        if was != is_now:
            reasons.append(f"`{path}` was {was} and is {is_now}")
    return reasons or ["the placement of arguments or the configuration of JAX changed, or its caches were cleared"]


# Both classes are printed, pickled and documented under the name of the module `transforms`.
for _type in (Explanation, LeafReport):
    _type.__module__ = __name__.partition(".checks")[0]
