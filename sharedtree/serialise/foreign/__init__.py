"""The files of others: Equinox's leaves and flax's msgpack.

Bytes and a template come in; named arrays and what does not fit go out. Never makes a tie: `convert` does.
"""
