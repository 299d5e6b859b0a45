// Loading of one pack of a source by one lane: as it is, or decoded and rounded to the dtype that it passes through.
#pragma once

#include "packed.h"

namespace qk {

// The item of a work list that holds a tile. At most kMaxItems: a linear search is the shortest code.
QK_DEVICE const Item& item_of_tile(const WorkList& list, int64_t tile) {
  int found = 0;
#pragma unroll 1
  while (found + 1 < list.count && tile >= list.items[found + 1].first_tile) ++found;
  return list.items[found];
}

template <class T>
QK_DEVICE T* place(const View& view, int64_t e, int64_t n, int64_t k) {
  return static_cast<T*>(view.data) + e * view.stride_e + n * view.stride_n + k * view.stride_k;
}

// Quotient of two sizes that nearly always fit 32 bits.
QK_DEVICE int64_t divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<int64_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
  return a / b;
}

// A tile's matrix, and its number within that matrix: tiles never span two matrices, so that only whole blocks divide. A
// launch has fewer than 2^31 tiles.
struct MatrixTile {
  int64_t e, index;

  QK_DEVICE_MEMBER MatrixTile(const Item& item, int64_t tile, int64_t tiles_a_matrix) {
    const uint32_t local = static_cast<uint32_t>(tile - item.first_tile), each = static_cast<uint32_t>(tiles_a_matrix);
    const uint32_t matrix = item.e == 1 ? 0u : local / each;
    e = matrix;
    index = local - matrix * each;
  }
};

// ---- plain sources ----------------------------------------------------------------------------------------------

// A loader reads packs in two steps, so that all loads of a lane are on their way before the first is used: `fetch` gives
// what is stored, `decode` the values. A `Row` holds what does not change along a row; positions are relative to it.

// Whole packs at aligned addresses: the host has checked that every pack of the list is one.
template <Element element, int lane>
struct PlainLoader {
  using Values = Pack<element, lane>;
  using Raw = Values;
  static constexpr int kLane = lane;
  static constexpr bool kCareful = false, kPlain = true;
  static constexpr int kBytes = Values::kHalves ? 2 : 4;

  struct Row {
    const char* address;
  };

  QK_DEVICE_MEMBER static Row row(const Job&, const Item& item, int64_t e, int64_t n, int64_t k) {
    return {static_cast<const char*>(item.source.data) +
            (e * item.source.stride_e + n * item.source.stride_n + k) * kBytes};
  }

  QK_DEVICE_MEMBER static Raw fetch(const Row& row, int k) {
    Values values;
    for (int part = 0; part < lane * kBytes / 16; ++part) {
      const Words4 words = load_once<Words4>(row.address + k * kBytes + 16 * part);
      for (int i = 0; i < 4; ++i) values.w[4 * part + i] = words.w[i];
    }
    return values;
  }

  // What does not change down a column of packs, from (n + down, k + across): n and k are the same for all lanes. Steps from
  // there are of 32 bits: the host has checked that a tile is no larger.
  struct Column {
    const char* address;
    int stride;
  };

  QK_DEVICE_MEMBER static Column column(const Job& job, const Item& item, int64_t e, int64_t n, int64_t k, int down,
                                        int across) {
    const int stride = static_cast<int>(item.source.stride_n * kBytes);
    return {row(job, item, e, n, k).address + (down * stride + across * kBytes), stride};
  }

  QK_DEVICE_MEMBER static Raw fetch_down(const Column& column, int rows) {
    return fetch({column.address + rows * column.stride}, 0);
  }

  QK_DEVICE_MEMBER static Raw nothing() {
    Values values;
    values.clear();
    return values;
  }

  QK_DEVICE_MEMBER static const Values& decode(const Raw& raw) { return raw; }

  QK_DEVICE_MEMBER static Values load(const Job& job, const Item& item, int64_t e, int64_t n, int64_t k) {
    return fetch(row(job, item, e, n, k), 0);
  }
};

