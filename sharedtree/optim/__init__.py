"""Optimizers on DAGs: any optax transformation, with one slot for each tied leaf, and `wrt=`, which says for which.

In come models and gradients; out go updates and states. Never changes a model, and imports optax only where it is used.
"""

from ._optimizer import (
    apply_updates as apply_updates,
    incremental_update as incremental_update,
    optimizer as optimizer,
)
