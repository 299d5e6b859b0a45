// PTPC FP8: one scale an output row. A row stays in the registers of `threads` lanes between its maximum and its codes,
// so that it is read once; several rows share a block. Also the maxima of rows alone.

#include "device_source.h"
#include "launch.h"
#include "layout.h"

namespace qk {
namespace {

constexpr int kRowThreads = 256;

#if defined(QK_HIP)
template <class Loader>
constexpr bool kFnuz = true;
#else
template <class Loader>
constexpr bool kFnuz = Loader::kCareful;
#endif

// Store the codes of one pack of row (e, n) at column k.
template <class Loader>
QK_DEVICE void store_row_codes(const Job& job, const Item& item, int64_t e, int64_t n, int64_t k,
                               const uint32_t (&codes)[Loader::kLane / 4]) {
  const int64_t left = item.k - k;
  const bool whole = !Loader::kCareful || (item.aligned && left >= Loader::kLane);
  uint8_t* address;
  if (job.layout == kCdna) {
    address = place<uint8_t>(item.data, e, 0, 0) + cdna_weight_offset(n, k, item.k);
  } else {
    address = place<uint8_t>(item.data, e, n, k);
  }
  store_codes(address, codes, whole, left < Loader::kLane ? static_cast<int>(left) : Loader::kLane);
}

// `packs` > 0: a row is at most threads * packs packs and stays in registers; 0: it is read twice, whatever its length.
template <class Loader, int threads, int packs, bool measured>
QK_DEVICE void rows_block(const WorkList& list) {
  using Values = typename Loader::Values;
  constexpr int kRows = kRowThreads / threads;
  constexpr int kShuffled = threads < 32 ? threads : 32;
  constexpr int kHeld = packs > 0 ? packs : 1;
  QK_SHARED uint32_t shared[kRowThreads / 32];
  QK_SHARED float shared_sums[2 * (kRowThreads / 32)];

  const int thread = thread_index(), lane = thread % threads;
  const int64_t tile = block_index();
  const Job& job = list.job;
  const Item& item = item_of_tile(list, tile);
  const MatrixTile at(item, tile, (item.n + kRows - 1) / kRows);
  const int64_t n = at.index * kRows + thread / threads;
  const int64_t row = at.e * item.n + n;
  const bool live = n < item.n;
  // Positions are counted from the lane's first, so that those of its packs are constants.
  const int first_k = lane * Loader::kLane;
  const int reach = live ? static_cast<int>(item.k) - first_k : 0;

  Values held[kHeld];
  uint32_t partial = 0;
  if constexpr (packs > 0) {
    const auto source = Loader::row(job, item, at.e, live ? n : 0, first_k);
    typename Loader::Raw raw[kHeld];
#pragma unroll
    for (int i = 0; i < packs; ++i) {
      const int k = i * threads * Loader::kLane;
      raw[i] = k < reach ? Loader::fetch(source, k) : Loader::nothing();
    }
#pragma unroll
    for (int i = 0; i < packs; ++i) {
      held[i] = Loader::decode(raw[i]);
      partial = Values::greater(partial, held[i].partial_amax());
    }
  } else if (live) {
    for (int64_t k = static_cast<int64_t>(lane) * Loader::kLane; k < item.k; k += threads * Loader::kLane) {
      partial = Values::greater(partial, Loader::load(job, item, at.e, n, k).partial_amax());
    }
  }
#pragma unroll
  for (int distance = 1; distance < kShuffled; distance *= 2) {
    partial = Values::greater(partial, shuffle_xor(partial, distance));
  }
  if constexpr (threads > 32) {
    if (thread % 32 == 0) shared[thread / 32] = partial;
    barrier();
    const int first = thread / threads * (threads / 32);
    for (int i = 0; i < threads / 32; ++i) partial = Values::greater(partial, shared[first + i]);
  }
  const uint32_t greatest = Values::amax_bits(partial);
  if (live && lane == 0) {
    check_amax(item, greatest, row);
    if (job.target == kAmax) *place<uint32_t>(item.scale, at.e, n, 0) = greatest > kInfinity ? kQuietNan : greatest;
  }
  if (job.target == kAmax) return;
  const uint32_t amax = live && item.amax.data != nullptr ? given_amax(item, at.e, n, 0) : greatest;
  const bool fnuz = kFnuz<Loader> && job.fnuz;
  const float scale = fp32_scale(amax, fnuz ? kE4m3FnuzMax : kE4m3Max);
  if (live && lane == 0) *place<float>(item.scale, at.e, n, 0) = scale;
  const Divider divider(scale, greatest);
  LaneSums sums;
  uint32_t codes[Loader::kLane / 4];
  if constexpr (packs > 0) {
    uint8_t* address = place<uint8_t>(item.data, at.e, live ? n : 0, first_k);
    const auto convert = [&]<bool plain>() {
#pragma unroll
      for (int i = 0; i < packs; ++i) {
        const int k = i * threads * Loader::kLane;
        if (k < reach) {
          encode_divided<plain>(held[i], divider, fnuz, codes);
          if (job.layout == kCdna) {
            store_row_codes<Loader>(job, item, at.e, n, first_k + k, codes);
          } else {
            store_codes(address + k, codes, true, Loader::kLane);
          }
          if constexpr (measured) add_e4m3_errors(sums, held[i], codes, scale, fnuz);
        }
      }
    };
    if (divider.plain) {
      convert.template operator()<true>();
    } else {
      convert.template operator()<false>();
    }
  } else if (live) {
    for (int64_t k = static_cast<int64_t>(lane) * Loader::kLane; k < item.k; k += threads * Loader::kLane) {
      held[0] = Loader::load(job, item, at.e, n, k);
      encode_divided<false>(held[0], divider, fnuz, codes);
      store_row_codes<Loader>(job, item, at.e, n, k, codes);
      if constexpr (measured) add_e4m3_errors(sums, held[0], codes, scale, fnuz);
    }
  }
  if constexpr (measured) {
    sums.reduce(kShuffled);
    double squares = static_cast<double>(sums.squares), errors = static_cast<double>(sums.errors);
    if constexpr (threads > 32) {
      if (thread % 32 == 0) {
        shared_sums[thread / 32 * 2] = sums.squares;
        shared_sums[thread / 32 * 2 + 1] = sums.errors;
      }
      barrier();
      squares = errors = 0;
      const int first = thread / threads * (threads / 32);
      for (int i = 0; i < threads / 32; ++i) {
        squares += static_cast<double>(shared_sums[2 * (first + i)]);
        errors += static_cast<double>(shared_sums[2 * (first + i) + 1]);
      }
    }
    if (live && lane == 0) {
      item.sums[2 * row] = squares;
      item.sums[2 * row + 1] = errors;
    }
  }
}

template <class Loader, int threads, int packs, bool measured>
QK_GLOBAL void QK_LAUNCH_BOUNDS(kRowThreads) rows_kernel(QK_ARGUMENT WorkList list) {
  rows_block<Loader, threads, packs, measured>(list);
}

}  // namespace

#if defined(QK_LAUNCHERS)

namespace {

// Fast kernels of quantized sources are built without measures: the careful ones have them.
template <class Loader>
constexpr bool kMeasures = Loader::kPlain || Loader::kCareful;

template <class Loader, int threads, int packs>
const char* launch(WorkList& list, int64_t stream) {
  constexpr int64_t kRows = kRowThreads / threads;
  const int64_t tiles = number_tiles(list, [](const Item& item) { return item.e * ceil_div(item.n, kRows); });
  if constexpr (kMeasures<Loader>) {
    if (list.items[0].sums != nullptr) {
      return start(rows_kernel<Loader, threads, packs, true>, tiles, kRowThreads, list, stream);
    }
  }
  return start(rows_kernel<Loader, threads, packs, false>, tiles, kRowThreads, list, stream);
}

// The shapes by the packs of a row that they hold; the last one reads rows of any length twice.
constexpr int64_t kReaches[] = {32, 128, 256, 512, 1024, 2048};
constexpr int kShapes = 7;

template <class Loader>
const char* launch_shape(WorkList& list, int shape, int64_t stream) {
  if constexpr (!Loader::kCareful) {
    switch (shape) {
      case 0: return launch<Loader, 8, 4>(list, stream);
      case 1: return launch<Loader, 32, 4>(list, stream);
      case 2: return launch<Loader, 32, 8>(list, stream);
      case 3: return launch<Loader, 128, 4>(list, stream);
      case 4: return launch<Loader, 128, 8>(list, stream);
      case 5: return launch<Loader, 256, 8>(list, stream);
      default: break;
    }
  }
  return launch<Loader, 256, 0>(list, stream);
}

// The narrowest shape that holds a row.
template <class Loader>
int shape_of(const Item& item) {
  if constexpr (Loader::kCareful) return kShapes - 1;
  const int64_t packs = ceil_div(item.k, Loader::kLane);
  int shape = 0;
  while (shape < kShapes - 1 && packs > kReaches[shape]) ++shape;
  return shape;
}

// Rows of other lengths take other shapes: a list is launched once for each. A few small weights are sooner done in the
// next wider shape than by a launch of their own.
template <class Loader>
const char* launch_shapes(const WorkList& list, int64_t stream) {
  if constexpr (!kMeasures<Loader>) {
    if (list.items[0].sums != nullptr) return launch_shapes<CarefulLoader<Loader::Values::kElement, 8>>(list, stream);
  }
  constexpr int64_t kFewElements = 4 << 20;
  int64_t elements[kShapes] = {};
  for (int i = 0; i < list.count; ++i) {
    const Item& item = list.items[i];
    elements[shape_of<Loader>(item)] += item.e * item.n * item.k;
  }
  int taken[kShapes];
  for (int shape = 0; shape < kShapes; ++shape) {
    const bool joins = shape + 2 < kShapes && elements[shape] < kFewElements && elements[shape + 1] > 0;
    taken[shape] = joins ? shape + 1 : shape;
  }
  for (int shape = 0; shape < kShapes; ++shape) {
    WorkList some = part_of(list, [&](const Item& item) { return taken[shape_of<Loader>(item)] == shape; });
    if (some.count == 0) continue;
    if (const char* error = launch_shape<Loader>(some, shape, stream)) return error;
  }
  return nullptr;
}

}  // namespace

const char* launch_rows(WorkList& list, int64_t stream) {
  return with_loader<RowLanes>(list, [&](auto loader) { return launch_shapes<decltype(loader)>(list, stream); });
}

#endif

}  // namespace qk
