"""One of two processes with four CPU devices each, that save one model and restore it onto another mesh.

Run by `test_orbax.py`: `python orbax_worker.py PORT PROCESS FOLDER FILE`. The last line that it prints lists what it
found wrong. FILE is a plain file, which each process loads its own part of.
"""

import sys

import equinox as eqx
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sharedtree as st
from sharedtree.serialise import orbax


class Model(eqx.Module):
    embed: jax.Array
    head: jax.Array
    low: jax.Array
    keys: jax.Array
    counter: jax.Array
    weak: jax.Array
    empty: jax.Array
    bias: np.ndarray
    activation: object


def globally(value, sharding):
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def is_right(array, expected, sharding):
    """Whether this process's shards are what and where they should be."""
    shards = array.addressable_shards
    where = {shard.device: shard.index for shard in shards}
    return (
        array.sharding == sharding
        and where == sharding.addressable_devices_indices_map(array.shape)
        and all(np.asarray(s.data).tobytes() == np.ascontiguousarray(expected[s.index]).tobytes() for s in shards)
    )


def main(port, process, folder, file):
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    lengthwise = Mesh(np.array(jax.devices()), ("d",))
    square = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    embed = np.arange(128, dtype=np.float32).reshape(16, 8)
    low = np.arange(64).reshape(8, 8).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    data = np.arange(16, dtype=np.uint32).reshape(8, 2)
    rows = NamedSharding(lengthwise, P("d"))
    weight = globally(embed, rows)
    keys = jax.jit(jax.random.wrap_key_data, out_shardings=rows)(globally(data, rows))
    weak = jax.jit(lambda: jax.lax.broadcast(2.0, (8,)), out_shardings=rows)()
    assert weak.weak_type
    empty = globally(np.zeros((8, 0), np.float32), rows)
    counter = jax.numpy.int32(7)
    model = Model(weight, weight, globally(low, rows), keys, counter, weak, empty, np.arange(3.0), jax.nn.relu)
    onto = NamedSharding(square, P("b", "a"))
    spread = NamedSharding(square, P("a"))
    placements = {"embed": onto, "low": onto, "keys": spread, "weak": spread, "empty": spread}
    placements["counter"] = NamedSharding(square, P())
    with ocp.CheckpointManager(folder) as manager:
        saved = orbax.save(manager, 3, model)
        manager.wait_until_finished()
        back = orbax.restore(manager, trusted=[Model], sharding=lambda name, _: placements[name])
        like = eqx.tree_at(lambda m: m.bias, model, np.zeros(3))
        again = orbax.restore(manager, 3, like=like)
    plain = st.load(file, sharding=spread)
    found = {
        "file": is_right(plain["w"], embed, spread)
        and plain["w"] is plain["tied"]
        and plain["empty"].sharding == spread,
        "keys of the file": plain["keys"].sharding == spread
        and is_right(jax.random.key_data(plain["keys"]), data, jax.random.key_data(plain["keys"]).sharding),
        "weak of the file": plain["weak"].weak_type and is_right(plain["weak"], np.full(8, 2.0, np.float32), spread),
        "saved": saved,
        "tied": back.embed is back.head and again.embed is again.head,
        "resharded": is_right(back.embed, embed, onto) and is_right(back.low, low, onto),
        "keys": is_right(jax.random.key_data(back.keys), data, jax.random.key_data(back.keys).sharding)
        and back.keys.sharding == spread
        and back.keys.dtype == keys.dtype,
        "weak": back.weak.weak_type and is_right(back.weak, np.full(8, 2.0, np.float32), spread),
        "empty": back.empty.shape == (8, 0) and back.empty.sharding == spread,
        "counter": int(back.counter.addressable_shards[0].data) == 7 and len(back.counter.sharding.device_set) == 8,
        "bias": type(back.bias) is np.ndarray and back.bias.tolist() == [0, 1, 2],
        "static": back.activation is jax.nn.relu,
        "as the template": is_right(again.embed, embed, rows) and again.keys.sharding == keys.sharding,
    }
    print([name for name, is_so in found.items() if not is_so], flush=True)  # noqa: T201 -- its parent reads it


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
