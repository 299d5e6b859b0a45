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
  static inline float store(float value) { return value; }
};
template <>
struct Dense<kF16> {
  using Stored = uint16_t;
  static inline uint16_t store(float value) { return static_cast<uint16_t>(float_to_f16(value)); }
};
template <>
struct Dense<kBf16> {
  using Stored = uint16_t;
  static inline uint16_t store(float value) { return static_cast<uint16_t>(float_to_bf16(value)); }
};

// Rounded to a dtype, but kept as fp32: what the next conversion reads.
template <Element element>
struct Through {
  using Stored = float;
  static inline float store(float value) {
    if constexpr (element == kF16) return f16_to_float(static_cast<uint16_t>(float_to_f16(value)));
    if constexpr (element == kBf16) return float_of(float_to_bf16(value) << 16);
    return value;
  }
};

// ---- decoding ---------------------------------------------------------------------------------------------------

constexpr int64_t kRun = 512;

// Codes one a byte, `count` of them. Scale groups of 32 have a loop of their own, of a known length.
template <Element element, class Writer>
static inline void decode_bytes(const uint8_t* codes, int64_t count, float scale, typename Writer::Stored* out) {
  const auto decode = [&](int64_t i) __attribute__((always_inline)) {
    const float value = element == kE4m3   ? decode_e4m3(codes[i])
                        : element == kE2m1 ? decode_e2m1(codes[i])
                                           : decode_e4m3fnuz(codes[i]);
    out[i] = Writer::store(value * scale);
  };
  if (count == 32) {
    for (int64_t i = 0; i < 32; ++i) decode(i);
  } else {
    for (int64_t i = 0; i < count; ++i) decode(i);
  }
}

// Two 4-bit codes of a byte to two bytes.
static inline void unpack_nibbles(const uint8_t* packed, int64_t pairs, uint8_t* codes) {
  for (int64_t i = 0; i < pairs; ++i) {
    const uint16_t pair = static_cast<uint16_t>((packed[i] & 15u) | ((packed[i] & 0xf0u) << 4));
    memcpy(codes + 2 * i, &pair, 2);
  }
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

// A row of packed codes in groups of 16: too short for loops of their own, so that scales are spread over the elements.
template <class Writer>
static void decode_groups_of_16(const Job& job, const Item& item, int64_t e, int64_t n, const uint8_t* codes,
                                typename Writer::Stored* out) {
  alignas(64) uint8_t unpacked[kRun];
  alignas(64) float scales[kRun];
  const int64_t row = (n + item.offset_rows) / item.block_rows;
  for (int64_t k = 0; k < item.k; k += kRun) {
    const int64_t count = item.k - k < kRun ? item.k - k : kRun;
    unpack_nibbles(codes + k / 2, count / 2, unpacked);
    for (int64_t group = 0; group < count / 16; ++group) {
      const float scale = source_scale(job, item, e, row, k / 16 + group);
      for (int64_t i = 0; i < 16; ++i) scales[group * 16 + i] = scale;
    }
    for (int64_t i = 0; i < count; ++i) out[k + i] = Writer::store(decode_e2m1(unpacked[i]) * scales[i]);
  }
}

// Codes of a row from element k on; packed ones are unpacked into `unpacked`, kRun at a time.
template <class Writer>
static void decode_row(const Job& job, const Item& item, int64_t e, int64_t n, const uint8_t* codes,
                       typename Writer::Stored* out) {
  const int64_t row = (n + item.offset_rows) / item.block_rows;
  int64_t column = item.offset_cols / item.block_cols;
  int64_t run = item.block_cols - item.offset_cols % item.block_cols;
  if (job.element == kE2m1 && item.block_cols == 16) {
    decode_groups_of_16<Writer>(job, item, e, n, codes, out);
    return;
  }
  alignas(64) uint8_t unpacked[kRun];
  for (int64_t k = 0; k < item.k; k += run, run = item.block_cols, ++column) {
    const int64_t count = item.k - k < run ? item.k - k : run;
    const float scale = source_scale(job, item, e, row, column);
    if (job.element == kE4m3) {
      decode_bytes<kE4m3, Writer>(codes + k, count, scale, out + k);
    } else if (job.element == kE4m3Fnuz) {
      decode_bytes<kE4m3Fnuz, Writer>(codes + k, count, scale, out + k);
    } else {
      // Groups of 16 and 32 share what was unpacked for kRun elements.
      for (int64_t i = 0; i < count;) {
        const int64_t at = (k + i) % kRun, left = count - i < kRun - at ? count - i : kRun - at;
        if (at == 0) unpack_nibbles(codes + (k + i) / 2, (item.k - k - i < kRun ? item.k - k - i : kRun) / 2, unpacked);
        decode_bytes<kE2m1, Writer>(unpacked + at, left, scale, out + k + i);
        i += left;
      }
    }
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

// The row as `element`, which is kF32 for quantized sources: rounded to job.through on the way.
template <Element element>
static const typename Reader<element>::Stored* source_row(const Job& job, const Item& item, int64_t e, int64_t n,
                                                          Scratch& scratch) {
  if constexpr (element == kF32) {
    if (job.encoded) {
      const int64_t width = job.element == kE2m1 ? item.k / 2 : item.k;
      const uint8_t* codes = contiguous_row<uint8_t>(item.source, e, n, width, scratch);
      float* decoded = scratch.decoded.of<float>(item.k);
      if (job.through == kBf16) decode_row<Through<kBf16>>(job, item, e, n, codes, decoded);
      if (job.through == kF16) decode_row<Through<kF16>>(job, item, e, n, codes, decoded);
      if (job.through == kF32) decode_row<Through<kF32>>(job, item, e, n, codes, decoded);
      return decoded;
    }
  }
  return contiguous_row<typename Reader<element>::Stored>(item.source, e, n, item.k, scratch);
}
