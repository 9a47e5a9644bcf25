"""Ties through a function: a node that stands for an array computed from other arrays of the model.

A dense kernel of NNX, Linen, Haiku and Keras has the shape (in, out), so it is the transpose of an embedding, and no
identity can tie the two. A `View` in the kernel's place holds the very embedding and the function:

    embed.embedding    w                         one leaf, one gradient, one slot, one tensor on disk
    head.kernel        View(transpose, w)        `.of[0]` is `w`

The arrays that a view is computed from are its *sources*. A source can also be another view, or the object in which a
library holds an array: a variable of Flax NNX, or a *box*, the object that Flax Linen puts around a parameter.

A view is no array. JAX takes it apart like any node, so `vmap` maps along an axis of `w`. If a view could be used as an
array, the user would expect an axis of the transpose, and get wrong results without an error. So a view can be computed
in these ways only, and every other use raises `ViewError`:

- NNX's `kernel[...]` and `kernel.get_value()`, which its layers call;
- Linen's `unbox()`, which Linen calls before a layer gets the parameter;
- `unwrap(model)`, which puts an array in the place of each view.

Printing, listing, loading and saving do not compute a view.
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
from ..core._comparison import short_text
from ..core._errors import SharingMismatchError, ViewError
from ..core._node_types import (
    LIBRARIES,
    PLAIN,
    Library,
    carries_identity,
    name_in,
    node_type_of,
    node_type_of_class,
    node_types_by_class,
    require_registered,
)
from ..core._printing import listed, shown, where_argument
from ..core._static_values import Static
from ..core._structure import FlatDag, Node, Op, Record, canonical_records
from ..libraries._equinox import name_of
from ..libraries._flax_linen import is_box, partition_spec_of, refuse_in_flax_files, register_as_box, sharding_of
from ..libraries._nnx import is_hijax_variable, is_variable, register_as_data, wraps_linen
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
        TypeError: if `through` is no function, or one of `of` is no array or is a hijax variable of Flax NNX.

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
        In a tree of labels, such as `in_axes`, shardings or a mask of optax, None for a view is the label of its array.
        Any other label counts as at each place of a tie, so one that differs from the array's is a conflict.
    """

    __slots__ = ("__weakref__", "of", "through")

    through: Callable[..., Any]
    of: tuple[Any, ...]

    def __init__(self, through: Callable[..., Any], *of: Any) -> None:
        """Checks the arguments, and notes the sources as tied."""
        if not callable(through):
            raise TypeError(
                f"The first argument of `View` must be a function, not {short_text(through)}. The arrays that it is "
                "called on follow:\n"
                "    view = sharedtree.View(jnp.transpose, array)"
            )
        if not of:
            raise TypeError(
                "`View` needs at least one array to compute another one from:\n"
                "    view = sharedtree.View(jnp.transpose, array)"
            )
        for source in of:
            # An array, a variable, a box or a view.
            if not is_source(source):
                raise TypeError(
                    f"`View` was given {shown(source)}, which is not an array. Pass an array, such as one in it:\n"
                    "    view = sharedtree.View(jnp.transpose, model.embed.weight)"
                )
            if is_hijax_variable(source):
                raise TypeError(
                    "A hijax variable of Flax NNX cannot be in a `View`: it is a value to transforms, so the one in "
                    "the view and the one elsewhere would be two.\n"
                    "Make the variable without hijax:\n"
                    "    variable = nnx.Param(value, hijax=False)"
                )
        self._set(through, of)
        # Outside modules, transforms take arrays for values. A transform that sees a noted array twice warns of it.
        note_tied_values([source for source in of if carries_identity(source)])

    def _set(self, through: Callable[..., Any], of: tuple[Any, ...]) -> None:
        """Sets the two attributes, which `__setattr__` refuses. Makes the class known to the libraries in use."""
        object.__setattr__(self, "through", through)
        object.__setattr__(self, "of", of)
        _introduce_to_libraries()

    @classmethod
    def _unflatten(cls, through: Callable[..., Any], children: Iterable[Any]) -> "View":
        """Makes a view from its function and its one child, without the checks of `__init__`.

        The child is the tuple of sources. While JAX or a library works on a tree, it can be any other object.
        """
        view = object.__new__(cls)
        (of,) = children
        view._set(through, of)
        return view

    def __reduce__(self) -> Any:
        return _unpickle, (self.through, self.of)

    def __repr__(self) -> str:
        sources = self.of if type(self.of) is tuple else (self.of,)
        return f"View({', '.join([text_of_function(self.through), *map(_text_of_source, sources)])})"

    # --- methods that layers of Flax NNX and Flax Linen call ---

    def __getitem__(self, index: Any) -> Any:
        """Computes the array if the index is `...`. Refuses every other index."""
        if index is not ...:
            self._refuse(f"it was indexed with `{shown(index)}`", "    array = view[...]")
        return array_of(self)

    def get_value(self, *, index: Any = ...) -> Any:
        """Computes the array, or the part of it at an index. A variable of Flax NNX has the same method."""
        array = array_of(self)
        # NNX passes an instance of its class `Missing` for no index.
        is_whole = index is ... or type(index).__name__ == "Missing"
        return array if is_whole else array[index]

    def unbox(self) -> Any:
        """Computes the array. Flax Linen calls this method of each box before a layer gets the parameter."""
        return array_of(self)

    def replace_boxed(self, val: Any) -> NoReturn:
        """Raises `ViewError`. Flax Linen calls this method of a box to put a new value into it."""
        self._refuse_assignment("a new value")

    def add_axis(self, index: int, params: Any) -> "View":
        """Returns the view itself. Linen's `vmap` calls this method of each box, so the sources get the axis."""
        return self

    def remove_axis(self, index: int, params: Any) -> "View":
        """Returns the view itself. Like `add_axis`, it is called for each box, so the sources lose the axis."""
        return self

    def get_partition_spec(self) -> "View":
        """Returns a view with the partition specs of its sources in their places.

        JAX takes the result as a prefix of this view, because both are nodes of one class with one function.
        """
        return self._unflatten(self.through, (tuple([partition_spec_of(source) for source in self.of]),))

    def get_sharding(self, mesh: Any) -> "View":
        """Returns a view with the shardings of its sources in their places, which JAX takes as a prefix of this one."""
        return self._unflatten(self.through, (tuple([sharding_of(source, mesh) for source in self.of]),))

    # --- all other uses, which are refused ---

    # Functions of `jax.numpy` and operators of arrays call this. Those of `jax.lax` do not, and raise JAX's own error.
    def __jax_array__(self) -> NoReturn:
        self._refuse("a function of JAX got it in the place of an array")

    def __array_ufunc__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("a function of NumPy got it in the place of an array")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("it was to be made an array of NumPy")

    # Python calls this only for attributes that do not exist.
    def __getattr__(self, name: str) -> NoReturn:
        if name == "set_value":
            self._refuse_assignment("its value")
        # An instance that `object.__new__` has just made lacks these. `_refuse` prints it, so it would ask again.
        if name in View.__slots__:
            raise AttributeError(name)
        self._refuse(f"it was asked for `.{name}`")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        self._refuse_assignment(f"`.{name}`")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        self._refuse_assignment(f"`[{'...' if index is ... else shown(index)}]`")

    def __bool__(self) -> bool:
        # NNX's norms test `if self.scale`, because the scale is None if they have none.
        if not self._is_of_nnx:
            self._refuse("it was asked whether it is true")
        return True

    def __eq__(self, value: object) -> Any:
        """Refuses numbers and arrays, with which an array would be compared by elements. Else compares by identity."""
        if isinstance(value, (int, float, complex, np.generic)) or (is_source(value) and not isinstance(value, View)):
            self._refuse("it was compared")
        return True if value is self else NotImplemented

    __hash__ = object.__hash__

    @property
    def _is_of_nnx(self) -> bool:
        """True if the view is computed from a variable of Flax NNX, so that a layer of NNX reads it."""
        return type(self.of) is tuple and any(is_variable(source) for source in self.of)

    def _refuse(self, fact: str, fix: str | None = None) -> NoReturn:
        """Raises the error for a use that needs an array.

        Args:
            fact: says how the view was used, for example "it was compared".
            fix: lines of code for the message. None for `unwrap`.
        """
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
        """Raises the error for a change of the view.

        Args:
            target: what was to be set, such as "`.through`".
        """
        if self._is_of_nnx:
            fix = "    view.of[0][...] = value"
        else:
            fix = "    model = sharedtree.tree.at(lambda m: m.head.kernel.of[0], model, value)"
        raise ViewError(
            f"{self!r} has no value of its own, so {target} cannot be set.\n"
            f"It is computed from {'another array' if len(self.of) == 1 else f'{len(self.of)} other arrays'}. Set "
            "that instead:\n"
            f"{fix}"
        )


