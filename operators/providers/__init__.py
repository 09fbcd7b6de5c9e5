"""The providers that jfabench ships, one file each. See `jfabench.operator.Provider` for what a file must hold."""