// ---- quantized sources ------------------------------------------------------------------------------------------

QK_DEVICE float source_scale(const Job& job, const Item& item, int64_t e, int64_t row, int64_t column) {
  float scale;
  if (job.scale_type == kScaleF32) {
    scale = *place<const float>(item.source_scale, e, row, column);
  } else if (job.scale_type == kScaleE8m0) {
    scale = decode_e8m0(*place<const uint8_t>(item.source_scale, e, row, column));
  } else {
    scale = decode_e4m3(*place<const uint8_t>(item.source_scale, e, row, column)) *
            *place<const float>(item.source_second, e, 0, 0);
  }
  // A checked conversion counts rows with a scale that no encoder writes.
  return item.bad != nullptr && scale < 0.0f ? float_of(kQuietNan) : scale;
}

// Scale of element (n, k), for blocks of any size.
QK_DEVICE float scale_at(const Job& job, const Item& item, int64_t e, int64_t n, int64_t k) {
  return source_scale(job, item, e, divide(n + item.offset_rows, item.block_rows),
                      divide(k + item.offset_cols, item.block_cols));
}

// The same for an aligned item.
QK_DEVICE float scale_of_pack(const Job& job, const Item& item, int64_t e, int64_t n, int64_t k) {
  return source_scale(job, item, e, (n + item.offset_rows) >> item.row_shift, (k + item.offset_cols) >> item.col_shift);
}

QK_DEVICE float decode_code(Element element, uint32_t code) {
  return element == kE4m3 ? decode_e4m3(code) : (element == kE4m3Fnuz ? decode_e4m3fnuz(code) : decode_e2m1(code));
}

// `lane` codes at an aligned address.
template <Element element, int lane>
QK_DEVICE void fetch_codes(const char* address, uint32_t (&words)[(lane + 3) / 4]) {
  if constexpr (element == kE2m1) {
    for (int i = 0; i < lane / 8; ++i) words[i] = load_once<Words1>(address + 4 * i).w[0];
  } else if constexpr (lane == 8) {
    const Words2 two = load_once<Words2>(address);
    for (int i = 0; i < 2; ++i) words[i] = two.w[i];
  } else {
    const Words4 four = load_once<Words4>(address);
    for (int i = 0; i < 4; ++i) words[i] = four.w[i];
  }
}

template <Element element, int lane>
QK_DEVICE void decode_codes(const uint32_t (&words)[(lane + 3) / 4], float scale, float (&decoded)[lane]) {
  if constexpr (element == kE4m3) {
    for (int i = 0; i < lane / 4; ++i) unpack_e4m3(words[i], decoded + 4 * i);
  } else if constexpr (element == kE2m1) {
    for (int i = 0; i < lane / 8; ++i) unpack_e2m1(words[i], decoded + 8 * i);
  } else {
    for (int i = 0; i < lane; ++i) decoded[i] = decode_e4m3fnuz((words[i / 4] >> (i % 4 * 8)) & 0xffu);
  }
  for (int i = 0; i < lane; ++i) decoded[i] *= scale;
}

// Whole packs at aligned addresses under one scale each.
template <Element element, Element through, int lane, ScaleType scale_type>
struct EncodedLoader {
  using Values = Pack<through, lane>;
  static constexpr int kLane = lane;
  static constexpr bool kCareful = false, kPlain = false;
  static constexpr Element kElement = element;
  static constexpr int kPerByte = element == kE2m1 ? 2 : 1;

  // The scale stays as it is stored: looking at it would wait for it, and hold up the loads behind it.
  struct Raw {
    uint32_t words[(lane + 3) / 4];
    uint32_t scale;
    bool checked;
  };

  struct Row {
    const char* address;
    const char* scales;
    int64_t first, stride;
    int shift;
    bool checked;
  };

  static constexpr int kScaleBytes = scale_type == kScaleF32 ? 4 : 1;

