"""The file. Keeps the promises about damage, size and durability: `_header.py`, `_reading.py`, `_writing.py`.

This folder writes tensors, bytes with names, stored dtypes and shapes, and the manifest as a text into one safetensors
file, with digests. It reads the same back, checked. It knows nothing of models, of JAX's or NumPy's arrays, or of the
contents of a manifest. It never believes a file about its own size, and never leaves half of one behind.

    _header.py          checked: the header, strictly; its size, and that tensors lie inside the file
    _byte_sources.py    paths, file objects, pipes and bytes, read in chunks
    _reading.py         tensors, with digests checked by default, into aligned memory of the file's size, or mapped
    _writing.py         durable: replaced as a whole or not at all; a snapshot: what is hashed is what is written
    _mapped_files.py    mapped files that are about to be written to in place
"""
