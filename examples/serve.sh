#!/bin/sh
# Serves the miniature pair with DDTree on port 8000; then: python examples/serve_client.py
# On a GPU: DTYPE=bfloat16 examples/serve.sh
# What follows the name goes to vLLM: examples/serve.sh --port 8001
cd "$(dirname "$0")/.." || exit 1
PATH="$PWD/.venv/bin:$PATH"
export PATH
exec vllm serve examples/tiny_kimi/target \
  --served-model-name tiny-kimi \
  --dtype "${DTYPE:-float32}" \
  --max-model-len 1024 \
  --max-num-seqs 8 \
  --kv-cache-memory-bytes 134217728 \
  --speculative-config '{"method": "ddtree", "model": "examples/tiny_kimi/drafter", "num_speculative_tokens": 7, "tree_budget": 16}' \
  "$@"
