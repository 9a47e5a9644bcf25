"""`jax.vmap`, `jax.pmap`, `jax.shard_map` and `equinox.filter_vmap`: axes and specifications, also inside modules.

    f(Net(w, b), x)     in_axes=(Net(0, None), 0)      groups  [w, x]  [b]      JAX gets  in_axes=(0, None)

The *label* of a leaf is its axis, as the user's prefix tree says it: `Net(0, None)` gives `w` the label 0. All leaves
with one label form a *leaf group*, one argument of the transform. A tied leaf is in a group once.

Under `shard_map` the labels are partition specifications: along which axes of a mesh a leaf is divided between devices.
A tied leaf is divided once, so each device gets one shard of it.

The axis of a leaf may be written in two ways: `-1` and `1` are one axis if the leaf has two. To *resolve* a label is to
write it in one of them, so that equal axes are equal labels.

*In place* means that what the function changes in its arguments is written back into the caller's objects. The changed
arguments are returned beside the result, along their own axes.
"""

import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import tree_util as jtu
from jax.sharding import PartitionSpec

from ..core._call_arguments import Arguments, Position, positions_of
from ..core._jax_internals import is_batched, varying_axes
from ..core._node_types import is_module, node_type_of
from ..core._pack_and_unpack import flat_dag_of
from ..core._prefix_trees import Branch
from ..core._static_values import Incomparable, Static
from ..ties._policy_and_context import Policy
from ._argument_names import as_sequence
from ._caller_side import Call, Grouping
from ._function_and_options import in_code
from ._function_side import FunctionTrace
from ._function_transform import FunctionTransform
from ._leaf_groups import LeafGroup, LeafGroups
from ._leaf_labels import SPLIT_WITH_WARNING, Treatment, is_donated, labels_in
from ._placements import shortest_spec

_UNMAPPED_BUT_BATCHED = re.compile(r"at vmap out_axes in place of (.*), got axis spec None but output was batched .*")
"""JAX's error for an object that was changed in place, whose new value has an axis although the old one had none.

The group is the path of the object.
"""


