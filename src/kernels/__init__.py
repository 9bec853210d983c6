"""KDA and MLA kernels over a paged pool; importable as kvledger.kernels."""