def _refusing_method(operator: str) -> Callable[..., NoReturn]:
    """Makes a special method of `View`. The method raises `ViewError`.

    Args:
        operator: the operator or function for which Python calls the method, such as `+`.
    """

    def refuse(view: View, *_: Any) -> NoReturn:
        view._refuse(f"`{operator}` was applied to it")  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    return refuse


# Name of a special method without its underscores → the operator or function for which Python calls it. Operators of
# the first dict also have a reflected method, which Python calls on the right operand: `__radd__` for `array + view`.
_REFLECTED = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_REFLECTED |= {"matmul": "@", "lshift": "<<", "rshift": ">>", "and": "&", "xor": "^", "or": "|", "divmod": "divmod"}
_UNREFLECTED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neg": "-", "pos": "+", "invert": "~", "contains": "in"}
_UNREFLECTED |= {"index": "operator.index", "trunc": "math.trunc", "floor": "math.floor", "ceil": "math.ceil"}
_UNREFLECTED |= {function: function for function in ("abs", "len", "iter", "int", "float", "complex", "round")}

for _method, _operator in _REFLECTED.items():
    setattr(View, f"__{_method}__", _refusing_method(_operator))
    setattr(View, f"__r{_method}__", _refusing_method(_operator))
for _method, _operator in _UNREFLECTED.items():
    setattr(View, f"__{_method}__", _refusing_method(_operator))


