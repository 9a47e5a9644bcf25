"""A module that several trees hold at one path, and that is stacked with itself, as if it were several.

    blocks = [Block(own_1, shared), Block(own_2, shared)]
    st.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)        `shared` twice, with two gradients

Only what makes larger arrays of smaller ones says so. A mean of two models, or a choice between an old version of a
model and a new one, holds a module that both share once, as each of them does. Arrays and containers that two trees
share count as little as between two arguments of a function: they alias by accident.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import tree_util as jtu

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._errors import definition_of_caller, report_untied
from ..core._printing import listed
from ..core._structure import FlatDag, Path
from ..ties._policy_and_context import current_policy, walk_alone


class _Shared(NamedTuple):
    """A module at one path of several trees.

    Attributes:
        path: in each of the trees.
        trees: the positions of these.
        kind: the name of its class.
    """

    path: Path
    trees: list[int]
    kind: str


def report_stacked_modules(trees: Sequence[Any], leaves: Sequence[Any], new: Sequence[Any]) -> None:
    """Warns if leaves of a module that several trees share have been stacked.

    Args:
        trees: the operands of `map`.
        leaves: of the first tree.
        new: what has been made of these.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.

    Cost: one look at each pair of leaves; a walk over all trees if one has grown.
    """
    policy = current_policy()
    grown = [leaf for leaf, made in zip(leaves, new, strict=True) if _has_grown(leaf, made)]
    if not grown or policy.on_untie == "ignore":
        return
    found = _shared_modules(trees, grown)
    if not found:
        return
    first = found[0]
    names = ["tree" if i == 0 else f"rest[{i - 1}]" for i in first.trees]
    path = jtu.keystr(first.path)
    places = [name + path for name in names]
    which = listed(places) if len(places) < 4 else f"{listed(places[:2])} (and {len(places) - 2} more)"
    others = f"; {len(found) - 1} more modules, too" if len(found) > 1 else ""
    lines = [
        f"{which} are one `{first.kind}`, which `map` has stacked with itself{others}. So it has become several, "
        "with a gradient and updates for each."
    ]
    if path:
        lines += [
            "Take it out before, and keep it beside the result:",
            f"    tree, *rest = [sharedtree.tree.at(lambda m: m{path}, each, None) for each in (tree, *rest)]",
        ]
    lines += ["If they are meant to be several, say so before:", "    tree, *rest = sharedtree.untie((tree, *rest))"]
    what, *fixes = lines
    report_untied(policy.on_untie, definition_of_caller(), what, "\n".join(fixes), places, count=len(found))


def _has_grown(leaf: Any, made: Any) -> bool:
    """Whether an array has more elements than the one that it was made of."""
    before, after = getattr(leaf, "shape", None), getattr(made, "shape", None)
    return before is not None and after is not None and np.prod(after) > np.prod(before)


def _shared_modules(trees: Sequence[Any], grown: Sequence[Any]) -> list[_Shared]:
    """The largest modules that are at one path of several trees and hold a leaf that has grown."""
    walked = [walk_alone(tree) for tree in trees]
    grown_leaves = IdentitySet(grown)
    numbers = {number for number, leaf in walked[0].leaves.items() if leaf in grown_leaves}
    modules_of = [_modules_by_path(tree) for tree in walked]
    first = walked[0]
    found: list[_Shared] = []
    # What is around a module comes before it.
    for number, path in first.first_paths.items():
        if path not in modules_of[0] or any(path[: len(other.path)] == other.path for other in found):
            continue
        holders: IdentityDict[list[int]] = IdentityDict()
        for i, modules in enumerate(modules_of):
            if path in modules:
                holders.setdefault(modules[path], []).append(i)
        several = [positions for _, positions in holders.items() if len(positions) > 1]
        if several and not numbers.isdisjoint(first.below(number).reached):
            found.append(_Shared(path, several[0], type(first.objects[number]).__name__))
    return found


def _modules_by_path(tree: FlatDag) -> dict[Path, Any]:
    """Each module of a tree by its first path."""
    found: dict[Path, Any] = {}
    for number, path in tree.first_paths.items():
        node = tree.node(number)
        if node is not None and not node.type.is_plain:
            found[path] = tree.objects[number]
    return found
