"""Two neural ODEs with one vector field: one goes forward in time, the other goes back.

The field is one object in both flows. Diffrax solves the equations and knows nothing of sharing: it is handed the field
inside a function under `st.jit` and `st.value_and_grad`, where it is one object like everywhere else. The gradient that
comes back through both solvers is added up.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import sharedtree as st

STEPS = 5


class Field(eqx.Module):
    """The velocity at each point of the plane."""

    mlp: eqx.nn.MLP

    def __init__(self, *, key: jax.Array) -> None:
        self.mlp = eqx.nn.MLP(2, 2, 16, depth=1, activation=jnp.tanh, key=key)

    def __call__(self, t, points: jax.Array, args) -> jax.Array:
        return jax.vmap(self.mlp)(points)


class Flow(eqx.Module):
    """Follows a field for some time, which may be negative."""

    field: Field
    time: float = eqx.field(static=True)

    def __call__(self, points: jax.Array) -> jax.Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(self.field),
            diffrax.Heun(),
            t0=0.0,
            t1=self.time,
            dt0=self.time / STEPS,
            y0=points,
            adjoint=diffrax.DirectAdjoint(),
            max_steps=STEPS + 1,
        )
        return solution.ys[-1]


class Clock(eqx.Module):
    """Says where a point will be after half a unit of time, and where it was."""

    future: Flow
    past: Flow

    def __init__(self, *, key: jax.Array) -> None:
        field = Field(key=key)
        self.future = Flow(field, 0.5)
        self.past = Flow(field, -0.5)


@jax.jit
def new_batch(key: jax.Array):
    """Points of the plane, and where a damped oscillation takes them in half a unit of time."""
    before = jax.random.normal(key, (32, 2))
    return before, before @ jax.scipy.linalg.expm(0.5 * jnp.array([[-0.1, 2.0], [-2.0, -0.1]])).T


def loss_fn(model: Clock, batch) -> jax.Array:
    before, after = batch
    return jnp.mean((model.future(before) - after) ** 2) + jnp.mean((model.past(after) - before) ** 2)


tx = st.optimizer(optax.adam(1e-2))


@st.jit
def train_step(model, state, batch):
    loss, gradient = st.value_and_grad(loss_fn)(model, batch)
    updates, state = tx.update(gradient, state, model)
    return st.apply_updates(model, updates), state, loss


def main() -> None:
    model = Clock(key=jax.random.key(0))
    (tie,) = st.ties(model)
    print(f"one {tie.kind}: {' = '.join(tie.paths)}")

    state = tx.init(model)
    first = last = None
    for key in jax.random.split(jax.random.key(1), 150):
        model, state, last = train_step(model, state, new_batch(key))
        first = last if first is None else first
    print(f"loss: {first:.3f} at the first step, {last:.3f} at the last")

    assert last < first / 5
    assert model.future.field is model.past.field
    assert state[0].mu.future.field is state[0].mu.past.field
    point = jnp.array([[1.0, 0.0]])
    print(f"there and back: {point[0]} becomes {model.past(model.future(point))[0].round(2)}")
    print("one field and one pair of moments, after 150 steps")


if __name__ == "__main__":
    main()
