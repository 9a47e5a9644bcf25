"""Makes the description of a live model from its flat DAG: the records and objects that every transform reads, too."""

import functools
import numbers
import types
from collections.abc import Iterator, MappingView
from typing import Any

import jax
import numpy as np
from jax import tree_util as jtu

from ..core._errors import UnregisteredTypeError
from ..core._node_types import LIBRARIES, carries_identity, node_type_of
from ..core._printing import printable
from ..core._structure import LEAF, FlatDag, Node, roles_in
from ..ties._list_ties import is_inexact, nbytes_of, read_tree, sources_of_view, text_of_function
from ..tree._dag import Dag
from ._description import Description, Edge, Part, Use, described

_LIBRARY_ENTRIES = frozenset[str]().union(*[library.attributes.own_entries for library in LIBRARIES])
"""Names under which libraries keep entries of their own in an instance. Such an entry is no part of the model."""

# The usual steps, made once: a list of a thousand layers needs no call of `keystr`.
_INDEX_STEPS = [f"[{i}]" for i in range(1_000)]


def description_of(tree: Any) -> Description:
    """Makes the description of a model. None, and a `Dag` of a static value, have a description of one empty part.

    Args:
        tree: a module, or any container of modules and arrays. A `Dag` is described as the model that it holds.

    Raises:
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` is no pytree.
    """
    if isinstance(tree, Dag):
        # A Dag has walked its model already.
        flat_dag = FlatDag.of_leaves(tree.structure, jtu.tree_leaves(tree))
        return described(_parts(flat_dag), flat_dag.root, is_none=tree.tree is None)
    if node_type_of(tree) is None and (not hasattr(tree, "dtype") or isinstance(tree, type | types.ModuleType)):
        raise _no_tree(tree)
    flat_dag = read_tree(tree)
    parts = _parts(flat_dag)
    # An array of texts or of objects, for instance, and the series of other libraries.
    if parts[flat_dag.root] is None and tree is not None:
        raise _no_tree(tree)
    return described(parts, flat_dag.root, is_none=tree is None)


def _no_tree(tree: Any) -> UnregisteredTypeError:
    """Returns the error for an object that is neither a pytree nor an array that JAX knows.

    The error says what to pass for a class, a file, a function, a number, an iterator and any other object.
    """
    is_class = isinstance(tree, type)
    class_name = printable(type(tree).__name__)
    name = printable(getattr(tree, "__name__", class_name)) if is_class else class_name
    if is_class:
        advice = f"Make a model of it first:\n    sharedtree.summary({name}(...))"
    elif isinstance(tree, str | bytes) or hasattr(tree, "__fspath__"):
        advice = (
            "To look at a file, use the command line, `sharedtree show FILE`, or load it first:\n"
            "    sharedtree.summary(sharedtree.load(path))"
        )
    elif hasattr(tree, "dtype"):
        advice = f"Its dtype is `{printable(str(tree.dtype))}`. Pass a model, or an array of numbers."
    elif isinstance(tree, numbers.Number):
        advice = "Pass a model, or an array."
    elif isinstance(tree, set | frozenset | range | Iterator | MappingView):
        advice = "Pass a list of models or arrays:\n    sharedtree.summary(list(tree))"
    elif isinstance(tree, _FUNCTIONS) or hasattr(tree, "__wrapped__"):
        advice = "Pass the model or the parameters that it uses."
    elif isinstance(tree, types.ModuleType):
        advice = "Pass a model."
    else:
        advice = (
            "Pass a model, or register its class:\n"
            f"    jax.tree_util.register_pytree_node({type(tree).__name__}, flatten, unflatten)"
        )
    article = "An" if name[:1].lower() in tuple("aeio") else "A"
    subject = f"The class `{name}`" if is_class else f"{article} `{name}`"
    return UnregisteredTypeError(f"{subject} is no pytree, so there is nothing to show.\n{advice}", ("",))


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


