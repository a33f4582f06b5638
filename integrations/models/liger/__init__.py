"""Liger-Kernel: norms, rotary embeddings and SwiGLU as one Triton kernel each."""