def _unpickle(through: Callable[..., Any], of: tuple[Any, ...]) -> View:
    """Makes a view from its attributes. Pickles name this function."""
    return View._unflatten(through, (of,))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


# Users see `sharedtree.View` in printed text and in pickles. Code that reads a pickle or a file looks up that name in
# the package, which imports its public names lazily. So the class is put there now.
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
# Without a convention, the convention of the module around the view decides which of its leaves are traced.
node_types_by_class[View] = node_type_of_class(View)._replace(convention=None, keys_vary=False, is_view=True)


def _fault_of_function(cls: Any, through: Any) -> str | None:
    """Returns the reason why no file may contain a view with this function. None if a file may.

    A file may contain a function that it names, or a partial of one: reading checks the name against an allow-list. A
    callable object or a bound method would be described by its parts, and so escape that check. A class is no function.

    Args:
        cls: class of the node that is to be written or read. All classes but `View` are left to other rules.
        through: auxiliary data of the node. For a view this is its function.
    """
    if cls is not View:
        return None
    while type(through) in (functools.partial, jtu.Partial):
        through = through.func
    is_named = callable(through) and node_type_of(through) is None and not isinstance(through, (type, types.MethodType))
    return None if is_named else f"`{name_of(through, type(through).__name__)}` in the place of a function with a name"


# Writing and reading of files ask every entry of `LIBRARIES`.
LIBRARIES.append(Library("views", fault_of_aux=_fault_of_function))

_introductions: list[Callable[[], bool]] = [
    lambda: register_as_data(View),
    lambda: register_as_box(View),
    lambda: refuse_in_flax_files(View, _refuse_flax_file),
]
"""Functions that make the class known to a library. They return False if the program has not imported it yet."""


def _introduce_to_libraries() -> None:
    """Makes the class known to each library that was imported since the last call.

    It is called for every new view, including those that transforms rebuild, since the user can import a library later.
    """
    for introduce in tuple(_introductions):
        if introduce():
            # Another thread may have removed the function already. A second introduction changes nothing.
            with contextlib.suppress(ValueError):
                _introductions.remove(introduce)


def _refuse_flax_file(view: View) -> NoReturn:
    """Raises the error for a view that `flax.serialization` was to write."""
    raise ViewError(
        f"{view!r} cannot be written by `flax.serialization`, which knows no ties: it would write an array that is "
        "elsewhere in the model a second time.\nWrite the parameters with their ties:\n"
        "    data = sharedtree.to_bytes(params)\n"
        "or with an array in the place of each view:\n"
        "    data = flax.serialization.to_bytes(sharedtree.unwrap(params))"
    )


