// Rows of a source on the host: as they are, gathered if they have gaps, or decoded if the source is quantized.
// Included once per instruction set, inside its namespace.

template <Element element>
struct Reader;

template <>
struct Reader<kF32> {
  using Stored = float;
  static inline float value(float stored) { return stored; }
  static inline uint32_t amax(const float* x, int64_t count) {
    uint32_t greatest = 0;
    for (int64_t i = 0; i < count; ++i) greatest = max_u32(greatest, bits_of(x[i]) & kMagnitude);
    return greatest;
  }
};

static inline uint16_t amax16(const uint16_t* x, int64_t count) {
  uint16_t greatest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t magnitude = x[i] & 0x7fffu;
    greatest = greatest < magnitude ? magnitude : greatest;
  }
  return greatest;
}

template <>
struct Reader<kF16> {
  using Stored = uint16_t;
  static inline float value(uint16_t stored) { return f16_to_float(stored); }
  static inline uint32_t amax(const uint16_t* x, int64_t count) { return bits_of(f16_to_float(amax16(x, count))); }
};

template <>
struct Reader<kBf16> {
  using Stored = uint16_t;
  static inline float value(uint16_t stored) { return bf16_to_float(stored); }
  static inline uint32_t amax(const uint16_t* x, int64_t count) {
    return static_cast<uint32_t>(amax16(x, count)) << 16;
  }
};

// ---- writers: where decoded values go ---------------------------------------------------------------------------

template <Element element>
struct Dense;
template <>
struct Dense<kF32> {
  using Stored = float;
  static constexpr bool kIsF16 = false;
  static inline float store(float value) { return value; }
};
template <>
struct Dense<kF16> {
  using Stored = uint16_t;
  static constexpr bool kIsF16 = true;
  static inline uint16_t store(float value) { return static_cast<uint16_t>(float_to_f16(value)); }
};
template <>
struct Dense<kBf16> {
  using Stored = uint16_t;
  static constexpr bool kIsF16 = false;
  static inline uint16_t store(float value) { return static_cast<uint16_t>(float_to_bf16(value)); }
};

constexpr int64_t kChunk = 512;  // elements whose codes are made at once; a multiple of every scale group

#if defined(QK_CPU_AVX512)
#include "codes_avx512.h"
#else
#include "codes_portable.h"
#endif

// ---- decoding ---------------------------------------------------------------------------------------------------

template <class T>
static inline T* place(const View& view, int64_t e, int64_t n, int64_t k) {
  return static_cast<T*>(view.data) + e * view.stride_e + n * view.stride_n + k * view.stride_k;
}

static inline float source_scale(const Job& job, const Item& item, int64_t e, int64_t row, int64_t col) {
  const View& view = item.source_scale;
  const int64_t offset = e * view.stride_e + row * view.stride_n + col * view.stride_k;
  float scale;
  if (job.scale_type == kScaleF32) {
    scale = static_cast<const float*>(view.data)[offset];
  } else if (job.scale_type == kScaleE8m0) {
    scale = decode_e8m0(static_cast<const uint8_t*>(view.data)[offset]);
  } else {
    scale = decode_e4m3(static_cast<const uint8_t*>(view.data)[offset]) *
            static_cast<const float*>(item.source_second.data)[e * item.source_second.stride_e];
  }
  // A checked conversion counts rows with a scale that no encoder writes.
  return item.bad != nullptr && scale < 0.0f ? float_of(kQuietNan) : scale;
}

// A row in groups of 16 or 32 that begin with it.
template <Element element, int size, class Writer>
static void decode_row_of_groups(const Job& job, const Item& item, int64_t e, int64_t n, const uint8_t* codes,
                                 typename Writer::Stored* out) {
  constexpr int64_t groups_a_chunk = kChunk / size;
  const int64_t row = (n + item.offset_rows) / item.block_rows, groups = item.k / size;
  const bool bytes = size == 32 && job.scale_type == kScaleE8m0 && item.source_scale.stride_k == 1;
  if (bytes) {
    decode_mx<element, Writer>(codes, groups, place<const uint8_t>(item.source_scale, e, row, 0), out);
    return;
  }
  float scale[groups_a_chunk];
  for (int64_t first = 0; first < groups; first += groups_a_chunk) {
    const int64_t count = groups - first < groups_a_chunk ? groups - first : groups_a_chunk;
    for (int64_t g = 0; g < count; ++g) scale[g] = source_scale(job, item, e, row, first + g);
    const uint8_t* chunk = codes + first * size / (element == kE2m1 ? 2 : 1);
    decode_groups<element, size, Writer>(chunk, count, scale, out + first * size);
  }
}

