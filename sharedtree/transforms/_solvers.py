"""`jax.lax.custom_root` and `custom_linear_solve`.

What is solved for has one structure: a guess goes in, and what each function returns in its place is fitted to it. The
solvers are given functions by JAX, on hands, and hand the user functions on modules:

    solve(f, Pair(w, w))        JAX calls    solve(f', Hand([w])),  where  f'(Hand([w])) → Hand([r])
"""

from collections.abc import Callable
from typing import Any

from .._arguments import LeafPath
from ._crossing import Crossing, argument, part_of
from ._hands import Hand, whole
from ._inside import Inside, receive
from ._meet import Words, fitted


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
    return _left(crossing, solution, has_aux)


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
    return _left(crossing, solution, has_aux)


def _left(crossing: Crossing, solution: Any, has_aux: bool) -> Any:
    hand, *aux = solution if has_aux else (solution,)
    return crossing.leave(whole(hand.leaves, part_of(hand.structure, 0)[0]), *aux)


def _value(inside: Inside, x: Hand) -> Any:
    return _like(inside, inside.call(x), x)


def _solution(inside: Inside, f: Callable[[Any], Any], x: Hand) -> Any:
    return _like(inside, inside.call(x, before=(_on_modules(inside, f, x),)), x)


def _solution_and_more(inside: Inside, f: Callable[[Any], Any], x: Hand) -> Any:
    result = inside.call(x, before=(_on_modules(inside, f, x),))
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(
            f"With `has_aux=True`, a solver of `{inside.terms.title}` returns a pair, what is solved for and more, but "
            f"this one returned a `{type(result).__name__}`:\n"
            "    return solution, None"
        )
    return _like(inside, result[0], x), inside.pack(result[1])


def _on_modules(inside: Inside, f: Callable[[Any], Any], like: Hand) -> Callable[[Any], Any]:
    """A function of hands, as the user calls it."""
    return lambda x: receive((f(_like(inside, x, like)),)).arguments.args[0]


def _like(inside: Inside, tree: Any, like: Hand) -> Hand:
    """A tree in the hand of what is solved for.

    Raises:
        SharingMismatchError: if it lacks a tie, or differs in shape or static values.
    """
    before = argument(receive((like,)).tree, 0)
    words = Words(inside.terms.title, "in what is solved for", "in what stands in its place")
    return Hand(fitted(before, inside.walked(tree), words, (LeafPath(inside.terms.names.text(0)),)), like.deal)