# --- computing views --------------------------------------------------------------------------------------------------


def is_source(obj: Any) -> bool:
    """Returns True for an object that a view can be computed from: an array, a variable, a box, or another view."""
    return (
        isinstance(obj, View)
        or is_variable(obj)
        or is_box(obj)
        or (node_type_of(obj) is None and carries_identity(obj))
    )


def array_of(view: View, computed: IdentityDict[Any] | None = None, *, is_abstract: bool = False) -> Any:
    """Computes the array of a view.

    Args:
        view: the view. If other views are among its sources, these are computed first, each once.
        computed: view → its array, for the views that are computed already. New arrays are added.
        is_abstract: True to compute only the shape and dtype, as a `jax.ShapeDtypeStruct`.

    Raises:
        ViewError: if a source is no array. For example, a gradient has None for a source that was not differentiated.
    """
    computed = IdentityDict() if computed is None else computed
    # A stack in place of a recursion, since views of views can be nested deeper than Python's recursion limit.
    stack = [view]
    while stack:
        current = stack[-1]
        # JAX or a library has put one object in the place of the tuple of sources. An array would not do either: to
        # iterate over it gives its rows, and these are no sources.
        if type(current.of) is not tuple:
            raise _no_arrays_error(current, current.of)
        uncomputed = [source for source in current.of if isinstance(source, View) and source not in computed]
        if uncomputed:
            stack.extend(uncomputed)
            continue
        stack.pop()
        # A view that is a source of two views is on the stack twice.
        if current not in computed:
            arguments = [
                computed[source] if isinstance(source, View) else _array_in(source, view) for source in current.of
            ]
            computed[current] = _call(current.through, arguments, is_abstract=is_abstract)
    return computed[view]


def _call(through: Callable[..., Any], arguments: Sequence[Any], *, is_abstract: bool) -> Any:
    """Calls the function of a view on arrays. Errors get a note that names the function.

    Returns:
        The array. A `jax.ShapeDtypeStruct` if `is_abstract` is True or one of the arguments is one.
    """
    try:
        if is_abstract or any(isinstance(argument, jax.ShapeDtypeStruct) for argument in arguments):
            return jax.eval_shape(through, *arguments)
        return through(*arguments)
    except Exception as error:
        error.add_note(f"This was raised where a `sharedtree.View` called `{text_of_function(through)}` on its arrays.")
        raise


def _array_in(source: Any, view: View) -> Any:
    """Returns the array in a variable, a box or a reference. An array itself is returned unchanged.

    Args:
        source: a source, but not a view.
        view: the view, for the message.

    Raises:
        ViewError: if there is no array, or one of float0, the dtype of gradients of integers.
    """
    if is_variable(source):
        source = source.get_value()
    elif is_box(source):
        source = source.unbox()
    elif isinstance(source, jax.Ref):
        source = source[...]
    if node_type_of(source) is not None or not carries_identity(source) or source.dtype == jax.dtypes.float0:
        raise _no_arrays_error(view, source)
    return source


def _no_arrays_error(view: View, value: Any) -> ViewError:
    """Makes the error for a view that cannot be computed, because something else is in the place of an array.

    Args:
        view: the view.
        value: what is in the place of one of its sources, or of all of them.
    """
    return ViewError(
        f"{view!r} cannot be computed, because it has {shown(value)} in the place of "
        f"{'an array' if type(view.of) is tuple else 'its arrays'}.\n"
        "Gradients and filtered trees have `None` for leaves that are left out. Read the leaves that are there, each "
        "once:\n"
        "    leaves = sharedtree.tree.leaves(tree)"
    )


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
    flat = walk_exactly(tree)
    if not any(type(op) is Node and op.type.is_view for op, _ in flat.records):
        return tree
    # Number of a view, or of a node above a view → the new object.
    replaced: dict[int, Any] = {}
    computed: IdentityDict[Any] = IdentityDict()
    # Children come before their parents.
    for number, (op, children) in enumerate(flat.records):
        if type(op) is not Node:
            continue
        if op.type.is_view:
            replaced[number] = array_of(flat.objects[number], computed)
        elif any(child in replaced for child in children):
            new_children = [replaced[child] if child in replaced else flat.objects[child] for child in children]
            replaced[number] = op.type.put_together(op.aux.thaw(), new_children)
    return replaced.get(flat.root, tree)


