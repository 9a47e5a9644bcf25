"""`jax.lax.scan`, `while_loop`, `fori_loop`, `map` and `associative_scan`.

A carry comes out of each iteration in the very group in which it went in: what is returned for it is fitted to what was
received (`_joining_trees`). Where the first trace shows that it does not fit, the operands are grouped anew and the
function is traced once more; later calls remember.

In place, what an iteration changed is written back at the end. How often a loop runs is not known when it is traced. So
each object that holds traced leaves comes back in its place; then the objects at the end are the caller's, with other
content. A function may swap two objects and swap them back. If an iteration moved or replaced one, the next would do so
again, and nobody could tell which is where. An immutable model can be replaced as a whole, as ever.

    def body(counter, x):                 def body(pair, x):
        counter.n += x                        pair.a, pair.b = pair.b, pair.a
        return counter, x                     return pair, x
    n is written back                     an error
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax import tree_util as jtu

from ..core._call_arguments import LeafPath
from ..core._errors import SharingMismatchError
from ..core._structure import LEAF, FlatDag, Given, Node, Op, Path, Record, Structure, Update, intern
from ..ties._leaf_notes import is_noted
from ._argument_names import Names
from ._caller_side import Call
from ._crossing import Crossing, TakingOperands, part_of
from ._function_given_to_jax import Inner
from ._function_side import Inside, receive
from ._joining_trees import Join, Repacking, Sides, holds_modules, join, leaves_like, repacking_for
from ._leaf_groups import LeafGroup, whole
from ._pass_through import ReceivedObjects


class CarryError(Exception):
    """The carry has to be packed in another way. Raised by a trace for the adapter, which catches it."""

    def __init__(self, terms: Any, how: Repacking) -> None:
        super().__init__("the carry has to be packed in another way")
        self.terms = terms
        self.how = how


class VanillaError(Exception):
    """The carry does not fit and holds no module, so that the transform itself says best what is wrong."""

    def __init__(self, error: SharingMismatchError) -> None:
        super().__init__(str(error))
        self.error = error


class Told(NamedTuple):
    """What the traces of an iteration tell of the carry, by the records of the call.

    Attributes:
        kept: the objects that came back in their places.
        changed: those of them that no longer have the parts with which they were received.
        noted: the leaves that were untied on purpose.
    """

    kept: frozenset[int]
    changed: frozenset[int]
    noted: frozenset[int]

    def then(self, earlier: "Told | None") -> "Told":
        """Both: without `jit` each iteration is called, and does something else."""
        if earlier is None:
            return self
        return Told(self.kept & earlier.kept, self.changed | earlier.changed, self.noted | earlier.noted)


NOTHING = Told(frozenset(), frozenset(), frozenset())


def scan(crossing: Crossing, f: Any, init: Any, xs: Any = None, **options: Any) -> Any:
    """`jax.lax.scan`."""
    crossing.enter(f, {"init": init, "xs": xs}, {"init": "carried", "xs": "scanned"})
    iteration = crossing.function(f, _iteration)
    (carry, ys), told = _until_it_fits(
        crossing,
        iteration,
        lambda init, xs: crossing.apply(iteration, init, xs, **options),
        lambda: crossing.transform(f, init, xs, **options),
    )
    return crossing.leave(_as_told(crossing, carry, told, 0), ys, with_state=(1,))


def _iteration(inside: Inside, carry: LeafGroup, xs: LeafGroup) -> Any:
    result = inside.call(carry, xs)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        tree = inside.walked(result)
        if holds_modules(tree):
            raise TypeError(
                f"The function of `{inside.terms.title}` returns a pair, the carry and what is emitted, but it "
                f"returned a `{type(result).__name__}`."
            )
        return result  # which JAX refuses
    carried, emitted = result
    return _like_carry(inside, carried, 0, carry), inside.pack_with_state(emitted, 1)


def while_loop(crossing: Crossing, cond_fun: Any, body_fun: Any, init_val: Any, **options: Any) -> Any:
    """`jax.lax.while_loop`."""
    crossing.enter(body_fun, {"init_val": init_val})
    condition = crossing.function(cond_fun, _condition, keeps=False)
    iteration = crossing.function(body_fun, _iteration_of_carry)
    carry, told = _until_it_fits(
        crossing,
        iteration,
        lambda init: crossing.apply(condition, iteration, init, **options),
        lambda: crossing.transform(cond_fun, body_fun, init_val, **options),
    )
    return crossing.leave(_as_told(crossing, carry, told, 0))


def _condition(inside: Inside, carry: LeafGroup) -> Any:
    received = receive((carry,))  # what it changes goes nowhere
    result = inside.call_with(received, received.arguments.args, {})
    tree = inside.walked(result)
    inside.check_walked(tree)
    if holds_modules(tree):
        raise TypeError(
            f"The first function of `{inside.terms.title}` says whether to go on, with a boolean of no dimensions, but "
            f"it returned a `{type(result).__name__}`."
        )
    return result


def _iteration_of_carry(inside: Inside, carry: LeafGroup) -> Any:
    return _like_carry(inside, inside.call(carry), 0, carry)


def fori_loop(crossing: Crossing, lower: Any, upper: Any, body_fun: Any, init_val: Any, **options: Any) -> Any:
    """`jax.lax.fori_loop`."""
    crossing.enter(body_fun, {"init_val": init_val})
    iteration = crossing.function(body_fun, _iteration_with_index, num_before=1)
    carry, told = _until_it_fits(
        crossing,
        iteration,
        lambda init: crossing.apply(lower, upper, iteration, init, **options),
        lambda: crossing.transform(lower, upper, body_fun, init_val, **options),
    )
    return crossing.leave(_as_told(crossing, carry, told, 0))


def _iteration_with_index(inside: Inside, i: Any, carry: LeafGroup) -> Any:
    return _like_carry(inside, inside.call(carry, before=(i,)), 0, carry)


def map_over(crossing: Crossing, f: Any, xs: Any, **options: Any) -> Any:
    """`jax.lax.map`."""
    (group,) = crossing.enter(f, {"xs": xs})
    return crossing.leave(crossing.apply(crossing.function(f, _each), group, **options), with_state=(0,))


def _each(inside: Inside, x: LeafGroup) -> Any:
    return inside.pack_with_state(inside.call(x), 0)


def associative_scan(crossing: Crossing, fn: Any, elems: Any, **options: Any) -> Any:
    """`jax.lax.associative_scan`."""
    crossing.enter(fn, {"elems": elems})
    combination = crossing.function(fn, _combination)
    result, told = _until_it_fits(
        crossing,
        combination,
        lambda elems: crossing.apply(combination, elems, **options),
        lambda: crossing.transform(fn, elems, **options),
    )
    return crossing.leave(_as_told(crossing, result, told, 0))


def _combination(inside: Inside, a: LeafGroup, b: LeafGroup) -> Any:
    return _like_carry(inside, inside.call_apart(a, b), 0, a)


def _like_carry(inside: Inside, result: Any, position: int, carry: LeafGroup) -> LeafGroup:
    """What is carried on, in the group in which it was received.

    Args:
        inside: the trace.
        result: what the function returned for the carry.
        position: of the operand that the carry is.
        carry: as it was received.

    Raises:
        CarryError: if the operands have to be grouped in another way.
        SharingMismatchError: if it cannot be.
    """
    terms, received = inside.terms, inside.received.tree
    before, after = received.child(position), inside.walked(result)
    words, above = (
        Sides(terms.title, "when an iteration begins", "when it ends"),
        (LeafPath(terms.names.text(position)),),
    )
    try:
        found = join(before, after, words, above)
    except SharingMismatchError as error:
        if holds_modules(before) or holds_modules(after):
            raise
        raise VanillaError(error) from None
    if not found.fits:
        raise CarryError(terms, repacking_for(received, before, after, found))
    leaves = leaves_like(before.below(before.root), after, found)
    numbers = [n for n in part_of(carry.selection.structure, position)[1] if received.records[n][0] is LEAF]
    noted = frozenset([n for n, leaf in zip(numbers, leaves, strict=True) if is_noted(leaf)])
    kept, changed = frozenset[int](), frozenset[int]()
    if terms.policy.in_place:
        kept, changed = kept_objects(received, before, after, found, above, containers=terms.policy.containers)
    call = inside.received.call
    if call is not None:
        call.told = Told(kept, changed, noted).then(call.told)
    return LeafGroup(leaves, carry.selection)


def kept_objects(
    received: FlatDag, before: FlatDag, after: FlatDag, found: Join, above: Path, *, containers: bool
) -> tuple[frozenset[int], frozenset[int]]:
    """Which objects came back in their places, by their numbers, and which of these were changed.

    Args:
        received: what the function received, as it is now.
        before: the part of it that is compared.
        after: what has become of it.
        found: how the two compare.
        above: the path to both.
        containers: whether mutable containers outside modules are objects.

    Raises:
        SharingMismatchError: if an object that holds traced leaves was moved, replaced within one that came back, or
            changed and not returned.
    """
    received_objects = ReceivedObjects(received, containers=containers)
    objects = {record for record in received_objects.records if type(received.records[record][0]) is Node}
    paths = before.first_paths
    kept: set[int] = set()
    replaced: set[int] = set()
    for i, j in found.pairs:
        if i not in objects:
            continue
        if after.objects[j] is received.objects[i]:
            kept.add(i)
        elif before.holds_leaf[i]:
            if received_objects.record_of(after.objects[j]) is not None:
                _raise_not_in_place((*above, *paths[i]), "another object that the function received was put there")
            replaced.add(i)
    for i in kept:
        for child in received.records[i][1]:
            if child in replaced:
                _raise_not_in_place((*above, *paths[child]), "a new object was put there")
    for i in replaced - kept:
        if not received_objects.is_unchanged(i):
            _raise_not_in_place((*above, *paths[i]), "it was changed, and another object was returned in its place")
    return frozenset(kept), frozenset([i for i in kept if not received_objects.is_unchanged(i)])


def _raise_not_in_place(path: Path, why: str) -> NoReturn:
    text = jtu.keystr(path)
    raise SharingMismatchError(
        f"`{text}` did not come back in its place: {why}.\n"
        "A loop changes in the next iteration again what it changes in place, and which branch is taken is not known "
        "when it is traced. So each object that holds traced leaves stays where it is. Change what is in it:\n"
        "    layer.weight = new                 # not: model.layer = Layer(new)\n"
        "or return a new model, without `in_place=True`.",
        (text,),
    )


def _as_told(crossing: Crossing, carry: LeafGroup, told: Told, position: int) -> LeafGroup:
    """The carry as the last iteration left it: the caller's objects where they came back, written if they changed."""
    part, numbers = part_of(carry.selection.structure, position)
    noted = frozenset([record for record, number in enumerate(numbers) if number in told.noted])
    return whole(
        carry.leaves,
        as_kept(part, numbers, told, crossing.call.tree.records, in_place=bool(crossing.policy.in_place), noted=noted),
    )


