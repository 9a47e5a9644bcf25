"""Which leaves of a model are state, which are parameters, and of which the library does not say: for optimizers.

    Net(kernel=Param(k), mean=BatchStat(m), scale=Scale(s))     k: parameter   m: state   s: unsaid, a user's class

What is below state is state. A leaf at several paths is a parameter if it is one at any of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ._plain_containers import Role
from ._structure import LEAF, Node
from ._trees_taken_apart import Walked


class Roles(NamedTuple):
    """The roles of the leaves of a tree.

    Attributes:
        of_leaves: by the numbers of the leaves. What is not there is a parameter.
        unsaid: the instances of classes that do not say, by number, if they are not below state.
    """

    of_leaves: dict[int, Role]
    unsaid: Sequence[int]

    def is_state(self, number: int) -> bool:
        """Whether a leaf is state, which nobody trains."""
        return self.of_leaves.get(number) == "state"


def roles_in(tree: Walked) -> Roles:
    """The roles of all leaves.

    Cost: a look at each record; if a class among them says anything, a walk.
    """
    of_leaves: dict[int, Role] = {}
    unsaid: dict[int, None] = {}
    if not any(type(op) is Node and op.type.roles is not None for op, _ in tree.records):
        return Roles(of_leaves, ())
    seen: set[tuple[int, Role]] = set()
    stack: list[tuple[int, Role]] = [(tree.root, "parameter")]
    while stack:
        number, role = stack.pop()
        if (number, role) in seen:
            continue
        seen.add((number, role))
        op, children = tree.records[number]
        if op is LEAF:
            before = of_leaves.get(number, role)
            of_leaves[number] = before if _STRONGEST.index(before) < _STRONGEST.index(role) else role
        elif type(op) is Node:
            if op.type.roles == "unsaid" and role != "state":
                unsaid[number] = None
            below = _roles_below(op, len(children))
            for child, here in zip(children, below, strict=True):
                stack.append((child, role if role == "state" or here is None else here))
    return Roles(of_leaves, sorted(unsaid))


def _roles_below(node: Node, num_children: int) -> Sequence[Role | None]:
    """The role that a node gives to each of its children; None where it says nothing."""
    roles = node.type.roles
    if not callable(roles):
        return [roles for _ in range(num_children)]
    of_children = roles(node.aux.peek())
    return [None for _ in range(num_children)] if of_children is None else of_children


_STRONGEST: tuple[Role, ...] = ("parameter", "unsaid", "state")