# --- making views -----------------------------------------------------------------------------------------------------


def with_view(
    flat: FlatDag, sources: Sequence[int], target: int, through: Callable[..., Any]
) -> tuple[tuple[Record, ...], dict[Any, int]]:
    """Returns the records of a tree with a view in the place of a record, at all of its paths.

    Args:
        flat: the tree, with its objects.
        sources: numbers of the records of its sources.
        target: number of the record to replace.
        through: the function.

    Returns:
        The new records, the root last, and a dict: old number → new number. The dict also has keys for the new nodes.

    Raises:
        SharingMismatchError: if the view would not have the shape and dtype of the target, if one of the records is no
            array, if the target is a view, if it is a parameter of Linen in a module of NNX, or if a source is computed
            from the target.
    """
    _require_arrays(flat, [*sources, target])
    if isinstance(flat.objects[target], View):
        path = flat.text(target)
        raise SharingMismatchError(
            f"`{path}` is a view already: {flat.objects[target]!r}.\n"
            "Replace it by an array first:\n"
            f"    model = sharedtree.untie(model, lambda m: m{path})\n"
            f"    model = sharedtree.tree.at(lambda m: m{path}, model, array)",
            (path,),
        )
    _require_not_in_bridge(flat, sources, target)
    _require_no_cycle(flat, sources, target)
    _require_shape(flat, sources, target, through)

    # Two new nodes: the view, and the tuple of its sources. Their keys are texts, those of old records are numbers.
    view_key, tuple_key = "view", "of"
    view_node = Node(node_types_by_class[View], Static(through, is_exact=True), (_OF,))
    tuple_node = Node(PLAIN[tuple], Static(None), tuple([jtu.SequenceKey(i) for i in range(len(sources))]))

    def expand(key: int | str) -> tuple[Op, Sequence[int | str]]:
        """Returns the operation of a node in the new tree, and the keys of its children."""
        if key == view_key:
            return view_node, [tuple_key]
        if key == tuple_key:
            return tuple_node, sources
        assert isinstance(key, int)
        op, children = flat.records[key]
        return op, [view_key if child == target else child for child in children]

    root: int | str = flat.root
    return canonical_records(root, expand)


def _require_arrays(flat: FlatDag, numbers: Sequence[int]) -> None:
    """Raises `SharingMismatchError` if one of the records is neither an array nor a view, a variable or a box."""
    for number in numbers:
        if is_source(flat.objects[number]):
            continue
        path = flat.text(number)
        raise SharingMismatchError(
            f"`{path or 'the whole tree'}` is {shown(flat.objects[number])}, but a tie through a function needs "
            "arrays.\n"
            "Name the arrays in it:\n"
            "    model = sharedtree.tie(model, lambda m: (m.embed.weight, m.head.weight), through=jnp.transpose)",
            (path,),
        )


def _require_not_in_bridge(flat: FlatDag, sources: Sequence[int], target: int) -> None:
    """Raises `SharingMismatchError` if the target is a parameter of a Linen module that an NNX module wraps.

    `nnx.bridge.ToNNX` passes variables to Linen and refuses views. It sets changed state as attributes, so `unwrap`,
    which returns a new module, would lose this state.
    """
    for number, (op, _) in enumerate(flat.records):
        if type(op) is not Node or not wraps_linen(op.type.cls):
            continue
        # Record of a variable → its path below the module, for example `['decoder']['kernel']`, as in Linen.
        path_of: dict[int, str] = {}
        stack = [(number, "")]
        while stack:
            record, path = stack.pop()
            is_first_visit = record not in path_of
            path_of.setdefault(record, path)
            node = flat.node(record)
            if is_first_visit and node is not None and (record == number or node.type.is_plain):
                steps = zip(node.keys, flat.records[record][1], strict=True)
                stack.extend((child, f"{path}[{name_in(key)!r}]") for key, child in steps)
        if target not in path_of:
            continue
        model_path = flat.text(number)
        text = (
            f"`{flat.text(target)}` cannot be a view: it is a parameter of Linen in a `{op.type.cls.__name__}` of NNX, "
            "which passes only variables on.\n"
        )
        if not all(source in path_of for source in sources):
            fix = "Replace the Linen module by a module of NNX. Its layers read views."
        else:
            places = ", ".join([f"p{path_of[record]}" for record in (*sources, target)])
            fix = (
                "Tie the parameters of the Linen module, and call that module:\n"
                f"    module, state = model{model_path}.to_nnx__module, nnx.state(model{model_path}, nnx.Param)\n"
                f"    params = sharedtree.tie(nnx.to_pure_dict(state), lambda p: ({places}), through=through)\n"
                "    out = module.apply({'params': params}, x)"
            )
        raise SharingMismatchError(text + fix, (flat.text(target),))


