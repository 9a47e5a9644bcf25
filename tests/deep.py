"""Models that are nested deeply, and a place where it does no harm if that goes wrong."""

import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest


class Link(eqx.Module):
    scale: jax.Array
    next: object


def link(scale, next):
    """A Link, past Equinox's constructor, which flattens its arguments and so meets Python 3.11's recursion limit."""
    m = object.__new__(Link)
    object.__setattr__(m, "scale", scale)
    object.__setattr__(m, "next", next)
    return m


def chain(depth, scale=None, last=None):
    """So many modules in one another, with one scale for all but the innermost one, which may have its own."""
    scale = jnp.array(1.0) if scale is None else scale
    m = link(scale if last is None else last, None)
    for _ in range(depth - 1):
        m = link(scale, m)
    return m


def free(m):
    """Takes a chain apart: what is freed as a whole is freed by recursion."""
    while m is not None:
        rest = m.next
        object.__setattr__(m, "next", None)
        m = rest


def lists(depth, inner):
    """So many lists in one another."""
    for _ in range(depth):
        inner = [inner]
    return inner


def room():
    """How many steps of recursion this thread has left."""

    def deeper(n):
        try:
            return deeper(n + 1)
        except RecursionError:
            return n

    return deeper(0)


def in_a_thread(function, seconds=60):
    """What a function returns, from a thread of its own: fails in plain words and in time.

    On Python 3.11 a tree that is too deep for JAX costs the thread in which it was flattened its recursion limit for
    ever, and pytest cannot print a traceback that holds a model of this depth.
    """
    outcome = []

    def work():
        try:
            outcome.append((None, function()))
        except BaseException as error:  # noqa: BLE001
            outcome.append((type(error).__name__, None))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    failure, result = outcome[0] if outcome else (f"not done in {seconds} seconds", None)
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return result
