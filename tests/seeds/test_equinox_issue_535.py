"""Equinox issue 535: models are loaded without a template, by the names of their classes and functions.

Saved here, loaded in a process of its own that makes none of the models again.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests import processes
from tests.models import embed_weight, head_weight

lx = pytest.importorskip("lineax")
diffrax = pytest.importorskip("diffrax")

KEY = jax.random.key(0)
MATRIX = jnp.array([[3.0, 1.0, 0.0], [1.0, 4.0, 1.0], [0.0, 1.0, 5.0]])
VECTOR = jnp.array([1.0, -2.0, 0.5])


def linear_solvers():
    direct = [lx.AutoLinearSolver(well_posed=True), lx.Cholesky(), lx.LU(), lx.QR(), lx.SVD()]
    return [*direct, *(cls(rtol=1e-6, atol=1e-6) for cls in (lx.BiCGStab, lx.CG, lx.GMRES))]


def solved(solver):
    tags = lx.positive_semidefinite_tag
    return lx.linear_solve(lx.MatrixLinearOperator(MATRIX, tags), VECTOR, solver).value


ODE_SOLVERS = ("Euler", "Tsit5", "Kvaerno3")


ADAPTIVE = diffrax.PIDController(rtol=1e-3, atol=1e-3)


class Field(eqx.Module):
    weight: jax.Array
    activation: object

    def __call__(self, t, y, args):
        return self.activation(self.weight @ y)


def ode(name):
    return {"solver": getattr(diffrax, name)(), "terms": diffrax.ODETerm(Field(MATRIX / 9, jax.nn.tanh))}


def integrated(ode):
    controller = diffrax.ConstantStepSize() if type(ode["solver"]) is diffrax.Euler else ADAPTIVE
    return diffrax.diffeqsolve(**ode, t0=0.0, t1=1.0, dt0=0.25, y0=VECTOR, stepsize_controller=controller).ys


class Stateful(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(3, 3, key=key)
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


def stateful():
    model, state = eqx.nn.make_with_state(Stateful)(KEY)
    return {"model": model, "state": run(model, state)[1]}


def run(model, state):
    xs = jnp.stack([VECTOR, 2 * VECTOR, -VECTOR])
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(xs, state)


def shared():
    """As Equinox shares, and as Python does."""
    one, two = (eqx.nn.Linear(3, 3, key=key) for key in jax.random.split(KEY))
    return {"shared": eqx.nn.Shared((one, two), head_weight, embed_weight), "tied": [one, one]}


def through_layers(model):
    return sum(layer(VECTOR) for layer in [*model["shared"](), *model["tied"]])


def answers(models):
    """What each of the saved models computes."""
    found = [solved(solver) for solver in models["linear"]] + [integrated(ode) for ode in models["ode"]]
    return [*found, run(**models["stateful"])[0], through_layers(models["shared"])]


def models():
    return {
        "linear": linear_solvers(),
        "ode": [ode(name) for name in ODE_SOLVERS],
        "stateful": stateful(),
        "shared": shared(),
    }


CODE = """
import sys
import numpy as np
import sharedtree as st
from tests.seeds import test_equinox_issue_535 as seed
loaded = st.load(sys.argv[1], trusted=[seed.Field, seed.Stateful, seed.embed_weight, seed.head_weight])
assert loaded["shared"]["tied"][0] is loaded["shared"]["tied"][1]
np.savez(sys.argv[1] + ".npz", *seed.answers(loaded))
"""


@pytest.mark.slow
def test_solvers_stateful_layers_and_shared_layers(tmp_path):
    made, path = models(), str(tmp_path / "models.safetensors")
    st.save(path, made)
    processes.run(CODE, path)
    with np.load(path + ".npz") as found:
        expected = answers(made)
        assert len(found.files) == len(expected) == len(made["linear"]) + len(ODE_SOLVERS) + 2
        for name, want in zip(found.files, expected, strict=True):
            np.testing.assert_allclose(found[name], want, rtol=1e-6)
