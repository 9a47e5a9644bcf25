"""The ports of real models in `examples/`, each trained beside a twin."""
