// From the tensors and numbers of an operator call to a work list: what would touch memory outside a tensor is refused.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <vector>

#include "job.h"

namespace qk {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Places of an item's tensors, in the order in which Python lists them.
enum Role { kSource, kSourceScale, kSourceSecond, kGivenAmax, kData, kScale, kSecond, kBad, kSums, kRoles };
enum Parameter { kTargetCode, kRoundingCode, kLayoutCode, kFnuz, kThrough, kAmaxRows, kAmaxCols, kParameters };
constexpr size_t kGeometry = 4;

Element element_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return kF32;
    case ScalarType::Half: return kF16;
    case ScalarType::BFloat16: return kBf16;
    case ScalarType::Float8_e4m3fn: return kE4m3;
    case ScalarType::Float8_e4m3fnuz: return kE4m3Fnuz;
    case ScalarType::Byte: return kE2m1;
    default: STD_TORCH_CHECK(false, "source: unsupported dtype"); return kF32;
  }
}

ScaleType scale_type_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return kScaleF32;
    case ScalarType::Byte: return kScaleE8m0;
    case ScalarType::Float8_e4m3fn: return kScaleE4m3;
    default: STD_TORCH_CHECK(false, "source scale: unsupported dtype"); return kScaleF32;
  }
}

// A matrix or a stack of matrices.
View view_of(const Tensor& tensor) {
  const int64_t rank = tensor.dim();
  STD_TORCH_CHECK(rank == 2 || rank == 3, "a tensor has ", rank, " dimensions, not 2 or 3");
  return View{tensor.data_ptr(), rank == 3 ? tensor.stride(0) : 0, tensor.stride(rank - 2), tensor.stride(rank - 1)};
}

// One number a matrix: 0-d, or [e].
View numbers_of(const Tensor& tensor) {
  return View{tensor.data_ptr(), tensor.dim() == 1 ? tensor.stride(0) : 0, 0, 0};
}

int64_t ceil_div(int64_t size, int64_t step) { return (size + step - 1) / step; }

// Refuses what would make a kernel touch memory outside a tensor; Python has explained the same to the user before.
void check_matrix(const char* role, const Tensor& tensor, const Item& item, int64_t rows, int64_t cols, bool packed) {
  const int64_t rank = tensor.dim();
  STD_TORCH_CHECK(rank == 2 || rank == 3, role, ": ", rank, " dimensions, not 2 or 3");
  STD_TORCH_CHECK((rank == 3 ? tensor.size(0) : 1) == item.e && tensor.size(rank - 2) == rows && tensor.size(rank - 1) == cols,
                  role, ": its shape does not fit the source");
  STD_TORCH_CHECK(!packed || cols <= 1 || tensor.stride(rank - 1) == 1, role, ": its last side has gaps");
}

void check_dtype(const char* role, const Tensor& tensor, ScalarType dtype) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, role, ": unexpected dtype");
}

struct Slots {
  const std::vector<Tensor>& tensors;
  const int64_t* places;

  const Tensor* find(Role role) const {
    const int64_t place = places[role];
    STD_TORCH_CHECK(place >= -1 && place < static_cast<int64_t>(tensors.size()), "slots: ", place, " is out of range");
    return place < 0 ? nullptr : &tensors[static_cast<size_t>(place)];
  }
};