// A row of codes one a byte, under scales of any number of columns.
template <Element element, class Writer>
static void decode_row_of_runs(const Job& job, const Item& item, int64_t e, int64_t n, const uint8_t* codes,
                               typename Writer::Stored* out) {
  const int64_t row = (n + item.offset_rows) / item.block_rows;
  int64_t column = item.offset_cols / item.block_cols;
  int64_t run = item.block_cols - item.offset_cols % item.block_cols;
  for (int64_t k = 0; k < item.k; k += run, run = item.block_cols, ++column) {
    const int64_t count = item.k - k < run ? item.k - k : run;
    decode_bytes<element, Writer>(codes + k, count, source_scale(job, item, e, row, column), out + k);
  }
}

// A row of packed codes whose groups of a multiple of 16 begin with it.
template <class Writer>
static void decode_row_of_nibbles(const Job& job, const Item& item, int64_t e, int64_t n, const uint8_t* codes,
                                  typename Writer::Stored* out) {
  if (item.block_cols == 16) {
    decode_row_of_groups<kE2m1, 16, Writer>(job, item, e, n, codes, out);
    return;
  }
  alignas(64) uint8_t unpacked[kChunk];
  const int64_t row = (n + item.offset_rows) / item.block_rows;
  for (int64_t k = 0; k < item.k; k += kChunk) {
    const int64_t count = item.k - k < kChunk ? item.k - k : kChunk;
    unpack_nibbles(codes + k / 2, count / 2, unpacked);
    for (int64_t i = 0; i < count; i += 16) {
      const int64_t live = count - i < 16 ? count - i : 16;
      const float scale = source_scale(job, item, e, row, (k + i) / item.block_cols);
      decode_bytes<kE2m1, Writer>(unpacked + i, live, scale, out + k + i);
    }
  }
}

template <class Writer>
static void decode_row(const Job& job, const Item& item, int64_t e, int64_t n, const uint8_t* codes,
                       typename Writer::Stored* out) {
  const bool from_the_first = item.offset_cols == 0 && item.k % 32 == 0;
  if (job.element == kE2m1 && item.block_cols == 32 && from_the_first) {
    decode_row_of_groups<kE2m1, 32, Writer>(job, item, e, n, codes, out);
  } else if (job.element == kE2m1) {
    decode_row_of_nibbles<Writer>(job, item, e, n, codes, out);
  } else if (job.element == kE4m3 && item.block_cols == 32 && from_the_first) {
    decode_row_of_groups<kE4m3, 32, Writer>(job, item, e, n, codes, out);
  } else if (job.element == kE4m3) {
    decode_row_of_runs<kE4m3, Writer>(job, item, e, n, codes, out);
  } else {
    decode_row_of_runs<kE4m3Fnuz, Writer>(job, item, e, n, codes, out);
  }
}

// ---- rows -------------------------------------------------------------------------------------------------------

// Memory of one thread, reused from row to row. No class of the standard library: its functions would be built for
// several instruction sets under one name, and the linker would keep any of them.
struct Buffer {
  void* memory = nullptr;
  int64_t bytes = 0;
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(memory); }

  template <class T>
  T* of(int64_t count) {
    const int64_t wanted = count * static_cast<int64_t>(sizeof(T));
    if (bytes < wanted) {
      free(memory);
      bytes = 0;
      memory = aligned_alloc(64, static_cast<size_t>((wanted + 63) / 64 * 64));
      if (memory == nullptr) abort();
      bytes = wanted;
    }
    return static_cast<T*>(memory);
  }
};

struct Scratch {
  Buffer gathered, decoded, codes, tile_amax, tile_scale, tile_row;
};

template <class Stored>
static const Stored* contiguous_row(const View& view, int64_t e, int64_t n, int64_t count, Scratch& scratch) {
  const Stored* row = static_cast<const Stored*>(view.data) + e * view.stride_e + n * view.stride_n;
  if (view.stride_k == 1 || count <= 1) return row;
  Stored* gathered = scratch.gathered.of<Stored>(count);
  for (int64_t i = 0; i < count; ++i) gathered[i] = row[i * view.stride_k];
  return gathered;
}

// The row as `element`, which is job.through for quantized sources: they are rounded to it.
template <Element element>
static const typename Reader<element>::Stored* source_row(const Job& job, const Item& item, int64_t e, int64_t n,
                                                          Scratch& scratch) {
  using Stored = typename Reader<element>::Stored;
  if (!job.encoded) return contiguous_row<Stored>(item.source, e, n, item.k, scratch);
  const int64_t width = job.element == kE2m1 ? item.k / 2 : item.k;
  const uint8_t* codes = contiguous_row<uint8_t>(item.source, e, n, width, scratch);
  Stored* decoded = scratch.decoded.of<Stored>(item.k);
  decode_row<Dense<element>>(job, item, e, n, codes, decoded);
  return decoded;
}
