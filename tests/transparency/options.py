"""Every option of every transform, right and wrong, and ways to write a function that goes wrong."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from tests.transparency.outcome import Pair, vec


class Row(NamedTuple):
    """A transform with options, a function, and arguments that are made anew for each side."""

    transform: Any
    f: Any
    args: Any
    options: dict[str, Any] = {}
    kwargs: Any = dict
    fails: bool | None = False  # None where the versions of JAX differ


def add(x, y=1.0, *rest, scale=1.0, **more):
    return x * scale + y + sum(rest) + sum(more.values())


def first_shape(n, x):
    return jnp.zeros(n) + x


def square_sum(x, y=1.0, **more):
    return jnp.sum(x * x) * jnp.sum(y) + sum(jnp.sum(v) for v in more.values())


def with_aux(x):
    return jnp.sum(x * x), {"aux": x, "n": 3, "none": None}


def generated(x):
    yield x


def mat(*shape):
    return jnp.arange(float(np.prod(shape))).reshape(shape)


def no_args():
    return ()


def one():
    return (vec(),)


def two():
    return (vec(), vec() + 1)


J, G, VG, V, C = jax.jit, jax.grad, jax.value_and_grad, jax.vmap, jax.checkpoint
FJ, FG, FVG = eqx.filter_jit, eqx.filter_grad, eqx.filter_value_and_grad
FV, FC = eqx.filter_vmap, eqx.filter_checkpoint

NO_FUNCTIONS = {"not callable": 3, "generator function": generated, "static method": staticmethod(jnp.sum)}

ROWS: dict[str, Row] = {
    **{f"{t.__name__}, {name}": Row(t, f, one, fails=True) for t in (J, G, V) for name, f in NO_FUNCTIONS.items()},
    # jax.jit
    "static first": Row(J, first_shape, lambda: (3, 1.0), {"static_argnums": 0}),
    "static tuple": Row(J, first_shape, lambda: (3, 1.0), {"static_argnums": (0,)}),
    "static negative": Row(J, first_shape, lambda: (3, 1.0), {"static_argnums": -2}),
    "static both": Row(J, first_shape, lambda: (3, 2), {"static_argnums": (0, 1)}),
    "static by name": Row(J, first_shape, lambda: (3, 1.0), {"static_argnames": "n"}),
    "static by name, given by name": Row(J, first_shape, no_args, {"static_argnames": "n"}, lambda: dict(n=3, x=1.0)),
    "static by number, given by name": Row(J, first_shape, no_args, {"static_argnums": 0}, lambda: dict(n=3, x=1.0)),
    "static keyword-only": Row(J, add, one, {"static_argnames": ("scale",)}, lambda: {"scale": 2}),
    "static string": Row(J, lambda x, how: {how: x}, lambda: (vec(), "a"), {"static_argnums": 1}),
    "static unhashable": Row(J, first_shape, lambda: ([3], 1.0), {"static_argnums": 0}, fails=True),
    "static dict by name": Row(J, add, one, {"static_argnames": "scale"}, lambda: {"scale": {}}, fails=True),
    "static array": Row(J, first_shape, lambda: (vec(), 1.0), {"static_argnums": 0}, fails=True),
    "static numpy": Row(J, first_shape, lambda: (np.arange(2), 1.0), {"static_argnums": 0}, fails=True),
    "static out of range": Row(J, lambda x: x, one, {"static_argnums": 3}, fails=True),
    "static out of range, negative": Row(J, lambda x: x, one, {"static_argnums": -3}, fails=True),
    "static unknown name": Row(J, lambda x: x, one, {"static_argnames": "y"}, fails=True),
    "static not a number": Row(J, lambda x: x, one, {"static_argnums": "x"}, fails=True),
    "static absent default": Row(J, add, one, {"static_argnums": 1}),
    "donate and static": Row(J, lambda x: x, one, {"static_argnums": 0, "donate_argnums": 0}, fails=True),
    "donate out of range": Row(J, lambda x: x, one, {"donate_argnums": 3}, fails=True),
    "donate unknown name": Row(J, lambda x: x, one, {"donate_argnames": "y"}, fails=True),
    "donate unused": Row(J, lambda x: x[:1], one, {"donate_argnums": 0}, fails=True),  # warns, an error here
    "inline, keep_unused": Row(J, lambda x, y: x, two, {"inline": True, "keep_unused": True}),
    "unknown option": Row(J, lambda x: x, one, {"no_such_option": 1}, fails=True),
    "compiler options": Row(J, lambda x: x + 1, one, {"compiler_options": {"no_such_flag": True}}, fails=True),
    "in_shardings, too many": Row(J, lambda x: x, one, {"in_shardings": (None, None)}, fails=True),
    "doubled argument": Row(J, lambda x: x, one, {}, lambda: {"x": 1}, fails=True),
    "builtin": Row(J, sum, lambda: ([vec(), vec()],)),
    "branch on a tracer": Row(J, lambda x: 1 if x[0] > 0 else 2, one, fails=True),
    "returns a string": Row(J, lambda x: (x, "text"), one, fails=True),
    "returns an object": Row(J, lambda x: {"a": object()}, one, fails=True),
    "returns a set": Row(J, lambda x: {1}, one, fails=True),
    "mixed dict keys": Row(J, lambda x: x, lambda: ({1: vec(), "a": vec()},), fails=True),
    "none": Row(J, lambda x: x, lambda: (None,)),
    "empty": Row(J, lambda: (), no_args),
    # jax.grad and jax.value_and_grad
    "argnums second": Row(G, square_sum, two, {"argnums": 1}),
    "argnums negative": Row(G, square_sum, two, {"argnums": -1}),
    "argnums tuple": Row(G, square_sum, two, {"argnums": (0, 1)}),
    "argnums tuple of one": Row(VG, square_sum, two, {"argnums": (1,)}),
    "argnums reversed": Row(VG, square_sum, two, {"argnums": (1, 0)}),
    "argnums list": Row(VG, square_sum, two, {"argnums": [0, -1]}),
    "argnums out of range": Row(G, square_sum, two, {"argnums": 2}, fails=True),
    "argnums out of range, negative": Row(G, square_sum, two, {"argnums": -3}, fails=True),
    "argnums not a number": Row(G, square_sum, two, {"argnums": "x"}, fails=True),
    "keyword argument": Row(G, square_sum, one, {}, lambda: {"y": vec(), "z": vec()}),
    "only keywords": Row(G, square_sum, no_args, {}, lambda: {"x": vec()}, fails=True),
    "has_aux": Row(G, with_aux, one, {"has_aux": True}),
    "has_aux, with value": Row(VG, with_aux, one, {"has_aux": True}),
    "has_aux, no aux": Row(G, square_sum, one, {"has_aux": True}, fails=True),
    "has_aux, three": Row(G, lambda x: (x.sum(), 1, 2), one, {"has_aux": True}, fails=True),
    "has_aux not said": Row(G, with_aux, one, fails=True),
    "allow_int": Row(G, lambda x: jnp.sum(x * 1.5), lambda: (jnp.arange(3),), {"allow_int": True}),
    "allow_int, cast": Row(G, lambda x: jnp.sum(x.astype(jnp.float32)), lambda: (jnp.arange(3),), {"allow_int": True}),
    "holomorphic": Row(G, lambda z: jnp.sum(z * z), lambda: (vec() + 1j * vec(),), {"holomorphic": True}),
    "holomorphic, real": Row(G, lambda z: jnp.sum(z * z), one, {"holomorphic": True}, fails=True),
    "complex": Row(G, lambda z: jnp.sum(z * z).real, lambda: (vec().astype(jnp.complex64),)),
    "complex loss": Row(G, lambda z: jnp.sum(z), lambda: (vec().astype(jnp.complex64),), fails=True),
    "loss is a vector": Row(G, lambda x: x * x, one, fails=True),
    "loss is an int": Row(G, lambda x: jnp.int32(1), one, fails=True),
    "loss is a tuple": Row(VG, lambda x: (x.sum(),), one, fails=True),
    "loss is None": Row(VG, lambda x: None, one, fails=True),
    "loss is a string": Row(VG, lambda x: "loss", one, fails=True),
    "loss is a python float": Row(VG, lambda x: 1.5, one),
    "python float": Row(VG, lambda x: x * x, lambda: (3.0,)),
    "numpy": Row(VG, square_sum, lambda: (np.ones(3, np.float32),)),
    "grad of containers": Row(G, lambda t: t["a"] * t["b"][0], lambda: ({"a": 2.0, "b": (3.0, None)},)),
    "grad of an int": Row(G, lambda x: x * 1.0, lambda: (3,), fails=True),
    "grad of a bool": Row(G, lambda x: 1.0, lambda: (True,), fails=True),
    "grad of a key": Row(G, lambda k: jax.random.uniform(k), lambda: (jax.random.key(0),), fails=True),
    "grad of a string": Row(G, lambda x: 1.0, lambda: ("text",), fails=True),
    # jax.vmap
    "in_axes 1": Row(V, lambda x: x.sum(), lambda: (mat(2, 3),), {"in_axes": 1}),
    "in_axes -1": Row(V, lambda x: x.sum(), lambda: (mat(2, 3),), {"in_axes": -1}),
    "in_axes tuple": Row(V, lambda x, y: x + y, lambda: (vec(), 1.0), {"in_axes": (0, None)}),
    "in_axes list": Row(V, lambda x, y: x + y, lambda: (vec(), 1.0), {"in_axes": [0, None]}),
    "in_axes nested": Row(
        V, lambda t: t["a"] + t["b"][0], lambda: ({"a": vec(), "b": (1.0, 2)},), {"in_axes": ({"a": 0, "b": None},)}
    ),
    "in_axes namedtuple": Row(
        V, lambda p: p.first * p.second, lambda: (Pair(vec(), 2.0),), {"in_axes": (Pair(0, None),)}
    ),
    "in_axes too few": Row(V, lambda x, y: x, two, {"in_axes": (0,)}, fails=True),
    "in_axes too many": Row(V, lambda x: x, one, {"in_axes": (0, 0)}, fails=True),
    "in_axes of another shape": Row(V, lambda x: x, lambda: ((vec(), vec()),), {"in_axes": ((0, 0, 0),)}, fails=True),
    "in_axes with another key": Row(V, lambda x: x, lambda: ({"a": vec()},), {"in_axes": ({"b": 0},)}, fails=True),
    "in_axes below a leaf": Row(V, lambda x: x, one, {"in_axes": ((0,),)}, fails=True),
    "in_axes out of range": Row(V, lambda x: x, one, {"in_axes": 1}, fails=True),
    "in_axes a string": Row(V, lambda x: x, one, {"in_axes": "x"}, fails=True),
    "in_axes a float": Row(V, lambda x: x, one, {"in_axes": 0.0}, fails=True),
    "in_axes a dict": Row(V, lambda x: x, one, {"in_axes": {"x": 0}}, fails=True),
    "in_axes all None": Row(V, lambda x: x, one, {"in_axes": None}, fails=True),
    "in_axes all None, with size": Row(V, lambda x: x, one, {"in_axes": None, "axis_size": 2}),
    "in_axes tuple of None": Row(V, lambda x: x, one, {"in_axes": (None,)}, fails=True),
    "sizes differ": Row(V, lambda x, y: x + y, lambda: (vec(3), vec(4)), fails=True),
    "sizes differ inside": Row(V, lambda t: t, lambda: ({"a": vec(3), "b": [vec(4)]},), fails=True),
    "scalar": Row(V, lambda x: x, lambda: (1.0,), fails=True),
    "mapped string": Row(V, lambda x: x, lambda: ("text",), fails=True),
    "no arguments": Row(V, lambda: 1.0, no_args, fails=True),
    "no arguments, with size": Row(V, lambda: 1.0, no_args, {"axis_size": 3}),
    "axis_size of another size": Row(V, lambda x: x, one, {"axis_size": 4}, fails=None),
    "axis_size": Row(V, lambda x: x + 1, one, {"axis_size": 3}),
    "out_axes 1": Row(V, lambda x: x * 2, lambda: (mat(2, 3),), {"out_axes": 1}),
    "out_axes -1": Row(V, lambda x: x * 2, lambda: (mat(2, 3),), {"out_axes": -1}),
    "out_axes tuple": Row(V, lambda x: (x * 2, x), lambda: (mat(2, 3),), {"out_axes": (1, 0)}),
    "out_axes nested": Row(V, lambda x: {"a": x, "b": [x]}, lambda: (mat(2, 3),), {"out_axes": {"a": 0, "b": [1]}}),
    "out_axes None": Row(V, lambda x, y: (x, y), lambda: (vec(), 2.0), {"in_axes": (0, None), "out_axes": (0, None)}),
    "out_axes None, mapped": Row(V, lambda x: x, one, {"out_axes": None}, fails=True),
    "out_axes out of range": Row(V, lambda x: x, one, {"out_axes": 2}, fails=True),
    "out_axes of another shape": Row(V, lambda x: (x, x), one, {"out_axes": (0, 0, 0)}, fails=True),
    "out_axes with another key": Row(V, lambda x: {"a": x}, one, {"out_axes": {"b": 0}}, fails=True),
    "out_axes a string": Row(V, lambda x: x, one, {"out_axes": "x"}, fails=True),
    "axis_name": Row(V, lambda x: jax.lax.psum(x, "i"), one, {"axis_name": "i"}),
    "axis_name unknown": Row(V, lambda x: jax.lax.psum(x, "j"), one, {"axis_name": "i"}, fails=True),
    "mapped keyword": Row(V, lambda x, y: x + y, one, {}, lambda: {"y": vec()}),
    "mapped keyword of another size": Row(V, lambda x, y: x + y, one, {}, lambda: {"y": vec(4)}, fails=True),
    "scalar keyword": Row(V, lambda x, y: x + y, one, {}, lambda: {"y": 1.0}, fails=True),
    "constant result": Row(V, lambda x: (1.0, np.arange(2)), one),
    "mapped string result": Row(V, lambda x: "text", one, fails=True),
    "none argument": Row(V, lambda x, y: x, lambda: (vec(), None)),
    # jax.checkpoint
    "policy": Row(C, lambda x: jnp.sin(x), one, {"policy": jax.checkpoint_policies.dots_saveable}),
    "prevent_cse": Row(C, lambda x: jnp.sin(x), one, {"prevent_cse": False}),
    "checkpoint static": Row(C, first_shape, lambda: (3, 1.0), {"static_argnums": 0}),
    "checkpoint static negative": Row(C, first_shape, lambda: (3, 1.0), {"static_argnums": (-2,)}),
    "checkpoint not static": Row(C, first_shape, lambda: (3, 1.0), fails=True),
    "checkpoint static out of range": Row(C, lambda x: x, one, {"static_argnums": 3}, fails=True),
    # Equinox
    "donate all": Row(FJ, lambda x, y: (x + 1, y + 1), two, {"donate": "all"}),
    "donate warn": Row(FJ, lambda x: x[:1], one, {"donate": "warn"}, fails=True),
    "donate what is not there": Row(FJ, lambda x: x, one, {"donate": "some"}, fails=True),
    "filter_jit static changes nothing": Row(FJ, lambda x, how: {how: x}, lambda: (vec(), "a")),
    "filter_jit returns anything": Row(FJ, lambda x: ("text", jnp.tanh, x), one),
    "filter_grad has_aux": Row(FG, with_aux, one, {"has_aux": True}),
    "filter_grad mixed": Row(FG, lambda t: jnp.sum(t[0]) * t[1], lambda: ((vec(), 2, "text", jnp.arange(2)),)),
    "filter_grad only keywords": Row(FG, square_sum, no_args, {}, lambda: {"x": vec()}, fails=True),
    "filter_grad of a vector": Row(FVG, lambda x: x, one, fails=True),
    "filter_grad argnums": Row(FG, square_sum, two, {"argnums": 1}, fails=True),
    "filter_value_and_grad": Row(FVG, with_aux, one, {"has_aux": True}),
    "filter_vmap default": Row(FV, lambda x, y: (x, y), lambda: (vec(), 2.0)),
    "filter_vmap by name": Row(FV, lambda x, y: x + y, lambda: (vec(), mat(2, 3)), {"in_axes": {"y": 1}}),
    "filter_vmap name None": Row(FV, lambda x, y: x + y, two, {"in_axes": {"y": None}}),
    "filter_vmap unknown name": Row(FV, lambda x, y: x + y, two, {"in_axes": {"z": 0}}, fails=True),
    "filter_vmap callable": Row(FV, lambda x, y: x + y, two, {"in_axes": (eqx.if_array(0), lambda _: None)}),
    "filter_vmap out None": Row(FV, lambda x: (x, 3, "s"), one, {"out_axes": (0, None, None)}),
    "filter_vmap out None, mapped": Row(FV, lambda x: x, one, {"out_axes": None}, fails=True),
    "filter_vmap if_mapped": Row(FV, lambda x, y: (x, y), two, {"in_axes": (0, None), "out_axes": eqx.if_array(0)}),
    "filter_vmap axis_size": Row(FV, lambda: jnp.ones(2), no_args, {"axis_size": 3}),
    "filter_vmap axis_name": Row(FV, lambda x: jax.lax.pmean(x, "i"), one, {"axis_name": "i"}),
    "filter_vmap too few": Row(FV, lambda x, y: x, two, {"in_axes": (0,)}, fails=True),
    "filter_vmap bad axes": Row(FV, lambda x: x, one, {"in_axes": ("a",)}, fails=True),
    "filter_vmap sizes differ": Row(FV, lambda x, y: x, lambda: (vec(3), vec(4)), fails=True),
    "filter_vmap keywords": Row(FV, lambda x: x, no_args, {}, lambda: {"x": vec()}, fails=True),
    "filter_vmap scalar": Row(FV, lambda x: x, lambda: (jnp.float32(1),), fails=True),
    "filter_checkpoint": Row(FC, lambda x, how: {how: jnp.sin(x)}, lambda: (vec(), "a")),
    "filter_checkpoint policy": Row(FC, jnp.sin, one, {"policy": jax.checkpoint_policies.everything_saveable}),
}