void read_source(const Slots& slots, const int64_t* geometry, Job& job, Item& item, bool first) {
  const Tensor* source = slots.find(kSource);
  const Tensor* scale = slots.find(kSourceScale);
  STD_TORCH_CHECK(source != nullptr, "an item has no source");
  const Element element = element_of(source->scalar_type());
  if (first) {
    job.element = element;
    job.encoded = scale != nullptr;
    job.scale_type = scale == nullptr ? kScaleF32 : scale_type_of(scale->scalar_type());
    if (!job.encoded) job.through = element;
  }
  STD_TORCH_CHECK(element == job.element && (scale != nullptr) == job.encoded, "the sources of a list differ in kind");
  STD_TORCH_CHECK(job.encoded == (element > kBf16), "a source's scale does not fit its dtype");
  const int64_t rank = source->dim();
  item.source = view_of(*source);
  item.e = rank == 3 ? source->size(0) : 1;
  item.n = source->size(rank - 2);
  item.k = source->size(rank - 1) * (element == kE2m1 ? 2 : 1);
  if (scale == nullptr) return;
  STD_TORCH_CHECK(scale_type_of(scale->scalar_type()) == job.scale_type, "the source scales of a list differ in kind");
  item.block_rows = geometry[0];
  item.block_cols = geometry[1];
  item.offset_rows = geometry[2];
  item.offset_cols = geometry[3];
  STD_TORCH_CHECK(item.block_rows > 0 && item.block_cols > 0 && item.offset_rows >= 0 && item.offset_cols >= 0,
                  "geometry: blocks are positive, offsets not negative");
  STD_TORCH_CHECK(element != kE2m1 || (item.block_cols % 16 == 0 && item.offset_cols == 0),
                  "geometry: packed codes have groups of a multiple of 16");
  check_matrix("source scale", *scale, item, ceil_div(item.n + item.offset_rows, item.block_rows),
               ceil_div(item.k + item.offset_cols, item.block_cols), false);
  item.source_scale = view_of(*scale);
  const Tensor* second = slots.find(kSourceSecond);
  STD_TORCH_CHECK((second != nullptr) == (job.scale_type == kScaleE4m3), "second scales belong to e4m3 scales");
  if (second != nullptr) {
    check_dtype("source second scale", *second, ScalarType::Float);
    STD_TORCH_CHECK(second->dim() == 0 || second->size(0) == item.e, "source second scale: one, or one a matrix");
    item.source_second = numbers_of(*second);
  }
}

struct Geometry {
  int64_t width;  // codes of a row
  int64_t scale_rows, scale_cols;
  ScalarType data_dtype, scale_dtype;
};

Geometry target_geometry(const Job& job, const Item& item) {
  const ScalarType fp8 = job.fnuz ? ScalarType::Float8_e4m3fnuz : ScalarType::Float8_e4m3fn;
  switch (job.target) {
    case kPtpcFp8: return {item.k, item.n, 1, fp8, ScalarType::Float};
    case kMxfp4: return {item.k / 2, item.n, item.k / 32, ScalarType::Byte, ScalarType::Byte};
    case kMxfp8: return {item.k, item.n, item.k / 32, ScalarType::Float8_e4m3fn, ScalarType::Byte};
    case kPerBlockFp8: return {item.k, ceil_div(item.n, 128), ceil_div(item.k, 128), ScalarType::Float8_e4m3fn, ScalarType::Float};
    case kNvfp4: return {item.k / 2, item.n, item.k / 16, ScalarType::Byte, ScalarType::Float8_e4m3fn};
    case kAmax: return {0, ceil_div(item.n, job.amax_rows), ceil_div(item.k, job.amax_cols), ScalarType::Byte, ScalarType::Float};
    default: {
      const ScalarType dense[] = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16};
      return {item.k, 0, 0, dense[job.through], ScalarType::Float};
    }
  }
}

