"""Jagged flash attention: the public function is :func:`jfabench.kernels.jagged_flash_attention`."""
