// The GPU kernels, run on the host, against the host kernels: every source, target, order and kind of stride, with
// guarded memory around every tensor. Prints one line a mismatch and a closing count; exit code 1 if there was one.
//
// Usage: emulate [--quick] [TEXT]   runs the cases whose name contains TEXT.

#include <stdio.h>
#include <string.h>

#include <memory>
#include <random>
#include <string>

#include "cpu/kernels.h"
#include "layout.h"
#include "runtime.h"

namespace {

using namespace qk;

std::mt19937_64 numbers(1);

// Memory of exactly one tensor: an access outside is one outside of a heap allocation.
struct Memory {
  std::unique_ptr<uint8_t[]> bytes;
  int64_t size = 0;
  explicit Memory(int64_t count = 0) : bytes(new uint8_t[static_cast<size_t>(count) + 16]), size(count) {}
  // 16-byte aligned, or off by `shift`; the end of the allocation is the end of the tensor.
  uint8_t* at(int64_t shift) {
    const auto address = reinterpret_cast<uintptr_t>(bytes.get());
    return bytes.get() + (16 - address % 16) % 16 + shift;
  }
};

struct Tensor {
  Memory memory;
  View view{};
  int64_t e = 1, n = 0, k = 0, element = 1;

  Tensor() = default;
  // `pad` elements between rows, `shift` elements before the first.
  Tensor(int64_t e_, int64_t n_, int64_t k_, int64_t element_, int64_t pad = 0, int64_t shift = 0)
      : memory((e_ * n_ * (k_ + pad) + shift) * element_), e(e_), n(n_), k(k_), element(element_) {
    memset(memory.bytes.get(), 0xa5, static_cast<size_t>(memory.size + 16));
    view = View{memory.at(shift * element), n * (k + pad), k + pad, 1};
  }
  bool equals(const Tensor& other) const {
    for (int64_t i = 0; i < e; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const int64_t here = (i * view.stride_e + j * view.stride_n) * element;
        const int64_t there = (i * other.view.stride_e + j * other.view.stride_n) * element;
        if (memcmp(static_cast<uint8_t*>(view.data) + here, static_cast<uint8_t*>(other.view.data) + there,
                   static_cast<size_t>(k * element)) != 0) {
          return false;
        }
      }
    }
    return true;
  }
};

void fill_floats(Tensor& tensor, Element element, bool wild) {
  std::normal_distribution<float> normal(0.0f, 0.02f);
  for (int64_t i = 0; i < tensor.e * tensor.view.stride_e; ++i) {
    float value = normal(numbers);
    if (wild && numbers() % 97 == 0) value = 0.0f * value;
    if (wild && numbers() % 3001 == 0) value = float_of(static_cast<uint32_t>(numbers()));
    if (element == kF32) static_cast<float*>(tensor.view.data)[i] = value;
    if (element == kF16) static_cast<uint16_t*>(tensor.view.data)[i] = static_cast<uint16_t>(float_to_f16(value));
    if (element == kBf16) static_cast<uint16_t*>(tensor.view.data)[i] = static_cast<uint16_t>(float_to_bf16(value));
  }
}

void fill_bytes(Tensor& tensor) {
  for (int64_t i = 0; i < tensor.e * tensor.view.stride_e; ++i) {
    static_cast<uint8_t*>(tensor.view.data)[i] = static_cast<uint8_t>(numbers());
  }
}

void calm_down(Tensor& weight, Tensor& scales) {
  for (int64_t i = 0; i < weight.e * weight.view.stride_e; ++i) {
    const uint64_t number = numbers();
    const uint64_t magnitude = number % 64 == 0 ? number / 64 % 127 : 48 + number / 64 % 79;
    static_cast<uint8_t*>(weight.view.data)[i] = static_cast<uint8_t>(magnitude | (number >> 63 << 7));
  }
  for (int64_t i = 0; i < scales.e * scales.view.stride_e; ++i) {
    float& scale = static_cast<float*>(scales.view.data)[i];
    scale = numbers() % 4 == 0 ? scale * scale : (scale < 0 ? -scale : scale);
  }
}

struct Shape {
  int64_t e, n, k, pad, shift;
};

struct Source {
  const char* name;
  Element element, through;
  ScaleType scale_type;
  int64_t block_rows, block_cols;
  bool calm = false;  // codes and scales as those of weights: no NaN, few tiny values, positive scales
};

const Source kSources[] = {
    {"bf16", kBf16, kBf16, kScaleF32, 0, 0},
    {"f16", kF16, kF16, kScaleF32, 0, 0},
    {"f32", kF32, kF32, kScaleF32, 0, 0},
    {"fp8 blocks", kE4m3, kBf16, kScaleF32, 128, 128},
    {"fp8 calm blocks", kE4m3, kBf16, kScaleF32, 128, 128, true},
    {"fp8 calm strips", kE4m3, kBf16, kScaleF32, 1, 128, true},
    {"fp8 odd blocks", kE4m3, kBf16, kScaleF32, 3, 48},
    {"fp8 rows", kE4m3, kF16, kScaleF32, 1, 1 << 20},
    {"mxfp8", kE4m3, kF32, kScaleE8m0, 1, 32},
    {"fnuz rows", kE4m3Fnuz, kBf16, kScaleF32, 1, 1 << 20},
    {"mxfp4", kE2m1, kBf16, kScaleE8m0, 1, 32},
    {"nvfp4", kE2m1, kF32, kScaleE4m3, 1, 16},
};

