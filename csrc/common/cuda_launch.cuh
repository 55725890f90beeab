// How every CUDA operator launches its kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "common/status.h"

namespace kdtree::cuda {

// The kernel may start while the one before it in the stream drains (programmatic dependent
// launch), so it calls wait_for_previous_kernel() before it touches memory. No synchronisation and
// no allocation: allowed in a stream capture.
template <class Params>
kdtree_status launch(const char* op, void (*kernel)(Params), dim3 grid, int threads, int cluster,
                     size_t shared_bytes, void* stream, const Params& params) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, params);
  const cudaError_t left_over = cudaGetLastError();  // also clears it for the next call
  const cudaError_t error = launched != cudaSuccess ? launched : left_over;
  if (error == cudaSuccess) return KDTREE_OK;
  return fail(KDTREE_RUNTIME_ERROR, "%s: launch failed: %s", op, cudaGetErrorString(error));
}

// Until all that came before this kernel in its stream is done and visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel may start when every CTA has called this; it still waits for this one's end.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace kdtree::cuda
