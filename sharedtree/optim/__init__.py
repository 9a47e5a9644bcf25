"""Optimizers on DAGs: any optax transformation, with one slot for each tied leaf. `wrt=` selects the leaves.

The functions take models and gradients, and return updates and states. They never change a model. Optax is imported
only when it is used.
"""

from ._optimizer import (
    apply_updates as apply_updates,
    incremental_update as incremental_update,
    optimizer as optimizer,
)
