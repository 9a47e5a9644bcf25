"""Checked by pyright, never run: wrapped functions keep their signatures."""

from collections.abc import Callable
from typing import Any, assert_type

import equinox as eqx
import jax

import sharedtree as st


def f(x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return x * scale


jitted = st.jit(f)
x = jax.numpy.ones(2)
assert_type(jitted(x, scale=2.0), jax.Array)
assert_type(st.jit(donate_argnums=0)(f)(x), jax.Array)
jitted.lower(x, scale=2.0)
jitted.clear_cache()
jitted(x, scale="text")  # type: ignore[arg-type]
jitted()  # type: ignore[call-arg]

assert_type(st.checkpoint(f)(x), jax.Array)
assert_type(st.remat(f)(x), jax.Array)
assert_type(st.value_and_grad(f)(x), tuple[jax.Array, jax.Array])
assert_type(st.grad(f)(x, scale=3), jax.Array)
st.vmap(f)(1)  # type: ignore[arg-type]


own = st.custom_vjp(f)
own.defvjp(f, f)
assert_type(own(x, scale=2.0), jax.Array)
own(x, scale="text")  # type: ignore[arg-type]
assert_type(st.custom_jvp(nondiff_argnums=(1,))(f)(x), jax.Array)
st.custom_jvp(f).defjvps(None)


@st.jit
def decorated(x: jax.Array) -> int:
    return 3


assert_type(decorated(x), int)

assert_type(st.Dag([x]).tree, list[jax.Array])


def same(leaf: Any) -> Any:
    return leaf


assert_type(st.tree.map(same, [x]), list[jax.Array])
assert_type(st.untie((x, x)), tuple[jax.Array, jax.Array])
assert_type(st.ties([x, x]), tuple[st.Tie, ...])
assert_type(st.count_parameters(x), int)
assert_type(st.same_sharing(x, x), bool)
assert_type(st.apply_updates([x], [x]), list[jax.Array])


assert_type(st.copy([x]), list[jax.Array])
assert_type(st.inference_mode(st.Dag([x])), st.Dag[list[jax.Array]])
assert_type(st.inference_mode([x], False), list[jax.Array])


class Stateful(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self, size: int) -> None:
        self.norm = eqx.nn.BatchNorm(size, "batch", mode="ema")


assert_type(st.make_with_state(Stateful)(3), tuple[Stateful, eqx.nn.State])
st.make_with_state(Stateful)("3")  # type: ignore[arg-type]

value, pullback = st.vjp(f, x)
assert_type(value, jax.Array)
assert_type(pullback(value), tuple[Any, ...])
assert_type(st.jvp(f, (x,), (x,)), tuple[jax.Array, Any])
assert_type(st.linearize(f, x)[0], jax.Array)
assert_type(st.linear_transpose(f, x)(x), tuple[Any, ...])


def with_aux(x: jax.Array) -> tuple[jax.Array, str]:
    return x, "aux"


assert_type(st.vjp(with_aux, x, has_aux=True)[2], str)
assert_type(st.jvp(with_aux, (x,), (x,), has_aux=True)[2], str)
assert_type(st.linearize(with_aux, x, has_aux=True)[2], str)
st.jacfwd(f, argnums=(0,))(x, scale=3)
st.jacrev(argnums=0)(f)(x, scale="text")  # type: ignore[arg-type]
st.hessian(f)(x, scale=3)

policy = st.Policy(containers=True)
assert_type(st.jit(f, policy=policy)(x, scale=2.0), jax.Array)
assert_type(st.jit(policy=policy, donate_argnums=0)(f)(x), jax.Array)
assert_type(st.checkpoint(f, policy=policy)(x), jax.Array)
assert_type(st.checkpoint(policy=jax.checkpoint_policies.dots_saveable)(f)(x), jax.Array)
assert_type(st.value_and_grad(f, policy=policy, in_place=True)(x), tuple[jax.Array, jax.Array])
assert_type(st.value_and_grad(f, 0, False)(x), tuple[jax.Array, Any])
assert_type(st.value_and_grad(policy=policy)(f)(x, scale=2.0), tuple[jax.Array, Any])
st.grad(f, (0,), policy=policy)(x, scale=3)
st.grad(policy=policy)(f)(x, scale="text")  # type: ignore[arg-type]
st.vmap(f, 0, 0, policy=policy)(x)
st.vmap(f, 0)(1)  # type: ignore[arg-type]

bound: Callable[[jax.Array], jax.Array] = st.jit(f)


def halved(x: jax.Array, by: float) -> jax.Array:
    return x / by


assert_type(st.cond(True, halved, halved, x, 2.0), jax.Array)
assert_type(st.cond(x.sum() > 0, halved, halved, x, 2.0, policy=policy), jax.Array)
assert_type(st.cond(True, decorated, decorated, operand=x), int)
assert_type(st.switch(1, [halved, halved], x, 2.0), jax.Array)
assert_type(st.switch(1, (decorated,), operand=x), int)
st.cond(True, halved, halved, x)  # type: ignore[arg-type]
st.switch(1, [halved], x, "text")  # type: ignore[call-arg, list-item]


class Net(eqx.Module):
    weight: jax.Array

    @st.jit
    def ready_made(self, x: jax.Array, times: int = 1) -> jax.Array:
        return x

    @st.jit(static_argnums=1)
    def with_options(self, x: int) -> int:
        return 3

    @st.checkpoint
    def again(self, x: jax.Array) -> jax.Array:
        return x


def loss(net: Net, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return x


def loss_and_count(net: Net) -> tuple[jax.Array, int]:
    return net.weight, 3


net = Net(x)
assert_type(net.ready_made(x, times=2), jax.Array)
assert_type(net.with_options(3), int)
assert_type(net.again(x), jax.Array)
assert_type(Net.with_options(net, 3), int)
net.ready_made("text")  # type: ignore[arg-type]

assert_type(st.grad(loss)(net, x, scale=2.0), Net)
assert_type(st.grad(loss, allow_int=True, in_place=True)(net, x), Net)
assert_type(st.grad(loss_and_count, has_aux=True)(net), tuple[Net, int])
assert_type(st.value_and_grad(loss)(net, x), tuple[jax.Array, Net])
assert_type(st.value_and_grad(loss_and_count, has_aux=True)(net), tuple[tuple[jax.Array, int], Net])
assert_type(st.grad(loss, wrt=lambda path, value: path == ("weight",))(net, x), Net)
assert_type(st.value_and_grad(loss, wrt=jax.Array)(net, x), tuple[jax.Array, Net])
assert_type(st.grad(loss, argnums=1)(net, x), Any)
assert_type(st.grad(loss, 1)(net, x), Any)
st.grad(loss)(x, x)  # type: ignore[arg-type]

assert_type(st.load("net.safetensors", like=net), Net)
assert_type(st.load("net.safetensors", like=net, trusted=[Net], select=lambda name: True), Net)
assert_type(st.load("net.safetensors", like=net, strict=False), tuple[Net, st.serialise.LoadReport])
assert_type(st.load("net.safetensors"), Any)
assert_type(st.load("net.safetensors", like=net, select=".weight"), Any)
assert_type(st.from_bytes(b"", like=net), Net)
assert_type(st.from_bytes(b"", like=net, strict=False), Any)


# What a function is is not always said, and an option that there is not is no option.
class Model(eqx.Module):
    w: jax.Array


model = Model(x)
st.grad(lambda m: m.w.sum())(model)
st.grad(lambda m, scale: (scale * m.w.sum(), m), has_aux=True)(model, 2.0)
st.value_and_grad(lambda m: m.w.sum(), wrt=Model)(model)
st.jit(f, static_argnames="scale", policy=st.Policy(), in_place=True)(x)
st.vmap(f, 0, 0, axis_name="batch")(x)
st.jit(f, static_argnms="scale")  # type: ignore[call-overload]
st.grad(f, holomorfic=True)  # type: ignore[call-overload]
st.vmap(f, in_axs=0)  # type: ignore[call-overload]
st.pmap(f, inplace=True)  # type: ignore[call-overload]
st.checkpoint(prevent_sce=False)  # type: ignore[call-overload]
st.scan(lambda carry, x: (carry, x), model, x, lenght=2)  # type: ignore[call-arg]
assert_type(st.cond(True, same, same, x, in_place=True), Any)

# So it is of what takes operands, and of rules.
assert_type(st.vjp(f, x, policy=policy, in_place=False)[0], jax.Array)
assert_type(st.filter_vjp(f, x)[0], jax.Array)
assert_type(st.filter_vjp(with_aux, x, has_aux=True)[2], str)
assert_type(st.filter_jvp(f, (x,), (x,), scale=2.0), tuple[jax.Array, Any])
assert_type(st.custom_vjp(f, (), ("scale",), policy=policy)(x), jax.Array)
assert_type(st.fori_loop(0, 2, lambda i, m: m, model, unroll=2, in_place=True), Model)
assert_type(st.while_loop(lambda m: True, lambda m: m, model, policy=policy), Model)
st.linear_transpose(f, x, reduce_axes=())
own.defvjp(f, f, symbolic_zeros=True)
st.device_put(x, may_alias=False)
st.export(f, platforms=("cpu",), policy=policy)
st.vjp(f, x, hasaux=True)  # type: ignore[call-overload]
st.filter_vjp(f, x, has_axu=True)  # type: ignore[call-overload]
st.jvp(f, (x,), (x,), polcy=policy)  # type: ignore[call-overload]
st.linearize(f, x, reduce_axes=())  # type: ignore[call-overload]
st.linear_transpose(f, x, inplace=True)  # type: ignore[call-arg]
st.while_loop(lambda m: True, lambda m: m, model, length=2)  # type: ignore[call-arg]
st.fori_loop(0, 2, lambda i, m: m, model, unrol=2)  # type: ignore[call-arg]
st.map(same, x, batchsize=2)  # type: ignore[call-arg]
st.associative_scan(lambda a, b: a, x, axes=0)  # type: ignore[call-arg]
st.cond(True, same, same, x, inplace=True)  # type: ignore[call-overload]
st.switch(1, [same], x, operands=x)  # type: ignore[call-overload]
st.custom_vjp(f, nondiff_argnum=(1,))  # type: ignore[call-overload]
st.custom_jvp(nondif_argnums=(1,))  # type: ignore[call-overload]
own.defvjp(f, f, symbolic_zero=True)  # type: ignore[call-arg]
st.custom_jvp(f).defjvp(f, symbolic=True)  # type: ignore[call-arg]
st.device_put(x, may_alais=False)  # type: ignore[call-arg]
st.export(f, platform=("cpu",))  # type: ignore[call-arg]
st.from_bytes(b"", trust=[Net])  # type: ignore[call-overload]