def _parts(flat_dag: FlatDag) -> list[Part | None]:
    """Returns one part for each record, at the record's number. None for static values and `None`."""
    parts: list[Part | None] = []
    roles = roles_in(flat_dag)
    for number, (op, children) in enumerate(flat_dag.records):
        if op is LEAF:
            part = _leaf(flat_dag.leaves[number])
            # State, such as the running mean of a batch norm, is not trained.
            role = roles.of_leaves.get(number)
            parts.append(part._replace(use=role) if role == "state" or role == "optimizer state" else part)
        elif type(op) is not Node or op.type.cls is type(None):
            parts.append(None)
        elif op.type.is_view:
            # The aux data of a view is its function, kept as a static value, which `peek` returns.
            sources = sources_of_view(flat_dag, number)
            steps = tuple([f".of[{i}]" for i in range(len(sources))])
            through = text_of_function(op.aux.peek())
            parts.append(Part("module", printable(op.type.cls.__name__), tuple(sources), steps, through=through))
        else:
            parts.append(_node(op, children, parts, flat_dag))
    return parts


def _node(op: Node, children: tuple[int, ...], parts: list[Part | None], flat_dag: FlatDag) -> Part:
    """Returns the part of a module or container.

    Args:
        op: node type and keys of the record.
        children: the numbers of its children.
        parts: the parts of all earlier records, also of the children.
        flat_dag: the flat DAG of the model.
    """
    edges: list[Edge] = []
    for key, child in zip(op.keys, children, strict=True):
        if parts[child] is not None and getattr(key, "name", None) not in _LIBRARY_ENTRIES:
            edges.append(Edge(child, _step(key)))
    name = printable(op.type.cls.__name__)
    # A variable of Flax NNX that holds one array is shown as that array, under the variable's class.
    if op.type.convention == "variable" and len(edges) == 1 and flat_dag.records[edges[0].child][0] is LEAF:
        array_part = parts[edges[0].child]
        # A reference is an object of its own, which other variables may hold too.
        if array_part is not None and not isinstance(flat_dag.leaves[edges[0].child], jax.Ref):
            return array_part._replace(name=name, has_identity=True)
    return Part(
        "container" if op.type.is_plain else "module",
        name,
        tuple([edge.child for edge in edges]),
        tuple([edge.step for edge in edges]),
        has_identity=op.type.carries_identity,
    )


def _leaf(leaf: Any) -> Part:
    """Returns the part of a traced leaf: an array, a reference, an abstract array or a number."""
    if not carries_identity(leaf):
        # Python and NumPy scalars. A Python scalar is shown by its class, such as `float`, since it has no dtype.
        array = np.asarray(leaf)
        dtype = str(array.dtype) if isinstance(leaf, np.generic) else type(leaf).__name__
        return Part(
            "number",
            "",
            shape=(),
            dtype=dtype,
            numbers=1,
            use=_use_of(leaf),
            nbytes=array.nbytes,
            has_identity=False,
        )
    shape = tuple(leaf.shape)
    # The default integer of NumPy has 32 bits on some platforms, which is too small for the size of a large array.
    numbers = int(np.prod(shape, dtype=np.int64))
    name = "NumPy" if isinstance(leaf, np.ndarray) else ""
    name = "abstract" if isinstance(leaf, jax.ShapeDtypeStruct) else name
    name = "Ref" if isinstance(leaf, jax.Ref) else name
    dtype = printable(str(leaf.dtype))
    return Part("array", name, shape=shape, dtype=dtype, numbers=numbers, use=_use_of(leaf), nbytes=nbytes_of(leaf))


def _use_of(leaf: Any) -> Use:
    """Returns the use of the numbers in a leaf that is no state."""
    return "parameter" if is_inexact(leaf) else "other"


def _step(key: Any) -> str:
    """Returns the text of a key of JAX, such as `.weight`, with escapes for characters that a terminal obeys."""
    if type(key) is jtu.SequenceKey and key.idx < len(_INDEX_STEPS):
        return _INDEX_STEPS[key.idx]
    return printable(jtu.keystr((key,)))