def _require_no_cycle(flat: FlatDag, sources: Sequence[int], target: int) -> None:
    """Raises `SharingMismatchError` if a source is the target itself, or a view that is computed from the target."""
    for source in sources:
        if target in flat.below(source).reached:
            source_path, target_path = paths = flat.text(source), flat.text(target)
            if source == target:
                fact = f"`{target_path}` would be computed from itself: both paths lead to one array."
            else:
                fact = f"`{source_path}` is computed from `{target_path}`, which would be computed from it."
            raise SharingMismatchError(
                f"{fact}\n"
                "The new array cannot be computed from the one that it replaces. Name another array, or untie the two "
                "first:\n"
                f"    model = sharedtree.untie(model{where_argument([f'm{source_path}'])})",
                paths,
            )


def _require_shape(flat: FlatDag, sources: Sequence[int], target: int, through: Callable[..., Any]) -> None:
    """Traces the function, and raises if its result does not have the shape and dtype of the target.

    Raises:
        SharingMismatchError: with a fix for the dtype if the shapes agree, else with one for the shape.
    """
    target_array = abstract_array(flat.objects[target])
    view = View(through, *[flat.objects[source] for source in sources])
    result = array_of(view, is_abstract=True)
    is_array = node_type_of(result) is None and carries_identity(result)
    if is_array and (result.shape, result.dtype) == (target_array.shape, target_array.dtype):
        return
    *source_paths, target_path = paths = [flat.text(number) for number in (*sources, target)]
    sources_text = ", ".join([f"`{path}`" for path in source_paths])
    result_text = short_text(result) if is_array else shown(result)
    if is_array and result.shape == target_array.shape:
        fix = (
            "Cast in a function of your own:\n"
            "    def through(*arrays):\n"
            f"        return {text_of_function(through)}(*arrays).astype(jnp.{np.dtype(target_array.dtype).name})"
        )
    else:
        fix = (
            "Use a function that returns this shape. For the last two axes of stacked layers, this is\n"
            "    through = jnp.matrix_transpose"
        )
    raise SharingMismatchError(
        f"`{target_path}` cannot be a view of {sources_text} through `{text_of_function(through)}`: that returns "
        f"{result_text}, and `{target_path}` is {short_text(target_array)}.\n"
        f"A view must have the shape and dtype that the layer expects. {fix}",
        paths,
    )


def abstract_array(source: Any) -> Any:
    """Returns an object with the shape and dtype of a source, without a computation.

    The object is a `jax.ShapeDtypeStruct` for a view. For all other sources it is the array itself.
    """
    if isinstance(source, View):
        return array_of(source, is_abstract=True)
    return source.get_value() if is_variable(source) else source.unbox() if is_box(source) else source


def add_note_of_views(error: Exception, tree: FlatDag) -> None:
    """Adds a note to an error that JAX raised about a view: the paths of all views in the arguments, and the fix.

    Errors about anything else do not change.

    Args:
        error: the error of the user's function.
        tree: the arguments of the function.
    """
    # A `ViewError` has the fix already. JAX's errors name the class, or the method by which it converts to an array.
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
    """Prints a source of a view: an array by its dtype and shape, another object by its class."""
    # The sources of an inner view are left out. In a tower of views, each computed from the next one twice, the text
    # would double with each level.
    if isinstance(source, View):
        return f"View({text_of_function(source.through)}, ...)"
    if is_variable(source) or is_box(source):
        return f"{type(source).__name__}"
    # While JAX or a library works on a tree, any object can stand in the place of an array.
    is_array = node_type_of(source) is None and carries_identity(source)
    return f"{source.dtype}{list(source.shape)}" if is_array else type(source).__name__