  QK_DEVICE_MEMBER static const char* codes(const Item& item, int64_t e, int64_t n, int64_t k) {
    const View& view = item.source;
    return static_cast<const char*>(view.data) + e * view.stride_e + n * view.stride_n + k / kPerByte;
  }

  QK_DEVICE_MEMBER static const char* scales(const Item& item, int64_t e, int64_t row, int64_t column) {
    const View& view = item.source_scale;
    return static_cast<const char*>(view.data) +
           (e * view.stride_e + row * view.stride_n + column * view.stride_k) * kScaleBytes;
  }

  QK_DEVICE_MEMBER static Row row(const Job&, const Item& item, int64_t e, int64_t n, int64_t k) {
    return {codes(item, e, n, k), scales(item, e, (n + item.offset_rows) >> item.row_shift, 0), k + item.offset_cols,
            item.source_scale.stride_k * kScaleBytes, item.col_shift, item.bad != nullptr};
  }

  QK_DEVICE_MEMBER static uint32_t stored_scale(const char* address) {
    if constexpr (scale_type == kScaleF32) return *reinterpret_cast<const uint32_t*>(address);
    return *reinterpret_cast<const uint8_t*>(address);
  }

  QK_DEVICE_MEMBER static float scale_of(const Raw& raw) {
    if constexpr (scale_type != kScaleF32) return decode_e8m0(raw.scale);
    const float scale = float_of(raw.scale);
    return raw.checked && scale < 0.0f ? float_of(kQuietNan) : scale;
  }

  QK_DEVICE_MEMBER static Raw fetch(const Row& row, int k) {
    Raw raw;
    fetch_codes<element, lane>(row.address + k / kPerByte, raw.words);
    raw.scale = stored_scale(row.scales + ((row.first + k) >> row.shift) * row.stride);
    raw.checked = row.checked;
    return raw;
  }

  struct Column {
    const char* address;
    const char* scales;
    int stride, scale_stride;
    int first;  // rows from the start of the tile's first block
    int shift;
    bool checked;
  };

  QK_DEVICE_MEMBER static Column column(const Job&, const Item& item, int64_t e, int64_t n, int64_t k, int down,
                                        int across) {
    // One block may hold all rows or columns: a shift of 31 is then as good, and where it begins does not matter.
    const int shift = item.row_shift < 31 ? item.row_shift : 31, shift_k = item.col_shift < 31 ? item.col_shift : 31;
    const int64_t from = n + item.offset_rows, block = from >> item.row_shift;
    const int64_t from_k = k + item.offset_cols, block_k = from_k >> item.col_shift;
    const int first = item.row_shift < 31 ? static_cast<int>(from - (block << shift)) : 0;
    const int first_k = item.col_shift < 31 ? static_cast<int>(from_k - (block_k << shift_k)) : 0;
    const int stride = static_cast<int>(item.source.stride_n);
    const int scale_across = static_cast<int>(item.source_scale.stride_k * kScaleBytes);
    return {codes(item, e, n, k) + (down * stride + across / kPerByte),
            scales(item, e, block, block_k) + ((first_k + across) >> shift_k) * scale_across, stride,
            static_cast<int>(item.source_scale.stride_n * kScaleBytes), first + down, shift, item.bad != nullptr};
  }

  QK_DEVICE_MEMBER static Raw fetch_down(const Column& column, int rows) {
    Raw raw;
    fetch_codes<element, lane>(column.address + rows * column.stride, raw.words);
    raw.scale = stored_scale(column.scales + ((column.first + rows) >> column.shift) * column.scale_stride);
    raw.checked = column.checked;
    return raw;
  }

  QK_DEVICE_MEMBER static Raw nothing() {
    Raw raw{};
    return raw;
  }

  QK_DEVICE_MEMBER static Values decode(const Raw& raw) {
#if defined(QK_PACKED_E2M1)
    if constexpr (element == kE2m1 && through == kBf16 && lane == 8 && scale_type == kScaleE8m0) {
      Values values;
      unpack_e2m1_bf16(raw.words[0], raw.scale, values.w);
      return values;
    }
#endif
    float decoded[lane];
    decode_codes<element, lane>(raw.words, scale_of(raw), decoded);
    Values values;
    round_into(decoded, values);
    return values;
  }

