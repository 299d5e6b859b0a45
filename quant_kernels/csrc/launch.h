// Host side of the GPU kernels: which loader reads a source, how many blocks a list needs, and the launch itself.
#pragma once

#include "device.h"
#include "encode.h"

// The launchers need a runtime, or its emulation: HIP without headers compiles device code alone.
#if ((defined(QK_CUDA) || defined(QK_HIP)) && !defined(QK_HIP_BARE)) || defined(QK_EMULATE)
#define QK_LAUNCHERS 1
#endif

namespace qk {

inline int64_t ceil_div(int64_t size, int64_t step) { return (size + step - 1) / step; }

// Values a lane loads at once, by kernel: 16 bytes of a plain source, 16 codes of a quantized one. A lane of a group kernel
// always holds 8 values of fp32 too, so that 4 lanes share a group of 32.
struct RowLanes {
  static constexpr int kF32Lane = 4, kCodeLane = 16;
};
struct GroupLanes {
  static constexpr int kF32Lane = 8, kCodeLane = 8;
};

// Call `function` with the loader of a list's source: the careful one unless every pack is whole, aligned, and read by
// code that was worth building for it. FNUZ codes are made in software on NVIDIA: only careful kernels carry that.
template <class Lanes, class Function>
const char* with_loader(const WorkList& list, Function function) {
  const Job& job = list.job;
  bool whole = true;
  const int lane = job.encoded ? Lanes::kCodeLane : (job.element == kF32 ? Lanes::kF32Lane : 8);
  for (int i = 0; i < list.count; ++i) whole = whole && list.items[i].aligned && list.items[i].k % lane == 0;
#if !defined(QK_HIP)
  whole = whole && !job.fnuz;
#endif
  if (whole && !job.encoded) {
    if (job.element == kF32) return function(PlainLoader<kF32, Lanes::kF32Lane>{});
    if (job.element == kF16) return function(PlainLoader<kF16, 8>{});
    return function(PlainLoader<kBf16, 8>{});
  }
  if (whole && job.element == kE4m3 && job.through == kBf16 && job.scale_type == kScaleF32) {
    return function(EncodedLoader<kE4m3, kBf16, Lanes::kCodeLane, kScaleF32>{});
  }
  if (job.through == kF32) return function(CarefulLoader<kF32, 8>{});
  if (job.through == kF16) return function(CarefulLoader<kF16, 8>{});
  return function(CarefulLoader<kBf16, 8>{});
}

// Give every item the number of its first tile; return the number of tiles.
template <class Tiles>
int64_t number_tiles(WorkList& list, Tiles tiles_of) {
  int64_t tiles = 0;
  for (int i = 0; i < list.count; ++i) {
    list.items[i].first_tile = tiles;
    tiles += tiles_of(list.items[i]);
  }
  return tiles;
}

const char* launch_rows(WorkList& list, int64_t stream);
const char* launch_groups(WorkList& list, int64_t stream);
const char* launch_blocks(WorkList& list, int64_t stream);
const char* launch_dense(WorkList& list, int64_t stream);
const char* launch_tensor_amax(WorkList& list, int64_t stream);
const char* launch_padding(WorkList& list, int64_t stream);

// Conversions of codes by coded.h: whether an item is one of theirs, and their launch.
bool coded_rows_fit(const Job& job, const Item& item);
bool coded_groups_fit(const Job& job, const Item& item);
const char* launch_coded_rows(WorkList& list, int64_t stream);
const char* launch_coded_groups(WorkList& list, int64_t stream);
// NVFP4 of matrices without gaps.
bool nvfp4_fits(const Job& job, const Item& item);
const char* launch_nvfp4(WorkList& list, int64_t stream);

inline bool coded_source(const Job& job, const Item& item) {
  return job.encoded && job.element == kE4m3 && job.through == kBf16 && job.scale_type == kScaleF32 && item.aligned;
}

// The items of a list that `wanted` says, in their order.
template <class Wanted>
WorkList part_of(const WorkList& list, Wanted wanted) {
  WorkList part{};
  part.job = list.job;
  for (int i = 0; i < list.count; ++i) {
    if (wanted(list.items[i])) part.items[part.count++] = list.items[i];
  }
  return part;
}

#if defined(QK_LAUNCHERS)

#if defined(QK_EMULATE)

// Run a kernel on the host; provided by the emulation.
const char* start(void (*kernel)(WorkList), int64_t tiles, int threads, const WorkList& list, int64_t stream);

#else

#if defined(QK_CUDA)
using Stream = cudaStream_t;
#else
using Stream = hipStream_t;
#endif

inline const char* start(void (*kernel)(WorkList), int64_t tiles, int threads, const WorkList& list, int64_t stream) {
  if (tiles == 0) return nullptr;
  if (tiles > 0x7fffffff) return "the list has more than 2^31 - 1 tiles";
  kernel<<<static_cast<unsigned>(tiles), static_cast<unsigned>(threads), 0, reinterpret_cast<Stream>(stream)>>>(list);
#if defined(QK_CUDA)
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
#else
  const hipError_t error = hipGetLastError();
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
#endif
}

#endif

#endif

}  // namespace qk
