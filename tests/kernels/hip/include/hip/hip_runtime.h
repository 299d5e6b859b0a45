// The part of HIP's runtime header that the kernels use, for a clang that comes without HIP: the same source lines are
// compiled for AMD GPUs, and for the host with a runtime that hands launches to a test (runtime.cpp).
#pragma once

#include <stdint.h>

typedef __SIZE_TYPE__ size_t;

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))

struct dim3 {
  uint32_t x, y, z;
  constexpr __host__ __device__ dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
};

typedef enum hipError_t { hipSuccess = 0, hipErrorLaunchFailure = 719 } hipError_t;
typedef struct ihipStream_t* hipStream_t;

extern "C" {
hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, hipStream_t stream);
hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, hipStream_t* stream);
hipError_t hipLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                           hipStream_t stream);
hipError_t hipGetLastError();
const char* hipGetErrorString(hipError_t error);
}

// Indices are members that read a register, as in HIP's own header.
struct QkThreadIndex {
  __declspec(property(get = read_x)) uint32_t x;
  __device__ uint32_t read_x() const { return __builtin_amdgcn_workitem_id_x(); }
};
struct QkBlockIndex {
  __declspec(property(get = read_x)) uint32_t x;
  __device__ uint32_t read_x() const { return __builtin_amdgcn_workgroup_id_x(); }
};
extern const __device__ __attribute__((weak)) QkThreadIndex threadIdx;
extern const __device__ __attribute__((weak)) QkBlockIndex blockIdx;

static inline __device__ void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// `width` is the wave's 64: lanes exchange with any other one of their wave.
static inline __device__ int __shfl_xor(int value, int distance) {
  const int lane = static_cast<int>(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)));
  return __builtin_amdgcn_ds_bpermute((lane ^ distance) << 2, value);
}

// `source` is counted within runs of `width` lanes.
static inline __device__ int __shfl(int value, int source, int width) {
  const int lane = static_cast<int>(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)));
  return __builtin_amdgcn_ds_bpermute(((lane & -width) | (source & (width - 1))) << 2, value);
}
