"""`jax.export` of functions whose arguments and results have sharing.

An exported program outlives the process. So do the structures of its arguments and results, which are auxiliary data
in the trees of JAX's program. When JAX serializes the program, it asks for this data as bytes.

A structure is written as a tree with that structure, in the way that `save` writes trees. It is read under the rules of
`load`: classes and functions by name, from an allow-list, and nothing is called because the bytes name it. In place of
each traced leaf, the tree has a *stand-in*, a `jax.ShapeDtypeStruct`. It has identity and carries no data:

    Net(w, w)  →  Net(struct((), bool), the same struct)

Words: a *leaf group* is what a transform sees of a tree: some or all of its traced leaves, with the structure of the
whole tree. Its *selection* is that structure and the numbers of its leaves. An *operation* (`Op`) says how one object
is made from its children. A *record* in a structure is an operation and the numbers of the children's records.
"""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Unpack

import jax
import numpy as np
from jax import export as jax_export, tree_util as jtu

from ..core._call_arguments import Arguments
from ..core._errors import FormatError, UntrustedTypeError
from ..core._jax_internals import api_boundary
from ..core._node_types import LocalConvention, node_type_of_class
from ..core._pack_and_unpack import Rules, Tags, build, pack
from ..core._static_values import Static
from ..core._structure import Node, Op, Structure, intern, records_outside_modules
from ..ties._policy_and_context import PolicyOption, current_policy
from ..transforms._caller_side import Grouping, build_from_groups, pack_call
from ..transforms._function_transform import rules_of_call
from ..transforms._jit import FilterJitted, JittedTransform, JitTransform, call_and_let_trace, require_made_for
from ..transforms._leaf_groups import LeafGroup, LeafSelection, groups_of
from ..transforms._option_lists import ADDED_OPTIONS, lists_options_of, title_of
from ..transforms._preserve_identities import preserve_identities
from ..transforms._signatures import Exporting
from ..transforms.checks._lost_changes import only_traced
from ..tree._dag import Dag
from .load import from_bytes
from .save import to_bytes
from .trust._trusted_names import Trusted

# The option `trusted` of the running call of `deserialize`. JAX calls the functions that read structures, and passes
# them nothing but bytes. So they find the option here.
_trusted: ContextVar[Any] = ContextVar("trusted", default=())


