"""Plans for results: unpacking, as generated code, what a planned call has returned before."""

import sys
from collections.abc import Callable, Sequence
from operator import countOf
from typing import Any

from .._compiled import ALONE, MAX_DEPTH, Builders, Source, all_different, indented, parts_of
from .._packed import Packed
from .._structure import LEAF, Given, Record, Update, canonical
from .._tied_values import note_tied_values
from .._untying import is_inside_a_function, note
from ._containers import COMMON_BARE, Containers, Trail, is_bare
from ._crossing import packed_in

NOT_BUILT: Any = object()
"""What a plan returns for a result that is not of the structure it was made for."""


class ResultPlan:
    """Unpacks results of one structure.

    Attributes:
        build: (packed result, the caller's objects by number) → result, or `NOT_BUILT`.
        given: the numbers that it takes from the caller.
        given_leaves: the numbers of the leaves in these.
    """

    def __init__(self, result: Any, arguments: Sequence[Record]) -> None:
        source = Source()
        found = [argument.packed for argument in packed_in(result, 0)]
        records = [record for packed in found for record in packed.structure.records]
        builders = Builders(source, records, [packed.structure.root for packed in found])
        source.names |= {"Packed": Packed, "COMMON": COMMON_BARE, "is_bare": is_bare, "NOT_BUILT": NOT_BUILT}
        checks: list[str] = []
        body: list[str] = []
        lists: list[str] = []
        modules = iter(found)

        def build_module(variable: str, _: Trail) -> str:
            packed = next(modules)
            structure = source.constant(packed.structure, "structure")
            checks.append(
                f"if type({variable}) is not Packed or {variable}.structure is not {structure}: return NOT_BUILT"
            )
            name = f"leaves{len(lists)}"
            checks.append(f"{name} = {variable}.leaves")
            if packed.structure.noted:
                source.names |= {"note": note, "is_inside_a_function": is_inside_a_function}
                checks.append("if is_inside_a_function(): return NOT_BUILT")  # which is told of the whole tree
                noted = source.constant(packed.structure.noted, "noted")
                body.append(f"note([{name}[i] for i in {noted}])")
            if packed.structure.tied_values:
                source.names["note_tied_values"] = note_tied_values
                tied = source.constant(packed.structure.tied_values, "tied")
                body.append(f"note_tied_values([{name}[i] for i in {tied}])")
            lists.append(name)
            body.extend(builders.build(packed.structure.root, name))
            return builders.variable_of[packed.structure.root]

        def pass_bare(variable: str, _: Trail) -> str:
            checks.append(f"if type({variable}) not in COMMON and not is_bare({variable}): return NOT_BUILT")
            return variable

        outside = Containers(source, (checks, body), result, (build_module, pass_bare), "return NOT_BUILT")
        expression = outside.visit(outside.root, "result")
        if lists:
            source.names |= {
                "getrefcount": sys.getrefcount,
                "countOf": countOf,
                "ALONE": ALONE,
                "all_different": all_different,
            }
            is_alone = [
                f"countOf(map(getrefcount, {name}), ALONE) == {packed.structure.num_leaves}"
                for name, packed in zip(lists, found, strict=True)
            ]
            different = f"all_different(({''.join(f'{name}, ' for name in lists)}))"
            checks.append(f"if not ({' and '.join(is_alone)}) and not {different}: return NOT_BUILT")
        lines = ["try:", *indented(checks), "except (LookupError, ValueError, RecursionError):", "    return NOT_BUILT"]
        source.function("build", "result, given", [*lines, *body, f"return {expression}"])
        self.build: Callable[[Any, Any], Any] = source.run()["build"]
        self.given = sorted({op.number for op, _ in records if type(op) is Given})
        below = {n for number in self.given for n in canonical(number, lambda n: arguments[n])[1]}
        self.given_leaves = sorted(n for n in below if arguments[n][0] is LEAF)


def can_be_built(result: Any) -> bool:
    """Whether a packed result is worth a plan: no updates in place, not too deep."""
    found = [argument.packed for argument in packed_in(result, 0)]
    records = [record for packed in found for record in packed.structure.records]
    if any(type(op) is Update for op, _ in records):
        return False
    return parts_of(records, [packed.structure.root for packed in found]).depth <= MAX_DEPTH
