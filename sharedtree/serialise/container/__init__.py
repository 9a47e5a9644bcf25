"""The file: tensors, a manifest and metadata in one safetensors file, with digests.

In come bytes with names, stored dtypes and shapes, and the manifest as a text; out come the same, checked. It knows
nothing of models, of arrays that JAX or NumPy have, or of what a manifest says. It never believes a file about its own
size, and never leaves half of one behind.
"""
