"""The classes of the libraries that sharedtree knows come back without a word of trust."""

import functools
import importlib
import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.serialise.trust._allow_list import TOKENS
from tests.models import first, second

from .equinox_layers import EQUINOX, filled, make_layer
from .isomorphic import assert_isomorphic

KEY = jax.random.key(0)


def round_trip(tree, trusted=()):
    return st.from_bytes(st.to_bytes(tree), trusted=trusted)


def check(tree, trusted=()):
    back = round_trip(tree, trusted)
    assert_isomorphic(tree, back)
    # What JAX and Equinox see: treedefs compare static fields with `==`, so new markers and partials differ there.
    structure = str(jax.tree.structure(tree))
    assert str(jax.tree.structure(back)) == structure or "object object" in structure
    return back


def test_equinox():
    for name in EQUINOX:
        check(make_layer(name))
    classes = {name: cls for name, cls in vars(eqx.nn).items() if isinstance(cls, type)}
    there = {name for name, cls in classes.items() if issubclass(cls, eqx.Module)}
    assert there - set(EQUINOX) <= {"Sequential", "SpectralNorm", "WeightNorm", "Shared", "StatefulLayer", "State"}


def test_equinox_compositions():
    linear = make_layer("Linear")
    leaky = functools.partial(jax.nn.leaky_relu, negative_slope=0.2)
    for each in (
        eqx.nn.Sequential([linear, eqx.nn.Lambda(jax.nn.gelu), linear]),
        eqx.nn.WeightNorm(linear),
        filled(lambda: eqx.nn.make_with_state(eqx.nn.SpectralNorm)(linear, "weight", key=KEY)),
        eqx.filter_eval_shape(lambda: linear),
        eqx.partition(linear, eqx.is_array),
        filled(lambda: eqx.nn.MLP(1, 1, 1, 1, activation=leaky, key=KEY)),
        eqx.nn.inference_mode(make_layer("BatchNorm")),
    ):
        check(each)
    shared = eqx.nn.Shared((linear, linear), first, second)
    for layer in round_trip(shared, [first, second])():
        np.testing.assert_array_equal(layer.weight, linear.weight)


@pytest.mark.slow
def test_optax_states():
    """Of every transformation that optax has; also of a pair of parameters."""
    optax = pytest.importorskip("optax")
    from tests.optimizers import MASKS, TRANSFORMATIONS, arrays, flat, transformation

    parameters = flat(*arrays(0))
    pair = optax.LookaheadParams.init_synced(parameters)
    sam = optax.contrib.SAMState  # a namedtuple in optax 0.2.8, in 0.2.5 a class, which must be trusted
    trusted = [] if hasattr(sam, "_fields") else [sam]
    for name in TRANSFORMATIONS:
        state = transformation(name, MASKS["tree"](flat)).init(pair if name == "lookahead" else parameters)
        try:
            check(state, trusted)
        except Exception as error:
            error.add_note(name)
            raise
    check(pair)


def penzai_models(pz):
    sizes = {"e": 4}
    linear = pz.nn.Linear.from_config("twice", KEY, sizes, sizes)
    layers = [
        pz.nn.Affine.from_config("affine", KEY, sizes, {"f": 4}),
        pz.nn.RenameAxes(("f",), ("e",)),
        linear,
        pz.nn.Residual(pz.nn.Sequential([linear, pz.nn.Elementwise(jax.nn.gelu), pz.nn.Softmax("e")])),
        pz.nn.LayerNorm.from_config("norm", KEY, across_axes=sizes),
        pz.nn.RMSLayerNorm.from_config("root", KEY, across_axes=sizes),
    ]
    table = pz.nn.EmbeddingTable.from_config("table", KEY, vocab_size=5, embedding_axes=sizes)
    counter = pz.StateVariable(value=jnp.array(3), label="calls", metadata={"since": 1})
    return pz.nn.Sequential(layers), table, counter