void read_targets(const Slots& slots, const Job& job, Item& item) {
  const bool groups = job.target == kMxfp4 || job.target == kMxfp8 || job.target == kNvfp4;
  STD_TORCH_CHECK(!groups || item.k % (job.target == kNvfp4 ? 16 : 32) == 0, "K = ", item.k, " is no multiple of the group");
  const Geometry geometry = target_geometry(job, item);
  const Tensor* data = slots.find(kData);
  const Tensor* scale = slots.find(kScale);
  STD_TORCH_CHECK((data != nullptr) == (job.target != kAmax) && (scale != nullptr) == (job.target != kDense), "outputs do not fit the target");
  if (data != nullptr) {
    check_dtype("data", *data, geometry.data_dtype);
    check_matrix("data", *data, item, item.n, geometry.width, true);
    item.data = view_of(*data);
  }
  const bool cdna = job.layout == kCdna;
  if (cdna) {
    STD_TORCH_CHECK(data != nullptr && item.n % 16 == 0 && geometry.width % 32 == 0 && item.data.stride_n == geometry.width, "the CDNA order needs whole tiles without gaps");
  }
  if (scale != nullptr) {
    const bool padded = cdna && (job.target == kMxfp4 || job.target == kMxfp8);
    item.scale_n = padded ? ceil_div(geometry.scale_rows, 256) * 256 : geometry.scale_rows;
    item.scale_k = padded ? ceil_div(geometry.scale_cols, 8) * 8 : geometry.scale_cols;
    check_dtype("scale", *scale, geometry.scale_dtype);
    check_matrix("scale", *scale, item, item.scale_n, item.scale_k, groups);
    item.scale = view_of(*scale);
    STD_TORCH_CHECK(!padded || item.scale.stride_n == item.scale_k, "scale: the CDNA order has no gaps");
  }
  if (const Tensor* amax = slots.find(kGivenAmax)) {
    check_dtype("amax", *amax, ScalarType::Float);
    if (job.target == kNvfp4) {
      STD_TORCH_CHECK(amax->dim() == 0 || amax->size(0) == item.e, "amax: one a matrix");
      item.amax = numbers_of(*amax);
    } else {
      check_matrix("amax", *amax, item, geometry.scale_rows, geometry.scale_cols, false);
      item.amax = view_of(*amax);
    }
  }
  if (job.target == kNvfp4) {
    const Tensor* second = slots.find(kSecond);
    STD_TORCH_CHECK(second != nullptr && item.amax.data != nullptr, "nvfp4 needs amax and a second scale");
    check_dtype("second scale", *second, ScalarType::Float);
    STD_TORCH_CHECK(second->dim() == 0 ? item.e == 1 : second->size(0) == item.e, "second scale: one a matrix");
    item.second = numbers_of(*second);
  }
  if (const Tensor* bad = slots.find(kBad)) {
    check_dtype("bad", *bad, ScalarType::Long);
    STD_TORCH_CHECK(bad->numel() == 2 && bad->is_contiguous(), "bad: two numbers");
    item.bad = static_cast<int64_t*>(bad->data_ptr());
  }
  if (const Tensor* sums = slots.find(kSums)) {
    check_dtype("sums", *sums, ScalarType::Double);
    const int64_t tiles = item.e * ceil_div(item.n, 128) * ceil_div(item.k, 128);
    const int64_t rows = item.e * item.n, runs = ceil_div(rows * item.k, 8192);
    STD_TORCH_CHECK(sums->numel() >= 2 * rows && sums->numel() >= 2 * tiles && sums->numel() >= 2 * runs && sums->is_contiguous(),
                    "sums: two numbers a row, tile and run");
    item.sums = static_cast<double*>(sums->data_ptr());
  }
}

struct Plan {
  Job job{};
  std::vector<Item> items;
};

Plan read_plan(const std::vector<Tensor>& tensors, const std::vector<int64_t>& slots,
               const std::vector<int64_t>& geometry, const std::vector<int64_t>& parameters) {
  STD_TORCH_CHECK(parameters.size() == kParameters && slots.size() % kRoles == 0, "malformed work list");
  const size_t count = slots.size() / kRoles;
  STD_TORCH_CHECK(geometry.size() == count * kGeometry, "malformed work list");
  STD_TORCH_CHECK(parameters[kTargetCode] >= 0 && parameters[kTargetCode] <= kAmax && parameters[kThrough] >= 0 && parameters[kThrough] <= kBf16, "malformed work list");
  Plan plan;
  Job& job = plan.job;
  job.target = static_cast<Target>(parameters[kTargetCode]);
  job.rounding = static_cast<Rounding>(parameters[kRoundingCode]);
  job.layout = static_cast<Layout>(parameters[kLayoutCode]);
  job.fnuz = parameters[kFnuz] != 0;
  job.through = static_cast<Element>(parameters[kThrough]);
  job.amax_rows = parameters[kAmaxRows];
  job.amax_cols = parameters[kAmaxCols];
  STD_TORCH_CHECK(job.target != kAmax || (job.amax_rows > 0 && job.amax_cols > 0), "amax needs a block");
  plan.items.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const Slots places{tensors, slots.data() + i * kRoles};
    read_source(places, geometry.data() + i * kGeometry, job, plan.items[i], i == 0);
    STD_TORCH_CHECK(job.target != kDense || job.encoded, "nothing to dequantize");
    read_targets(places, job, plan.items[i]);
  }
  return plan;
}

}  // namespace
}  // namespace qk
