"""The files of others: Equinox's leaves and flax's msgpack.

In come bytes and a template; out go named arrays, and what does not fit. Never makes a tie: `convert` does.
"""
