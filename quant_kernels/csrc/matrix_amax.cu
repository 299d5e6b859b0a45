// Greatest magnitude of each matrix: blocks raise one number a matrix, which was set to zero before.

#include "launch.h"

namespace qk {
namespace {

constexpr int kMatrixThreads = 256;
constexpr int kMatrixLane = 8;
constexpr int64_t kRowsATile = 8;

// Raise a matrix's number to the greatest of a block's partial maxima.
template <class Values>
QK_DEVICE void raise(const Item& item, int64_t e, uint32_t partial) {
  QK_SHARED uint32_t shared[kMatrixThreads / 32];
  const int thread = thread_index();
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    partial = Values::greater(partial, shuffle_xor(partial, distance));
  }
  if (thread % 32 == 0) shared[thread / 32] = partial;
  barrier();
  if (thread != 0) return;
  for (int i = 1; i < kMatrixThreads / 32; ++i) partial = Values::greater(partial, shared[i]);
  const uint32_t amax = Values::amax_bits(partial);
  atomic_max(place<uint32_t>(item.scale, e, 0, 0), amax > kInfinity ? kQuietNan : amax);
}

// A tile is 8 rows of one matrix.
template <class Loader>
QK_DEVICE void matrix_amax_block(const WorkList& list) {
  using Values = typename Loader::Values;
  const int thread = thread_index();
  const int64_t tile = block_index();
  const Job& job = list.job;
  const Item& item = item_of_tile(list, tile);
  const MatrixTile at(item, tile, (item.n + kRowsATile - 1) / kRowsATile);
  const int64_t e = at.e, first = at.index * kRowsATile;
  uint32_t partial = 0;
  for (int64_t n = first; n < item.n && n < first + kRowsATile; ++n) {
#pragma unroll 4
    for (int64_t k = static_cast<int64_t>(thread) * kMatrixLane; k < item.k; k += kMatrixThreads * kMatrixLane) {
      partial = Values::greater(partial, Loader::load(job, item, e, n, k).partial_amax());
    }
  }
  raise<Values>(item, e, partial);
}

// Tiles of plain matrices without gaps, whatever their rows.
constexpr int kFlatLoads = 8;
constexpr int64_t kFlatTile = int64_t{kMatrixThreads} * kMatrixLane * kFlatLoads;

template <class Loader>
QK_DEVICE void flat_amax_block(const WorkList& list) {
  using Values = typename Loader::Values;
  const Job& job = list.job;
  const Item& item = item_of_tile(list, block_index());
  const int64_t size = item.n * item.k;
  const MatrixTile at(item, block_index(), (size + kFlatTile - 1) / kFlatTile);
  const int64_t begin = at.index * kFlatTile, left = size - begin;
  const int ahead = thread_index() * kMatrixLane;
  const int reach = (left < kFlatTile ? static_cast<int>(left) : static_cast<int>(kFlatTile)) - ahead;
  // Read to stay in the cache: what follows reads it again, from the end.
  const char* address = Loader::row(job, item, at.e, 0, begin).address + ahead * Loader::kBytes;
  constexpr int kParts = kMatrixLane * Loader::kBytes / 16;
  Values held[kFlatLoads];
#pragma unroll
  for (int i = 0; i < kFlatLoads; ++i) {
    constexpr int kStep = kMatrixThreads * kMatrixLane;
    held[i].clear();
    if (i * kStep >= reach) continue;
    for (int part = 0; part < kParts; ++part) {
      const Words4 words = *reinterpret_cast<const Words4*>(address + i * kStep * Loader::kBytes + 16 * part);
      for (int j = 0; j < 4; ++j) held[i].w[4 * part + j] = words.w[j];
    }
  }
  uint32_t partial = 0;
#pragma unroll
  for (int i = 0; i < kFlatLoads; ++i) partial = Values::greater(partial, held[i].partial_amax());
  raise<Values>(item, at.e, partial);
}

template <class Loader>
QK_GLOBAL void QK_LAUNCH_BOUNDS(kMatrixThreads) flat_amax_kernel(QK_ARGUMENT WorkList list) {
  flat_amax_block<Loader>(list);
}

template <class Loader>
QK_GLOBAL void QK_LAUNCH_BOUNDS(kMatrixThreads) matrix_amax_kernel(QK_ARGUMENT WorkList list) {
  matrix_amax_block<Loader>(list);
}

// One thread a matrix: cheap beside the pass over the matrices themselves, and any strides will do.
QK_GLOBAL void QK_LAUNCH_BOUNDS(kMatrixThreads) zero_kernel(QK_ARGUMENT WorkList list) {
  const int64_t tile = block_index();
  const Item& item = item_of_tile(list, tile);
  const int64_t e = (tile - item.first_tile) * kMatrixThreads + thread_index();
  if (e < item.e) *place<uint32_t>(item.scale, e, 0, 0) = 0;
}

// Scales of rows and groups that only pad the CDNA order.
QK_GLOBAL void QK_LAUNCH_BOUNDS(kMatrixThreads) padding_kernel(QK_ARGUMENT WorkList list) {
  const int64_t tile = block_index();
  const Item& item = item_of_tile(list, tile);
  const int64_t size = item.scale_n * item.scale_k / 4;
  const int64_t index = (tile - item.first_tile) * kMatrixThreads + thread_index();
  const int64_t e = divide(index, size);
  if (e < item.e) {
    *reinterpret_cast<uint32_t*>(place<uint8_t>(item.scale, e, 0, 0) + 4 * (index - e * size)) = 0x7f7f7f7fu;
  }
}

}  // namespace

#if defined(QK_LAUNCHERS)

const char* launch_tensor_amax(WorkList& list, int64_t stream) {
  int64_t tiles = number_tiles(list, [](const Item& item) { return ceil_div(item.e, kMatrixThreads); });
  if (const char* error = start(zero_kernel, tiles, kMatrixThreads, list, stream)) return error;
  bool flat = true;
  for (int i = 0; i < list.count; ++i) {
    flat = flat && (list.items[i].n == 1 || list.items[i].source.stride_n == list.items[i].k);
  }
  return with_loader<GroupLanes>(list, [&](auto loader) -> const char* {
    if constexpr (decltype(loader)::kPlain) {
      if (flat) {
        tiles = number_tiles(list, [](const Item& item) { return item.e * ceil_div(item.n * item.k, kFlatTile); });
        return start(flat_amax_kernel<decltype(loader)>, tiles, kMatrixThreads, list, stream);
      }
    }
    tiles = number_tiles(list, [](const Item& item) { return item.e * ceil_div(item.n, kRowsATile); });
    return start(matrix_amax_kernel<decltype(loader)>, tiles, kMatrixThreads, list, stream);
  });
}

const char* launch_padding(WorkList& list, int64_t stream) {
  const int64_t tiles = number_tiles(list, [](const Item& item) {
    const bool padded = item.scale_n != item.n || item.scale_k * 32 != item.k;
    return padded ? ceil_div(item.e * item.scale_n * item.scale_k / 4, kMatrixThreads) : 0;
  });
  return start(padding_kernel, tiles, kMatrixThreads, list, stream);
}

#endif

}  // namespace qk
