"""What each transform in the table of adapters does with a model, found by running it; written into the docs.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.transform_table

A scenario says how a transform is called with a function of models, and a *conflict* how it would treat one model in
two ways. From these come all columns.
"""

import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec as P

import sharedtree as st
from sharedtree.core._jax_internals import deprecated_shard_map
from sharedtree.transforms._adapter_names import NAME_OF_ADAPTER
from sharedtree.transforms._option_lists import title_of
from tests.strategies import Mutable, Pair

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "transforms.md"
BEGIN = "<!-- written by `python -m tests.transform_table` -->\n"
END = "\n<!-- the end of what is written -->\n"
YES, NO, NONE = "yes", "no", "-"


class Scenario(NamedTuple):
    """How a transform is tried.

    Attributes:
        call: (transform, a function of models that returns one, models) → what comes out.
        tested: the file of tests, or of what they share.
        conflict: the same, where one model is treated in two ways; None where all operands are treated alike.
    """

    call: Callable[..., Any]
    tested: str
    conflict: Callable[..., Any] | None = None


def total(tree: Any) -> Any:
    return sum(leaf.sum() for leaf in st.tree.leaves(tree))


def scalar(f: Any) -> Any:
    return lambda *ms: total(f(*ms))


def mesh() -> Any:
    return jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def plain(t: Any, f: Any, *ms: Any) -> Any:
    return t(f)(*ms)


def differentiated(t: Any, f: Any, *ms: Any) -> Any:
    return t(scalar(f), argnums=tuple(range(len(ms))))(*ms)


def over_devices(t: Any, f: Any, *ms: Any, **options: Any) -> Any:
    return t(f, **({"mesh": mesh(), "in_specs": P("x"), "out_specs": P("x")} | options))(*ms)


def with_value(operand: Callable[..., Any]) -> Callable[..., Any]:
    """Calls what gives a value and a linear function, and that function with what `operand` makes of both."""

    def call(t: Any, f: Any, *ms: Any) -> Any:
        value, linear = t(f, *ms)
        return value, linear(*operand(value, ms))

    return call


def with_rules(name: str, *rules: Callable[[Any], Any]) -> Callable[..., Any]:
    """Calls a function under rules, each of which is made of the function."""

    def call(t: Any, f: Any, *ms: Any) -> Any:
        g = t(f)
        getattr(g, name)(*[rule(f) for rule in rules])
        return g(*ms)

    return call


round_trip = with_value(lambda value, ms: (value,))
tangents_of_the_first = lambda f: lambda primals, tangents: (f(*primals), tangents[0])
with_vjp = with_rules("defvjp", lambda f: lambda *ms: (f(*ms), ms), lambda f: lambda ms, ct: ms)
with_jvp = with_rules("defjvp", tangents_of_the_first)


def repeated(f: Any) -> Any:
    """A function from models to as many of them."""
    return lambda ms: (f(*ms),) * len(ms)


def looped(t: Any, f: Any, *ms: Any, **options: Any) -> Any:
    return t(lambda state: state[0] < 1, lambda state: (state[0] + 1, repeated(f)(state[1])), (0, ms), **options)[1]


def scanned(t: Any, f: Any, *ms: Any, **options: Any) -> Any:
    return t(lambda carry, _: (repeated(f)(carry), None), ms, None, 2, **options)[0]


def carried_and_scanned(t: Any, f: Any, m: Any, **options: Any) -> Any:
    return t(lambda carry, x: (carry, f(x)), m, m, 8, **options)


JIT = Scenario(plain, "laws", lambda t, f, m: t(lambda a, b: f(a), donate_argnums=0)(m, m))
GRAD = Scenario(differentiated, "laws", lambda t, f, m: t(scalar(lambda a, b: f(a)))(m, [m]))
FILTER_GRAD = Scenario(lambda t, f, *ms: t(lambda ms: total(f(*ms)))(ms), "test_transformed_modules", GRAD.conflict)
JACOBIAN = GRAD._replace(tested="test_likes")
FILTER_JACOBIAN = FILTER_GRAD._replace(tested="test_likes")
VMAP = Scenario(plain, "laws", lambda t, f, m: t(lambda a, b: f(a), in_axes=(0, None))(m, m))
SHARD_MAP = Scenario(
    over_devices, "on_eight_devices", lambda t, f, m: over_devices(t, lambda a, b: f(a), m, m, in_specs=(P("x"), P()))
)
CHECKPOINT = Scenario(plain, "test_applying", lambda t, f, m: t(lambda a, b: f(a), static_argnums=1)(m, m))

