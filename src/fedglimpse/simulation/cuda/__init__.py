"""The fast path on a CUDA device: Triton convolutions, compiled steps, CUDA graphs."""
