// Device memory for the tests of the C interface.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace test {

constexpr int kSkipped = 77;  // the exit status that CTest takes as "skipped"

inline void cuda(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Ends the program when there is no GPU.
inline void need_gpu(const char* name) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return;
  std::printf("%s: skipped, no CUDA device (%s)\n", name, cudaGetErrorString(error));
  std::exit(kSkipped);
}

// A copy of host memory on the device.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& host) : size_(host.size()) {
    cuda(cudaMalloc(&data_, (size_ + 1) * sizeof(T)));
    set(host);
  }
  OnDevice(OnDevice&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(data_); }

  void set(const std::vector<T>& host) {
    cuda(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> get() const {
    std::vector<T> host(size_);
    cuda(cudaDeviceSynchronize());
    cuda(cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t size_;
};

}  // namespace test