class Exported:
    """Exported program: `jax.export.Exported` for models with sharing.

    It has every attribute of JAX's class. The leaves of its `in_tree` and `out_tree` are the distinct arrays.

    Args:
        exported: JAX's exported program.
        policy: the rules of sharing. None for the policy of the thread, at each call.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> layer = {"w": jnp.ones(2)}
        >>> exported = st.export(st.jit(lambda d: 2 * d.tree["a"]["w"]))(st.Dag({"a": layer, "b": layer}))
        >>> isinstance(exported, st.Exported), len(exported.in_avals)
        (True, 1)
        >>> exported.call(st.Dag({"a": layer, "b": layer}))
        Array([2., 2.], dtype=float32)

    Limitations: `vjp()` is JAX's own, and works on the distinct arrays. To differentiate calls, use `sharedtree.grad`.
    """

    def __init__(self, exported: jax_export.Exported, policy: PolicyOption = None) -> None:
        self._exported = exported
        self._policy = policy

    @api_boundary
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the program. The arguments must have the sharing of the export. Leave out static ones.

        Raises:
            SharingMismatchError: if ties, classes or static values differ from the export.
            ValueError: if the arguments are another tree, or their arrays have other shapes.
        """
        in_tree = self._exported.in_tree
        # 1. The rules for packing. Outside modules, only Equinox's transforms (such as `filter_jit`) leave static
        # values. So if there are some, the arguments are packed in the way of these transforms.
        structure = _structure_of_arguments(in_tree)
        records = structure.records
        outside = records_outside_modules(records, structure.root)
        is_filtered = any(type(records[number][0]) is Static for number in outside)
        rules = rules_of_call(current_policy(self._policy), filtered=is_filtered)
        # 2. Pack the arguments. The grouping gives no leaf a treatment: the program's own groups say which leaves go
        # where.
        with pack_call(_arguments_named_like(structure, args, kwargs), rules, Grouping("export", lambda _: ())) as call:
            fact, fix = f"`{self._exported.fun_name}` was exported", "sharedtree.export(f)(*args)"
            require_made_for(structure, call, fact, fix)
            # 3. Group the leaves like the program's arguments. Here, numbers stand for the arrays.
            groups, _ = in_tree.unflatten(range(in_tree.num_leaves))
            # A program that was exported with plain `jax.export` takes arrays and not leaf groups. It may have no
            # positional arguments.
            if not groups or not all(type(group) is LeafGroup for group in groups):
                plain_args, plain_kwargs = in_tree.unflatten(call.leaves)
                return self._exported.call(*plain_args, **plain_kwargs)
            # Each group takes its leaves by number from all leaves of the call.
            selections = [group.selection for group in groups]
            leaf_groups = [
                LeafGroup([call.leaves[i] for i in selection.positions], selection) for selection in selections
            ]
            # 4. Call the program, and build the result.
            try:
                result = self._exported.call(*leaf_groups)
            except ValueError as error:
                # JAX names a leaf `args[0]model.w`: by the argument that is its group, then by its path. Drop the
                # group.
                error.args = (re.sub(r"args\[\d+\](?=[^\W\d])", "", str(error)),)
                raise
        return build_from_groups(groups_of(result))

    @api_boundary
    def serialize(self, vjp_order: int = 0) -> bytearray:
        """Returns the program as bytes, for `sharedtree.Exported.deserialize`.

        Args:
            vjp_order: highest order of the program's derivatives to write as well.

        Raises:
            UnserialisableError: if the structure of arguments or results holds something that no file can hold, such as
                a lambda.
            ImportError: if flatbuffers is not installed.
        """
        _require_flatbuffers()
        return self._exported.serialize(vjp_order)

    @classmethod
    @api_boundary
    def deserialize(
        cls,
        blob: bytes | bytearray,
        *,
        trusted: Trusted | Iterable[Trusted] = (),
        policy: PolicyOption = None,
    ) -> "Exported":
        """Reads a program from the bytes of `serialize`.

        The classes and functions in the structures of arguments and results are found in the way of `load`, under the
        same rules. But the program itself is compiled and run, whatever it computes: read it only from people whom you
        trust.

        Args:
            blob: the bytes.
            trusted: as for `load`. See also `sharedtree.trust`.
            policy: the rules of sharing. None for the policy of the thread, at each call.

        Raises:
            UntrustedTypeError: if the bytes name forbidden classes or functions.
            FormatError: if the structures are damaged, or were made by hand.
            ImportError: if flatbuffers is not installed.
        """
        _require_flatbuffers()
        # JAX calls `structure_of` and `selection_of` below.
        token = _trusted.set(trusted)
        try:
            exported = jax_export.deserialize(bytearray(blob))
        # JAX raises these if a structure has more or fewer leaves than the program.
        except (StopIteration, AssertionError):
            raise _malformed_error() from None
        finally:
            _trusted.reset(token)
        _require_complete_groups(exported.in_tree)
        _require_complete_groups(exported.out_tree)
        return cls(exported, policy)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of JAX's exported program."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._exported, name)

    def __repr__(self) -> str:
        return f"Exported({self._exported.fun_name})"


@lists_options_of(jax_export.export, *ADDED_OPTIONS)
@api_boundary
def export(function: Callable[..., Any], /, **options: Unpack[Exporting]) -> Callable[..., Exported]:
    """`preserve_identities(jax.export.export)`: compiles a function for other processes and machines.

    Args:
        function: a function under `sharedtree.jit`, with its options; or a plain function.
        options: options of `jax.export.export`, and `policy=` and `in_place=`. The latter can only be False.

    Returns:
        A function that takes the arguments, or `jax.ShapeDtypeStruct`s in place of their arrays, and returns an
        `Exported`. That program takes and returns models with the same sharing, each distinct array once.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> exported = st.export(st.jit(lambda d: st.Dag([d.tree["a"] + d.tree["b"]] * 2)))(st.Dag({"a": w, "b": w}))
        >>> exported.in_avals, exported.out_avals
        ((ShapedArray(float32[2]),), (ShapedArray(float32[2]),))
        >>> result = exported.call(st.Dag({"a": 3 * w, "b": 3 * w})).tree
        Traceback (most recent call last):
        ...
        sharedtree.errors.SharingMismatchError: ...
        >>> w = 3 * w
        >>> result = exported.call(st.Dag({"a": w, "b": w})).tree
        >>> result[0] is result[1], result[0]
        (True, Array([6., 6.], dtype=float32))

    Raises:
        InconsistentSharingError: from the returned function, as from the function under `sharedtree.jit`. Its other
            errors are the same as well.
        ValueError: from the returned function, if changes of the arguments are to be written back in place.

    `serialize()` needs flatbuffers: `pip install flatbuffers`.

    Limitations: if the function returns a module unchanged, it is an output like any other. A program cannot refer to
    its caller's objects.
    """
    return preserve_identities(jax_export.export)(function, **options)


def exporting(
    transform: Callable[..., Any], function: Callable[..., Any], policy: PolicyOption, options: dict[str, Any]
) -> Callable[..., Exported]:
    """Adapts `jax.export.export`. Returns a function that takes arguments and returns the program exported for them.

    Args:
        transform: `jax.export.export`.
        function: the function to export, under `sharedtree.jit` or plain.
        policy: the rules of sharing. If the function is under `sharedtree.jit`, its own policy comes first.
        options: options of the transform.
    """
    jitted = function if isinstance(function, JittedTransform) else JitTransform(jax.jit, function, policy, {})

    @api_boundary
    def for_arguments(*args: Any, **kwargs: Any) -> Exported:
        """Exports the function for arguments with the structures, shapes and dtypes of these.

        Raises:
            ValueError: if the policy writes changes back in place.
        """
        export_policy = current_policy(jitted.policy or policy)
        if export_policy.in_place:
            raise ValueError(
                f"A program that `{title_of(transform)}` makes has none of its caller's objects, so it cannot change "
                "them as `in_place=True` says.\n"
                "Let `f` return the objects that it changes, as `return result, model`, and switch `in_place` off:\n"
                "    exported = sharedtree.export(sharedtree.jit(f, in_place=False))(model)"
            )
        # A program cannot refer to its caller's objects, so it returns unchanged modules like others.
        export_policy = dataclasses.replace(export_policy, pass_through=False)
        with jitted.enter(args, kwargs, export_policy) as call:
            jitted_function = jitted.transformed_for(export_policy, call)
            with only_traced():
                if isinstance(jitted_function, FilterJitted):
                    # `jax.export` takes nothing but a function under `jax.jit`.
                    export = transform(jitted_function.jitted, **options)
                    exported = call_and_let_trace(export, *call.groups, *call.statics)
                else:
                    exported = transform(jitted_function, **options)(*call.groups, *call.statics)
        return Exported(exported, jitted.policy or policy)

    return for_arguments


def _arguments_named_like(structure: Structure, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Returns the arguments of a call, with their names at the export.

    The names begin the paths in errors, and are compared with the structure. Static arguments, which the call leaves
    out, are None in the result.

    Args:
        structure: structure of the exported program's arguments.
        args: the call's arguments by position.
        kwargs: the call's arguments by keyword.
    """
    # The auxiliary data of `Arguments`: the names of positional arguments, with None for a static one; those of keyword
    # arguments; those of static keyword arguments.
    positional, _, static = structure.records[structure.root][0].aux.peek()  # pyright: ignore[reportAttributeAccessIssue]
    names = list(positional)
    # If the call has too many arguments, the error needs names for the rest.
    while len([name for name in names if name is not None]) < len(args):
        names.append(f"args[{len(names)}]")
    remaining_args, kwargs = iter(args), dict(kwargs)
    # Each name takes the next positional argument; if there is none left, the keyword argument of this name. When the
    # program was exported, Equinox may have passed by position what the caller now passes by keyword.
    present_names: list[Any] = []
    present_args: list[Any] = []
    for name in names:
        arg = None if name is None else next(remaining_args, kwargs.pop(name, _MISSING))
        if arg is not _MISSING:
            present_names.append(name)
            present_args.append(arg)
    return Arguments(
        tuple(present_names),
        present_args,
        {**kwargs, **dict.fromkeys(static)},
        static,
    )


