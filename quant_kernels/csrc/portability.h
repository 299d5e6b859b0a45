// One source for CUDA, HIP (with and without its headers) and the host: qualifiers, thread indices, barriers, shuffles.
//
// Branches:
//   QK_HIP_BARE   HIP compiled by a clang that has no HIP headers: compiler builtins only.
//   __HIP__       HIP with headers.
//   __CUDACC__    CUDA.
//   QK_EMULATE    the host runs the kernels themselves (tests); the including file provides `qk::emulation`.
//   otherwise     plain C++: only the conversions are used.
// Waves have 32 or 64 lanes: nothing here exchanges values further than 31 lanes apart.
#pragma once

#include <stdint.h>

#if defined(QK_HIP_BARE)
#define QK_DEVICE_CODE 1
#define QK_HIP 1
#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define QK_LAUNCH_BOUNDS(threads) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define QK_FN static inline __attribute__((host, device, always_inline))
#define QK_DEVICE_MEMBER inline __attribute__((device, always_inline))
#define QK_DEVICE static inline __attribute__((device, always_inline))
#define QK_GLOBAL __global__
#define QK_SHARED __shared__
#elif defined(__HIP__) || defined(__HIPCC__)
#include <hip/hip_runtime.h>
#define QK_DEVICE_CODE 1
#define QK_HIP 1
#define QK_LAUNCH_BOUNDS(threads) __launch_bounds__(threads)
#define QK_FN static inline __host__ __device__ __attribute__((always_inline))
#define QK_DEVICE_MEMBER inline __device__ __attribute__((always_inline))
#define QK_DEVICE static inline __device__ __attribute__((always_inline))
#define QK_GLOBAL __global__
#define QK_SHARED __shared__
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#define QK_DEVICE_CODE 1
#define QK_CUDA 1
#define QK_LAUNCH_BOUNDS(threads) __launch_bounds__(threads)
#define QK_RESIDENT_BLOCKS(threads, blocks) __launch_bounds__(threads, blocks)
#define QK_FN static __host__ __device__ __forceinline__
#define QK_DEVICE_MEMBER __device__ __forceinline__
#define QK_DEVICE static __device__ __forceinline__
#define QK_GLOBAL __global__
#define QK_SHARED __shared__
#else
#define QK_LAUNCH_BOUNDS(threads)
#define QK_FN static inline __attribute__((always_inline))
#define QK_DEVICE_MEMBER inline
#define QK_DEVICE static inline
#define QK_GLOBAL
#if defined(QK_EMULATE)
#define QK_SHARED static
#endif
#endif

// Registers so few that `blocks` fit a multiprocessor (0: as the compiler sees fit). Where that pays is a property of the
// machine: of NVIDIA's, here.
#if !defined(QK_RESIDENT_BLOCKS)
#define QK_RESIDENT_BLOCKS(threads, blocks) QK_LAUNCH_BOUNDS(threads)
#endif

// How a kernel takes its work list: in CUDA it stays in constant memory.
#if defined(QK_CUDA)
#define QK_ARGUMENT const __grid_constant__
#else
#define QK_ARGUMENT const
#endif

