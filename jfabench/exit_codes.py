"""What the commands return; the command line's own docstring says when."""

OK, FAILED, USAGE, MACHINE, INTERRUPTED = 0, 1, 2, 3, 130
