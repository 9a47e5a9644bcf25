"""What is lost because an inner transform was not told what the outer one was: changes in place, and ties of values.

    @st.jit(in_place=True)
    def step(model, x):
        gradient = st.grad(loss)(model, x)      # `loss` counts its calls in the model, and the count stays as it was

In a transform that is not in place a function works on copies. Under an outer one that is, what it changes looks as if
it would be written back, and a random stream that does not advance, or statistics that stay as they are, show nowhere.
So it is said, unless the inner transform was told what is meant, or the function returns what it changed.

An array that was made one, by `tie` or by an outer transform under `Policy(containers=True)`, may be met twice where
arrays are values: the function gets two, so the transform says so. It is said when the function is traced, of each
argument and of the result by itself: ties between separate arguments do not count. An array that is met twice in
modules stays one, but not one that is met there and in a dict beside them.
"""

import threading
from collections.abc import Iterator
from typing import Any

from jax import tree_util as jtu

from ...core._by_identity import IdentityDict, IdentitySet
from ...core._call_arguments import Arguments
from ...core._errors import LostChangeWarning
from ...core._pack_and_unpack import Rules, walked
from ...core._printing import listed
from ...core._structure import LEAF, Node, Path
from ...core._trees_taken_apart import Walked
from ...core._warning_source import report_untied, warn_about
from ...ties._leaf_notes import is_one_around, is_tied_value
from ...ties._policy_and_context import Policy
from .._argument_names import Names
from .._function_and_options import in_code


class _Around(threading.local):
    def __init__(self) -> None:
        self.in_place: list[bool] = [False]


_around = _Around()


class traced_under:  # noqa: N801 -- a context manager
    """While a user's function runs: whether what is around it writes changes back.

    Args:
        policy: of the innermost transform.
        is_told: whether that was said of it. Where it was not, what is further out counts.
    """

    def __init__(self, policy: Policy, *, is_told: bool) -> None:
        self._in_place = policy.in_place or (not is_told and _around.in_place[-1])

    def __enter__(self) -> None:
        _around.in_place.append(self._in_place)

    def __exit__(self, *_: object) -> None:
        _around.in_place.pop()


def report_lost_changes(received: Walked, result: Any, names: Names, title: str, rules: Rules, *, writes: bool) -> None:
    """Warns of traced leaves that a function changed and does not return, if an outer transform is in place.

    To be called where the inner transform is not in place, and was not told so.

    Args:
        received: what the function received, as it is now.
        result: what it returned.
        names: where it is defined.
        title: what the inner transform is called.
        rules: of the inner transform.
        writes: whether that could be in place.
    """
    if not _around.in_place[-1]:
        return
    changed = dict(_changed(received, containers=rules.containers))
    if not changed:
        return
    known = IdentitySet(walked(result, rules, "result").objects)
    where = [
        jtu.keystr((*received.first_paths[number], *key))
        for number, leaves in sorted(changed.items(), key=lambda item: item[0])
        if received.objects[number] not in known
        for key, leaf in leaves
        if leaf not in known
    ]
    if not where:
        return
    written, apart = [f"    inner = {in_code(title, f'in_place={value}')}" for value in (True, False)]
    to_write = ["Say that it is to be written back:", written, "or that it is not:"]
    fix = "\n".join([*(to_write if writes else ["Return it, or say that it is not to be written back:"]), apart])
    warn_about(
        names.definition,
        f"What {names.definition} changes in {listed(where)} is lost: `{title}` is not in place, as what is around it "
        f"is. {fix}",
        LostChangeWarning,
    )


def _changed(received: Walked, *, containers: bool) -> Iterator[tuple[int, list[tuple[Path, Any]]]]:
    """The objects with other traced leaves than they were received with, and these leaves with their keys."""
    records, objects = received.records, received.objects
    values = () if containers else received.outside
    for number, ((op, children), obj) in enumerate(zip(records, objects, strict=True)):
        if type(op) is Node and op.type.carries_identity and not (op.type.is_plain and number in values):
            found, _ = op.type.take_apart(obj)
            each = zip(op.keys, found, children, strict=False)
            # A variable is named, and not what is in it.
            of_variable = op.type.convention == "variable"
            new = [
                (() if of_variable else (key,), part)
                for key, part, child in each
                if records[child][0] is LEAF and part is not objects[child]
            ]
            if new:
                yield number, new


def report_tied_values(tree: Walked, names: Names, transform: str, policy: Policy) -> None:
    """Looks for such arrays in arguments or in a result.

    Args:
        tree: the arguments, or the result.
        names: of the function.
        transform: what it is called.
        policy: what to do. If containers carry identity, what is left outside is meant to be a value.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if policy.containers or policy.on_untie == "ignore":
        return
    for path, root in _each(tree):
        met = next(_met_twice(tree.below(root)), None)
        if met is not None:
            _report(tree, root, path, met, names, transform, policy)


def _each(tree: Walked) -> list[tuple[Path, int]]:
    node = tree.node(tree.root)
    if node is None or node.type.cls is not Arguments:
        return [((), tree.root)]
    return [((key,), child) for key, child in zip(node.keys, tree.records[tree.root][1], strict=True)]


def _met_twice(tree: Walked) -> Iterator[list[Path]]:
    """The paths of each array that was tied and is met twice, outside modules at least once."""
    noted = {n for n, leaf in tree.leaves.items() if is_tied_value(leaf) or is_one_around(leaf)}
    if not noted:
        return
    found: IdentityDict[dict[int, Path]] = IdentityDict()
    for number, path in tree.first_paths.items():
        if number in noted:
            found.setdefault(tree.objects[number], {})[number] = path
    for first_paths in found.values():
        if len(first_paths) > 1 and tree.outside.keys() & first_paths.keys():
            yield list(first_paths.values())


def _report(
    tree: Walked, root: int, above: Path, met: list[Path], names: Names, transform: str, policy: Policy
) -> None:
    name = jtu.keystr(above) or "result"
    paths = [name + jtu.keystr(path) for path in met]
    what = (
        f"{listed(paths)} are one array, which `sharedtree.tie` or an outer transform made of several. But outside "
        f"modules arrays are values: under `{transform}` they are {len(paths)}, each with its own gradient and updates."
    )
    lines: list[str] = []
    if met not in list(_met_twice(walked(tree.objects[root], Rules(containers=True, convention="outside")))):
        lines += [
            "Let lists and dicts carry identity, here and under every other transform that sees them:",
            "    policy = sharedtree.Policy(containers=True)",
            f"    inner = {in_code(transform, 'policy=policy')}",
        ]
    lines += [
        "Or hand over one object that holds the tie, which vanilla transforms keep, too:",
        f"    dag = sharedtree.Dag({name})      # `dag.tree` gives it back",
        "Or, if they are meant to be several from here on, say so:",
        f"    {name} = sharedtree.untie({name})",
    ]
    report_untied(policy.on_untie, names.definition, what, "\n".join(lines), paths)