namespace qk {

// ---- bits -------------------------------------------------------------------------------------------------------

QK_FN uint32_t bits_of(float value) {
#if defined(QK_CUDA) && defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(uint32_t, value);
#endif
}

QK_FN float float_of(uint32_t bits) {
#if defined(QK_CUDA) && defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

QK_FN uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
QK_FN uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Greater of each 16-bit half of two words, unsigned (bit patterns without their sign keep the order of magnitudes).
QK_FN uint32_t max_halves(uint32_t a, uint32_t b) {
#if defined(QK_CUDA) && defined(__CUDA_ARCH__)
  return __vmaxu2(a, b);
#else
  const uint32_t high = max_u32(a & 0xffff0000u, b & 0xffff0000u);
  return high | max_u32(a & 0xffffu, b & 0xffffu);
#endif
}

// ---- vectors ----------------------------------------------------------------------------------------------------

struct alignas(4) Words1 {
  uint32_t w[1];
};
struct alignas(8) Words2 {
  uint32_t w[2];
};
struct alignas(16) Words4 {
  uint32_t w[4];
};

#if defined(QK_DEVICE_CODE) || defined(QK_EMULATE)

// ---- threads ----------------------------------------------------------------------------------------------------

#if defined(QK_HIP_BARE)
QK_DEVICE int thread_index() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
QK_DEVICE int64_t block_index() { return static_cast<int64_t>(__builtin_amdgcn_workgroup_id_x()); }
QK_DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
QK_DEVICE uint32_t shuffle_xor(uint32_t value, int distance) {
  const int lane = static_cast<int>(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)));
  return static_cast<uint32_t>(__builtin_amdgcn_ds_bpermute((lane ^ distance) << 2, static_cast<int>(value)));
}
// The value of lane `source` of the same 32 lanes.
QK_DEVICE uint32_t shuffle(uint32_t value, int source) {
  const int lane = static_cast<int>(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)));
  return static_cast<uint32_t>(__builtin_amdgcn_ds_bpermute(((lane & ~31) | source) << 2, static_cast<int>(value)));
}
#elif defined(QK_HIP)
QK_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
QK_DEVICE int64_t block_index() { return static_cast<int64_t>(blockIdx.x); }
QK_DEVICE void barrier() { __syncthreads(); }
QK_DEVICE uint32_t shuffle_xor(uint32_t value, int distance) {
  return static_cast<uint32_t>(__shfl_xor(static_cast<int>(value), distance));
}
QK_DEVICE uint32_t shuffle(uint32_t value, int source) {
  return static_cast<uint32_t>(__shfl(static_cast<int>(value), source, 32));
}
#elif defined(QK_CUDA)
QK_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
QK_DEVICE int64_t block_index() { return static_cast<int64_t>(blockIdx.x); }
QK_DEVICE void barrier() { __syncthreads(); }
QK_DEVICE uint32_t shuffle_xor(uint32_t value, int distance) { return __shfl_xor_sync(0xffffffffu, value, distance); }
QK_DEVICE uint32_t shuffle(uint32_t value, int source) { return __shfl_sync(0xffffffffu, value, source); }
#else
int thread_index();
int64_t block_index();
void barrier();
uint32_t shuffle_xor(uint32_t value, int distance);
uint32_t shuffle(uint32_t value, int source);
#endif

// ---- memory -----------------------------------------------------------------------------------------------------

// Reads that are not needed again, and writes that nothing here reads back: leave the cache to others.
template <class Vector>
QK_DEVICE Vector load_once(const void* address) {
#if defined(QK_CUDA)
  if constexpr (sizeof(Vector) == 16) {
    const uint4 found = __ldcs(static_cast<const uint4*>(address));
    return __builtin_bit_cast(Vector, found);
  } else if constexpr (sizeof(Vector) == 8) {
    const uint2 found = __ldcs(static_cast<const uint2*>(address));
    return __builtin_bit_cast(Vector, found);
  } else {
    const unsigned found = __ldcs(static_cast<const unsigned*>(address));
    return __builtin_bit_cast(Vector, found);
  }
#else
  return *static_cast<const Vector*>(address);
#endif
}

template <class Vector>
QK_DEVICE void store_once(void* address, const Vector& value) {
#if defined(QK_CUDA)
  if constexpr (sizeof(Vector) == 16) {
    __stcs(static_cast<uint4*>(address), __builtin_bit_cast(uint4, value));
  } else if constexpr (sizeof(Vector) == 8) {
    __stcs(static_cast<uint2*>(address), __builtin_bit_cast(uint2, value));
  } else {
    __stcs(static_cast<unsigned*>(address), __builtin_bit_cast(unsigned, value));
  }
#else
  *static_cast<Vector*>(address) = value;
#endif
}

// Counters that any thread may raise; integers, so that the order does not show.
QK_DEVICE void atomic_add(int64_t* address, int64_t value) {
#if defined(QK_CUDA)
  atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
#else
  __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
#endif
}

QK_DEVICE void atomic_min(int64_t* address, int64_t value) {
#if defined(QK_CUDA)
  atomicMin(reinterpret_cast<long long*>(address), static_cast<long long>(value));
#else
  int64_t seen = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (value < seen && !__atomic_compare_exchange_n(address, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

QK_DEVICE void atomic_max(uint32_t* address, uint32_t value) {
#if defined(QK_CUDA)
  atomicMax(address, value);
#else
  uint32_t seen = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (value > seen && !__atomic_compare_exchange_n(address, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

#endif  // device code or emulation

}  // namespace qk