SCENARIOS: dict[Any, Scenario] = {
    jax.jit: JIT,
    **dict.fromkeys((jax.grad, jax.value_and_grad), GRAD),
    **dict.fromkeys((jax.jacfwd, jax.jacrev, jax.jacobian, jax.hessian), JACOBIAN),
    jax.vmap: VMAP,
    **dict.fromkeys((jax.checkpoint, jax.remat), CHECKPOINT),
    jax.custom_vjp: Scenario(
        with_vjp, "test_rules", lambda t, f, m: with_vjp(_first_fixed(t), lambda a, b: f(b), m, m)
    ),
    jax.custom_jvp: Scenario(
        with_jvp, "test_rules", lambda t, f, m: with_jvp(_first_fixed(t), lambda a, b: f(b), m, m)
    ),
    jax.custom_gradient: Scenario(lambda t, f, *ms: t(lambda *ms: (f(*ms), lambda ct: ms))(*ms), "test_rules"),
    custom_vmap: Scenario(
        with_rules("def_vmap", lambda f: lambda size, batched, *ms: (f(*ms), batched[0])), "test_rules"
    ),
    eqx.filter_jit: Scenario(
        plain, "test_transformed_modules", lambda t, f, m: t(lambda a, b: f(a), donate="all-except-first")(m, m)
    ),
    **dict.fromkeys((eqx.filter_grad, eqx.filter_value_and_grad), FILTER_GRAD),
    **dict.fromkeys((eqx.filter_jacfwd, eqx.filter_jacrev, eqx.filter_hessian), FILTER_JACOBIAN),
    eqx.filter_vmap: VMAP._replace(tested="test_transformed_modules"),
    eqx.filter_checkpoint: Scenario(plain, "test_transformed_modules"),
    jax.vjp: Scenario(round_trip, "test_autodiff"),
    jax.jvp: Scenario(lambda t, f, *ms: t(f, ms, ms), "test_autodiff"),
    jax.linearize: Scenario(with_value(lambda value, ms: ms), "test_autodiff"),
    jax.linear_transpose: Scenario(lambda t, f, *ms: t(f, *ms)(ms[0]), "test_autodiff"),
    eqx.filter_vjp: Scenario(round_trip, "test_autodiff"),
    eqx.filter_jvp: Scenario(
        lambda t, f, *ms: t(f, ms, ms), "test_autodiff", lambda t, f, m: t(lambda a, b: f(a), (m,), (m,), b=m)
    ),
    **dict.fromkeys((jax.shard_map, deprecated_shard_map()), SHARD_MAP),
    jax.pmap: VMAP._replace(tested="on_eight_devices"),
    eqx.filter_shard: Scenario(lambda t, f, *ms: t(ms, NamedSharding(mesh(), P("x"))), "on_eight_devices"),
    jax.lax.scan: Scenario(scanned, "test_loops", carried_and_scanned),
    jax.lax.while_loop: Scenario(looped, "test_loops"),
    eqxi.scan: Scenario(
        lambda t, f, *ms: scanned(t, f, *ms, kind="lax"),
        "test_loops",
        lambda t, f, m: carried_and_scanned(t, f, m, kind="lax"),
    ),
    eqxi.while_loop: Scenario(lambda t, f, *ms: looped(t, f, *ms, kind="lax"), "test_loops"),
    jax.lax.fori_loop: Scenario(lambda t, f, *ms: t(0, 2, lambda i, ms: repeated(f)(ms), ms), "test_loops"),
    jax.lax.map: Scenario(lambda t, f, *ms: t(lambda ms: f(*ms), ms), "test_loops"),
    jax.lax.associative_scan: Scenario(lambda t, f, *ms: t(lambda a, b: repeated(f)(a), ms), "test_loops"),
    jax.lax.cond: Scenario(lambda t, f, *ms: t(True, f, f, *ms), "test_branches"),
    jax.lax.switch: Scenario(lambda t, f, *ms: t(0, [f, f], *ms), "test_branches"),
    **dict.fromkeys((jax.eval_shape, eqx.filter_eval_shape), Scenario(lambda t, f, *ms: t(f, *ms), "test_shapes")),
    jax.make_jaxpr: Scenario(plain, "test_shapes", lambda t, f, m: t(lambda a, b: f(a), static_argnums=1)(m, m)),
    **dict.fromkeys((eqx.filter_make_jaxpr, jax.named_call), Scenario(plain, "test_shapes")),
    jax.export.export: Scenario(lambda t, f, *ms: t(st.jit(f))(*ms).call(*ms), "test_export"),
}


