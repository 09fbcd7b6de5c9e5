"""Records -> rows -> charts -> one HTML page. Reads records and result folders only; never torch, never an operator."""
