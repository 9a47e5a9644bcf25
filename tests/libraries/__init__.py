"""The pytrees that people have, library by library, and what works with each."""
