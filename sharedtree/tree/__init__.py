"""`jax.tree` with ties kept: the same names and signatures, and each shared node once. Also `Dag` and states.

The functions take trees and functions of leaves, and return trees. They never change a tree in place, and never call a
transform. All of the argument counts as inside a module: tied arrays in a plain dict of parameters are one leaf. The
leaves are the *traced* ones. Static leaves (activation functions, strings, Python numbers in Equinox modules) are part
of the structure. `at`, `filter`, `partition`, `combine` and `equal` are Equinox's, with ties kept. `norm` and `cast`
look at the floating-point leaves.
"""

from ..core._structure import Structure as Structure
from ._floating_leaves import cast as cast, norm as norm
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
from ._replace_nodes import at as at

Structure.__module__ = __name__  # under which it is printed and documented