def _first_fixed(t: Any) -> Any:
    return lambda f: t(f, nondiff_argnums=(0,))


def weight(*, sharded: bool = False) -> Any:
    w = jnp.arange(1.0, 9.0)
    return jax.device_put(w, NamedSharding(mesh(), P("x"))) if sharded else w


def tied(**options: Any) -> Pair:
    """A model with a tied weight."""
    w = weight(**options)
    return Pair(w, w)


def nets_in(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Pair)) if isinstance(x, Pair)]


def said(answers: Sequence[bool]) -> str:
    """One word for what was seen; nothing where nothing could be."""
    return NONE if not answers else YES if all(answers) else NO


def row(transform: Any, wrap: Callable[..., Any] = st.preserve_identities) -> list[str]:
    """What a transform does, for each of the columns.

    Args:
        transform: the vanilla one.
        wrap: what preserves identities.
    """
    scenario = SCENARIOS[transform]
    ours = wrap(transform)
    inside: list[bool] = []

    def f(*nets: Pair) -> Pair:
        inside.extend(net.first is net.second for net in nets)
        aliases.extend(net is nets[0] for net in nets[1:])
        return st.tree.map(lambda w: w * 1, nets[0])

    aliases: list[bool] = []
    out = scenario.call(ours, f, tied())
    first = [said(inside), said([net.first is net.second for net in nets_in(out)])]

    net = tied()
    out = scenario.call(ours, f, net, net)
    if not inside:  # there is no function, but what comes out may be as many as went in
        aliases += [one is other for one, other in zip(nets_in(out)[:1], nets_in(out)[1:], strict=False)]

    treatments = "alike"
    if scenario.conflict is not None:
        try:
            scenario.conflict(ours, f, net)
            treatments = NO
        except st.errors.InconsistentSharingError:
            treatments = YES

    return [*first, said(aliases), treatments, in_place(wrap(transform, in_place=True), scenario)]


def in_place(ours: Any, scenario: Scenario) -> str:
    """Whether what a function changes is written back."""
    w = weight()
    counter = Mutable(first=w, second=w, count=jnp.zeros(8))
    called: list[bool] = []

    def count_up(counter: Mutable) -> Mutable:
        called.append(True)
        counter.count = counter.count + 1
        return counter

    try:
        scenario.call(ours, count_up, counter)
    except ValueError as error:
        refusals = "does not support `in_place=True`", "writes nothing back", "has none of its caller's objects"
        if any(words in str(error) for words in refusals):
            return "refused"
        raise
    return NONE if not called else YES if np.all(np.asarray(counter.count) > 0) else NO


def on_eight(ours: Any, scenario: Scenario) -> str:
    """Whether operands that are sharded over eight devices have the same ties inside and outside, and values."""
    answers: list[bool] = []

    def f(net: Pair) -> Pair:
        answers.append(net.first is net.second)
        return st.tree.map(lambda w: w * 1, net)

    one, other = (scenario.call(ours, f, tied(sharded=sharded)) for sharded in (False, True))
    nets, others = nets_in(one), nets_in(other)
    answers += [net.first is net.second for net in others]
    arrays, of_other = ([x for x in jax.tree.leaves(each) if isinstance(x, jax.Array)] for each in (nets, others))
    answers += [np.array_equal(a, b) for a, b in zip(arrays, of_other, strict=True)]
    return said(answers)


COLUMNS = ("inside", "outside", "aliases", "checked", "in place")


def name_of(transform: Any) -> str:
    return "jax.experimental.shard_map.shard_map" if transform is deprecated_shard_map() else title_of(transform)


def table() -> str:
    """The table, for the page."""
    heads = ["transform", *COLUMNS, "8 devices"]
    lines = [heads, ["---"] * len(heads)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for transform in NAME_OF_ADAPTER:
            eight = on_eight(st.preserve_identities(transform), SCENARIOS[transform])
            # In some versions of JAX they are one.
            names = (
                {"jax.checkpoint", "jax.remat"} if transform is jax.checkpoint is jax.remat else {name_of(transform)}
            )
            found = row(transform)
            lines += [[f"`{name}`", *found, eight] for name in sorted(names)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page_with(text: str) -> str:
    """The page with another table."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + begin + "\n" + text + end + after


if __name__ == "__main__":
    PAGE.write_text(page_with(table()), encoding="utf-8")