def test_penzai():
    pz: Any = pytest.importorskip("penzai.pz")
    trusted = ["penzai"]
    model, table, counter = penzai_models(pz)

    # Variables are nothing that JAX takes, so a model is saved without them, or with what they hold.
    with pytest.raises(st.errors.UnserialisableError) as refused:
        st.to_bytes((model, table, counter))
    assert "[0].sublayers[0].sublayers[0].weights" in refused.value.paths
    with_slots, held = pz.unbind_variables((model, table, counter), freeze=True)
    slots, values = check((with_slots, held), trusted)
    bound, _, calls = pz.bind_variables(slots, values, unfreeze_as_copy=True)
    first, second = bound.sublayers[2], bound.sublayers[3].delta.sublayers[0]
    assert first.sublayers[0].weights is second.sublayers[0].weights
    assert (int(calls.value), calls.label, calls.metadata) == (3, "calls", {"since": 1})

    frozen = pz.freeze_params((model, table))
    back = check(frozen, trusted)
    assert len(st.ties(back)) == len(st.ties(frozen)) > 0


def test_flax_and_chex():
    struct, chex, core = (pytest.importorskip(name) for name in ("flax.struct", "chex", "flax.core"))

    class Flaxed:
        w: Any
        name: str = struct.field(pytree_node=False)

    class Chexed:
        w: Any
        n: int = 3

    for cls, make in ((Flaxed, struct.dataclass), (Chexed, chex.dataclass(frozen=True))):
        cls.__qualname__ = cls.__name__
        globals()[cls.__name__] = make(cls)
    w = jnp.ones(2)
    Flaxed, Chexed = globals()["Flaxed"], globals()["Chexed"]
    check([Flaxed(w=w, name="x"), Chexed(w=w)], [Flaxed, Chexed])
    back = round_trip(core.freeze({"a": {"b": w}}))
    assert type(back) is core.FrozenDict
    np.testing.assert_array_equal(back["a"]["b"], w)


@pytest.fixture
def lx():
    return pytest.importorskip("lineax")


def test_lineax(lx):
    matrix = jnp.array([[2.0, 1.0], [1.0, 3.0]])
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    structure = jax.ShapeDtypeStruct((2,), jnp.float32)
    solvers = [
        lx.AutoLinearSolver(well_posed=True), lx.BiCGStab(1e-3, 1e-3), lx.CG(1e-3, 1e-3), lx.Cholesky(), lx.Diagonal(),
        lx.GMRES(1e-3, 1e-3), lx.LU(), lx.QR(), lx.SVD(), lx.Triangular(), lx.Tridiagonal(),
    ]  # fmt: skip
    operators = [
        operator, lx.DiagonalLinearOperator(jnp.ones(2)), lx.IdentityLinearOperator(structure), operator + operator,
        operator @ operator, 2 * operator, operator / 3, -operator, lx.TaggedLinearOperator(operator, lx.symmetric_tag),
        lx.PyTreeLinearOperator({"a": jnp.ones((2, 2))}, {"a": structure}),
        lx.TridiagonalLinearOperator(jnp.ones(2), jnp.ones(1), jnp.ones(1)),
    ]  # fmt: skip
    for each in (*solvers, *operators):
        check(each)
    with pytest.raises(st.errors.UnserialisableError, match="jaxpr"):
        st.to_bytes(lx.FunctionLinearOperator(jnp.negative, structure))


@pytest.mark.parametrize("name", ["eig", "eigh", "qr", "slogdet", "svd"])
def test_results_of_linear_algebra(name):
    """Their classes are those of what is traced, for which nothing is compiled."""
    found = jax.eval_shape(getattr(jnp.linalg, name), jnp.eye(2))
    found = jax.tree.map(lambda leaf: jnp.asarray(np.ones(leaf.shape, leaf.dtype)), found)
    assert_isomorphic(round_trip(found), found)


