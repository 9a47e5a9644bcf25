"""The models are imported where their libraries are installed, not by who collects tests."""

collect_ignore = ["models"]
