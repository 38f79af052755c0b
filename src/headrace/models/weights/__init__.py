"""Weights on their way into a decoder: from safetensors, from GGUF, or made up."""