  QK_DEVICE_MEMBER static Values load(const Job& job, const Item& item, int64_t e, int64_t n, int64_t k) {
    return decode(fetch(row(job, item, e, n, k), 0));
  }
};

// `lane` codes at an aligned address, all under one scale, decoded; element and scales decided while running.
template <int lane>
QK_DEVICE void decode_aligned(const Job& job, const Item& item, Element element, int64_t e, int64_t n, int64_t k,
                              float (&decoded)[lane]) {
  const char* codes = static_cast<const char*>(item.source.data) + e * item.source.stride_e + n * item.source.stride_n;
  uint32_t words[(lane + 3) / 4] = {};
  const float scale = scale_of_pack(job, item, e, n, k);
  if (element == kE2m1) {
    fetch_codes<kE2m1, lane>(codes + k / 2, words);
    decode_codes<kE2m1, lane>(words, scale, decoded);
  } else {
    fetch_codes<kE4m3, lane>(codes + k, words);
    if (element == kE4m3) {
      decode_codes<kE4m3, lane>(words, scale, decoded);
    } else {
      decode_codes<kE4m3Fnuz, lane>(words, scale, decoded);
    }
  }
}

// Any source, any strides, any length: decided while running. `element` is the dtype of the values.
template <Element element, int lane>
struct CarefulLoader {
  using Values = Pack<element, lane>;
  static constexpr int kLane = lane;
  static constexpr bool kCareful = true, kPlain = false;

  QK_DEVICE_MEMBER static Values load(const Job& job, const Item& item, int64_t e, int64_t n, int64_t k) {
    Values values;
    float decoded[lane];
    if (!job.encoded) {
      values.clear();
#pragma unroll 1
      for (int i = 0; i < lane; ++i) {
        if (k + i < item.k) values.put(i, stored(item, e, n, k + i));
      }
      return values;
    }
    bool decided = false;
    if constexpr (lane % 8 == 0) {
      decided = item.aligned && k + lane <= item.k;
      if (decided) decode_aligned(job, item, job.element, e, n, k, decoded);
    }
    if (!decided) {
#pragma unroll 1
      for (int i = 0; i < lane; ++i) decoded[i] = k + i < item.k ? decode_one(job, item, e, n, k + i) : 0.0f;
    }
    round_into(decoded, values);
    return values;
  }

 private:
  QK_DEVICE_MEMBER static uint32_t stored(const Item& item, int64_t e, int64_t n, int64_t k) {
    if constexpr (Values::kHalves) {
      return *place<const uint16_t>(item.source, e, n, k);
    } else {
      return *place<const uint32_t>(item.source, e, n, k);
    }
  }

  QK_DEVICE_MEMBER static float decode_one(const Job& job, const Item& item, int64_t e, int64_t n, int64_t k) {
    uint32_t code;
    if (job.element == kE2m1) {
      code = (*place<const uint8_t>(item.source, e, n, k / 2) >> (k % 2 * 4)) & 15u;
    } else {
      code = *place<const uint8_t>(item.source, e, n, k);
    }
    return decode_code(job.element, code) * scale_at(job, item, e, n, k);
  }
};

// ---- counters ---------------------------------------------------------------------------------------------------

QK_DEVICE void check_amax(const Item& item, uint32_t amax, int64_t row) {
  if (item.bad != nullptr && amax >= kInfinity) {
    atomic_add(item.bad, 1);
    atomic_min(item.bad + 1, row);
  }
}

QK_DEVICE uint32_t given_amax(const Item& item, int64_t e, int64_t n, int64_t k) {
  return bits_of(*place<const float>(item.amax, e, n, k)) & kMagnitude;
}

}  // namespace qk
