// Entry of the GPU kernels: brings the items of a list into the shape that kernels like best, and picks the kernel.

#include "launch.h"

#include <initializer_list>

namespace qk {

bool device_kernels_built() { return true; }

namespace {

int64_t element_bytes(Element element) { return element == kF32 ? 4 : (element <= kBf16 ? 2 : 1); }

bool multiple(int64_t value, int64_t step) { return value % step == 0; }

bool aligned_view(const View& view, int64_t element, int64_t bytes) {
  return multiple(reinterpret_cast<intptr_t>(view.data), bytes) && multiple(view.stride_e * element, bytes) &&
         multiple(view.stride_n * element, bytes);
}

// The shift that divides positions up to `reach` by a block's side; -1 if there is none.
int32_t block_shift(int64_t side, int64_t reach) {
  if (side >= reach) return 62;
  int32_t shift = 0;
  while ((int64_t{1} << shift) < side) ++shift;
  return (int64_t{1} << shift) == side ? shift : -1;
}

// Whether rows are so close that 128 of them are less than 2^31 bytes apart.
bool near(const Item& item) {
  constexpr int64_t kFarthest = int64_t{1} << 22;
  for (const View* view : {&item.source, &item.source_scale, &item.data, &item.scale}) {
    if (view->stride_n >= kFarthest || view->stride_n <= -kFarthest) return false;
  }
  return true;
}

// Whether whole packs of every kernel can be loaded and stored at once: 16 bytes of a source, a pack of codes.
bool aligned(const Job& job, const Item& item) {
  if (item.n > 1 && !near(item)) return false;
  const int64_t source_bytes = job.element == kE2m1 ? 8 : 16;
  if (!aligned_view(item.source, element_bytes(job.element), source_bytes)) return false;
  if (item.source.stride_k != 1 && item.k > 1) return false;
  if (job.encoded) {
    if (item.row_shift < 0 || item.col_shift < 0) return false;
    if (item.col_shift < 62 && (item.col_shift < 4 || !multiple(item.offset_cols, 16))) return false;
  }
  if (item.data.data == nullptr) return true;
  if (job.target == kDense) return aligned_view(item.data, element_bytes(job.through), 16);
  return aligned_view(item.data, 1, 16);
}

// Matrices that follow each other without gaps are one matrix, where scales allow it.
void join_matrices(const Job& job, Item& item) {
  if (item.e == 1 || job.target == kPerBlockFp8 || job.target == kNvfp4 || job.target == kAmax) return;
  if (job.layout == kCdna || item.source_second.data != nullptr) return;
  const auto follows = [&](const View& view, int64_t rows) {
    return view.data == nullptr || view.stride_e == rows * view.stride_n;
  };
  if (!follows(item.source, item.n) || !follows(item.data, item.n)) return;
  if (!follows(item.scale, item.n) || !follows(item.amax, item.n)) return;
  if (job.encoded) {
    if (item.offset_rows != 0 || !multiple(item.n, item.block_rows)) return;
    if (!follows(item.source_scale, item.n / item.block_rows)) return;
  }
  item.n *= item.e;
  item.e = 1;
}

// Rows without gaps are one row, where groups are all that counts.
void join_rows(const Job& job, Item& item) {
  if (item.e != 1 || job.layout == kCdna || job.encoded) return;
  if (job.target != kMxfp4 && job.target != kMxfp8) return;
  const int64_t width = job.target == kMxfp4 ? item.k / 2 : item.k;
  if (item.source.stride_n != item.k || item.source.stride_k != 1) return;
  if (item.data.stride_n != width || item.scale.stride_n != item.k / 32) return;
  if (item.amax.data != nullptr && (item.amax.stride_n != item.k / 32 || item.amax.stride_k != 1)) return;
  item.k *= item.n;
  item.n = 1;
}

// Kernels that take some items only, in the order in which they are asked.
struct Specialist {
  bool (*fits)(const Job& job, const Item& item);
  const char* (*launch)(WorkList& list, int64_t stream);
};

constexpr Specialist kSpecialists[] = {
    {coded_rows_fit, launch_coded_rows}, {coded_groups_fit, launch_coded_groups}, {nvfp4_fits, launch_nvfp4}};

const char* launch_all(WorkList& list, int64_t stream) {
  const Job& job = list.job;
  switch (job.target) {
    case kDense: return launch_dense(list, stream);
    case kPtpcFp8: return launch_rows(list, stream);
    case kPerBlockFp8: return launch_blocks(list, stream);
    case kMxfp4:
    case kMxfp8:
      if (job.layout == kCdna) {
        if (const char* error = launch_padding(list, stream)) return error;
      }
      return launch_groups(list, stream);
    case kNvfp4: return launch_groups(list, stream);
    case kAmax:
      if (job.amax_rows == 1 && (job.amax_cols == 16 || job.amax_cols == 32)) {
        for (int i = 0; i < list.count; ++i) {
          if (list.items[i].k % job.amax_cols != 0) return "the maxima of partial groups are not taken on a GPU";
        }
        return launch_groups(list, stream);
      }
      if (job.amax_rows == 128 && job.amax_cols == 128) return launch_blocks(list, stream);
      if (job.amax_rows == 1) return launch_rows(list, stream);
      return launch_tensor_amax(list, stream);
  }
  return "unknown target";
}

const char* launch(const WorkList& list, int64_t stream) {
  WorkList rest = list;
  for (const Specialist& specialist : kSpecialists) {
    const auto fits = [&](const Item& item) { return specialist.fits(list.job, item); };
    WorkList some = part_of(rest, fits);
    if (some.count == 0) continue;
    rest = part_of(rest, [&](const Item& item) { return !fits(item); });
    if (const char* error = specialist.launch(some, stream)) return error;
  }
  return rest.count == 0 ? nullptr : launch_all(rest, stream);
}

}  // namespace

const char* convert_on_device(const Job& job, const Item* items, int count, int64_t stream) {
  for (int first = 0; first < count; first += kMaxItems) {
    WorkList list{};
    list.job = job;
    list.count = count - first < kMaxItems ? count - first : kMaxItems;
    for (int i = 0; i < list.count; ++i) {
      Item& item = list.items[i] = items[first + i];
      join_matrices(job, item);
      join_rows(job, item);
      item.row_shift = block_shift(item.block_rows, item.n + item.offset_rows);
      item.col_shift = block_shift(item.block_cols, item.k + item.offset_cols);
      item.aligned = aligned(job, item);
    }
    if (const char* error = launch(list, stream)) return error;
  }
  return nullptr;
}

}  // namespace qk
