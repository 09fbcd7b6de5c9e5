"""The sweeps that ship with jfabench, as YAML files."""
