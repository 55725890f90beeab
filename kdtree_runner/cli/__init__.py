"""The command `kdtree`. Nothing here imports torch or vLLM before a command needs them."""
