"""Sorts the leaves of a model for optimizers: parameters, state, and those of which the library does not say.

    Net(kernel=Param(k), mean=BatchStat(m), scale=Scale(s))     k: parameter   m: state   s: unsaid, a user's class

Everything below state is state. A leaf at several paths is a parameter if it is one at any of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ._flat_dags import FlatDag
from ._plain_containers import Role
from ._structure import LEAF, Node


class Roles(NamedTuple):
    """Roles of the leaves of a tree.

    Attributes:
        of_leaves: number of a leaf → its role. A leaf that is missing is a parameter.
        unsaid: the numbers of instances whose classes do not say, unless they are below state.
    """

    of_leaves: dict[int, Role]
    unsaid: Sequence[int]

    def is_state(self, number: int) -> bool:
        """Tells whether a leaf is state, which is not trained."""
        return self.of_leaves.get(number) == "state"


def roles_in(tree: FlatDag) -> Roles:
    """Finds the roles of all leaves.

    Cost: a look at each record; if a class among them has roles, up to three visits of each.
    """
    of_leaves: dict[int, Role] = {}
    unsaid: set[int] = set()
    if not any(type(op) is Node and op.type.roles is not None for op, _ in tree.records):
        return Roles(of_leaves, ())
    # A shared record is visited once for each role that it has on some path, not once for each path.
    visited: set[tuple[int, Role]] = set()
    stack: list[tuple[int, Role]] = [(tree.root, "parameter")]
    while stack:
        number, role = stack.pop()
        if (number, role) in visited:
            continue
        visited.add((number, role))
        op, children = tree.records[number]
        if op is LEAF:
            earlier_role = of_leaves.get(number)
            if earlier_role is None or _STRENGTH[role] > _STRENGTH[earlier_role]:
                of_leaves[number] = role
        elif type(op) is Node:
            if op.type.roles == "unsaid" and role != "state":
                unsaid.add(number)
            for child, role_by_node in zip(children, _roles_of_children(op, len(children)), strict=True):
                stack.append((child, role if role == "state" or role_by_node is None else role_by_node))
    return Roles(of_leaves, sorted(unsaid))


def _roles_of_children(node: Node, num_children: int) -> Sequence[Role | None]:
    """The role that a node assigns to each of its children. None for a child that has the node's role."""
    roles = node.type.roles
    if not callable(roles):
        return [roles for _ in range(num_children)]
    of_children = roles(node.aux.peek())
    return [None for _ in range(num_children)] if of_children is None else of_children


_STRENGTH: dict[Role, int] = {"parameter": 2, "unsaid": 1, "state": 0}
"""Of the roles that a leaf has at several paths, the strongest holds."""
