"""jfabench: Jagged Flash Attention kernels, and a harness that measures them against their peers.

Importing this package imports neither torch nor triton; each module imports what it needs.
"""

__version__ = "0.1.0"
