"""Ties through a function: a node that stands for an array computed from other arrays of the model.

A dense kernel of NNX, Linen, Haiku and Keras has the shape (in, out), so it is the transpose of an embedding, and no
identity can tie the two. A `View` in the kernel's place holds the very embedding and the function:

    embed.embedding    w                         one leaf, one gradient, one slot, one tensor on disk
    head.kernel        View(transpose, w)        `.of[0]` is `w`

A view is no array. JAX takes it apart like any node: under `vmap` an array with a note would be mapped along an axis of
`w`, not of the transpose, in silence. So a view refuses every use but these:

- NNX's `kernel[...]` and `kernel.get_value()`, which its layers call;
- Linen's `unbox()`, which Linen calls before a layer gets the parameter;
- `unwrap(model)`, which puts an array in the place of each view.

Printing, listing, loading and saving call no function of a view.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax import tree_util as jtu

from ..core._by_identity import IdentityDict
from ..core._comparison import described
from ..core._errors import SharingMismatchError, ViewError
from ..core._node_types import (
    LIBRARIES,
    PLAIN,
    Library,
    carries_identity,
    node_type_of,
    node_type_of_class,
    node_types_by_class,
    require_registered,
)
from ..core._printing import listed, shown
from ..core._static_values import Static
from ..core._structure import FlatDag, Node, Op, Record, canonical_records
from ..libraries._equinox import name_of
from ..libraries._flax_linen import is_box, partition_spec_of, refuse_in_flax_files, register_as_box, sharding_of
from ..libraries._nnx import is_variable, register_as_data
from ._leaf_notes import note_tied_values
from ._list_ties import text_of_function
from ._policy_and_context import walk_exactly

T = TypeVar("T")


class View:
    """An array computed from other arrays, in the place where a layer has its parameter: `through(*of)`.

    A pytree node. Its leaves are the arrays that it is computed from, which are also elsewhere in the model. So they
    are tied: one leaf, one gradient, which sums over all uses, one optimizer slot, one tensor in a file. To put a view
    in the place of a parameter, call `sharedtree.tie`.

    Layers of Flax NNX and Flax Linen read a view as they read a parameter. Elsewhere `sharedtree.unwrap` puts an array
    in the place of each view. All other uses, such as arithmetic, raise `ViewError`.

    Args:
        through: takes the arrays and returns one array. A named function, or a `functools.partial` of one, made once: a
            function that is made anew has every call of a transform compiled anew, and no file can name a lambda.
        of: arrays, variables of Flax NNX, boxed parameters of Flax Linen, or other views.

    Attributes:
        through: the function.
        of: what it takes, as a tuple. Its paths end in `.of[0]`, `.of[1]`.

    Raises:
        TypeError: if `through` is no function, or one of `of` is no array.

    Cost: a view takes no memory. Each use computes the function again; XLA merges equal computations in one program.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.arange(6.0).reshape(2, 3)
        >>> model = {"embed": w, "head": st.View(jnp.transpose, w)}
        >>> st.unwrap(model)["head"].shape
        (3, 2)
        >>> [tie.paths for tie in st.ties(model)]
        [("['embed']", "['head'].of[0]")]

    Limitations: vanilla transforms and optimizers take the view apart and see two arrays, as they do with every tie.
        A gradient has a view in the same place, and reading that as an array gives the function of the gradient.
    """

    __slots__ = ("__weakref__", "of", "through")

    through: Callable[..., Any]
    of: tuple[Any, ...]

    def __init__(self, through: Callable[..., Any], *of: Any) -> None:
        if not callable(through):
            raise TypeError(
                f"`View` takes a function and the arrays that it is called on, not {shown(through)} first:\n"
                "    view = sharedtree.View(jnp.transpose, array)"
            )
        if not of:
            raise TypeError(
                "`View` needs at least one array to compute another one from:\n"
                "    view = sharedtree.View(jnp.transpose, array)"
            )
        for source in of:
            if not is_source(source):
                raise TypeError(
                    f"`View` computes an array from arrays, and {shown(source)} is none. Name the array in it:\n"
                    "    view = sharedtree.View(jnp.transpose, model.embed.weight)"
                )
        self._set(through, of)
        note_tied_values([source for source in of if carries_identity(source)])

    def _set(self, through: Callable[..., Any], of: tuple[Any, ...]) -> None:
        object.__setattr__(self, "through", through)
        object.__setattr__(self, "of", of)
        _introduce_to_libraries()

    @classmethod
    def _unflatten(cls, through: Callable[..., Any], children: Iterable[Any]) -> "View":
        """Makes a view of whatever JAX puts in the place of its child, the tuple of sources."""
        view = object.__new__(cls)
        (of,) = children
        view._set(through, of)
        return view

    def __reduce__(self) -> Any:
        return _unpickle, (self.through, self.of)

    def __repr__(self) -> str:
        of = self.of if type(self.of) is tuple else (self.of,)
        return f"View({', '.join([text_of_function(self.through), *map(_text_of_source, of)])})"

    # --- the doors of libraries ---

    def __getitem__(self, index: Any) -> Any:
        """Computes the array, for `view[...]` only."""
        if index is not ...:
            self._refuse(f"it was indexed with `{shown(index)}`", "    array = view[...]")
        return array_of(self)

    def get_value(self, *, index: Any = ...) -> Any:
        """Computes the array, as `Variable.get_value` of Flax NNX returns the one that it holds."""
        array = array_of(self)
        return array if index is ... or type(index).__name__ == "Missing" else array[index]

    def unbox(self) -> Any:
        """Computes the array, as a box of Flax Linen returns the one that it holds."""
        return array_of(self)

    def replace_boxed(self, val: Any) -> NoReturn:
        """Refuses what Flax Linen would put into a box."""
        self._refuse_assignment("a new value")

    def add_axis(self, index: int, params: Any) -> "View":
        """Returns the view itself: its sources get the axis."""
        return self

    def remove_axis(self, index: int, params: Any) -> "View":
        """Returns the view itself: its sources lose the axis."""
        return self

    def get_partition_spec(self) -> "View":
        """Returns a view of the partition specs of its sources, which a view of arrays takes as a prefix."""
        return self._unflatten(self.through, (tuple([partition_spec_of(source) for source in self.of]),))

    def get_sharding(self, mesh: Any) -> "View":
        """Returns a view of the shardings of its sources, which a view of arrays takes as a prefix."""
        return self._unflatten(self.through, (tuple([sharding_of(source, mesh) for source in self.of]),))

    # --- everything else is refused ---

    # Functions of `jax.numpy` and operators of arrays call this. Those of `jax.lax` do not, and raise JAX's own error.
    def __jax_array__(self) -> NoReturn:
        self._refuse("a function of JAX got it in the place of an array")

    def __array_ufunc__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("a function of NumPy got it in the place of an array")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("it was to be made an array of NumPy")

    def __getattr__(self, name: str) -> NoReturn:
        if name == "set_value":
            self._refuse_assignment("its value")
        if name in View.__slots__:  # of an instance without content, whose text would ask for it again
            raise AttributeError(name)
        self._refuse(f"it was asked for `.{name}`")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        self._refuse_assignment(f"`.{name}`")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        self._refuse_assignment(f"`[{'...' if index is ... else shown(index)}]`")

    def __bool__(self) -> bool:
        # NNX's norms ask `if self.scale`, to learn whether there is one.
        if not self._is_of_nnx:
            self._refuse("it was asked whether it is true")
        return True

    def __eq__(self, other: object) -> Any:
        if isinstance(other, (int, float, complex, np.generic)) or (is_source(other) and not isinstance(other, View)):
            self._refuse("it was compared")
        return True if other is self else NotImplemented

    __hash__ = object.__hash__

    @property
    def _is_of_nnx(self) -> bool:
        return type(self.of) is tuple and any(is_variable(source) for source in self.of)

    def _refuse(self, fact: str, fix: str | None = None) -> NoReturn:
        if fix is None:
            fix = "    model = sharedtree.unwrap(model)"
            if self._is_of_nnx:
                fix += "\nor, in a layer of Flax NNX, read it as NNX's layers read a parameter:\n    array = view[...]"
        raise ViewError(
            f"{self!r} is no array, but {fact}.\n"
            "A view stands for an array that is computed where it is used, and JAX would take it apart into the arrays "
            "that it is computed from. Compute it first, inside the function that is differentiated:\n" + fix
        )

    def _refuse_assignment(self, target: str) -> NoReturn:
        if self._is_of_nnx:
            fix = "    view.of[0][...] = value"
        else:
            fix = "    model = sharedtree.tree.at(lambda m: m.head.kernel.of[0], model, value)"
        raise ViewError(
            f"{self!r} has no value of its own, but {target} was to be set.\n"
            f"It is computed from {'another array' if len(self.of) == 1 else f'{len(self.of)} other arrays'}. Set what "
            f"it is computed from:\n{fix}"
        )


def _refuser(operator: str) -> Callable[..., NoReturn]:
    def refuse(view: View, *_: Any) -> NoReturn:
        view._refuse(f"`{operator}` was applied to it")  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    return refuse


# Name of a method, without its underscores → what calls it.
_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_OPERATORS |= {"matmul": "@", "lshift": "<<", "rshift": ">>", "and": "&", "xor": "^", "or": "|", "divmod": "divmod"}
_OTHERS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neg": "-", "pos": "+", "invert": "~", "contains": "in"}
_OTHERS |= {"index": "operator.index", "trunc": "math.trunc", "floor": "math.floor", "ceil": "math.ceil"}
_OTHERS |= {name: name for name in ("abs", "len", "iter", "int", "float", "complex", "round")}

for _name, _text in _OPERATORS.items():
    setattr(View, f"__{_name}__", _refuser(_text))
    setattr(View, f"__r{_name}__", _refuser(_text))
for _name, _text in _OTHERS.items():
    setattr(View, f"__{_name}__", _refuser(_text))


def _unpickle(through: Callable[..., Any], of: tuple[Any, ...]) -> View:
    return View._unflatten(through, (of,))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


# The public name, under which it is printed and pickled. Files look it up in the package, which imports it lazily.
View.__module__ = __name__.partition(".")[0]
vars(sys.modules[View.__module__])[View.__name__] = View

# The tuple of sources is one child, so that JAX itself writes the paths `.of[0]`, `.of[1]`.
_OF = jtu.GetAttrKey("of")
jtu.register_pytree_with_keys(
    View,
    lambda view: (((_OF, view.of),), view.through),
    View._unflatten,  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    lambda view: ((view.of,), view.through),
)
node_types_by_class[View] = node_type_of_class(View)._replace(convention=None, keys_vary=False, is_view=True)


def _fault_of_function(cls: Any, through: Any) -> str | None:
    """A function by its name, or a partial of one: what a file names is judged, and what it describes would not be."""
    if cls is not View:
        return None
    while type(through) in (functools.partial, jtu.Partial):
        through = through.func
    is_named = callable(through) and node_type_of(through) is None and not isinstance(through, (type, types.MethodType))
    return None if is_named else f"`{name_of(through, type(through).__name__)}` in the place of a function with a name"


LIBRARIES.append(Library("views", fault_of_aux=_fault_of_function))

_introductions: list[Callable[[], bool]] = [
    lambda: register_as_data(View),
    lambda: register_as_box(View),
    lambda: refuse_in_flax_files(View, _refuse_flax_file),
]
"""What libraries are told of views as soon as the program has imported them."""


def _introduce_to_libraries() -> None:
    # Every view comes here, also one that a transform rebuilds: a library may have been imported since the last one.
    for introduce in tuple(_introductions):
        if introduce():
            with contextlib.suppress(ValueError):  # another thread came first, which does no harm
                _introductions.remove(introduce)


def _refuse_flax_file(view: View) -> NoReturn:
    raise ViewError(
        f"{view!r} cannot be written by `flax.serialization`, which knows no ties: it would write an array that is "
        "elsewhere in the model a second time.\nWrite the parameters with their ties:\n"
        "    data = sharedtree.to_bytes(params)\n"
        "or with an array in the place of each view:\n"
        "    data = flax.serialization.to_bytes(sharedtree.unwrap(params))"
    )


# --- what a view stands for -------------------------------------------------------------------------------------------


def is_source(obj: Any) -> bool:
    """Tells whether a view can be computed from an object: an array, or what a library puts around one."""
    return (
        isinstance(obj, View)
        or is_variable(obj)
        or is_box(obj)
        or (node_type_of(obj) is None and carries_identity(obj))
    )


def array_of(view: View, computed: IdentityDict[Any] | None = None, *, is_abstract: bool = False) -> Any:
    """Computes the array that a view stands for.

    Args:
        view: the view. The views that it is computed from are computed first, each once.
        computed: view → its array, as far as computed before. Extended.
        is_abstract: whether shape and dtype suffice, as a `jax.ShapeDtypeStruct`. No array is computed then.

    Raises:
        ViewError: if a source is no array, as in the gradient of a model in which it was not differentiated.
    """
    computed = IdentityDict() if computed is None else computed
    stack = [view]
    while stack:
        current = stack[-1]
        if type(current.of) is not tuple:
            _opened(current.of, current)
        missing = [source for source in current.of if isinstance(source, View) and source not in computed]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        if current not in computed:
            arguments = [
                computed[source] if isinstance(source, View) else _opened(source, view) for source in current.of
            ]
            computed[current] = _called(current.through, arguments, is_abstract=is_abstract)
    return computed[view]


def _called(through: Callable[..., Any], arguments: Sequence[Any], *, is_abstract: bool) -> Any:
    try:
        if is_abstract or any(isinstance(argument, jax.ShapeDtypeStruct) for argument in arguments):
            return jax.eval_shape(through, *arguments)
        return through(*arguments)
    except Exception as error:
        error.add_note(f"This was raised where a `sharedtree.View` called `{text_of_function(through)}` on its arrays.")
        raise


def _opened(source: Any, view: View) -> Any:
    if is_variable(source):
        source = source.get_value()
    elif is_box(source):
        source = source.unbox()
    elif isinstance(source, jax.Ref):
        source = source[...]
    if node_type_of(source) is not None or not carries_identity(source) or source.dtype == jax.dtypes.float0:
        raise ViewError(
            f"{view!r} cannot be computed: in the place of an array it has {shown(source)}.\n"
            "Gradients and filtered trees have `None` for what is left out, and a function of that is no array. Read "
            "the tree's own leaves, each once:\n"
            "    leaves = sharedtree.tree.leaves(tree)"
        )
    return source


def unwrap(tree: T) -> T:
    """Puts the array that it stands for in the place of each view.

    Call it inside the function that is differentiated, so that the gradient flows to the arrays that the views are
    computed from. Layers of Flax NNX and Flax Linen open views themselves.

    Args:
        tree: a model, or any container of modules and arrays; it is not changed.

    Returns:
        The tree with arrays for views. Nodes above a view are new; everything else is the same objects, so state that
        a function changes there is written back as ever. Without views, the very tree.

    Raises:
        ViewError: if a view has no arrays, as in a gradient with `None`.
        CycleError: if an object contains itself.

    Cost: one walk over the nodes, and the function of each view once.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones((2, 3))
        >>> model = {"embed": w, "head": st.View(jnp.transpose, w)}
        >>> def loss(model, x):
        ...     model = st.unwrap(model)
        ...     return jnp.sum(model["embed"][x] @ model["head"])
        >>> gradient = st.grad(loss, policy=st.Policy(containers=True))(model, 0)
        >>> gradient["embed"] is gradient["head"].of[0]
        True
    """
    require_registered(tree)
    read = walk_exactly(tree)
    if not any(type(op) is Node and op.type.is_view for op, _ in read.records):
        return tree
    replaced: dict[int, Any] = {}
    computed: IdentityDict[Any] = IdentityDict()
    for number, (op, children) in enumerate(read.records):
        if type(op) is not Node:
            continue
        if op.type.is_view:
            replaced[number] = array_of(read.objects[number], computed)
        elif any(child in replaced for child in children):
            parts = [replaced[child] if child in replaced else read.objects[child] for child in children]
            replaced[number] = op.type.put_together(op.aux.thaw(), parts)
    return replaced.get(read.root, tree)


# --- making one -------------------------------------------------------------------------------------------------------


def with_view(
    read: FlatDag, sources: Sequence[int], target: int, through: Callable[..., Any]
) -> tuple[tuple[Record, ...], dict[Any, int]]:
    """Puts a view in the place of a record, wherever it stands.

    Args:
        read: the tree, with its objects.
        sources: the records that the view is computed from.
        target: the record that it replaces.
        through: the function.

    Returns:
        The new records, and old number → new number.

    Raises:
        SharingMismatchError: if the view would not have the shape and dtype of the target, if one of the records is no
            array, if the target is a view, or if a source is computed from the target.
    """
    _require_arrays(read, [*sources, target])
    if isinstance(read.objects[target], View):
        path = read.text(target)
        raise SharingMismatchError(
            f"`{path}` is a view already: {read.objects[target]!r}. One place has one value.\n"
            "Put an array in its place first:\n"
            f"    model = sharedtree.untie(model, lambda m: m{path})\n"
            f"    model = sharedtree.tree.at(lambda m: m{path}, model, array)",
            (path,),
        )
    _require_no_cycle(read, sources, target)
    _require_shape(read, sources, target, through)
    view_key, of_key = "view", "of"
    view_node = Node(node_types_by_class[View], Static(through, is_exact=True), (_OF,))
    of_node = Node(PLAIN[tuple], Static(None), tuple([jtu.SequenceKey(i) for i in range(len(sources))]))

    def expand(key: int | str) -> tuple[Op, Sequence[int | str]]:
        if key == view_key:
            return view_node, [of_key]
        if key == of_key:
            return of_node, sources
        assert isinstance(key, int)
        op, children = read.records[key]
        return op, [view_key if child == target else child for child in children]

    root: int | str = read.root
    return canonical_records(root, expand)


def _require_arrays(read: FlatDag, numbers: Sequence[int]) -> None:
    for number in numbers:
        if is_source(read.objects[number]):
            continue
        path = read.text(number)
        raise SharingMismatchError(
            f"`{path or 'the whole tree'}` is {shown(read.objects[number])}, and a tie through a function is between "
            "arrays.\nName the arrays in it:\n"
            "    model = sharedtree.tie(model, lambda m: (m.embed.weight, m.head.weight), through=jnp.transpose)",
            (path,),
        )


def _require_no_cycle(read: FlatDag, sources: Sequence[int], target: int) -> None:
    for source in sources:
        if target in read.below(source).reached:
            paths = read.text(source), read.text(target)
            if source == target:
                fact = f"`{paths[1]}` would be computed from itself: both paths lead to one array."
            else:
                fact = f"`{paths[0]}` is computed from `{paths[1]}`, which would be computed from it."
            raise SharingMismatchError(
                f"{fact}\nA tie through a function needs an array that is no part of what it replaces. Name another "
                "array, or give the target one of its own first:\n"
                "    model = sharedtree.untie(model)",
                paths,
            )


def _require_shape(read: FlatDag, sources: Sequence[int], target: int, through: Callable[..., Any]) -> None:
    wanted = abstract_array(read.objects[target])
    view = View(through, *[read.objects[source] for source in sources])
    result = array_of(view, is_abstract=True)
    is_one = node_type_of(result) is None and carries_identity(result)
    if is_one and (result.shape, result.dtype) == (wanted.shape, wanted.dtype):
        return
    paths = [read.text(number) for number in (*sources, target)]
    of = ", ".join([f"`{path}`" for path in paths[:-1]])
    what = described(result) if is_one else shown(result)
    if is_one and result.shape == wanted.shape:
        fix = (
            "Cast in a function of your own:\n"
            "    def through(*arrays):\n"
            f"        return {text_of_function(through)}(*arrays).astype(jnp.{np.dtype(wanted.dtype).name})"
        )
    else:
        fix = (
            "Take a function that returns this shape, such as, for the last two axes of stacked layers,\n"
            "    through = jnp.matrix_transpose"
        )
    raise SharingMismatchError(
        f"`{paths[-1]}` cannot be a view of {of} through `{text_of_function(through)}`: that returns {what}, and "
        f"`{paths[-1]}` is {described(wanted)}.\nA view must have the shape and dtype that the layer expects. {fix}",
        paths,
    )


def abstract_array(source: Any) -> Any:
    """Describes what a source or target holds, without a computation."""
    if isinstance(source, View):
        return array_of(source, is_abstract=True)
    return source.get_value() if is_variable(source) else source.unbox() if is_box(source) else source


def add_note_of_views(error: Exception, tree: FlatDag) -> None:
    """Notes the views among the arguments of a function in an error of JAX's that is about one of them.

    Args:
        error: what the function raised.
        tree: its arguments.
    """
    if isinstance(error, ViewError) or not any(text in str(error) for text in ("sharedtree.View", "__jax_array__")):
        return
    views = [number for number, (op, _) in enumerate(tree.records) if type(op) is Node and op.type.is_view]
    if views:
        paths = [tree.text(number) for number in views]
        error.add_note(
            f"{listed(paths)} {'is a view' if len(views) == 1 else 'are views'}, and a view is no array. Compute the "
            "array first, inside the function that is differentiated:\n"
            "    model = sharedtree.unwrap(model)"
        )


# --- in words ---------------------------------------------------------------------------------------------------------


def _text_of_source(source: Any) -> str:
    if isinstance(source, View):  # of which there may be a tower, each with two of the one below
        return f"View({text_of_function(source.through)}, ...)"
    if is_variable(source) or is_box(source):
        return f"{type(source).__name__}"
    # What stands in the place of an array while JAX or a library works on the tree is named by its class.
    is_array = node_type_of(source) is None and carries_identity(source)
    return f"{source.dtype}{list(source.shape)}" if is_array else type(source).__name__
