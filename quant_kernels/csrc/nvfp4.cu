// NVFP4 of plain matrices without gaps: a lane has whole groups of 16, whose scale it makes alone.

#include "launch.h"
#include "tiles.h"

namespace qk {
namespace {

constexpr int kGroup = 16;
constexpr int kGroups = 2;  // of a lane, 512 elements apart: 32 lanes take 1,024 elements side by side
constexpr int kWarpElements = 32 * kGroup * kGroups;
constexpr int64_t kElements = kTileThreads / 32 * kWarpElements;

template <Element element>
using Group = Pack<element, kGroup>;

// Signs of values 8 * half and on, in the high bits of nibbles.
template <Element element>
QK_DEVICE uint32_t signs_of(const Group<element>& group, int half) {
  uint32_t signs = 0;
  if constexpr (Group<element>::kHalves) {
    const uint32_t* w = group.w + 4 * half;
#if defined(QK_PACKED_E2M1)
    const uint32_t first = __byte_perm(w[0], w[1], 0x7351), second = __byte_perm(w[2], w[3], 0x7351);
    const uint32_t even = __byte_perm(first, second, 0x5410), odd = __byte_perm(first, second, 0x7632);
    return ((even >> 4) & 0x08080808u) | (odd & 0x80808080u);
#else
    for (int i = 0; i < 4; ++i) signs |= (((w[i] >> 12) & 8u) | ((w[i] >> 24) & 0x80u)) << (8 * i);
#endif
  } else {
    for (int i = 0; i < 8; ++i) signs |= (group.w[8 * half + i] >> 31) << (4 * i + 3);
  }
  return signs;
}

// Eight codes of magnitudes divided by the scale of a plain divider.
template <Element element>
QK_DEVICE uint32_t magnitude_codes(const Group<element>& magnitudes, int half, const Divider& divider) {
  uint32_t codes = 0;
  for (int i = 7; i >= 0; --i) {
    const float value = magnitudes.value(8 * half + i), quotient = value * divider.inverse;
    const float remainder = LaneSums::fused(-quotient, divider.scale, value);
    const float ratio = LaneSums::fused(remainder, divider.inverse, quotient);
#if defined(QK_PACKED_E2M1)
    codes = codes * 16u + ramps_f32(ratio, 0.5f);
  }
  return codes - kRampsBase;
#else
    codes = codes * 16u + encode_e2m1(ratio);
  }
  return codes;
#endif
}

// A group that the fast way does not cover: infinite, without numbers, or beyond the maximum that was given.
template <Element element>
QK_DEVICE void convert_by_value(const Job& job, const Item& item, int64_t e, int64_t k, uint8_t* data, float step) {
  const Divider divider(step, kInfinity);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const auto values = PlainLoader<element, 8>::load(job, item, e, 0, k + 8 * half);
    uint32_t codes = 0;
    for (int i = 0; i < 8; ++i) codes |= encode_e2m1(divider.divide(values.value(i))) << (4 * i);
    store_once(data + 4 * half, Words1{{step == 0.0f ? 0u : codes}});
  }
}

template <Element element>
QK_DEVICE void nvfp4_block(const WorkList& list) {
  using Loader = PlainLoader<element, kGroup>;
  const Job& job = list.job;
  const Item& item = item_of_tile(list, block_index());
  const int64_t size = item.n * item.k, tiles = (size + kElements - 1) / kElements;
  const MatrixTile at(item, block_index(), tiles);
  const int64_t begin = (tiles - 1 - at.index) * kElements;  // backwards: the end is what the pass for the maximum left in cache
  const int thread = thread_index(), ahead = thread / 32 * kWarpElements + thread % 32 * kGroup;
  const int64_t left = size - begin;
  const int reach = (left < kElements ? static_cast<int>(left) : static_cast<int>(kElements)) - ahead;
  auto source = Loader::row(job, item, at.e, 0, begin);
  source.address += ahead * Loader::kBytes;
  Group<element> held[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    held[i] = i * 32 * kGroup < reach ? Loader::fetch(source, i * 32 * kGroup) : Loader::nothing();
  }
  const float second = nvfp4_second_scale(given_amax(item, at.e, 0, 0));
  if (at.index == 0 && thread == 0) *place<float>(item.second, at.e, 0, 0) = second;
  uint8_t* data = place<uint8_t>(item.data, at.e, 0, begin / 2) + ahead / 2;
  uint8_t* scales = place<uint8_t>(item.scale, at.e, 0, begin / kGroup) + ahead / kGroup;
  const Divider six(kE2m1Max, 0u), by_second(second, 0u);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (i * 32 * kGroup >= reach) continue;
    Group<element> magnitudes;
    for (int j = 0; j < Group<element>::kWords; ++j) {
      magnitudes.w[j] = held[i].w[j] & (Group<element>::kHalves ? 0x7fff7fffu : kMagnitude);
    }
    const uint32_t amax = Group<element>::amax_bits(magnitudes.partial_amax());
    if (item.bad != nullptr && amax >= kInfinity) {
      check_amax(item, amax, at.e * item.n + divide(begin + ahead + i * 32 * kGroup, item.k));
    }
    // Within the maximum that was given both quotients are at most 448: nothing overflows, and what underflows is code 0.
    bool covered = by_second.plain && float_of(amax) <= second * 2700.0f;
    uint32_t scale_code;
    if (covered) {
      scale_code = pack_e4m3(by_second.divide_plain(six.divide_plain(float_of(amax))), 0.0f, 0.0f, 0.0f) & 0xffu;
    } else {
      scale_code = nvfp4_scale(amax, second);
    }
    float decoded[4];
    unpack_e4m3(scale_code, decoded);
    const float step = decoded[0] * second;
    const Divider divider(step, amax);
    covered = covered && divider.plain;
    scales[i * 32] = static_cast<uint8_t>(scale_code);
    if (covered) {
      store_once(data + i * 16 * kGroup,
                 Words2{{magnitude_codes<element>(magnitudes, 0, divider) | signs_of<element>(held[i], 0),
                         magnitude_codes<element>(magnitudes, 1, divider) | signs_of<element>(held[i], 1)}});
    } else {
      convert_by_value<element>(job, item, at.e, begin + ahead + i * 32 * kGroup, data + i * 16 * kGroup, step);
    }
  }
}

template <Element element>
QK_GLOBAL void QK_LAUNCH_BOUNDS(kTileThreads) nvfp4_kernel(QK_ARGUMENT WorkList list) {
  nvfp4_block<element>(list);
}

}  // namespace

#if defined(QK_LAUNCHERS)

bool nvfp4_fits(const Job& job, const Item& item) {
  if (job.target != kNvfp4 || job.layout != kRowMajor || job.encoded || !item.aligned || item.sums != nullptr) return false;
  const bool whole = item.source.stride_n == item.k && item.data.stride_n == item.k / 2 && item.scale.stride_n == item.k / 16;
  return item.n == 1 || whole;
}

const char* launch_nvfp4(WorkList& list, int64_t stream) {
  const int64_t tiles =
      number_tiles(list, [](const Item& item) { return item.e * ceil_div(item.n * item.k, kElements); });
  if (list.job.element == kF32) return start(nvfp4_kernel<kF32>, tiles, kTileThreads, list, stream);
  if (list.job.element == kF16) return start(nvfp4_kernel<kF16>, tiles, kTileThreads, list, stream);
  return start(nvfp4_kernel<kBf16>, tiles, kTileThreads, list, stream);
}

#endif

}  // namespace qk