# Stands for an argument that the call does not have.
_MISSING = object()


def _structure_of_arguments(in_tree: Any) -> Structure:
    """Returns the structure of the arguments of a program.

    If it was exported with plain `jax.export`, there are no leaf groups. Then it is the structure of the plain
    arguments, with the names `args[0]` and so on.

    Args:
        in_tree: the program's `in_tree`.

    Raises:
        FormatError: if it is malformed.
    """
    args, kwargs = in_tree.unflatten([_stand_in() for _ in range(in_tree.num_leaves)])
    if args and all(type(arg) is LeafGroup for arg in args):
        return args[0].structure
    names = tuple([f"args[{i}]" for i in range(len(args))])
    return pack(Arguments(names, args, kwargs), Tags(), Rules(convention="outside"))[1]


# ---- Structure ⇄ bytes ----


def _stand_in() -> jax.ShapeDtypeStruct:
    """Returns a new stand-in for a traced leaf. It has identity, and carries no data."""
    return jax.ShapeDtypeStruct((), np.bool_)


def _malformed_error() -> FormatError:
    """Returns the error for bytes that `bytes_of` and `bytes_of_selection` do not write."""
    return FormatError("The structure of an exported program is malformed: it is damaged, or was made by hand.")


def bytes_of(structure: Structure, convention: LocalConvention = "jax") -> bytes:
    """Returns a structure as bytes, for `structure_of`.

    They are the bytes of a list with five items:

        tree            a tree with that structure, and a stand-in for each traced leaf. Of `Arguments`, the children
        names           of `Arguments`, their auxiliary data: the names of the arguments; None for any other tree
        convention      as below
        noted           numbers of the leaves without their ties on purpose; `()` except for a result of a function
        tied_values     numbers of the leaves tied outside modules; `()` except for a result of a function

    Args:
        structure: the structure.
        convention: the rules that say at the root which leaves are traced. It is `"jax"`, or `"outside"` for a tree
            whose root is in no module.

    Raises:
        UnserialisableError: if no file can hold a part of it.
    """
    table: list[Any] = []
    records = [(_op_to_write(op), children) for op, children in structure.records]
    # `build` appends to the table one object for each record.
    build(records, [_stand_in() for _ in range(structure.num_leaves)], table)
    tree, names = table[structure.root], None
    if type(tree) is Arguments:
        tree, names = tree.parts()
    return to_bytes([tree, names, convention, structure.noted, structure.tied_values])


