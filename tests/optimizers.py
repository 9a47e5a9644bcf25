"""Every transformation of optax, found by running through it, and a model with ties beside a dict without.

One of a new release, whose arguments are not known here, makes tests fail that ask for them.
"""

import inspect
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest


class Layer(eqx.Module):
    """A layer with a static function."""

    weight: Any
    activation: object = jnp.tanh


class Model(eqx.Module):
    """A model whose embedding is its head, and whose blocks are one layer."""

    embed: Any
    blocks: Any
    head: Any
    other: Any


def net(weight, block, other):
    """A model of three weights."""
    layer = Layer(block)
    return Model(Layer(weight), [layer, layer, [layer]], {"again": weight}, other)


def flat(weight, block, other):
    """The same weights as a dict without ties."""
    return {"a": weight, "b": block, "c": other}


def parts(tree):
    """The three weights of a model or a dict."""
    return (
        [tree["a"], tree["b"], tree["c"]]
        if isinstance(tree, dict)
        else [tree.embed.weight, tree.blocks[0].weight, tree.other]
    )


def is_tied(model):
    """Whether a model has all of its ties."""
    return model.embed.weight is model.head["again"] and model.blocks[0] is model.blocks[1] is model.blocks[2][0]


def arrays(seed):
    """Three random weights."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 2), (2, 2), (2, 3))]


def _transformations():
    """Yields whatever in optax is a function or a class that makes a transformation."""
    for module in (optax, optax.contrib):
        for name, f in vars(module).items():
            if name.startswith("_") or not callable(f):
                continue
            if inspect.isclass(f):
                if hasattr(f, "gradient_transformation"):
                    yield name, f
            elif inspect.isfunction(f) and "GradientTransformation" in str(inspect.signature(f).return_annotation):
                yield name, f


TRANSFORMATIONS = dict(sorted(_transformations()))

norm = lambda tree: sum((x**2).sum() for x in jax.tree.leaves(tree))
adam = lambda: optax.adam(0.1)

# Optax 0.2.5 takes a seed instead of a key.
NOISE_KEY = jax.random.key(1) if "key" in inspect.signature(optax.add_noise).parameters else 1

# Functions of a mask. Transformations that are not here take no argument, or a learning rate.
ARGUMENTS = {
    **dict.fromkeys(("MultiSteps", "apply_if_finite"), lambda _: (adam(), 2)),
    **dict.fromkeys(("flatten", "mechanize", "split_real_and_imaginary"), lambda _: (adam(),)),
    **dict.fromkeys(("selective_transform", "with_extra_args_support"), lambda _: (adam(),)),
    **dict.fromkeys(("adaptive_grad_clip", "inject_hyperparams", "inject_stateful_hyperparams"), lambda _: (0.1,)),
    **dict.fromkeys(("clip", "clip_by_block_rms", "clip_by_global_norm", "scale"), lambda _: (0.2,)),
    **dict.fromkeys(("ema", "trace"), lambda _: (0.9,)),
    **dict.fromkeys(
        ("conditionally_mask", "conditionally_transform"), lambda _: (adam(), lambda step, **__: step != 1)
    ),
    **dict.fromkeys(("multi_transform", "partition"), lambda mask: ({True: adam(), False: optax.sgd(0.1, 0.9)}, mask)),
    "add_noise": lambda _: (0.1, 0.5, NOISE_KEY),
    "chain": lambda _: (optax.clip_by_global_norm(0.5), adam()),
    "differentially_private_aggregate": lambda _: (0.5, 0.1, 3),
    "dpsgd": lambda _: (0.1, 0.5, 0.1, 3),
    "freeze": lambda mask: (mask,),
    "lookahead": lambda _: (adam(), 2, 0.5),
    "masked": lambda mask: (adam(), mask),
    "measure_with_ema": lambda _: (lambda updates: jax.tree.map(jnp.abs, updates), 0.9),
    "named_chain": lambda _: (("one", optax.clip(0.3)), ("two", adam())),
    "noisy_sgd": lambda _: (0.1, 0.1, 0.5, NOISE_KEY),
    "sam": lambda _: (optax.sgd(0.1), optax.sgd(0.05)),
    "scale_by_backtracking_linesearch": lambda _: (3,),
    "scale_by_schedule": lambda _: (optax.linear_schedule(0.1, 0.0, 5),),
    "scale_by_zoom_linesearch": lambda _: (2,),
    "schedule_free": lambda _: (adam(), 0.1),
    "snapshot": lambda _: ("norm", lambda updates, **__: norm(updates)),
    "stateless": lambda _: (lambda updates, params: jax.tree.map(lambda u, p: u - 0.1 * p, updates, params),),
    "stateless_with_tree_map": lambda _: (lambda u, p: u - 0.1 * p,),
}
OPTIONS = {
    **dict.fromkeys(("inject_hyperparams", "inject_stateful_hyperparams"), lambda mask: {"mask": mask}),
    "selective_transform": lambda mask: {"freeze_mask": mask},
}


def transformation(name, mask):
    """Makes a transformation, with a mask or labels where it takes any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are deprecated
        f = TRANSFORMATIONS[name]
        required = [p.name for p in inspect.signature(f).parameters.values() if p.default is p.empty]
        if name in ARGUMENTS:
            args, kwargs = ARGUMENTS[name](mask), OPTIONS.get(name, lambda _: {})(mask)
        elif required in ([], ["learning_rate"]):
            args, kwargs = (0.1,) * len(required), {}
            names = {"mask", "weight_decay_mask"} & set(inspect.signature(f).parameters)
            kwargs = dict.fromkeys(names, mask)
        else:
            pytest.fail(f"optax has a transformation that these tests do not know: {name}({required})")
        if name.startswith("inject"):
            f = f(optax.adamw, static_args="mask")
        tx = f(*args, **kwargs)
    return tx.gradient_transformation() if name == "MultiSteps" else tx


MASKS = {
    "tree": lambda make: make(True, True, False),
    "function": lambda _: lambda tree: jax.tree.map(lambda x: x.shape[-1] == 2, tree),
}


def nets(tree):
    """The models in the state of an optimizer."""
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Model)) if isinstance(x, Model)]


def distinct(tree):
    """The arrays of a tree, each once."""
    return list({id(x): x for x in jax.tree.leaves(tree) if eqx.is_array(x)}.values())