class MappingTransform(FunctionTransform):
    """A function under a transform with a prefix tree of labels for its arguments, and one for its results.

    The labels are axes or partition specifications. The subclasses say how one of them is resolved.
    """

    in_name: str
    """Name of the option with the labels of arguments."""
    out_name: str
    """Name of the option with the labels of results."""
    default_in: Any
    """Value of the first option if it is left out."""
    default_out: Any
    is_label: Callable[[Any], bool]
    """(object in a prefix) → True if it is a label, False if it is a container or module that holds labels."""
    groups_by_outcome = False
    """True to group leaves by their resolved labels, False to group them by the labels as written."""
    unmapped_result: Any = None
    """The label of a changed argument in the option for results, if its label in the option for arguments is None."""

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """Returns how leaves are grouped: by their axes and, if the transform donates, by whether they are donated.

        If the options do not fit the arguments, the vanilla transform is called, to raise its own error.
        """
        prefix = self.prefix_of_arguments(arguments)
        # The distinct labels in the prefix. None if the prefix does not fit the number or kind of arguments.
        labels = None if prefix is None else labels_in(prefix, self.is_label)
        args, kwargs = arguments.args, arguments.kwargs
        # The options do not fit: there is nothing to map, the prefix is wrong, or a static position is too large.
        if (
            not (args or kwargs)
            or labels is None
            or not all(map(self.is_label, labels))
            or any(isinstance(i, int) and i >= len(args) for i in self.static_positions(len(args), kwargs))
        ):
            # Calls the vanilla transform. This raises its error. If it accepts the call, nothing is raised.
            self.raise_vanilla_error(args, kwargs)
        # The vanilla transform has accepted the call, or the options fit. Without labels, the base groups the leaves.
        if labels is None:
            return super().grouping(policy, arguments)
        mapping = Treatment(
            name=self.in_name,
            prefix=prefix,
            is_label=self.is_label,
            resolve=lambda label, leaf, _: self.resolve_for_argument(label, leaf),
            # Words for errors, such as "in_axes 0".
            describe=functools.partial("{} {}".format, self.in_name),
            groups_by_outcome=self.groups_by_outcome,
            within_module=SPLIT_WITH_WARNING,
            has_containers=policy.containers,
        )
        donation = self.donation_treatment(arguments)
        treatments = [mapping] if donation is None else [mapping, donation]
        if self.groups_by_outcome:
            # Here labels may be functions (Equinox). Their answers for the leaves of another call are not known. So the
            # grouping gets no key, and no plan (the groups of a structure) is kept.
            return Grouping(self.transform_name, lambda _: treatments)
        key = Static((policy.containers, *[treatment.prefix for treatment in treatments]))
        return Grouping(
            self.transform_name,
            lambda _: treatments,
            key=key,
            # The ranks of the leaves decide which labels mean one axis: `1` and `-1` do for rank 2. So they are part of
            # the key of a plan. With a single label there is nothing to compare.
            facts_of_leaves=_ndims if len(labels) > 1 else None,
            # A label without leaves gets a group, too, so that JAX sees all axes of the prefix.
            groups=[(label,) for label in labels] if donation is None else (),
            # JAX reads the options anew on each call. Where the user can change them, a call in C would miss that.
            holds_for_like_calls=not (key.is_mutable or _can_change(self.options.get(self.out_name))),
        )

    def prefix_of_arguments(self, arguments: Arguments) -> Any:
        """Makes the prefix of all arguments: the user's for positional ones, and the axis 0 for keywords, as in JAX.

        Returns:
            A prefix with one part for each argument. None if the user's prefix has another number of parts.
        """
        # For each argument in the graph: its index, or its name if it was passed by keyword.
        positions = positions_of(arguments.parts()[1])
        prefix = self.options.get(self.in_name, self.default_in)
        # One label holds for all positional arguments.
        if self.is_label(prefix):
            parts = dict.fromkeys(range(len(arguments.args)), prefix)
        elif isinstance(prefix, (tuple, list)) and len(prefix) == len(arguments.args):
            parts = dict(enumerate(prefix))
        else:
            return None
        return Branch(tuple([parts[i] if isinstance(i, int) else 0 for i in positions]))

    def treatment_of_results(self, policy: Policy, arguments: Arguments) -> Treatment | None:
        """Returns how results are grouped: by the labels of the user's prefix.

        In place, the prefix has a part for the arguments in front. A changed object is returned along its own axis.
        """
        prefix = self.options.get(self.out_name, self.default_out)
        if policy.in_place:
            parts = self.prefix_of_arguments(arguments).parts
            prefix_of_changes = Branch(tuple([self.unmapped_result if part is None else part for part in parts]))
            prefix = Branch((prefix_of_changes, prefix))
        return Treatment(
            name=self.out_name,
            prefix=prefix,
            # If None has no meaning for a result, then a None in the option is the tree of a result `None`.
            is_label=lambda part: self.is_label(part) and not (part is None and self.unmapped_result is not None),
            resolve=lambda label, leaf, _: self.resolve_for_result(label, leaf),
            describe=lambda label: f"{self.out_name} {label}",
            groups_by_outcome=self.groups_by_outcome,
            within_module=SPLIT_WITH_WARNING,
            has_containers=policy.containers,
        )

    def apply_transform(
        self, inner: Callable[..., Any], labels: Sequence[Any], result_labels: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """Applies the transform to the inner function, with one axis for each leaf group of arguments and results."""
        options = {
            **self.options,
            # A group has one label, or two labels under a transform that donates. The first label is its axis.
            self.in_name: tuple([group_labels[0] for group_labels in labels]),
            # The result is a `LeafGroups`, so its prefix is one, too: a label in place of each group.
            self.out_name: LeafGroups(result_labels or ()),
        }
        return self.transform(inner, **options)

    # ---- Labels of single leaves ----

    def resolve_for_argument(self, label: Any, leaf: Any) -> Any:
        """Resolves the label of a leaf of the arguments, so that equal labels mean equal treatment.

        A wrong label is returned as it is, since JAX raises the error.
        """
        raise NotImplementedError

    def resolve_for_result(self, label: Any, leaf: Any) -> Any:
        """Resolves the label of a leaf of the result, as `resolve_for_argument` does for arguments."""
        raise NotImplementedError


def _can_change(prefix: Any) -> bool:
    """Returns True if the user may change an option: it holds a list, a dict or an object without a usable `==`."""
    try:
        return Static(prefix).is_mutable
    except Incomparable:
        return True


def _ndim(leaf: Any) -> int:
    """Number of axes of a leaf. It is 0 for a leaf that is no array: JAX raises the error when it maps the leaf."""
    return getattr(leaf, "ndim", 0)


def _ndims(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Number of axes of each leaf. A plan (the groups of a structure) holds for calls with equal ones."""
    return tuple(map(_ndim, leaves))


class VmapTransform(MappingTransform):
    """A function under `jax.vmap`, with identities preserved. Labels are axes, and None for what is not mapped."""

    calls_each_time = True
    in_name = "in_axes"
    out_name = "out_axes"
    default_in: Any = 0
    default_out: Any = 0
    is_label: Callable[[Any], bool] = staticmethod(lambda obj: obj is None or isinstance(obj, int))
    has_functions_as_labels = False
    """True if a label may be a function: leaf → axis."""
    can_compare_elements = True
    """True if a tracer of a new value tells whether the value differs between the mapped elements."""

    def check_options(self) -> None:
        """Copies a list of axes, and lets the transform raise its own errors for wrong options.

        The options are read again on each call, so the wrapper sees later changes of other lists in them.
        """
        # `jax.vmap` turns a list into a tuple when it wraps a function, so later changes of the list do nothing.
        if self.transform is jax.vmap and isinstance(self.options.get(self.in_name), list):
            self.options = {**self.options, self.in_name: tuple(self.options[self.in_name])}
        super().check_options()

    def resolve_for_argument(self, label: Any, leaf: Any) -> Any:
        """Returns the axis of a leaf of the arguments as a positive number. A function is asked about the leaf."""
        if self.has_functions_as_labels and callable(label):
            label = label(leaf)
        num_axes = _ndim(leaf)
        return label + num_axes if isinstance(label, int) and -num_axes <= label < 0 else label

    def resolve_for_result(self, label: Any, leaf: Any) -> Any:
        """Returns the axis of a leaf of the result as a positive number.

        The transform adds the mapped axis after the trace: `-1` is axis 2 for a leaf with two axes in the trace.
        """
        if self.has_functions_as_labels and callable(label):
            label = label(leaf)
        return label + _ndim(leaf) + 1 if isinstance(label, int) and label < 0 else label

    def unwritable(self, call: Call, number: int | None, value: Any) -> str:
        """Returns the reason, as a sentence, why `in_place=True` cannot write a changed leaf back. Empty if it can.

        A leaf with the axis None is one leaf for all elements. No value that differs between them can be written to it.

        Args:
            call: the call.
            number: record of the changed leaf. None for a new leaf.
            value: the leaf after the change. None if it is not known.
        """
        # A leaf with an axis can be written, and so can a new leaf whose value is the same for all elements.
        if number not in call.leaf_records_with_label(None) and not (number is None and self.may_differ(value)):
            return ""
        text = f"`{self.in_name}` is None for it, so there is one object for all elements. "
        if self.may_differ(value):
            return text + "The new values may differ between the elements, and one object cannot hold them all."
        return (
            text
            + "The new value is the same for all elements, so `in_place=True` would keep it (a dropout then has one "
            "mask for all)."
        )

    def may_differ(self, value: Any) -> bool:
        """Returns True if a new value may differ between the mapped elements. None stands for an unknown value."""
        if value is None or not self.can_compare_elements:
            return True
        # `is_batched` is True for a tracer of this `vmap` that has the mapped axis.
        return any(map(is_batched, flat_dag_of(value).leaves.values()))

    def explain(self, error: Exception, call: Callable[[], Call]) -> None:
        """Rewrites the text of two errors of JAX.

        One is about different sizes of the mapped axes: keyword arguments get the names of vanilla JAX. The
        other is about an object without an axis that was changed in place: the new text says how to avoid the error.

        Args:
            error: the error. Its text may be changed.
            call: returns the failed call.
        """
        super().explain(error, call)
        if isinstance(error, ValueError) and "inconsistent sizes" in str(error):
            # Vanilla JAX writes `kwargs['rate']` where this error has `argument rate`.
            for name in call().arguments.kwargs:
                error.args = (re.sub(rf"argument {name}\b", f"kwargs['{name}']", str(error)),)
        match = _UNMAPPED_BUT_BATCHED.fullmatch(str(error))
        if match is not None and isinstance(error, ValueError):
            # For a class without keys, JAX's path ends in `[<flat index 0>]`, which is no name of the user's.
            holder, _, index = match[1].partition("[<flat index")
            place = f"An array in `{holder}`" if index else f"`{holder}`"
            options = f'{self.in_name}={self.in_name}, axis_name="batch", in_place=True'
            error.args = (
                f"{place} has `{self.in_name}` None, so all elements share one value, but the function assigns a "
                "different value in each element. `in_place=True` cannot write several values into one object.\n"
                'Assign a value that all elements have in common, such as `jax.lax.pmean(value, "batch")`, and name '
                "the axis:\n"
                f"    f = {in_code(self.transform_name, options, 'f')}\n"
                "or return the values, or give each element an object of its own, stacked, with an axis in "
                f"`{self.in_name}`:\n"
                "    model = sharedtree.tree.map(lambda leaf: jnp.stack([leaf] * size), model)",
            )


class PmapTransform(VmapTransform):
    """A function under `jax.pmap`, with identities preserved."""

    caches_traces = True
    calls_each_time = False
    can_compare_elements = False

    def unwritable(self, call: Call, number: int | None, value: Any) -> str:
        """Returns the reason why a leaf cannot be written back. Every leaf with the axis None has one.

        For that leaf JAX would return the value of the first device, without comparing it with the other devices'.
        """
        if number not in call.leaf_records_with_label(None):
            return super().unwritable(call, number, value)
        return (
            "`in_axes` is None for it, so there is one object for all devices. `in_place=True` would write the value "
            "of the first device into it, whatever the others have."
        )

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        return as_sequence(self.options.get("static_broadcasted_argnums", ()))

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        # A negative position counts from the last argument.
        return {i + num_args if i < 0 else i for i in as_sequence(self.options.get("donate_argnums", ()))}

    def apply_transform(
        self, inner: Callable[..., Any], labels: Sequence[Any], result_labels: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """Applies `jax.pmap` to the inner function, with all options translated to leaf groups.

        The arguments of the inner function are the leaf groups, and then the static arguments.
        """
        options = {name: value for name, value in self.options.items() if name != "static_broadcasted_argnums"}
        options |= {
            # The first label of a group is its axis. The second says whether it is donated.
            "in_axes": (*[group_labels[0] for group_labels in labels], *[None] * num_statics),
            "out_axes": LeafGroups(result_labels or ()),
            "donate_argnums": tuple([i for i, group_labels in enumerate(labels) if is_donated(group_labels)]),
            "static_broadcasted_argnums": tuple(range(len(labels), len(labels) + num_statics)),
        }
        return self.transform(inner, **options)


_INFERRED = "inferred"
"""The label of all arguments if the option `in_specs` is left out. JAX then takes the sharding of each argument."""


class ShardMapTransform(MappingTransform):
    """A function under `jax.shard_map`, with identities preserved. Labels are partition specifications."""

    calls_each_time = True
    in_name = "in_specs"
    out_name = "out_specs"
    default_in = _INFERRED
    default_out = PartitionSpec()
    is_label = staticmethod(lambda obj: obj is None or node_type_of(obj) is None)
    unmapped_result = PartitionSpec()

    def resolve_for_argument(self, label: Any, leaf: Any) -> Any:
        """Returns the shortest way to write a specification."""
        return shortest_spec(label) if isinstance(label, PartitionSpec) else label

    def resolve_for_result(self, label: Any, leaf: Any) -> Any:
        """Returns the shortest way to write a specification."""
        return self.resolve_for_argument(label, leaf)

    def unwritable(self, call: Call, number: int | None, value: Any) -> str:
        """Returns the reason why a leaf cannot be written back. Empty if it can be.

        Either there are no `in_specs`, or the new value differs along an axis of the mesh, and the leaf's specification
        lacks this axis.
        """
        if number in call.leaf_records_with_label(_INFERRED):
            return f"Without `{self.in_name}` it is not known how to assemble the values that would be written back."
        # The axes of the mesh along which the new value may differ between devices.
        leaves = () if value is None else flat_dag_of(value).leaves.values()
        axes = {axis for leaf in leaves for axis in varying_axes(leaf)}
        # Without those along which the leaf is divided. An entry of a specification is one axis or a tuple of axes.
        for spec, *_ in call.plan.labels:
            if isinstance(spec, PartitionSpec) and number in call.leaf_records_with_label(spec):
                axes -= {name for part in spec for name in (part if isinstance(part, tuple) else (part,))}
        if not axes:
            return ""
        return f"Every device has a value of its own there, but `{self.in_name}` says that all have the same."

    def explain(self, error: Exception, call: Callable[[], Call]) -> None:
        """Replaces the text of an error about `in_specs` by vanilla JAX's, with argument and specification.

        Args:
            error: the error. Its text may be changed.
            call: returns the failed call.
        """
        super().explain(error, call)
        if isinstance(error, ValueError) and self.in_name in str(error):
            arguments = call().arguments
            # JAX compares specifications before it calls the user's function, so this does not run that function.
            try:
                self.raise_vanilla_error(arguments.args, arguments.kwargs)
            except ValueError as vanilla_error:
                error.args = vanilla_error.args
            except Exception:  # noqa: BLE001 -- another error than the one to be explained
                return

    def prefix_of_arguments(self, arguments: Arguments) -> Any:
        """Makes the prefix of all arguments. None if JAX will refuse the call.

        JAX refuses keyword arguments, and a list of specifications.
        """
        prefix = self.options.get(self.in_name, self.default_in)
        if arguments.kwargs or not (self.is_label(prefix) or isinstance(prefix, tuple)):
            return None
        return super().prefix_of_arguments(arguments)

    def apply_transform(
        self, inner: Callable[..., Any], labels: Sequence[Any], result_labels: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """Applies `jax.shard_map` to the inner function, without `in_specs` if JAX has to infer them.

        Raises:
            ValueError: in place, if there are no `in_specs`.
        """
        # In place, the labels of changed arguments are among those of the results.
        if _INFERRED in (result_labels or ()):
            raise ValueError(
                "`sharedtree.shard_map` with `in_place=True` was called without `in_specs`. It writes changed "
                "arguments back, so it must know how they are sharded. Pass `in_specs`, for example:\n"
                "    in_specs = jax.sharding.PartitionSpec()"
            )
        options = {**self.options, self.out_name: LeafGroups(result_labels or ())}
        # Without `in_specs` there is one group, whose only label is `_INFERRED`.
        if labels != ((_INFERRED,),):
            options[self.in_name] = tuple([group_labels[0] for group_labels in labels])
        return self.transform(inner, **options)


class FilterVmapTransform(VmapTransform):
    """A function under `equinox.filter_vmap`, with identities preserved.

    A label may be a function: leaf → axis. By default all arrays have axis 0, and other leaves have None.
    """

    default_in = eqx.if_array(0)
    default_out = eqx.if_array(0)
    is_label = staticmethod(lambda obj: obj is None or isinstance(obj, int) or (callable(obj) and not is_module(obj)))
    groups_by_outcome = True
    has_functions_as_labels = True

    def prefix_of_arguments(self, arguments: Arguments) -> Any:
        """Makes the prefix of all arguments. None if Equinox will refuse the call.

        `in_axes` may be a dict from the name of a parameter to its axis, as Equinox allows.
        """
        axes = self.options.get(self.in_name, self.default_in)
        # Equinox refuses keyword arguments.
        if arguments.kwargs:
            return None
        if not isinstance(axes, dict):
            return super().prefix_of_arguments(arguments)
        parameters = self.names.positional[: len(arguments.args)]
        # The dict names a parameter that the call has no argument for.
        if set(axes) - set(parameters):
            return None
        return Branch(tuple([axes.get(name, self.default_in) for name in parameters]))

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """Makes the transformed function anew for each call.

        The axes of results are only known when the function has returned. Then the base class puts them into the list
        `call.result_labels`, and JAX reads `out_axes` after that.
        """
        labels = [group_labels[0] for group_labels in call.plan.labels]
        # `jax.vmap` refuses a call without any axis. `filter_vmap` then calls the function once.
        if all(label is None for label in labels) and self.options.get("axis_size") is None:
            return self.inner(policy)
        options = {name: value for name, value in self.options.items() if name not in ("in_axes", "out_axes")}
        return jax.vmap(self.inner(policy), in_axes=tuple(labels), out_axes=LeafGroups(call.result_labels), **options)

    def pack_results(self, result: Any, trace: FunctionTrace) -> Any:
        """Packs the result of the function into leaf groups, one for each axis.

        First, Python numbers outside modules become arrays if they have an axis, as in Equinox.
        """
        prefix = self.options.get(self.out_name, self.default_out)
        return super().pack_results(self._with_arrays(prefix, result), trace)

    def _with_arrays(self, prefix: Any, result: Any) -> Any:
        """Returns a result whose Python numbers outside modules are arrays, wherever the prefix has an axis.

        Args:
            prefix: the part of `out_axes` for this result.
            result: the result of the function, or a part of it.
        """
        # Each part of a tuple or list has a part of the prefix.
        if type(prefix) in (tuple, list) and type(result) is type(prefix) and len(result) == len(prefix):
            return type(prefix)(map(self._with_arrays, prefix, result))
        # Another tree in the prefix, such as a module. A prefix that does not fit raises an error later.
        if not self.is_label(prefix):
            return result

        def has_axis(leaf: Any) -> bool:
            return isinstance(leaf, complex | float | int) and self.resolve_for_result(prefix, leaf) is not None

        # `tree_map` would make new containers, which may carry identity. So a result without such numbers is returned
        # as it is.
        if not any(map(has_axis, jtu.tree_leaves(result, is_leaf=is_module))):
            return result
        return jtu.tree_map(lambda leaf: jnp.asarray(leaf) if has_axis(leaf) else leaf, result, is_leaf=is_module)

    def leave(self, result: Any, call: Call, policy: Policy) -> Any:
        """Builds the result of a call, after two steps of `filter_vmap` beyond `jax.vmap`.

        Args:
            result: the leaf groups of the result.
            call: the call. Its `result_labels` are the axes of these groups.
            policy: the policy of the call.

        Raises:
            ValueError: if nothing was mapped, and the option for results has an axis.
        """
        has_axes = any(group_labels[0] is not None for group_labels in call.plan.labels)
        is_mapped = has_axes or self.options.get("axis_size") is not None
        # First step: Equinox refuses axes of results if nothing was mapped.
        if not is_mapped and any(label is not None for label in call.result_labels):
            raise ValueError(
                "Cannot resolve batch dimension. Non-`None` `out_axes` requires either `in_axes` or `axis_size` to be "
                "not `None`."
            )
        # Second step: Equinox makes arrays of all mapped results, since it moves their axes.
        groups: list[LeafGroup] = []
        for group, label in zip(result.parts, call.result_labels, strict=True):
            has_axis = label is not None
            groups.append(LeafGroup(list(map(jnp.asarray, group.leaves)), group.selection) if has_axis else group)
        return super().leave(LeafGroups(groups), call, policy)
