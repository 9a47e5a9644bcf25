"""`jax.lax.custom_root` and `custom_linear_solve`.

What is solved for has one structure: a guess goes in, and what each function returns in its place is fitted to it. The
solvers are given functions by JAX, on hands, and hand the user functions on modules:

    solve(f, Pair(w, w))        JAX calls    solve(f', Hand([w])),  where  f'(Hand([w])) → Hand([r])
"""

from collections.abc import Callable
from typing import Any

from ._crossing import Crossing
from ._function_side import Inside, receive
from ._hands import Hand


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
    return crossing.leave(*(solution if has_aux else (solution,)))


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
    (hand,) = crossing.enter(matvec, {"b": b})
    body = _solution_and_more if has_aux else _solution
    solution = crossing.apply(
        crossing.function(matvec, _value),
        hand,
        crossing.function(solve, body),
        None if transpose_solve is None else crossing.function(transpose_solve, body),
        symmetric=symmetric,
        has_aux=has_aux,
    )
    return crossing.leave(*(solution if has_aux else (solution,)))


def _value(inside: Inside, x: Hand) -> Any:
    return inside.like(x, inside.call(x))


def _solution(inside: Inside, f: Callable[[Any], Any], x: Hand) -> Any:
    return inside.like(x, inside.call(x, before=(_on_modules(inside, f, x),)))


def _solution_and_more(inside: Inside, f: Callable[[Any], Any], x: Hand) -> Any:
    result = inside.call(x, before=(_on_modules(inside, f, x),))
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(
            f"With `has_aux=True`, a solver of `{inside.terms.title}` returns a pair, what is solved for and more, but "
            f"this one returned a `{type(result).__name__}`:\n"
            "    return solution, None"
        )
    return inside.like(x, result[0]), inside.pack(result[1])


def _on_modules(inside: Inside, f: Callable[[Any], Any], like: Hand) -> Callable[[Any], Any]:
    """A function of hands, as the user calls it."""
    return lambda x: receive((f(inside.like(like, x)),)).arguments.args[0]
