"""`jax.tree`, sharing-aware: the same names and signatures, each shared node once.

All of the argument counts as inside a module: tied arrays in a plain dict of parameters are one leaf. The leaves are
the *traced* ones; static leaves (activation functions, strings, Python numbers in Equinox modules) ride along in the
structure. `at`, `filter`, `partition`, `combine` and `equal` are Equinox's, with ties kept. Trees and functions of
leaves come in, trees go out; nothing here changes a tree in place or calls a transform.
"""

from ..core._structure import Structure as Structure
from ._at import at as at
from ._jax_tree import (
    equal as equal,
    flatten as flatten,
    leaves as leaves,
    leaves_with_path as leaves_with_path,
    map as map,  # noqa: A004
    map_with_path as map_with_path,
    structure as structure,
    unflatten as unflatten,
)
from ._partition import combine as combine, filter as filter, partition as partition  # noqa: A004

Structure.__module__ = __name__  # under which it is printed and documented
