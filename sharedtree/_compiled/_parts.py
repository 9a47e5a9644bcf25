"""Which parts of a structure are equal and stand on their own, so that they can share generated code.

A part is a record with everything that a walk first meets below it. It is *closed* if nothing in it is referred to from
outside, and it refers to nothing outside. Parts are compared by hash consing, references counted relative to the record
that makes them, so that equal closed parts get one number wherever they are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .._statics import Static
from .._structure import Node, Op, Record

_SMALL = 4  # records; a smaller part costs less to write out than to call
_SMALL_IN_LOOPS = 200  # and in a loop, where it is written once for many


class Parts(NamedTuple):
    """What is known of the parts of a table of records.

    Attributes:
        is_first: (parent, position of the child) wherever a walk first meets the child there.
        code: for each record a number, equal for equal parts.
        is_closed: for each record, whether its part is closed.
        is_shared: for each record, whether it is referred to more than once.
        size: for each record, how many records its part has.
        depth: how deeply the records are nested.
    """

    is_first: set[tuple[int, int]]
    code: list[int]
    is_closed: list[bool]
    is_shared: list[bool]
    size: list[int]
    depth: int


def parts_of(records: Sequence[Record], roots: Sequence[int]) -> Parts:
    """Finds the closed parts of a table and which of them are equal. Cost: linear in the records."""
    is_first, depth = _first_meetings(records, roots)
    last_use = [-1] * len(records)  # the highest-numbered record that refers to each
    uses = [0] * len(records)
    for number, (_, children) in enumerate(records):
        for child in children:
            last_use[child] = number
            uses[child] += 1
    for root in roots:
        last_use[root] = len(records)
        uses[root] += 1

    ops: dict[Any, int] = {}
    codes: dict[tuple[int, tuple[tuple[bool, int], ...]], int] = {}
    code: list[int] = []
    start: list[int] = []  # of the part
    lowest: list[int] = []  # record that the part refers to
    latest: list[int] = []  # use of any record in the part but its own
    for number, (op, children) in enumerate(records):
        first, low, late = number, number, -1
        described: list[tuple[bool, int]] = []
        for i, child in enumerate(children):
            if (number, i) in is_first:
                first, low = min(first, start[child]), min(low, lowest[child])
                late = max(late, last_use[child], latest[child])
                described.append((True, code[child]))
            else:
                low = min(low, child)
                described.append((False, child - number))
        key = ops.setdefault(_identified(op), len(ops)), tuple(described)
        code.append(codes.setdefault(key, len(codes)))
        start.append(first)
        lowest.append(low)
        latest.append(late)
    is_closed = [lowest[n] >= start[n] and latest[n] <= n for n in range(len(records))]
    size = [n - start[n] + 1 for n in range(len(records))]
    return Parts(is_first, code, is_closed, [count > 1 for count in uses], size, depth)


def _identified(op: Op) -> Any:
    """An operation as it is compared here. Statics that are equal by a user's `==` need not be interchangeable."""
    static = op.aux if type(op) is Node else op
    if type(static) is Static and not static.is_settled:
        return op, id(static.peek())  # alive in the records
    return op


def _first_meetings(records: Sequence[Record], roots: Sequence[int]) -> tuple[set[tuple[int, int]], int]:
    is_first: set[tuple[int, int]] = set()
    met: set[int] = set()
    depth = 0
    for root in roots:
        stack = [] if root in met else [(root, 0)]
        met.add(root)
        while stack:
            number, i = stack[-1]
            children = records[number][1]
            depth = max(depth, len(stack))
            if i == len(children):
                stack.pop()
                continue
            stack[-1] = number, i + 1
            child = children[i]
            if child not in met:
                met.add(child)
                is_first.add((number, i))
                stack.append((child, 0))
    return is_first, depth


def deserves_a_function(parts: Parts, number: int, op: Any, *, in_loop: bool) -> bool:
    """Whether a record is the top of a closed part that is large enough to be a function of its own."""
    smallest = _SMALL_IN_LOOPS if in_loop else _SMALL
    return parts.is_closed[number] and parts.size[number] >= smallest and not op.type.is_plain


def runs(parts: Parts, records: Sequence[Record], number: int) -> list[tuple[int, int]]:
    """The children of a record in runs of equal closed parts: (first, one past the last) of each, most of length 1."""
    children = records[number][1]
    found: list[tuple[int, int]] = []
    start = 0
    for i in range(1, len(children) + 1):
        before = children[i - 1]
        if (
            i < len(children)
            and parts.code[children[i]] == parts.code[before]
            and _can_repeat(parts, records, number, i - 1)
            and _can_repeat(parts, records, number, i)
        ):
            continue
        found.append((start, i))
        start = i
    return found


def _can_repeat(parts: Parts, records: Sequence[Record], number: int, i: int) -> bool:
    child = records[number][1][i]
    op = records[child][0]
    is_node = type(op) is Node and op.type.cls is not type(None)
    return is_node and (number, i) in parts.is_first and parts.is_closed[child]