def structure_of(data: bytes) -> Structure:
    """Returns the structure written by `bytes_of`.

    Raises:
        UntrustedTypeError: if the bytes name a forbidden class or function.
        FormatError: if the bytes are malformed.
    """
    values = _read_bytes(data)
    # The bytes may be anyone's, so each value is checked before it is used.
    if type(values) is not list or len(values) != 5 or not all(type(values[i]) is tuple for i in (3, 4)):
        raise _malformed_error()
    # `leaf_numbers` has the last two items, `noted` and `tied_values`.
    tree, names, convention, *leaf_numbers = values
    if convention not in ("jax", "outside") or (names is not None and not _are_names(names, tree)):
        raise _malformed_error()
    tree = tree if names is None else Arguments.of_parts(names, tree)
    leaves, packed = pack(tree, Tags(), Rules(convention=convention))
    for number in itertools.chain.from_iterable(leaf_numbers):
        if type(number) is not int or not 0 <= number < len(leaves):
            raise _malformed_error()
    records = tuple([(_op_that_was_written(op, len(children)), children) for op, children in packed.records])
    # The arguments 0 and None: the first record has the number 0, and the structure belongs to no `Context`.
    return intern(records, packed.root, 0, None, *leaf_numbers)


def _read_bytes(data: bytes) -> Any:
    """Loads a tree from bytes. It trusts the names trusted by the running call of `deserialize`.

    The error for names that are not allowed offers `sharedtree.trust` instead of an option, since a user of
    `jax.export.deserialize` could not pass one.
    """
    try:
        return from_bytes(data, trusted=_trusted.get())
    except UntrustedTypeError as error:
        advice = re.sub(r"sharedtree\.load\(path, trusted=\[(.*)\]\)", r"sharedtree.trust(\1)", str(error))
        raise UntrustedTypeError(advice, error.paths, error.names) from None


def _are_names(names: Any, children: Any) -> bool:
    """Returns True if `names` can be the auxiliary data of `Arguments` with these children.

    That is a tuple (positional, keywords, static) of tuples. Their items are texts, or None for a static positional
    argument. Each other positional argument and each keyword argument is a child.
    """
    if type(names) is not tuple or len(names) != 3 or type(children) is not list:
        return False
    if not all(type(group) is tuple and all(type(x) in (str, type(None)) for x in group) for group in names):
        return False
    positional, keywords, _ = names
    return len([name for name in positional if name is not None]) + len(keywords) == len(children)