const char* const kTargets[] = {"dense", "ptpc", "mxfp4", "mxfp8", "blocks", "nvfp4", "amax"};

int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Outputs {
  Tensor data, scale, second;
  int64_t bad[2] = {0, INT64_MAX};
  std::vector<double> sums;
};

Outputs outputs_for(const Job& job, const Item& item, const Shape& shape) {
  Outputs out;
  const bool half = job.target == kMxfp4 || job.target == kNvfp4;
  const int64_t data_bytes = job.target != kDense ? 1 : (job.through == kF32 ? 4 : 2);
  const int64_t pad = job.layout == kCdna ? 0 : shape.pad * 2;
  if (job.target != kAmax) out.data = Tensor(item.e, item.n, half ? item.k / 2 : item.k, data_bytes, pad, shape.shift);
  int64_t rows = item.n, cols = 1, bytes = 4;
  if (job.target == kMxfp4 || job.target == kMxfp8) {
    cols = item.k / 32;
    bytes = 1;
    if (job.layout == kCdna) {
      rows = ceil_of(rows, 256) * 256;
      cols = ceil_of(cols, 8) * 8;
    }
  } else if (job.target == kNvfp4) {
    cols = item.k / 16;
    bytes = 1;
  } else if (job.target == kPerBlockFp8) {
    rows = ceil_of(rows, 128);
    cols = ceil_of(item.k, 128);
  } else if (job.target == kAmax) {
    rows = ceil_of(rows, job.amax_rows);
    cols = ceil_of(item.k, job.amax_cols);
  }
  if (job.target != kDense) out.scale = Tensor(item.e, rows, cols, bytes);
  if (job.target == kNvfp4) out.second = Tensor(item.e, 1, 1, 4);
  const int64_t slots = item.e * (item.n > 512 ? item.n : 512) + ceil_of(item.e * item.n * item.k, 8192);
  out.sums.assign(static_cast<size_t>(2 * slots), 0.0);
  return out;
}

void point_at(Item& item, Outputs& out, const Job& job, bool counted, bool measured) {
  item.data = out.data.view;
  item.scale = out.scale.view;
  item.scale_n = out.scale.n;
  item.scale_k = out.scale.k;
  if (job.target == kNvfp4) item.second = View{out.second.memory.at(0), 1, 0, 0};
  item.bad = counted ? out.bad : nullptr;
  item.sums = measured ? out.sums.data() : nullptr;
}

int failures = 0, cases = 0;

void compare(const std::string& name, const Outputs& wanted, const Outputs& found) {
  ++cases;
  const auto sum = [](const std::vector<double>& sums, size_t first) {
    double total = 0;
    for (size_t i = first; i < sums.size(); i += 2) total += sums[i];
    return total;
  };
  std::string wrong;
  if (!wanted.data.equals(found.data)) wrong += " data";
  if (!wanted.scale.equals(found.scale)) wrong += " scale";
  if (!wanted.second.equals(found.second)) wrong += " second";
  if (wanted.bad[0] != found.bad[0] || wanted.bad[1] != found.bad[1]) wrong += " bad";
  for (size_t i = 0; i < 2; ++i) {
    const double a = sum(wanted.sums, i), b = sum(found.sums, i);
    if (!(a == b || (a != a && b != b) || (a - b < 1e-4 * a && b - a < 1e-4 * a))) wrong += " sums";
  }
  if (!wrong.empty()) {
    ++failures;
    printf("%s: differs in%s\n", name.c_str(), wrong.c_str());
  }
}

