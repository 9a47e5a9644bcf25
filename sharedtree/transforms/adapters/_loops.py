"""`jax.lax.scan`, `while_loop`, `fori_loop`, `map` and `associative_scan`.

A carry goes in and comes out of each iteration with one structure (`_joining`). Where the first trace shows that it
does not, the operands are packed anew and the function is traced once more; later calls remember.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ..._graph import Tags
from ..._packed import LeafPath
from ..._untying import is_noted
from .._crossed import Graph, packed_in, with_packed
from .._crossing import Crossing
from .._inner import Inner
from .._inside import Inside
from .._joining import Words, joined, leaves_like, packed_as, require_same_containers
from .._kept import Kept, kept_objects, with_kept
from .._lowering import Lowering, lowering


class CarryError(Exception):
    """The carry has to be packed in another way. Raised by a trace for the adapter, which catches it."""

    def __init__(self, terms: Any, how: Lowering) -> None:
        super().__init__("the carry has to be packed in another way")
        self.terms = terms
        self.how = how


class Told(NamedTuple):
    """What the traces of an iteration tell of the carry.

    Attributes:
        noted: the records whose leaves were untied on purpose.
        kept: which objects came back in their places; None if no iteration has run.
    """

    noted: frozenset[int] = frozenset()
    kept: Kept | None = None

    def then(self, noted: frozenset[int], kept: Kept) -> "Told":
        """This, and what a further iteration tells: without `jit` each one is called, and does something else."""
        given = kept.given if self.kept is None else kept.given & self.kept.given
        return Told(self.noted | noted, Kept(given, (kept.given | kept.updated) - given))


class _Word:
    """The aux data of a carry, which a trace returns with what it tells.

    JAX asks that a carry come out as it went in, and hands back what came out. So any two of these are equal.
    """

    def __init__(self, told: Told) -> None:
        self.told = told

    def __eq__(self, other: object) -> bool:
        return type(other) is _Word

    def __hash__(self) -> int:
        return hash(_Word)


class Round:
    """A carry that holds modules, as it goes round."""

    __slots__ = ("carry", "word")

    def __init__(self, carry: Any, word: _Word) -> None:
        self.carry = carry
        self.word = word


jtu.register_pytree_with_keys(
    Round,
    # No part of a path, so that JAX's messages name the leaf as if the carry stood there itself.
    lambda item: ([(LeafPath(""), item.carry)], item.word),
    lambda word, children: Round(next(iter(children)), word),
    lambda item: ((item.carry,), item.word),
)


def scan(crossing: Crossing, f: Any, init: Any, xs: Any = None, **options: Any) -> Any:
    """`jax.lax.scan`."""
    crossing.enter(f, {"init": init, "xs": xs}, {"init": "carried", "xs": "scanned"})
    iteration = crossing.function(f, _iteration)
    carry, ys = _until_it_fits(
        crossing, iteration, lambda init, xs: crossing.apply(iteration, _round(init), xs, **options)
    )
    return crossing.leave(_as_told(crossing, carry), ys, with_state=(1,))


def _iteration(inside: Inside, carry: Any, x: Any) -> Any:
    result = inside.call(_carry(carry), x)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        packed = inside.pack(result)
        if any(packed_in(packed, "result")):
            raise TypeError(
                f"The function of `{inside.terms.title}` returns a pair, the carry and what is emitted, but it "
                f"returned a `{type(result).__name__}`."
            )
        return packed  # which JAX refuses
    carried, emitted = result
    return _like_carry(inside, carried, 0, carry), inside.pack_with_state(emitted, 1)


def while_loop(crossing: Crossing, cond_fun: Any, body_fun: Any, init_val: Any, **options: Any) -> Any:
    """`jax.lax.while_loop`."""
    crossing.enter(body_fun, {"init_val": init_val})
    condition = crossing.function(cond_fun, _condition)
    iteration = crossing.function(body_fun, _iteration_of_carry)
    carry = _until_it_fits(
        crossing, iteration, lambda init: crossing.apply(condition, iteration, _round(init), **options)
    )
    return crossing.leave(_as_told(crossing, carry))


def _condition(inside: Inside, carry: Any) -> Any:
    result = inside.call(_carry(carry), keeps_state=False)
    packed = inside.pack(result)
    if any(packed_in(packed, "result")):
        raise TypeError(
            f"The first function of `{inside.terms.title}` says whether to go on, with a boolean of no dimensions, but "
            f"it returned a `{type(result).__name__}`."
        )
    return packed


def _iteration_of_carry(inside: Inside, carry: Any) -> Any:
    return _like_carry(inside, inside.call(_carry(carry)), 0, carry)


def fori_loop(crossing: Crossing, lower: Any, upper: Any, body_fun: Any, init_val: Any, **options: Any) -> Any:
    """`jax.lax.fori_loop`."""
    crossing.enter(body_fun, {"i": lower, "init_val": init_val})
    iteration = crossing.function(body_fun, _iteration_with_index)
    carry = _until_it_fits(
        crossing, iteration, lambda lower, init: crossing.apply(lower, upper, iteration, _round(init), **options)
    )
    return crossing.leave(_as_told(crossing, carry))


def _iteration_with_index(inside: Inside, i: Any, carry: Any) -> Any:
    return _like_carry(inside, inside.call(i, _carry(carry)), 1, carry)


def map_over(crossing: Crossing, f: Any, xs: Any, **options: Any) -> Any:
    """`jax.lax.map`."""
    (xs,) = crossing.enter(f, {"xs": xs})
    return crossing.leave(crossing.apply(crossing.function(f, _each), xs, **options), with_state=(0,))


def _each(inside: Inside, x: Any) -> Any:
    return inside.pack_with_state(inside.call(x), 0)


def associative_scan(crossing: Crossing, fn: Any, elems: Any, **options: Any) -> Any:
    """`jax.lax.associative_scan`."""
    crossing.enter(fn, {"elems": elems})
    combination = crossing.function(fn, _combination)
    return crossing.leave(
        _until_it_fits(crossing, combination, lambda elems: crossing.apply(combination, elems, **options))
    )


def _combination(inside: Inside, a: Any, b: Any) -> Any:
    return _like_carry(inside, inside.call(a, b, apart=True), 0, a)


def _like_carry(inside: Inside, result: Any, which: int, carry: Any) -> Any:
    """What is carried on, packed like the carry that the function was given.

    Args:
        inside: the trace.
        result: what the function returned for the carry.
        which: of its operands the carry is.
        carry: as it was packed; with a word if one goes round.

    Raises:
        CarryError: if the carry has to be packed in another way.
        SharingMismatchError: if it cannot.
    """
    terms, entered = inside.terms, inside.entered
    name = terms.names.text(which)
    words = Words(terms.title, "when an iteration begins", "when it ends")
    tags = Tags()
    packed = inside.pack(result, tags)
    if not require_same_containers(_carry(carry), packed, name, words):
        return packed
    before, after = Graph.of(_carry(carry), name), Graph.of(packed, name)
    found = joined(before, after, words)
    if not found.fits:
        raise CarryError(terms, lowering(entered.graph, before, after, found))
    leaves = leaves_like(before, after, found)
    result = packed_as(packed, _carry(carry), leaves)
    if type(carry) is not Round:
        return result
    kept = Kept()
    if terms.policy.in_place:
        kept = kept_objects(entered.graph, before, tags.objects, after, found)
    noted = frozenset(number for number, leaf in leaves.items() if is_noted(leaf))
    return Round(result, _Word(carry.word.told.then(noted, kept)))


def _round(carry: Any) -> Any:
    return Round(carry, _Word(Told())) if any(packed_in(carry, 0)) else carry


def _carry(carry: Any) -> Any:
    return carry.carry if type(carry) is Round else carry


def _as_told(crossing: Crossing, carry: Any) -> Any:
    """The carry as the last iteration left it."""
    if type(carry) is not Round:
        return carry
    told = carry.word.told
    # If no iteration has run, every object is what it was.
    kept = Kept(crossing.objects) if told.kept is None else told.kept
    if not crossing.policy.in_place:
        kept = Kept()
    return with_packed(carry.carry, lambda packed: with_kept(packed, kept, crossing.noted | told.noted))


def _until_it_fits(crossing: Crossing, iteration: Inner, run: Callable[..., Any]) -> Any:
    """Runs a loop, with its operands packed anew as often as a trace asks for it."""
    terms = iteration.terms
    while True:
        structures = [packed.structure for packed in crossing.packed]
        known = terms.lowerings.get(structures)
        # A function can do something else with arrays of other shapes and types, and in other containers.
        form = None if known is None else crossing.form
        how = None if known is None else known.get(form)
        if how is None:
            try:
                return run(*crossing.call.args)
            except CarryError as error:
                if error.terms is not terms:
                    raise
                how = error.how
                terms.lowerings.add(structures, {**(known or {}), crossing.form: how})
        crossing.lower(how)
