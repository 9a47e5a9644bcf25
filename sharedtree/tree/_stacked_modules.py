"""Warns if `map` stacks a module with itself, because several of its trees hold the module at one path.

    blocks = [Block(layer_1, shared), Block(layer_2, shared)]
    st.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)        `shared` twice, with two gradients

Only functions that make larger arrays from smaller ones lead to the warning. The mean of two models, or a choice
between an old version of a model and a new one, holds a shared module once, as each model does. Arrays and
containers that two trees share do not count, as between two arguments of a function: they may alias by accident.
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
    """A module that several trees hold at one path.

    Attributes:
        path: its path in each of the trees.
        trees: indices of these trees.
        kind: name of its class.
    """

    path: Path
    trees: list[int]
    kind: str


def report_stacked_modules(trees: Sequence[Any], leaves: Sequence[Any], new: Sequence[Any]) -> None:
    """Warns if `map` stacked leaves of a module that several of its trees share.

    Args:
        trees: the operands of `map`.
        leaves: the leaves of the first tree.
        new: the leaves of the result, in the same order.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.

    Cost: one look at each pair of leaves; a walk over all trees if one has grown.
    """
    policy = current_policy()
    grown_leaves = [leaf for leaf, new_leaf in zip(leaves, new, strict=True) if _has_grown(leaf, new_leaf)]
    if not grown_leaves or policy.on_untie == "ignore":
        return
    shared_modules = _shared_modules(trees, grown_leaves)
    if not shared_modules:
        return

    # The message names the first module, and counts the others.
    first = shared_modules[0]
    names = [f"trees[{i}]" for i in first.trees]
    path = jtu.keystr(first.path)
    full_paths = [name + path for name in names]
    # The parameters of `map`, for programs that catch the error.
    paths_of_arguments = [("tree" if i == 0 else f"rest[{i - 1}]") + path for i in first.trees]
    num_more = len(full_paths) - 2
    paths_text = listed(full_paths) if len(full_paths) < 4 else f"{listed(full_paths[:2])} (and {num_more} more)"
    more_text = f"; {len(shared_modules) - 1} more modules, too" if len(shared_modules) > 1 else ""
    fact = (
        f"{paths_text} are one `{first.kind}`, and `sharedtree.tree.map` has stacked it with itself{more_text}. The "
        "result holds a copy of it for each tree, each with its own gradient and updates."
    )
    fixes: list[str] = []
    # The root cannot be taken out of itself.
    if path:
        fixes += [
            "To keep one layer, take it out of the trees, stack these, and store it beside the result:",
            f"    shared = trees[0]{path}",
            f"    trees = [sharedtree.tree.at(lambda m: m{path}, each, None) for each in trees]",
            "    stacked = sharedtree.tree.map(f, *trees)",
        ]
    fixes += [
        "If each tree should have a layer of its own, give it one before the call. Ties inside each tree are kept:",
        "    trees = [sharedtree.copy(each) for each in trees]",
    ]
    count = len(shared_modules)
    report_untied(policy.on_untie, definition_of_caller(), fact, "\n".join(fixes), paths_of_arguments, count=count)


def _has_grown(leaf: Any, new_leaf: Any) -> bool:
    """Returns True if both are arrays and the new one has more elements."""
    shape, new_shape = getattr(leaf, "shape", None), getattr(new_leaf, "shape", None)
    return shape is not None and new_shape is not None and np.prod(new_shape) > np.prod(shape)


def _shared_modules(trees: Sequence[Any], grown_leaves: Sequence[Any]) -> list[_Shared]:
    """Finds the outermost modules that several trees hold at one path, and in which a leaf has grown.

    Args:
        trees: the trees. Only the paths of modules in the first tree are looked at.
        grown_leaves: the leaves of the first tree from which larger arrays were made.
    """
    walked = [walk_alone(tree) for tree in trees]
    first = walked[0]
    grown_set = IdentitySet(grown_leaves)
    grown_numbers = {number for number, leaf in first.leaves.items() if leaf in grown_set}
    modules_of = [_modules_by_path(tree) for tree in walked]
    shared_modules: list[_Shared] = []
    # First paths are in flatten order, so a module comes before the modules in it.
    for number, path in first.first_paths.items():
        if path not in modules_of[0]:
            continue
        # Skip the modules inside a module that was found.
        if any(path[: len(shared.path)] == shared.path for shared in shared_modules):
            continue
        # Module → indices of the trees that hold it at this path.
        holders: IdentityDict[list[int]] = IdentityDict()
        for i, modules in enumerate(modules_of):
            if path in modules:
                holders.setdefault(modules[path], []).append(i)
        index_groups = [indices for _, indices in holders.items() if len(indices) > 1]
        if index_groups and not grown_numbers.isdisjoint(first.below(number).reached):
            shared_modules.append(_Shared(path, index_groups[0], type(first.objects[number]).__name__))
    return shared_modules


def _modules_by_path(tree: FlatDag) -> dict[Path, Any]:
    """Maps the first path of each module of a tree to the module."""
    modules: dict[Path, Any] = {}
    for number, path in tree.first_paths.items():
        node = tree.node(number)
        if node is not None and not node.type.is_plain:
            modules[path] = tree.objects[number]
    return modules
