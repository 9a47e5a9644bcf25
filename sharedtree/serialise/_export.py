"""`jax.export` of functions whose arguments and results have sharing.

An exported program outlives the process. So do the structures of its arguments and results, which say how they are
packed. They are part of JAX's trees, and JAX asks for them as bytes. They are written like trees to files, and read
under the same rules: by name, from an allow-list, and nothing is called. A `jax.ShapeDtypeStruct` stands for each
traced leaf, since it has identity and carries no data:

    Net(w, w)  →  Net(struct((), bool), the same)
"""

import contextlib
import dataclasses
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
from ..core._node_types import Inherited, node_type_of_class
from ..core._pack_and_unpack import Rules, Tags, build, pack
from ..core._static_values import Static
from ..core._structure import Node, Op, Structure, intern, reached_outside
from ..ties._policy_and_context import PolicyOption, current_policy
from ..transforms._ahead_of_time import require_made_for
from ..transforms._caller_side import Grouping, enter, leave
from ..transforms._function_transform import rules_of_call
from ..transforms._jit import FilterJitted, JittedTransform, JitTransform
from ..transforms._leaf_groups import LeafGroup, LeafGroups, LeafSelection
from ..transforms._option_lists import ADDED_OPTIONS, lists_options_of, title_of
from ..transforms._preserve_identities import preserve_identities
from ..transforms._signatures import Exporting
from ..transforms.checks._lost_changes import only_traced
from ..tree._dag import Dag
from .load import from_bytes
from .save import to_bytes
from .trust._trusted_names import Trusted

# What the running call of `deserialize` trusts. JAX calls the readers of structures, and passes them bytes alone.
_trusted: ContextVar[Any] = ContextVar("trusted", default=())


