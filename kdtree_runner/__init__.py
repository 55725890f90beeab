"""Tree speculative decoding (DDTree) for vLLM."""

__version__ = "0.1.0"
