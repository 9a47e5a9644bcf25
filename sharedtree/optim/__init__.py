"""Optimizers on DAGs: any optax transformation, with one slot for each tied leaf, and `wrt=`, which says for which.

Models and gradients come in; updates and states go out. Never changes a model, and imports optax only where it is used.
"""

from ._optimizer import apply_updates as apply_updates, optimizer as optimizer