class Exported:
    """Exported program: `jax.export.Exported` for models with sharing.

    It has every attribute of JAX's own. The leaves of its `in_tree` and `out_tree` are the distinct arrays.

    Args:
        exported: JAX's exported program.
        policy: what counts as sharing; None for the policy of the thread at each call.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> layer = {"w": jnp.ones(2)}
        >>> exported = st.export(st.jit(lambda d: 2 * d.tree["a"]["w"]))(st.Dag({"a": layer, "b": layer}))
        >>> isinstance(exported, st.Exported), len(exported.in_avals)
        (True, 1)
        >>> exported.call(st.Dag({"a": layer, "b": layer}))
        Array([2., 2.], dtype=float32)

    Limitations: `vjp()` is JAX's own, of the distinct arrays. Calls can be differentiated with `sharedtree.grad`.
    """

    def __init__(self, exported: jax_export.Exported, policy: PolicyOption = None) -> None:
        self._exported = exported
        self._policy = policy

    @api_boundary
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the program. The arguments must have the sharing it was exported for. Static ones are left out.

        Raises:
            SharingMismatchError: if ties, classes or static values differ from those of the export.
            ValueError: if the arguments are another tree, or their arrays have other shapes.
        """
        in_tree = self._exported.in_tree
        structure = _structure_of_arguments(in_tree)
        # The operations that lie in no module: only plain containers are between them and the root. Only Equinox's
        # transforms leave static values there.
        outside = [structure.records[number][0] for number in reached_outside(structure.records, structure.root)]
        is_filtered = any(type(op) is Static for op in outside)
        rules = rules_of_call(current_policy(self._policy), filtered=is_filtered)
        # No leaf has a treatment here: the numbers in the groups of the program say where each goes.
        with enter(_named_like(structure, args, kwargs), rules, Grouping("export", lambda _: ())) as call:
            fact, fix = f"`{self._exported.fun_name}` was exported", "sharedtree.export(f)(*args)"
            require_made_for(structure, call, fact, fix)
            # The program's arguments, with numbers for leaves.
            groups, _ = in_tree.unflatten(range(in_tree.num_leaves))
            if not all(type(group) is LeafGroup for group in groups):
                # A program of plain JAX takes the distinct arrays themselves.
                plain_args, plain_kwargs = in_tree.unflatten(call.leaves)
                return self._exported.call(*plain_args, **plain_kwargs)
            # Each group takes its leaves, by number, from all leaves of the call.
            leaf_groups: list[LeafGroup] = []
            for group in groups:
                # The numbers are None for a group that has all leaves.
                numbers = group.selection.numbers or range(structure.num_leaves)
                leaf_groups.append(LeafGroup([call.leaves[i] for i in numbers], group.selection))
            try:
                result = self._exported.call(*leaf_groups)
            except ValueError as error:
                # JAX names a leaf by its group and its path, which begins with the argument's name. Drop the group.
                error.args = (re.sub(r"args\[\d+\](?=[^\W\d])", "", str(error)),)
                raise
        parts: Any = result.parts if type(result) is LeafGroups else (result,)
        return leave(parts)

    @api_boundary
    def serialize(self, vjp_order: int = 0) -> bytearray:
        """Returns the program as bytes, for `sharedtree.Exported.deserialize`.

        Args:
            vjp_order: number of derivatives that are written, too.

        Raises:
            UnserialisableError: if the structure of arguments or results holds something no file can hold, such as
                a lambda.
            ImportError: without flatbuffers.
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

        The classes and functions in the structures of arguments and results are found as `load` finds those of a file,
        under the same rules. But the program itself is compiled and run, whatever it computes: read it only from
        people whom you trust.

        Args:
            blob: the bytes.
            trusted: as for `load`. See also `sharedtree.trust`.
            policy: what counts as sharing.

        Raises:
            UntrustedTypeError: if the bytes name forbidden classes or functions.
            FormatError: if the structures are damaged, or were made by hand.
            ImportError: without flatbuffers.
        """
        _require_flatbuffers()
        # JAX calls `structure_of` and `selection_of` below, with bytes alone. They find `trusted` here.
        token = _trusted.set(trusted)
        try:
            exported = jax_export.deserialize(bytearray(blob))
        # JAX raises these if there are more or fewer leaves than arguments.
        except (StopIteration, AssertionError):
            raise _malformed() from None
        finally:
            _trusted.reset(token)
        _require_complete_groups(exported.in_tree)
        _require_complete_groups(exported.out_tree)
        return cls(exported, policy)

    def __getattr__(self, name: str) -> Any:
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
        function: a function under `sharedtree.jit`, whose options count; or a function.
        options: of `jax.export.export`, and `policy=` and `in_place=`, which can only be False.

    Returns:
        A function of the arguments, or of `jax.ShapeDtypeStruct`s in their places. It returns an `Exported`, which
        takes and returns models with the same sharing, each distinct array once.

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
        InconsistentSharingError: as the function under `sharedtree.jit` would, and likewise its other errors.
        ValueError: for arguments, if what the function changes in them is to be written back in place.

    `serialize()` needs flatbuffers: `pip install flatbuffers`.

    Limitations: a module the function returns unchanged is an output, for a program cannot name an object of its
    caller's.
    """
    return preserve_identities(jax_export.export)(function, **options)


def exporting(
    transform: Callable[..., Any], function: Callable[..., Any], policy: PolicyOption, options: dict[str, Any]
) -> Callable[..., Exported]:
    """Adapts `jax.export.export`: returns a function that takes arguments and returns the program exported for them.

    Args:
        transform: `jax.export.export`.
        function: what to export, under `sharedtree.jit` or plain.
        policy: what counts as sharing.
        options: of the transform.
    """
    jitted = function if isinstance(function, JittedTransform) else JitTransform(jax.jit, function, policy, {})

    @api_boundary
    def for_arguments(*args: Any, **kwargs: Any) -> Exported:
        """Exports the function for arguments of these structures and shapes."""
        export_policy = current_policy(jitted.policy or policy)
        if export_policy.in_place:
            raise ValueError(
                f"A program that `{title_of(transform)}` makes holds none of its caller's objects, so nothing could be "
                "written back in place. Return what changes:\n"
                "    exported = sharedtree.export(sharedtree.jit(f, in_place=False))(model)"
            )
        # A program cannot name an object of its caller's.
        export_policy = dataclasses.replace(export_policy, pass_through=False)
        with jitted.enter(args, kwargs, export_policy) as call:
            jitted_function = jitted.transformed_for(export_policy, call)
            jitted_function = jitted_function.jitted if isinstance(jitted_function, FilterJitted) else jitted_function
            with only_traced():
                exported = transform(jitted_function, **options)(*call.groups, *call.statics)
        return Exported(exported, jitted.policy or policy)

    return for_arguments


