"""Settings for all tests."""

from hypothesis import settings

# Machines that run these are small and shared: a slow example is no failure.
settings.register_profile("jfabench", deadline=None)
settings.load_profile("jfabench")
