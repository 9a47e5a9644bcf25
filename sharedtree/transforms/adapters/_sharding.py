"""`jax.shard_map`, `jax.pmap`, `equinox.filter_pmap`: functions mapped over devices; and `equinox.filter_shard`.

A partition specification says of one leaf along which axes of a mesh it is cut, so it is to `shard_map` what an axis is
to `vmap`; `pmap` has axes itself. Of a tied leaf each device gets one shard.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import equinox as eqx
from jax.sharding import PartitionSpec

from ..._context import Context
from ..._node_types import node_type_of
from .._argnums import several
from .._crossed import Position
from .._crossing import Crossing
from .._device_put import placed
from .._treatments import Treatment
from ._donation import DonatingTransform
from ._vmap import FilterVmapTransform, VmapTransform

_INFERRED = "inferred"
"""Stands for `in_specs` that were not given: JAX then asks each argument how it is sharded."""


class ShardMapTransform(VmapTransform):
    """A function under `jax.shard_map`, with identities preserved."""

    in_name = "in_specs"
    out_name = "out_specs"
    default_in = _INFERRED
    default_out = PartitionSpec()
    is_label = staticmethod(lambda obj: obj is None or node_type_of(obj) is None)

    def prefixes_of_arguments(self, num_args: int, keywords: Collection[str]) -> Sequence[Any] | None:
        """As the base; several are a tuple, and there are no arguments by keyword."""
        prefix = self.options.get(self.in_name, self.default_in)
        if keywords or not (self.is_label(prefix) or isinstance(prefix, tuple)):
            return None
        return super().prefixes_of_arguments(num_args, keywords)

    def resolve_in(self, label: Any, leaf: Any) -> Any:
        """The specification for one leaf, written in the shortest way."""
        if not isinstance(label, PartitionSpec) or label.unreduced or label.reduced:
            return label
        axes = [axis[0] if isinstance(axis, tuple) and len(axis) == 1 else axis or None for axis in label]
        while axes and axes[-1] is None:
            axes.pop()
        return PartitionSpec(*axes)

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


class PmapTransform(VmapTransform, DonatingTransform):
    """A function under `jax.pmap`, with identities preserved."""

    caches_traces = True

    def static_positions(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Collection[Position]:
        """Those that `static_broadcasted_argnums` chooses."""
        return several(self.options.get("static_broadcasted_argnums", ()))

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Those that `donate_argnums` chooses."""
        return {i + num_args if i < 0 else i for i in several(self.options.get("donate_argnums", ()))}

    def treatments(self, num_args: int, keywords: Collection[str]) -> Sequence[Treatment]:
        """Along which axis, and donated or not."""
        of_buffers = DonatingTransform.treatments(self, num_args, keywords)
        return (*super().treatments(num_args, keywords), *of_buffers)


class FilterPmapTransform(FilterVmapTransform, DonatingTransform):
    """A function under `equinox.filter_pmap`, with identities preserved."""

    caches_traces = True
    shares_alike = True

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """All of them or none."""
        return () if self.options.get("donate", "none") == "none" else range(num_args)


def filter_shard(crossing: Crossing, x: Any, device_or_shardings: Any) -> Any:
    """`equinox.filter_shard`. Like `device_put`, it takes its whole argument as one model."""
    place: Callable[[Any, Any], Any] = eqx.filter_shard
    with Context(crossing.policy):
        return placed(x, device_or_shardings, "device_or_shardings", crossing.title, place)
