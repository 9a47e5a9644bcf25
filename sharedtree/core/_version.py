"""The version of the package, also written into files."""

__version__ = "0.2.0"