void run_case(const std::string& name, Job job, const Shape& shape, const Source& source, bool given, bool counted,
              bool measured) {
  Item item{};
  item.e = shape.e;
  item.n = shape.n;
  item.k = shape.k;
  const bool packed = source.element == kE2m1;
  const int64_t bytes = source.element == kF32 ? 4 : (source.element <= kBf16 ? 2 : 1);
  Tensor weight(shape.e, shape.n, packed ? shape.k / 2 : shape.k, bytes, shape.pad, shape.shift);
  Tensor scales, amax, seconds;
  job.encoded = source.block_rows != 0;
  if (job.encoded) {
    fill_bytes(weight);
    item.block_rows = source.block_rows;
    item.block_cols = source.block_cols;
    item.offset_rows = packed || source.scale_type != kScaleF32 ? 0 : shape.shift;
    item.offset_cols = packed || source.scale_type != kScaleF32 ? 0 : 16 * shape.shift;
    scales = Tensor(shape.e, ceil_of(shape.n + item.offset_rows, item.block_rows),
                    ceil_of(shape.k + item.offset_cols, item.block_cols), source.scale_type == kScaleF32 ? 4 : 1);
    if (source.scale_type == kScaleF32) {
      fill_floats(scales, kF32, false);
    } else {
      fill_bytes(scales);
    }
    if (source.calm) calm_down(weight, scales);
    item.source_scale = scales.view;
    if (source.scale_type == kScaleE4m3) {
      seconds = Tensor(shape.e, 1, 1, 4);
      fill_floats(seconds, kF32, false);
      item.source_second = View{seconds.view.data, 1, 0, 0};
    }
  } else {
    fill_floats(weight, source.element, true);
  }
  item.source = weight.view;
  Outputs wanted = outputs_for(job, item, shape), found = outputs_for(job, item, shape);
  if (given || job.target == kNvfp4) {
    amax = job.target == kNvfp4 ? Tensor(shape.e, 1, 1, 4) : Tensor(shape.e, wanted.scale.n, wanted.scale.k, 4);
    fill_floats(amax, kF32, false);
    item.amax = amax.view;
    if (job.target == kNvfp4) item.amax = View{amax.view.data, 1, 0, 0};
  }
  Item for_host = item, for_device = item;
  point_at(for_host, wanted, job, counted, measured);
  point_at(for_device, found, job, counted, measured);
  if (job.target == kAmax || job.layout == kCdna) {
    const int fill = job.target == kAmax ? 0 : 127;
    memset(wanted.scale.view.data, fill, static_cast<size_t>(wanted.scale.e * wanted.scale.view.stride_e * wanted.scale.element));
  }
  baseline::convert_range(job, for_host, 0, cpu_units(job, for_host));
  if (const char* error = convert_on_device(job, &for_device, 1, 0)) {
    ++failures;
    printf("%s: %s\n", name.c_str(), error);
    return;
  }
  compare(name, wanted, found);
}

}  // namespace

int main(int argc, char** argv) {
  // --quick: one variant of each case, another one from case to case.
  const bool quick = argc > 1 && std::string(argv[1]) == "--quick";
  const std::string wanted = argc > (quick ? 2 : 1) ? argv[quick ? 2 : 1] : "";
  int turn = 0;
  const Shape shapes[] = {
      {1, 3, 192, 0, 0}, {1, 2, 2048, 0, 0}, {1, 1, 4096, 0, 0}, {1, 1, 7168, 0, 0}, {1, 1, 9216, 0, 0}, {1, 1, 32768, 0, 0},
      {3, 5, 288, 0, 0}, {2, 130, 96, 0, 0}, {2, 17, 160, 32, 0}, {1, 7, 96, 3, 0},  {1, 9, 64, 0, 1},   {2, 3, 129, 0, 0},
      {1, 150, 200, 8, 0}, {2, 32, 256, 0, 0}, {2, 144, 544, 0, 0},
  };
  for (const Source& source : kSources) {
    for (const Shape& shape : shapes) {
      for (int target = kDense; target <= kAmax; ++target) {
        const bool encoded = source.block_rows != 0;
        if (target == kDense && !encoded) continue;
        if ((target == kMxfp4 || target == kMxfp8) && shape.k % 32 != 0) continue;
        if ((target == kNvfp4 || source.element == kE2m1) && shape.k % 16 != 0) continue;
        if (source.scale_type == kScaleE8m0 && shape.k % 32 != 0) continue;
        ++turn;
        for (int variant = 0; variant < 6; ++variant) {
          if (quick && target != kDense && variant != turn % 6) continue;
          Job job{};
          job.element = source.element;
          job.through = source.through;
          job.scale_type = source.scale_type;
          job.target = static_cast<Target>(target);
          job.rounding = static_cast<Rounding>(variant % 3);
          if (variant == 3) job.layout = kCdna;
          if (variant == 4) job.fnuz = target == kPtpcFp8;
          const int64_t width = target == kMxfp4 || target == kNvfp4 ? shape.k / 2 : shape.k;
          if (job.layout == kCdna && (target == kDense || target == kAmax || shape.n % 16 != 0 || width % 32 != 0 || shape.shift != 0)) continue;
          if (target == kDense && variant > 0) continue;
          if (target == kAmax) {
            const int64_t blocks[6][2] = {{1, shape.k}, {1, 32}, {1, 16}, {128, 128}, {shape.n, shape.k}, {1, shape.k}};
            job.amax_rows = blocks[variant][0];
            job.amax_cols = blocks[variant][1];
            if (job.amax_rows == 1 && job.amax_cols < shape.k && shape.k % job.amax_cols != 0) continue;
          }
          const std::string name = std::string(source.name) + " -> " + kTargets[target] + " [" + std::to_string(shape.e) +
                                   ", " + std::to_string(shape.n) + ", " + std::to_string(shape.k) + "] pad " +
                                   std::to_string(shape.pad) + " shift " + std::to_string(shape.shift) + " variant " +
                                   std::to_string(variant);
          if (name.find(wanted) == std::string::npos) continue;
          const bool quantizes = target != kDense && target != kAmax;
          run_case(name, job, shape, source, variant == 2 && quantizes, variant == 1 && quantizes, variant == 5 && quantizes);
        }
      }
    }
  }
  printf("%d cases, %d failed\n", cases, failures);
  return failures != 0 || cases == 0;
}