def _named_like(structure: Structure, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Returns the arguments of a call under the names of the program's arguments.

    Args:
        structure: structure of the exported program's arguments.
        args: the call's arguments by position.
        kwargs: the call's arguments by keyword.
    """
    positional, _, static = structure.records[structure.root][0].aux.peek()  # pyright: ignore[reportAttributeAccessIssue]
    names = list(positional)
    while len([name for name in names if name is not None]) < len(args):
        names.append(f"args[{len(names)}]")
    remaining_args, kwargs = iter(args), dict(kwargs)
    # Equinox passes by position what the caller passed by keyword.
    named_args = [(name, None if name is None else next(remaining_args, kwargs.pop(name, _MISSING))) for name in names]
    named_args = [(name, arg) for name, arg in named_args if arg is not _MISSING]
    return Arguments(
        tuple([name for name, _ in named_args]),
        [arg for _, arg in named_args],
        {**kwargs, **dict.fromkeys(static)},
        static,
    )


# Stands for an argument that the call does not have.
_MISSING = object()


def _structure_of_arguments(in_tree: Any) -> Structure:
    """Returns the structure of the arguments a program takes. `jax.export` may have made it of plain trees.

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
    """Stand-in for a traced leaf where a structure is written: it has identity, and carries no data."""
    return jax.ShapeDtypeStruct((), np.bool_)


def _malformed() -> FormatError:
    return FormatError("The structure of an exported program is malformed: it is damaged, or was made by hand.")


def bytes_of(structure: Structure, convention: Inherited = "jax") -> bytes:
    """Returns a structure as bytes, which `structure_of` reads.

    They hold a tree with that structure, in which a `ShapeDtypeStruct` stands for each leaf. With it go the names of
    arguments, if the tree is `Arguments`, the convention, and two tuples of numbers of leaves that only the result of a
    function has: `noted`, the leaves that lost their ties on purpose, and `tied_values`, those tied outside modules.

    Args:
        structure: the structure.
        convention: the rules that say at the root which leaves are traced: `"jax"`, or `"outside"` for a tree that
            lies in no module.

    Raises:
        UnserialisableError: if no file can hold a part of it.
    """
    table: list[Any] = []
    records = [(_written(op), children) for op, children in structure.records]
    # `build` appends to the table one object for each record.
    build(records, [_stand_in() for _ in range(structure.num_leaves)], table)
    tree, names = table[structure.root], None
    if type(tree) is Arguments:
        tree, names = tree.parts()
    return to_bytes([tree, names, convention, structure.noted, structure.tied_values])


def structure_of(data: bytes) -> Structure:
    """Reads a structure from the bytes of `bytes_of`.

    Raises:
        UntrustedTypeError: if it names a forbidden class or function.
        FormatError: if the bytes are malformed.
    """
    values = _read_bytes(data)
    # The bytes may be anyone's, so each value is checked before it is used.
    if type(values) is not list or len(values) != 5 or not all(type(values[i]) is tuple for i in (3, 4)):
        raise _malformed()
    # The last two are `noted` and `tied_values`, as `bytes_of` describes them.
    tree, names, convention, *leaf_numbers = values
    if convention not in ("jax", "outside") or (names is not None and not _are_names(names, tree)):
        raise _malformed()
    tree = tree if names is None else Arguments.of_parts(names, tree)
    leaves, packed = pack(tree, Tags(), Rules(convention=convention))
    if not all(type(number) is int and 0 <= number < len(leaves) for numbers in leaf_numbers for number in numbers):
        raise _malformed()
    # Its first record has the number 0, and it belongs to no `Context`, hence the None.
    return intern(
        tuple([(_read(op, len(children)), children) for op, children in packed.records]),
        packed.root,
        0,
        None,
        *leaf_numbers,
    )


def _read_bytes(data: bytes) -> Any:
    """Loads a tree from bytes.

    The error for untrusted names offers `sharedtree.trust`, since JAX's callers pass no options.
    """
    try:
        return from_bytes(data, trusted=_trusted.get())
    except UntrustedTypeError as error:
        advice = re.sub(r"sharedtree\.load\(path, trusted=\[(.*)\]\)", r"sharedtree.trust(\1)", str(error))
        raise UntrustedTypeError(advice, error.paths, error.names) from None


def _are_names(names: Any, children: Any) -> bool:
    """Returns True for names of arguments that fit these children.

    They are (positional, keywords, static), each a tuple of texts.
    """
    if type(names) is not tuple or len(names) != 3 or type(children) is not list:
        return False
    if not all(type(group) is tuple and all(type(x) in (str, type(None)) for x in group) for group in names):
        return False
    positional, keywords, _ = names
    return len([name for name in positional if name is not None]) + len(keywords) == len(children)


def bytes_of_selection(selection: LeafSelection) -> bytes:
    """Returns the auxiliary data of a leaf group as bytes: its structure, and which leaves of it are in the group."""
    return to_bytes((bytes_of(selection.structure, "outside"), selection.numbers))


def selection_of(data: bytes) -> LeafSelection:
    """Reads the auxiliary data of a leaf group from bytes. Raises as `structure_of`."""
    values = from_bytes(data)
    if type(values) is not tuple or len(values) != 2 or type(values[0]) is not bytes:
        raise _malformed()
    structure, numbers = structure_of(values[0]), values[1]
    if numbers is not None and not (
        type(numbers) is tuple and all(type(n) is int and 0 <= n < structure.num_leaves for n in numbers)
    ):
        raise _malformed()
    return LeafSelection(structure, numbers)


class WrittenDag:
    """Stands for a `Dag` in a structure that is written. It has the Dag's own structure as bytes."""

    __slots__ = ("leaves", "structure")

    def __init__(self, leaves: Sequence[Any], structure: bytes) -> None:
        self.leaves = leaves
        self.structure = structure


jtu.register_pytree_node(
    WrittenDag, lambda dag: (dag.leaves, dag.structure), lambda structure, leaves: WrittenDag(leaves, structure)
)


def _written(op: Op) -> Op:
    """Returns the operation that is written for another: `WrittenDag` for `Dag`, others as they are."""
    if type(op) is not Node or op.type.cls is not Dag:
        return op
    return Node(node_type_of_class(WrittenDag), Static(bytes_of(op.aux.peek())), op.keys)


def _read(op: Op, num_leaves: int) -> Op:
    """Reverses `_written`. Raises `FormatError` if the number of leaves does not fit."""
    if type(op) is not Node or op.type.cls is not WrittenDag:
        return op
    data = op.aux.peek()
    structure = structure_of(data) if type(data) is bytes else None
    if structure is None or structure.num_leaves != num_leaves:
        raise _malformed()
    dag = Dag._unflatten(structure, [_stand_in() for _ in range(num_leaves)])  # noqa: SLF001 # pyright: ignore
    # Children come before parents, so the last record is the Dag's.
    return pack(dag, Tags())[1].records[-1][0]


def _require_complete_groups(treedef: Any) -> None:
    """Raises `FormatError` unless the leaf groups in a tree have all the leaves of one structure, each once.

    A tree without leaf groups is accepted: a program of plain JAX has none.
    """
    tree = treedef.unflatten([_stand_in() for _ in range(treedef.num_leaves)])
    leaves = jtu.tree_leaves(tree, is_leaf=lambda x: type(x) is LeafGroup)
    groups = [leaf for leaf in leaves if type(leaf) is LeafGroup]
    # `numbers` is None for a group that has all leaves.
    numbers = [n for group in groups for n in group.selection.numbers or range(group.structure.num_leaves)]
    for group in groups:
        if group.structure is not groups[0].structure or group.selection.num_leaves != len(group.leaves):
            raise _malformed()
    if groups and sorted(numbers) != list(range(groups[0].structure.num_leaves)):
        raise _malformed()


def _require_flatbuffers() -> None:
    """Raises `ImportError`, with the command to install it, if flatbuffers is missing."""
    try:
        import flatbuffers as flatbuffers  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            "JAX writes exported programs with flatbuffers, which is not installed. Install it:\n"
            "    pip install flatbuffers\n"
            "It is also what the extra of sharedtree brings: `sharedtree[export]`.",
            name=error.name,
        ) from None


# Exported programs carry these names, so they outlive renamings of the classes.
for cls, serialized_name, write, read in (
    (LeafGroup, "sharedtree.Hand", bytes_of_selection, selection_of),
    (Dag, "sharedtree.Dag", bytes_of, structure_of),
):
    # JAX knows each name once, and keeps that of an earlier import of the package.
    with contextlib.suppress(ValueError):
        jax_export.register_pytree_node_serialization(
            cls, serialized_name=serialized_name, serialize_auxdata=write, deserialize_auxdata=read
        )
