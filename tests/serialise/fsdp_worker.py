"""The demo's language model, whose head is its embedding, trained on devices that have a part of each parameter.

Run by `test_orbax.py`. `fsdp_worker.py train FOLDER PORT PROCESS` is one of two processes with four devices each.
They save every step and train on until they are killed. `fsdp_worker.py resume FOLDER` has eight devices. It
trains on from there on four of them, does all of it again on eight, and prints what is not the same, bit for bit.

Parameters and the optimizer's state are split over the devices, and gathered for each step. A device works out the
gradient of one window of text at a time; those of all windows are gathered, and added up in the order of the windows by
whoever updates a part. So no sum depends on how many devices there are.
"""

import itertools
import sys

import equinox as eqx
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import sharedtree as st
from sharedtree.cli._demo import LanguageModel, Sizes, make_optimizer, next_byte_loss

SIZES = Sizes(width=32, heads=2, blocks=1, context=16, batch=8)
TX = make_optimizer(steps=100)


def spec_of(leaf):
    return P("data") if leaf.ndim else P()


def mesh_of(devices):
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def windows_of(number, mesh):
    found = np.random.default_rng(number).integers(0, 256, (SIZES.batch, SIZES.context + 1), np.int32)
    return jax.make_array_from_callback(found.shape, NamedSharding(mesh, P("data")), lambda index: found[index])


def gathered(tree):
    return st.tree.map(lambda x: lax.all_gather(x, "data", tiled=True) if x.ndim else x, tree)


def own_part(whole, part):
    if not part.ndim:
        return whole
    return lax.dynamic_slice_in_dim(whole, lax.axis_index("data") * len(part), len(part))


def update(model, state, windows):
    """What each device does in one step."""
    assert model.embed is model.head
    whole = gathered(model)
    _, each = st.scan(lambda _, window: (None, st.value_and_grad(next_byte_loss)(whole, window[None])), None, windows)
    losses, gradients = gathered(each)
    parts = st.tree.filter(model, eqx.is_array)
    gradient = st.tree.map(lambda one, part: own_part(one.mean(0), part), gradients, parts)
    updates, state = TX.update(gradient, state, model)
    return st.apply_updates(model, updates), state, losses.mean()


def beginning(mesh):
    model = LanguageModel(SIZES, key=jax.random.key(0))
    model = st.device_put(model, st.tree.map(lambda leaf: NamedSharding(mesh, spec_of(leaf)), model))
    return model, st.jit(TX.init)(model)


def steps(mesh, model, state, first):
    """The model, the state and the loss after each step from some number on."""
    specs = st.tree.filter(st.tree.map(spec_of, (model, state)), lambda leaf: isinstance(leaf, P), replace=P())
    everywhere = st.shard_map(update, mesh=mesh, in_specs=(*specs, P("data")), out_specs=(*specs, P()), check_vma=False)
    step = st.jit(everywhere)
    for number in itertools.count(first):
        model, state, loss = step(model, state, windows_of(number, mesh))
        yield number + 1, {"model": model, "state": state, "loss": loss}


def train(folder, port, process):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(process))
    assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    mesh = mesh_of(jax.devices())
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=3)) as manager:
        for number, run in steps(mesh, *beginning(mesh), 0):
            st.orbax.save(manager, number, run)
            if number == 1:
                manager.wait_until_finished()
                print("saved", flush=True)  # noqa: T201 -- its parent reads it, and kills it


def bits(run):
    return {path: np.asarray(leaf).tobytes() for path, leaf in st.tree.leaves_with_path(run)}


def resume(folder):
    four, eight = mesh_of(jax.devices()[:4]), mesh_of(jax.devices())
    with ocp.CheckpointManager(folder) as manager:
        number = manager.latest_step()
        back = st.orbax.restore(manager, number, sharding=lambda _, leaf: NamedSharding(four, spec_of(leaf)))
    model = back["model"]
    parts = {shard.data.shape for shard in model.embed.weight.addressable_shards}
    found = [] if model.embed is model.head and parts == {(64, 32)} else ["tied, a quarter on each device"]
    resumed = {number: back} | dict(itertools.islice(steps(four, model, back["state"], number), 2))
    first, state = beginning(eight)
    vanilla = next_byte_loss(st.untie(first), windows_of(0, eight))
    for at, run in itertools.islice(steps(eight, first, state, 0), number + 2):
        if at == 1 and not np.allclose(vanilla, run["loss"], rtol=1e-5):
            found.append("the loss of JAX alone")
        if at >= number:
            ours, theirs = bits(resumed[at]), bits(run)
            found += [f"{at}: {path}" for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path)]
    print(found, flush=True)  # noqa: T201 -- its parent reads it


if __name__ == "__main__":
    {"train": train, "resume": resume}[sys.argv[1]](*sys.argv[2:])
