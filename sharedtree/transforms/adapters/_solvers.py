"""`jax.lax.custom_root` and `custom_linear_solve`.

What is solved for has one structure: a guess goes in, and what each function returns in its place is packed like it.
The solvers are given functions by JAX, on packed trees, and hand the user functions on modules:

    solve(f, Pair(w, w))        JAX calls    solve(f', Packed([w])),  where  f'(Packed([w])) → Packed([r])
"""

from collections.abc import Callable
from typing import Any

from .._crossed import Graph
from .._crossing import Crossing
from .._inside import Inside
from .._joining import Words, joined, leaves_like, packed_as, require_same_containers
from .._packing import unpack_call


def custom_root(
    crossing: Crossing, f: Any, initial_guess: Any, solve: Any, tangent_solve: Any, has_aux: bool = False
) -> Any:
    """`jax.lax.custom_root`."""
    (guess,) = crossing.enter(f, {"initial_guess": initial_guess})
    solution = crossing.apply(
        crossing.function(f, _value),
        guess,
        crossing.function(solve, _solution_and_more if has_aux else _solution),
        crossing.function(tangent_solve, _solution),
        has_aux=has_aux,
    )
    return crossing.leave(*solution) if has_aux else crossing.leave(solution)


def custom_linear_solve(
    crossing: Crossing,
    matvec: Any,
    b: Any,
    solve: Any,
    transpose_solve: Any = None,
    symmetric: bool = False,
    has_aux: bool = False,
) -> Any:
    """`jax.lax.custom_linear_solve`."""
    (b,) = crossing.enter(matvec, {"b": b})
    body = _solution_and_more if has_aux else _solution
    solution = crossing.apply(
        crossing.function(matvec, _value),
        b,
        crossing.function(solve, body),
        None if transpose_solve is None else crossing.function(transpose_solve, body),
        symmetric=symmetric,
        has_aux=has_aux,
    )
    return crossing.leave(*solution) if has_aux else crossing.leave(solution)


def _value(inside: Inside, x: Any) -> Any:
    return _like(inside, inside.call(x), x)


def _solution(inside: Inside, f: Callable[[Any], Any], x: Any) -> Any:
    return _like(inside, inside.call(_on_modules(inside, f, x), x), x)


def _solution_and_more(inside: Inside, f: Callable[[Any], Any], x: Any) -> Any:
    result = inside.call(_on_modules(inside, f, x), x)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(
            f"With `has_aux=True`, a solver of `{inside.terms.title}` returns a pair, what is solved for and more, but "
            f"this one returned a `{type(result).__name__}`:\n"
            "    return solution, None"
        )
    return _like(inside, result[0], x), inside.pack(result[1])


def _on_modules(inside: Inside, f: Callable[[Any], Any], like: Any) -> Callable[[Any], Any]:
    """A function of packed trees, as the user calls it."""

    def on_modules(x: Any) -> Any:
        return unpack_call((f(_like(inside, x, like)),), {}, ()).args[0]

    return on_modules


def _like(inside: Inside, tree: Any, like: Any) -> Any:
    """A tree packed like what is solved for.

    Raises:
        SharingMismatchError: if it lacks a tie, or differs in shape or static values.
    """
    name = inside.terms.names.text(0)
    words = Words(inside.terms.title, "in what is solved for", "in what stands in its place")
    packed = inside.pack(tree)
    if not require_same_containers(like, packed, name, words):
        return packed
    before, after = Graph.of(like, name), Graph.of(packed, name)
    return packed_as(packed, like, leaves_like(before, after, joined(before, after, words, exact=True)))
