"""Telling the user something that is no error, once per process: a line in the log, by default on standard error."""

from __future__ import annotations

import functools
import logging


@functools.cache
def say_once(message: str) -> None:
    logging.getLogger("jfabench.kernels").warning(message)
