"""`jax.vmap`, `pmap`, `shard_map`, `equinox.filter_vmap`: axes and specifications, also for the inside of modules.

A partition specification says of one leaf along which axes of a mesh it is cut, so it is to `shard_map` what an axis is
to `vmap`; `pmap` has axes itself. Of a tied leaf each device gets one shard.
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
from ..core._pack_and_unpack import walked
from ..core._prefix_trees import Branch
from ..core._static_kinds import Incomparable
from ..core._static_values import Static
from ..ties._policy_and_context import Policy
from ._argument_names import several
from ._caller_side import Call, Grouping
from ._donation import DonatingTransform
from ._function_and_options import in_code
from ._function_side import Inside, Received
from ._grouping_leaves import GroupedResult
from ._leaf_groups import LeafGroup, LeafGroups
from ._leaf_labels import SPLIT_WITH_WARNING, Treatment, is_donated, labels_in
from ._placements import shortened

_UNMAPPED = re.compile(r"at vmap out_axes in place of (.*), got axis spec None but output was batched .*")
"""What JAX says of a place that was changed, and has no axis to come out along."""


class VmapTransform(DonatingTransform):
    """A function under `jax.vmap`, with identities preserved; and how others are wrapped that have the like options."""

    calls_each_time = True
    in_name = "in_axes"
    out_name = "out_axes"
    default_in: Any = 0
    default_out: Any = 0
    is_label: Callable[[Any], bool] = staticmethod(lambda obj: obj is None or isinstance(obj, int))
    groups_by_outcome = False

    @classmethod
    def is_label_of_results(cls, obj: Any) -> bool:
        """Whether an object in the prefix of results is a label."""
        return cls.is_label(obj)

    def check_options(self) -> None:
        """Copies a list of axes, as `jax.vmap` does when a function is wrapped. All else is read on each call."""
        if self.transform is jax.vmap and isinstance(self.options.get(self.in_name), list):
            self.options = {**self.options, self.in_name: tuple(self.options[self.in_name])}
        super().check_options()

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """As the base."""
        prefix = self.prefix_of_arguments(self.arguments(args, kwargs))
        known = prefix is not None and all(map(self.is_label, labels_in(prefix, self.is_label)))
        if (
            not (args or kwargs)
            or not known
            or any(isinstance(i, int) and i >= len(args) for i in self.static_positions(len(args), kwargs))
        ):
            self.transform(self.function, **self.options)(*args, **kwargs)  # says best what is wrong
        return super().enter(args, kwargs, policy)

    def explain(self, error: Exception, call: Callable[[], Call]) -> None:
        """As the base, and what was changed in place although it is not mapped."""
        super().explain(error, call)
        if isinstance(error, ValueError) and "inconsistent sizes" in str(error):
            for name in call().arguments.kwargs:  # as JAX has it
                error.args = (re.sub(rf"argument {name}\b", f"kwargs['{name}']", str(error)),)
        found = _UNMAPPED.fullmatch(str(error))
        if found is not None and isinstance(error, ValueError):
            options = f'{self.in_name}={self.in_name}, axis_name="batch", in_place=True'
            error.args = (
                f"`{found[1]}` has the {self.in_name} None, so it is one for all elements, but it was given another "
                "value for each of them. In place, what was changed goes out along the axes along which it came in.\n"
                'Let the function assign what all have in common, such as `jax.lax.pmean(value, "batch")`, and name '
                "the axis:\n"
                f"    f = {in_code(self.transform_name, options, 'f')}\n"
                "or return the values instead of assigning them, or give each element an object of its own, stacked, "
                f"with an axis in `{self.in_name}`:\n"
                "    model = sharedtree.tree.map(lambda leaf: jnp.stack([leaf] * size), model)",
            )

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """The axis of each leaf, and whether it is donated."""
        prefix = self.prefix_of_arguments(arguments)
        if prefix is None:
            return super().grouping(policy, arguments)
        mapped = Treatment(
            self.in_name,
            prefix,
            self.is_label,
            lambda label, leaf, _: self.resolve_in(label, leaf),
            functools.partial("{} {}".format, self.in_name),
            self.groups_by_outcome,
            within_module=SPLIT_WITH_WARNING,
            has_containers=policy.containers,
        )
        labels = labels_in(prefix, self.is_label)
        donating = self.donating(arguments)
        treatments = [mapped] if donating is None else [mapped, donating]
        if self.groups_by_outcome:
            return Grouping(self.transform_name, lambda _: treatments)
        key = Static((policy.containers, *[each.prefix for each in treatments]))
        groups = [(label,) for label in labels] if donating is None else ()
        return Grouping(
            self.transform_name,
            lambda _: treatments,
            key,
            _ndims if len(labels) > 1 else None,
            groups,
            # Like JAX, we read options that can be changed on each call, so C cannot know what the next one says.
            is_of_form=not (key.is_mutable or _can_change(self.options.get(self.out_name))),
        )

    def prefix_of_arguments(self, arguments: Arguments) -> Any:
        """That of all: as given for positional ones, and the axis 0 for keywords; None if they are not as many."""
        positions = positions_of(arguments.parts()[1])
        prefix = self.options.get(self.in_name, self.default_in)
        if self.is_label(prefix):
            parts = dict.fromkeys(range(len(arguments.args)), prefix)
        elif isinstance(prefix, (tuple, list)) and len(prefix) == len(arguments.args):
            parts = dict(enumerate(prefix))
        else:
            return None
        return Branch(tuple([parts[i] if isinstance(i, int) else 0 for i in positions]))

    def leaving(self, policy: Policy, arguments: Arguments) -> Treatment | None:
        """Results go out along `out_axes`, and what was changed along the axes along which it came in."""
        prefix = self.options.get(self.out_name, self.default_out)
        if policy.in_place:
            own = self.prefix_of_arguments(arguments)
            prefix = Branch((Branch(tuple(map(self.leaves_along, own.parts))), prefix))
        return Treatment(
            self.out_name,
            prefix,
            self.is_label_of_results,
            lambda label, leaf, _: self.resolve_out(label, leaf),
            lambda label: f"{self.out_name} {label}",
            self.groups_by_outcome,
            within_module=SPLIT_WITH_WARNING,
            has_containers=policy.containers,
        )

    def unwritable(self, call: Call, number: int | None, value: Any) -> str:
        """Leaves with the axis None are one for all elements, so that no value which differs between them fits in."""
        if number not in call.leaves_labelled(None) and not (number is None and self.may_differ(value)):
            return ""
        text = f"Where `{self.in_name}` is None there is one object for all elements, "
        if self.may_differ(value):
            return text + "into which no value that differs between them can be written."
        return text + "and `in_place=True` writes what is one for all of them, as a single mask of a dropout is."

    def may_differ(self, value: Any) -> bool:
        """Whether what was changed may have a value for each element."""
        return value is None or any(map(is_batched, walked(value).leaves.values()))

    def applied(
        self, inner: Callable[..., Any], labels: Sequence[Any], leaving: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """With the axes of the groups."""
        options = {
            **self.options,
            self.in_name: tuple([label[0] for label in labels]),
            self.out_name: LeafGroups(leaving or ()),
        }
        return self.transform(inner, **options)

    # What the transforms differ in ----------------------------------------------------------------------------------

    def resolve_in(self, label: Any, leaf: Any) -> Any:
        """The axis for one leaf of the arguments, the last one being the same as -1."""
        num_axes = _ndim(leaf)
        return label + num_axes if isinstance(label, int) and -num_axes <= label < 0 else label

    def resolve_out(self, label: Any, leaf: Any) -> Any:
        """The axis for one leaf of the result, which has one axis more outside."""
        return label + _ndim(leaf) + 1 if isinstance(label, int) and label < 0 else label

    def leaves_along(self, prefix: Any) -> Any:
        """The prefix under which an argument that was changed goes out."""
        return prefix


def _can_change(prefix: Any) -> bool:
    """Whether an option is, or holds, a list or a dictionary, or something else of which nothing is known."""
    try:
        return Static(prefix).is_mutable
    except Incomparable:
        return True


def _ndim(leaf: Any) -> int:
    """The number of axes; of what is no array JAX itself says what is wrong."""
    return getattr(leaf, "ndim", 0)


def _ndims(leaves: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(_ndim, leaves))


class PmapTransform(VmapTransform):
    """A function under `jax.pmap`, with identities preserved."""

    caches_traces = True
    calls_each_time = False

    def may_differ(self, value: Any) -> bool:
        """True: nothing tells."""
        return True

    def unwritable(self, call: Call, number: int | None, value: Any) -> str:
        """Leaves with the axis None are one for all devices. JAX takes what the first has, and compares nothing."""
        if number not in call.leaves_labelled(None):
            return super().unwritable(call, number, value)
        return (
            "Where `in_axes` is None there is one object for all devices, and `in_place=True` writes what the first "
            "device has into it, whatever the others have."
        )

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Those that `static_broadcasted_argnums` chooses."""
        return several(self.options.get("static_broadcasted_argnums", ()))

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Those that `donate_argnums` chooses."""
        return {i + num_args if i < 0 else i for i in several(self.options.get("donate_argnums", ()))}

    def applied(
        self, inner: Callable[..., Any], labels: Sequence[Any], leaving: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """With the axes of the groups, and those that are donated."""
        options = {name: value for name, value in self.options.items() if name != "static_broadcasted_argnums"}
        options |= {
            "in_axes": (*[label[0] for label in labels], *[None] * num_statics),
            "out_axes": LeafGroups(leaving or ()),
            "donate_argnums": tuple([i for i, label in enumerate(labels) if is_donated(label)]),
            "static_broadcasted_argnums": tuple(range(len(labels), len(labels) + num_statics)),
        }
        return self.transform(inner, **options)


_INFERRED = "inferred"
"""Stands for `in_specs` that were not given: JAX then asks each argument how it is sharded."""


class ShardMapTransform(VmapTransform):
    """A function under `jax.shard_map`, with identities preserved."""

    in_name = "in_specs"
    out_name = "out_specs"
    default_in = _INFERRED
    default_out = PartitionSpec()
    is_label = staticmethod(lambda obj: obj is None or node_type_of(obj) is None)

    @classmethod
    def is_label_of_results(cls, obj: Any) -> bool:
        """As the base. None stands for itself: for a result in which there is nothing."""
        return obj is not None and cls.is_label(obj)

    def unwritable(self, call: Call, number: int | None, value: Any) -> str:
        """No leaf can, if no specifications were given; nor what differs along an axis that is not in its own."""
        if number in call.leaves_labelled(_INFERRED):
            return f"Without `{self.in_name}` nobody knows how to put together what would be written back."
        leaves = () if value is None else walked(value).leaves.values()
        axes = {axis for leaf in leaves for axis in varying_axes(leaf)}
        for spec, *_ in call.plan.labels:
            if isinstance(spec, PartitionSpec) and number in call.leaves_labelled(spec):
                axes -= {name for part in spec for name in (part if isinstance(part, tuple) else (part,))}
        if not axes:
            return ""
        return f"Every device has a value of its own there, while `{self.in_name}` says that they have one."

    def explain(self, error: Exception, call: Callable[[], Call]) -> None:
        """As the base. Which argument and specification are at fault JAX says best of the arguments themselves."""
        super().explain(error, call)
        if isinstance(error, ValueError) and self.in_name in str(error):  # so the function was not called
            own = call().arguments
            try:
                self.transform(self.function, **self.options)(*own.args, **own.kwargs)
            except ValueError as vanilla:
                error.args = vanilla.args
            except Exception:  # noqa: BLE001 -- what else they are is not what was refused
                return

    def prefix_of_arguments(self, arguments: Arguments) -> Any:
        """As the base; several are a tuple, and there are no arguments by keyword."""
        prefix = self.options.get(self.in_name, self.default_in)
        if arguments.kwargs or not (self.is_label(prefix) or isinstance(prefix, tuple)):
            return None
        return super().prefix_of_arguments(arguments)

    def applied(
        self, inner: Callable[..., Any], labels: Sequence[Any], leaving: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """As the base, but for specifications that JAX infers."""
        options = {**self.options, self.out_name: LeafGroups(leaving or ())}
        if labels != ((_INFERRED,),):
            options[self.in_name] = tuple([label[0] for label in labels])
        return self.transform(inner, **options)

    def resolve_in(self, label: Any, leaf: Any) -> Any:
        """The specification for one leaf, written in the shortest way."""
        return shortened(label) if isinstance(label, PartitionSpec) else label

    resolve_out = resolve_in

    def leaves_along(self, prefix: Any) -> Any:
        """What every device was given whole leaves whole."""
        if prefix is _INFERRED:
            raise ValueError(
                "`Policy(in_place=True)` writes back what the function changed, and `in_specs` does not say how it is "
                "sharded. Say so, for example\n"
                "    in_specs = jax.sharding.PartitionSpec()"
            )
        return PartitionSpec() if prefix is None else prefix


class FilterVmapTransform(VmapTransform):
    """A function under `equinox.filter_vmap`, with identities preserved: a label may be a function of a leaf."""

    default_in = eqx.if_array(0)
    default_out = eqx.if_array(0)
    is_label = staticmethod(lambda obj: obj is None or isinstance(obj, int) or (callable(obj) and not is_module(obj)))
    groups_by_outcome = True

    def prefix_of_arguments(self, arguments: Arguments) -> Any:
        """As the base; Equinox takes them by name, too, and no arguments by keyword."""
        axes = self.options.get(self.in_name, self.default_in)
        if arguments.kwargs:
            return None
        if not isinstance(axes, dict):
            return super().prefix_of_arguments(arguments)
        parameters = self.names.positional[: len(arguments.args)]
        if set(axes) - set(parameters):
            return None
        return Branch(tuple([axes.get(name, self.default_in) for name in parameters]))

    def resolve_in(self, label: Any, leaf: Any) -> Any:
        """As the base."""
        return super().resolve_in(label(leaf) if callable(label) else label, leaf)

    def resolve_out(self, label: Any, leaf: Any) -> Any:
        """As the base."""
        return super().resolve_out(label(leaf) if callable(label) else label, leaf)

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """Made anew for each call: along which axes its results leave is known when the function has returned."""
        labels = [label[0] for label in call.plan.labels]
        if all(label is None for label in labels) and self.options.get("axis_size") is None:
            return self.inner(policy)
        own = ("in_axes", "out_axes")
        options = {name: value for name, value in self.options.items() if name not in own}
        return jax.vmap(self.inner(policy), in_axes=tuple(labels), out_axes=LeafGroups(call.leaving), **options)

    def pack_results(self, result: Any, inside: Inside) -> Any:
        """As the base. A Python number in no module that is given an axis is an array, as with Equinox."""
        return super().pack_results(
            self._with_arrays(self.options.get(self.out_name, self.default_out), result), inside
        )

    def _with_arrays(self, prefix: Any, result: Any) -> Any:
        if type(prefix) in (tuple, list) and type(result) is type(prefix) and len(result) == len(prefix):
            return type(prefix)(map(self._with_arrays, prefix, result))
        if not self.is_label(prefix):
            return result

        def is_given_axis(leaf: Any) -> bool:
            return isinstance(leaf, complex | float | int) and self.resolve_out(prefix, leaf) is not None

        if not any(map(is_given_axis, jtu.tree_leaves(result, is_leaf=is_module))):
            return result
        return jtu.tree_map(lambda leaf: jnp.asarray(leaf) if is_given_axis(leaf) else leaf, result, is_leaf=is_module)

    def handed_out(self, out: GroupedResult, received: Received) -> Any:
        """As the base. Of what they are, the transform is told when it asks."""
        assert received.call is not None
        received.call.leaving[:] = out.labels
        return super().handed_out(out, received)

    def leave(self, result: Any, call: Call, policy: Policy, used: Any = None) -> Any:
        """As the base."""
        is_mapped = any(label[0] is not None for label in call.plan.labels) or self.options.get("axis_size") is not None
        if not is_mapped and any(label is not None for label in call.leaving):
            raise ValueError(
                "Cannot resolve batch dimension. Non-`None` `out_axes` requires either `in_axes` or `axis_size` to be "
                "not `None`."
            )
        # As Equinox, which moves the axes of what is mapped.
        groups = [
            group if label is None else LeafGroup(list(map(jnp.asarray, group.leaves)), group.selection)
            for group, label in zip(result.parts, call.leaving, strict=True)
        ]
        return super().leave(LeafGroups(groups), call, policy, used)