def as_kept(
    part: Structure,
    numbers: Sequence[int],
    told: Told,
    received: Sequence[Record],
    *,
    in_place: bool,
    noted: frozenset[int],
) -> Structure:
    """A structure in which the caller's objects stand for themselves.

    Args:
        part: of what came out.
        numbers: for each of its records, that of the caller.
        told: which objects came back and which of them were changed, by the caller's numbers.
        received: the caller's records.
        in_place: whether anything is written.
        noted: the records whose leaves were untied on purpose.
    """
    records: list[Any] = []
    for (op, children), number in zip(part.records, numbers, strict=True):
        new: Op = op
        if in_place and number in told.changed and type(op) is Node:
            new = Update.of(number, op, received[number][0])
        elif in_place and number in told.kept:
            new, children = Given(number), ()
        records.append((new, children))
    places = tuple([place for place, number in enumerate(part.leaf_numbers) if number in noted])
    return intern(tuple(records), part.root, 0, None, places)


def _until_it_fits(
    crossing: Crossing, iteration: Inner, run: Callable[..., Any], vanilla: Callable[[], Any]
) -> tuple[Any, Told]:
    """Runs a loop, with its operands grouped anew as often as a trace asks for it; and what is known of the carry."""
    terms = iteration.terms
    while True:
        call = crossing.call
        structures = (call.tree.structure,)
        known = terms.learned.get(structures)
        # A function can do something else with arrays of other shapes and types.
        form = None if known is None else form_of(call)
        learned = None if known is None else known.get(form)
        if not isinstance(learned, Repacking):
            try:
                result = run(*call.groups)
            except TypeError as error:
                _name_parameter(error, iteration)
                raise
            except VanillaError as error:
                vanilla()
                raise error.error from None
            except CarryError as error:
                if error.terms is not terms:
                    raise
                learned = error.how
                terms.learned.add(structures, {**(known or {}), form_of(call): learned})
            else:
                if call.told is not None and call.told != NOTHING:
                    learned = call.told
                    terms.learned.add(structures, {**(known or {}), form_of(call): learned})
                elif call.told is None and jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
                    learned = NOTHING._replace(kept=frozenset(range(len(call.tree.records))))  # there was no iteration
                return result, learned or NOTHING
        crossing.lower(learned)


def _name_parameter(error: TypeError, iteration: Inner) -> None:
    """Lets JAX's error about a carry name the parameter of the function, as it does in vanilla JAX."""
    operand, place = iteration.terms.names.text(0), iteration.num_before
    parameters = Names(iteration.function).positional
    if place < len(parameters) and not isinstance(error, SharingMismatchError):
        pattern = rf"(input carry component )(?:loop_carry\[\d+\])?{operand}(?=[ .\[])"
        error.args = (re.sub(pattern, lambda match: match[1] + parameters[place], str(error)),)


def form_of(call: Call) -> Any:
    """The types of all leaves; None if JAX will refuse one."""
    try:
        return tuple(map(jax.typeof, call.leaves))
    except TypeError:
        return None


SCAN = TakingOperands(scan)
WHILE_LOOP = TakingOperands(while_loop)
UNWRITTEN_SCAN = TakingOperands(scan, writes=False)
UNWRITTEN_WHILE_LOOP = TakingOperands(while_loop, writes=False)
FORI_LOOP = TakingOperands(fori_loop)
MAP = TakingOperands(map_over)
ASSOCIATIVE_SCAN = TakingOperands(associative_scan, writes=False)
