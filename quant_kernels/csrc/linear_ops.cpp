// The native part of the linear product, on torch's stable ABI:
//   _linear(Tensor x, Tensor data, Tensor scale, Tensor? bias, Tensor(a!) out, int[] options, int stream) -> bool
// writes x * weight^T + bias to `out` and tells whether there is a kernel for such operands; if not, nothing was done.
// `options`: activation, groups of rows a block, blocks that share the input side (0: the launcher chooses).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <vector>

#include "linear.h"

namespace qk {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

enum Option { kActivationCode, kRowGroups, kSplits, kOptions };

bool aligned_rows(const Tensor& tensor, int64_t bytes) {
  return tensor.stride(1) == 1 && tensor.stride(0) * bytes % 16 == 0 && reinterpret_cast<intptr_t>(tensor.data_ptr()) % 16 == 0;
}

// The format of a weight that a kernel reads; kWeightFormats if there is none.
WeightFormat format_of(const Tensor& data, const Tensor& scale) {
  const bool grouped = scale.scalar_type() == ScalarType::Byte;
  if (data.scalar_type() == ScalarType::Byte) return grouped ? kGroupFp4 : kWeightFormats;
  if (data.scalar_type() != ScalarType::Float8_e4m3fn) return kWeightFormats;
  if (grouped) return kGroupFp8;
  return scale.scalar_type() == ScalarType::Float && scale.size(1) == 1 ? kRowFp8 : kWeightFormats;
}

bool linear(Tensor x, Tensor data, Tensor scale, std::optional<Tensor> bias, Tensor out, std::vector<int64_t> options, int64_t stream) {
  STD_TORCH_CHECK(options.size() == kOptions && x.dim() == 2 && data.dim() == 2 && scale.dim() == 2 && out.dim() == 2, "malformed product");
  LinearJob job{};
  job.n = data.size(0);
  job.k = x.size(1);
  job.format = format_of(data, scale);
  if (job.format == kWeightFormats || x.size(0) < 1 || job.n < 1 || job.k < 1 || job.k > kLongestInput) return false;
  const ScalarType dtype = x.scalar_type();
  if (dtype != ScalarType::BFloat16 && dtype != ScalarType::Half) return false;
  const int64_t width = job.format == kGroupFp4 ? job.k / 2 : job.k;
  const bool grouped = job.format != kRowFp8;
  if (job.k % (grouped ? 32 : 16) != 0 || data.size(1) != width) return false;
  if (scale.size(0) != job.n || scale.size(1) != (grouped ? job.k / 32 : 1) || (scale.size(1) > 1 && scale.stride(1) != 1)) return false;
  if (out.size(0) != x.size(0) || out.size(1) != job.n || !out.is_contiguous() || out.scalar_type() != dtype) return false;
  if (!aligned_rows(x, 2) || !aligned_rows(data, 1)) return false;
  if (bias.has_value()) {
    if (bias->scalar_type() != dtype || bias->numel() != job.n || !bias->is_contiguous()) return false;
    job.bias = bias->data_ptr();
  }
  const auto power_of_two = [](int64_t parts) { return parts == 0 || parts == 1 || parts == 2 || parts == 4 || parts == 8; };
  STD_TORCH_CHECK(power_of_two(options[kRowGroups]) && power_of_two(options[kSplits]), "malformed product");
  const int64_t activation = options[kActivationCode];
  if (activation < 0 || activation >= kActivations || (activation >= kGroupedFp8 && job.k % 32 != 0)) return false;
  job.activation = static_cast<Activation>(activation);
  job.x = x.data_ptr();
  job.y = out.data_ptr();
  job.w = static_cast<const uint8_t*>(data.data_ptr());
  job.scale = scale.data_ptr();
  job.x_stride = x.stride(0);
  job.w_stride = data.stride(0);
  job.scale_stride = scale.stride(0);
  job.element = dtype == ScalarType::BFloat16 ? kBf16 : kF16;
  job.row_groups = static_cast<int32_t>(options[kRowGroups]);
  job.splits = static_cast<int32_t>(options[kSplits]);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  if (x.size(0) > linear_tokens()) return false;  // beyond, dequantizing the weight once is quicker
  job.m = static_cast<int32_t>(x.size(0));
  std::optional<Tensor> workspace;
  if (const int64_t bytes = linear_workspace(job)) workspace = torch::stable::new_empty(x, {bytes}, ScalarType::Byte);
  const char* error = linear_on_device(job, workspace.has_value() ? workspace->data_ptr() : nullptr, stream);
  STD_TORCH_CHECK(error == nullptr, "kernel launch failed: ", error);
  return true;
}

}  // namespace
}  // namespace qk

STABLE_TORCH_LIBRARY_FRAGMENT(quant_kernels, library) {
  library.def("_linear(Tensor x, Tensor data, Tensor scale, Tensor? bias, Tensor(a!) out, int[] options, int stream) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(quant_kernels, CUDA, library) { library.impl("_linear", TORCH_BOX(&qk::linear)); }
