"""What is measured: one module per operator, its providers in `providers/`."""
