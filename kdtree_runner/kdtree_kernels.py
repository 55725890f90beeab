"""The operators as plain functions over Torch tensors, for engines other than vLLM too.

They check shapes, types and that all tensors are on the CPU or all on GPUs, then hand data pointers
and the current stream to the C interface, csrc/include/kdtree.h, whose names of sizes these are: B
requests, N nodes, T = 1 + N, L horizon, K candidates, R rows of the tree state, A = L + 1, H heads,
S vocabulary shards. All of them write into their arguments and return nothing; none makes a tensor
(but build_ddtree its scratch) or synchronises, and all may be captured in a CUDA graph. The library
is the package's, or KDTREE_LIB.

Values of index tensors (starts, slots, tree rows) are checked on the CPU alone, so that nothing is
read or written past a tensor's end; kv_commit's slots only in steps of up to 256 tokens. A GPU's
are never read: there they are the caller's responsibility.

They stand in kdtree_kernels_tree.py and kdtree_kernels_cache.py; this file is their face. It needs
Torch, the other kdtree_kernels_*.py and native.py alone: these files also work side by side outside
the package.
"""

from __future__ import annotations

if __name__.startswith("kdtree_runner."):
    from kdtree_runner import kdtree_kernels_cache as cache
    from kdtree_runner import kdtree_kernels_tree as tree
else:  # outside the package, even where it is installed: the files beside this one
    import kdtree_kernels_cache as cache  # type: ignore[import-not-found, no-redef]
    import kdtree_kernels_tree as tree  # type: ignore[import-not-found, no-redef]

LSE_WORDS = tree.LSE_WORDS

build_candidates = tree.build_candidates
build_select = tree.build_select
build_ddtree = tree.build_ddtree
tree_place = tree.tree_place
tree_accept = tree.tree_accept

verify_attn = cache.verify_attn
verify_attn_plan = cache.verify_attn_plan
verify_attn_workspace = cache.verify_attn_workspace
KVCommit = cache.KVCommit
kv_commit = cache.kv_commit
