"""Two counters that are one object: the case from which the idea of `preserve_identities` comes (treex issue 8).

A mutable module holds the same counter twice. Calling it increments the first one, and the second must follow, with
and without `jit`. The classes are ordinary ones, registered with JAX by hand; nothing in them knows of sharing.
"""

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey, register_pytree_with_keys

import sharedtree as st


class Counter:
    """Counts its calls."""

    def __init__(self, count: jax.Array) -> None:
        self.count = count

    def __call__(self) -> None:
        self.count = self.count + 1


class Model:
    """Holds two counters, and calls the first."""

    def __init__(self, first: Counter, second: Counter) -> None:
        self.first = first
        self.second = second

    def __call__(self) -> None:
        self.first()


register_pytree_with_keys(
    Counter, lambda c: (((GetAttrKey("count"), c.count),), None), lambda _, children: Counter(*children)
)
register_pytree_with_keys(
    Model,
    lambda m: (((GetAttrKey("first"), m.first), (GetAttrKey("second"), m.second)), None),
    lambda _, children: Model(*children),
)


def new_model() -> Model:
    counter = Counter(jnp.array(0))
    return Model(counter, counter)


def call(model: Model) -> Model:
    model()
    return model


def show(title: str, model: Model) -> None:
    same = "one object" if model.first is model.second else "two objects"
    print(f"{title}: first {model.first.count}, second {model.second.count}, {same}")


def main() -> None:
    eager = call(new_model())
    show("no jit               ", eager)
    assert eager.first is eager.second

    vanilla = jax.jit(call)(new_model())
    show("jax.jit              ", vanilla)
    assert vanilla.first is not vanilla.second
    assert int(vanilla.second.count) == 0  # it did not follow

    kept = st.preserve_identities(jax.jit)(call)(new_model())
    show("preserve_identities  ", kept)
    assert kept.first is kept.second
    assert int(kept.second.count) == 1

    # The caller's own objects stay as they were, unless they are to be changed too.
    model = new_model()
    counter = model.first
    st.preserve_identities(jax.jit, policy=st.Policy(in_place=True))(Model.__call__)(model)
    show("Policy(in_place=True)", model)
    assert model.first is model.second is counter
    assert int(counter.count) == 1


if __name__ == "__main__":
    main()
