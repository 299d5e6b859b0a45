// Instructions of NVIDIA's tensor cores and clusters that the linear product is made of.
#pragma once

#include "portability.h"

#if defined(QK_CUDA)

namespace qk {

QK_DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// Copy 16 bytes to shared memory in the background; zeros if not `inside`.
QK_DEVICE void copy_16(uint32_t shared, const void* global, bool inside) {
  const int bytes = inside ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// The same for 4 bytes.
QK_DEVICE void copy_4(uint32_t shared, const void* global, bool inside) {
  const int bytes = inside ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

QK_DEVICE void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int pending>
QK_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Four 8 x 16-byte matrices: lane i gives the address of row i % 8 of matrix i / 8, and gets word i % 4 of row i / 4 of each.
QK_DEVICE void load_matrices(uint32_t (&words)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared)
               : "memory");
}

// sums[16 x 8] += a[16 x 16] * b[16 x 8], f16 with fp32 sums.
QK_DEVICE void multiply(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two f16 from two e4m3 codes, the lower or the upper ones of a word.
template <int half>
QK_DEVICE uint32_t f16_of_e4m3(uint32_t word) {
  const uint16_t codes = static_cast<uint16_t>(half ? word >> 16 : word);
#if __CUDA_ARCH__ >= 890
  uint32_t found;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(found) : "h"(codes));
  return found;
#else
  uint32_t found = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t code = (codes >> (8 * i)) & 0xffu;
    const uint32_t bits = bits_of(decode_e4m3(code));
    const uint32_t magnitude = bits & kMagnitude;
    const uint32_t half_bits = magnitude > kInfinity ? 0x7e00u : (magnitude == 0 ? 0u : (magnitude - (112u << 23)) >> 13);
    found |= (half_bits | ((code & 0x80u) << 8)) << (16 * i);
  }
  return found;
#endif
}

// 2^-14 times the codes of a word of e2m1: pairs of the codes (0, 4), (2, 6), (1, 5) and (3, 7).
QK_DEVICE void f16_of_e2m1(uint32_t (&pairs)[4], uint32_t word) {
  const uint32_t even = ((word << 4) & 0x80808080u) | ((word << 1) & 0x0e0e0e0eu);
  const uint32_t odd = (word & 0x80808080u) | ((word >> 3) & 0x0e0e0e0eu);
  pairs[0] = __byte_perm(even, 0u, 0x2404);
  pairs[1] = even & 0xff00ff00u;
  pairs[2] = __byte_perm(odd, 0u, 0x2404);
  pairs[3] = odd & 0xff00ff00u;
}

// ---- clusters: blocks that read each other's shared memory ----------------------------------------------------------

QK_DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

QK_DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

QK_DEVICE void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

// Raise a number of another block.
QK_DEVICE void raise_in([[maybe_unused]] uint32_t rank, [[maybe_unused]] uint32_t shared, [[maybe_unused]] uint32_t value) {
#if __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  asm volatile("red.relaxed.cluster.shared::cluster.max.u32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
#endif
}

QK_DEVICE float load_from([[maybe_unused]] uint32_t rank, [[maybe_unused]] uint32_t shared) {
  float found = 0.0f;
#if __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(found) : "r"(remote) : "memory");
#endif
  return found;
}

// ---- launches that overlap ------------------------------------------------------------------------------------------

// Let the next launch of the stream begin, if it was made to begin early.
QK_DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait until the launches before this one have ended and their writes are seen. Nothing may be read before.
QK_DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace qk

#endif