@pytest.mark.slow
def test_solutions_of_lineax_go_on_where_they_were(lx):
    """Of each solver that lineax chooses by itself."""
    square, vector = 2 * jnp.eye(3), jnp.arange(3.0)
    rectangular = lx.MatrixLinearOperator(jnp.arange(12.0).reshape(4, 3) % 5)
    general = lx.MatrixLinearOperator(square)
    for operator in (
        general,
        lx.MatrixLinearOperator(square, lx.positive_semidefinite_tag),
        lx.MatrixLinearOperator(square, lx.lower_triangular_tag),
        lx.TridiagonalLinearOperator(2 * jnp.ones(3), jnp.ones(2), jnp.ones(2)),
        lx.DiagonalLinearOperator(2 * jnp.ones(3)),
        rectangular,
    ):
        # Lineax solves no rectangular system as one that is well posed.
        for well_posed in (False, None) if operator is rectangular else (True, False, None):
            solver = lx.AutoLinearSolver(well_posed=well_posed)
            right = jnp.arange(float(operator.out_size()))
            solution = filled(lambda solve=(operator, right, solver): lx.linear_solve(*solve))
            back = check(solution)
            assert back.result == lx.RESULTS.successful
            assert jax.tree.structure(back) == jax.tree.structure(solution)
            assert str(back.state[0]) == str(solution.state[0])
    solver = lx.AutoLinearSolver(well_posed=True)
    solution = lx.linear_solve(general, vector, solver)
    again = lx.linear_solve(general, 2 * vector, solver, state=round_trip(solution).state)
    np.testing.assert_allclose(again.value, 2 * solution.value, rtol=1e-5)


def test_every_token_is_that_of_lineax(lx):
    solve = importlib.import_module("lineax._solve")
    found = {f"lineax._solve:{name}" for name in vars(solve) if name.endswith("_token")}
    assert found == TOKENS


def checked_of(package, bases, *arguments):
    """The names of the concrete classes of a package that come back, each made of the first arguments that it takes."""
    checked = set()
    for cls in vars(package).values():
        if isinstance(cls, type) and issubclass(cls, bases) and not inspect.isabstract(cls):
            for each in arguments:
                try:
                    made = cls(*each)
                except TypeError:
                    continue
                check(made)
                checked.add(cls.__name__)
                break
    return checked


def test_optimistix():
    optx = pytest.importorskip("optimistix")
    names = "AbstractRootFinder AbstractLeastSquaresSolver AbstractMinimiser AbstractFixedPointSolver"
    bases = tuple(getattr(optx, name) for name in names.split())
    solvers = "Newton BFGS LevenbergMarquardt FixedPointIteration NelderMead Dogleg NonlinearCG"
    assert {*solvers.split()} <= checked_of(optx, bases, (1e-3, 1e-3), (0.1, 1e-3, 1e-3), ())
    solution = filled(lambda: optx.minimise(quadratic, optx.BFGS(1e-3, 1e-3), jnp.ones(2)))
    back = round_trip([solution.value, solution.result, solution.stats])
    assert back[1] == optx.RESULTS.successful


def quadratic(y, args):
    return jnp.sum((y - 1) ** 2)


def decay(t, y, args):
    return -y


@pytest.mark.slow
def test_diffrax():
    diffrax = pytest.importorskip("diffrax")
    solvers = "Tsit5 Dopri8 Kvaerno5 KenCarp4 Heun ReversibleHeun Euler ImplicitEuler"
    assert {*solvers.split()} <= checked_of(diffrax, diffrax.AbstractSolver, ())
    ts, term, controller = jnp.linspace(0, 1, 3), diffrax.ODETerm(decay), diffrax.PIDController(1e-3, 1e-3)
    check([diffrax.HalfSolver(diffrax.Euler()), controller, diffrax.ConstantStepSize(), diffrax.StepTo(ts)])
    check([diffrax.SaveAt(t1=True), diffrax.SaveAt(ts=jnp.ones(2), dense=True), diffrax.RecursiveCheckpointAdjoint()])
    noise = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-3, (2,), KEY)
    check([term, diffrax.MultiTerm(term, diffrax.ControlTerm(decay, noise))], decay)
    check(diffrax.LinearInterpolation(ts, jnp.ones((3, 2))))
    solution = filled(
        lambda: diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0, 1, 0.1, jnp.ones(2), saveat=diffrax.SaveAt(dense=True, ts=ts),
            stepsize_controller=controller,
        )
    )  # fmt: skip
    assert check(solution).result == diffrax.RESULTS.successful
