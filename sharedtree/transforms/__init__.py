"""Transforms that keep identity: `preserve_identities`, and the ready-made ones. One file a family.

`_crossing` packs arguments and unpacks results; `_function` is the base of all families; `_treatments`, `_untied`,
`_leaks` and `_retracing` are the checks made when a function is traced.
"""

from ._explain import Explanation as Explanation, LeafReport as LeafReport, explain as explain
from ._placement import device_put as device_put, with_sharding_constraint as with_sharding_constraint
from ._preserve import (
    Adapter as Adapter,
    preserve_identities as preserve_identities,
    register_transform as register_transform,
)
from ._ready_made import (
    checkpoint as checkpoint,
    grad as grad,
    jit as jit,
    value_and_grad as value_and_grad,
    vmap as vmap,
)