def bytes_of_selection(selection: LeafSelection) -> bytes:
    """Returns the selection of a leaf group as bytes, for `selection_of`: the bytes of its structure, and its numbers.

    Raises:
        UnserialisableError: if no file can hold a part of the structure.
    """
    return to_bytes((bytes_of(selection.structure, "outside"), selection.numbers))


def selection_of(data: bytes) -> LeafSelection:
    """Returns the selection written by `bytes_of_selection`. Raises the errors of `structure_of`."""
    values = from_bytes(data)
    if type(values) is not tuple or len(values) != 2 or type(values[0]) is not bytes:
        raise _malformed_error()
    structure, numbers = structure_of(values[0]), values[1]
    if numbers is not None and not (
        type(numbers) is tuple and all(type(n) is int and 0 <= n < structure.num_leaves for n in numbers)
    ):
        raise _malformed_error()
    return LeafSelection(structure, numbers)


class WrittenDag:
    """Takes the place of a `Dag` in a tree that is written, since no file can hold a structure as it is.

    Its name is in exported programs.

    Args:
        leaves: the leaves of the Dag.
        structure: the structure of the Dag, as bytes.
    """

    __slots__ = ("leaves", "structure")

    def __init__(self, leaves: Sequence[Any], structure: bytes) -> None:
        self.leaves = leaves
        self.structure = structure


jtu.register_pytree_node(
    WrittenDag, lambda dag: (dag.leaves, dag.structure), lambda structure, leaves: WrittenDag(leaves, structure)
)


def _op_to_write(op: Op) -> Op:
    """Returns the operation of a `WrittenDag` for that of a `Dag`, and any other operation as it is."""
    if type(op) is not Node or op.type.cls is not Dag:
        return op
    return Node(node_type_of_class(WrittenDag), Static(bytes_of(op.aux.peek())), op.keys)


def _op_that_was_written(op: Op, num_children: int) -> Op:
    """Returns the operation of a `Dag` for that of a `WrittenDag`, and any other operation as it is.

    Args:
        op: the operation.
        num_children: its number of children.

    Raises:
        FormatError: if a `WrittenDag` has no structure, or one with another number of leaves than it has children.
    """
    if type(op) is not Node or op.type.cls is not WrittenDag:
        return op
    data = op.aux.peek()
    structure = structure_of(data) if type(data) is bytes else None
    if structure is None or structure.num_leaves != num_children:
        raise _malformed_error()
    dag = Dag._unflatten(structure, [_stand_in() for _ in range(num_children)])  # noqa: SLF001 # pyright: ignore
    # Children come before parents, so the last record is the Dag's. Its operation comes first.
    return pack(dag, Tags())[1].records[-1][0]


def _require_complete_groups(treedef: Any) -> None:
    """Raises `FormatError` unless the leaf groups in a tree have all leaves of one structure, each once.

    A tree without leaf groups is accepted: a program exported with plain `jax.export` has none.

    Args:
        treedef: the program's `in_tree` or `out_tree`.
    """
    tree = treedef.unflatten([_stand_in() for _ in range(treedef.num_leaves)])
    leaves = jtu.tree_leaves(tree, is_leaf=lambda x: type(x) is LeafGroup)
    groups = [leaf for leaf in leaves if type(leaf) is LeafGroup]
    numbers = [number for group in groups for number in group.selection.positions]
    for group in groups:
        if group.structure is not groups[0].structure or group.selection.num_leaves != len(group.leaves):
            raise _malformed_error()
    if groups and sorted(numbers) != list(range(groups[0].structure.num_leaves)):
        raise _malformed_error()


def _require_flatbuffers() -> None:
    """Raises `ImportError` if flatbuffers is not installed. The error has the command to install it."""
    try:
        import flatbuffers as flatbuffers  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            "JAX writes exported programs with flatbuffers, which is not installed. Install it:\n"
            "    pip install flatbuffers\n"
            "It is also what the extra of sharedtree brings: `sharedtree[export]`.",
            name=error.name,
        ) from None


# JAX writes these names into exported programs. So they stay, even if a class gets another name.
for cls, serialized_name, write, read in (
    (LeafGroup, "sharedtree.Hand", bytes_of_selection, selection_of),
    (Dag, "sharedtree.Dag", bytes_of, structure_of),
):
    # JAX accepts each name once. If the package was imported before in this process, that registration stays.
    with contextlib.suppress(ValueError):
        jax_export.register_pytree_node_serialization(
            cls, serialized_name=serialized_name, serialize_auxdata=write, deserialize_auxdata=read
        )
