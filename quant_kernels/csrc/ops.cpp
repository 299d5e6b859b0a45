// The operators of the compiled library, on torch's stable ABI alone: one binary serves several versions of torch.
//
// Schemas are defined in Python (ops.py); here are the native parts that Python calls:
//   _convert(Tensor(a!)[] tensors, int[] slots, int[] geometry, int[] parameters, int stream) -> ()
//   _quantize_whole(Tensor weight, int target, int rounding, int stream) -> (Tensor, Tensor)
//   _dequantize_whole(Tensor data, Tensor scale, Tensor? second, int rows, int cols, int through, int stream) -> Tensor
//   _native_devices() -> int        bit 0: CPU, bit 1: CUDA or HIP
//   _native_cpu_isa() -> int        0 baseline, 1 AVX2, 2 AVX-512
// Scales of E8M0 and packed codes are uint8 here; the stream is an integer, so that nothing of torch's GPU libraries
// is linked.

#include <Python.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"
#include "device.h"
#include "plan.h"

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}

namespace qk {
namespace {

int cpu_isa() {
  static const int level = [] {
    const char* limit = std::getenv("QUANT_KERNELS_CPU_ISA");
    if (limit == nullptr) return cpu_level(2);
    return cpu_level(std::strcmp(limit, "avx512") == 0 ? 2 : (std::strcmp(limit, "avx2") == 0 ? 1 : 0));
  }();
  return level;
}

void zero_tiles(const Item& item) {
  for (int64_t e = 0; e < item.e; ++e) {
    for (int64_t n = 0; n < item.scale_n; ++n) {
      float* row = static_cast<float*>(item.scale.data) + e * item.scale.stride_e + n * item.scale.stride_n;
      for (int64_t k = 0; k < item.scale_k; ++k) row[k * item.scale.stride_k] = 0.0f;
    }
  }
}

// Scales of rows and groups that only pad the CDNA order.
void fill_padding(const Item& item) {
  for (int64_t e = 0; e < item.e; ++e) {
    uint8_t* matrix = static_cast<uint8_t*>(item.scale.data) + e * item.scale.stride_e;
    std::memset(matrix, 127, static_cast<size_t>(item.scale_n * item.scale_k));
  }
}

void run_on_cpu(const Plan& plan) {
  const CpuRange convert = cpu_kernels(cpu_isa());
  constexpr int64_t elements_a_task = 32768;
  for (const Item& item : plan.items) {
    if (plan.job.target == kAmax && plan.job.amax_rows > 1) zero_tiles(item);
    if (plan.job.layout == kCdna && (plan.job.target == kMxfp4 || plan.job.target == kMxfp8)) fill_padding(item);
    const int64_t units = cpu_units(plan.job, item);
    if (units == 0) continue;
    const int64_t elements = item.e * item.n * item.k / units;
    const int64_t grain = elements > 0 ? ceil_div(elements_a_task, elements) : units;
    if (units <= grain) {
      convert(plan.job, item, 0, units);
    } else {
      torch::stable::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) { convert(plan.job, item, begin, end); });
    }
  }
}

void convert_cpu(std::vector<Tensor> tensors, std::vector<int64_t> slots, std::vector<int64_t> geometry,
                 std::vector<int64_t> parameters, int64_t /*stream*/) {
  run_on_cpu(read_plan(tensors, slots, geometry, parameters));
}

void run_on_device(const Plan& plan, const Tensor& on, int64_t stream) {
  if (plan.items.empty()) return;
  const torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
  const char* error = convert_on_device(plan.job, plan.items.data(), static_cast<int>(plan.items.size()), stream);
  STD_TORCH_CHECK(error == nullptr, "kernel launch failed: ", error);
}

void convert_device(std::vector<Tensor> tensors, std::vector<int64_t> slots, std::vector<int64_t> geometry,
                    std::vector<int64_t> parameters, int64_t stream) {
  if (tensors.empty()) return;
  run_on_device(read_plan(tensors, slots, geometry, parameters), tensors[0], stream);
}

// A new contiguous tensor where `like` is.
Tensor new_tensor(const Tensor& like, int64_t rank, int64_t matrices, int64_t rows, int64_t cols, int32_t dtype) {
  const int64_t sizes[] = {matrices, rows, cols}, strides[] = {rows * cols, cols, 1};
  const int64_t first = rank == 3 ? 0 : 1;
  int32_t device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(rank, sizes + first, strides + first, dtype, device_type, device_index, &made));
  return Tensor(made);
}

// One whole plain weight into new tensors, row-major: small weights are many, and lists cost more time than they do.
using Pair = std::tuple<Tensor, Tensor>;
Pair quantize_whole(const Tensor& weight, int64_t target, int64_t rounding, int64_t stream, bool on_device) {
  const int64_t rank = weight.dim();
  STD_TORCH_CHECK(rank == 2 || rank == 3, "weight: ", rank, " dimensions, not 2 or 3");
  STD_TORCH_CHECK(target >= kPtpcFp8 && target <= kPerBlockFp8, "target: ", target, " needs more than one pass");
  Job shape{};
  shape.target = static_cast<Target>(target);
  Item item{};
  item.e = rank == 3 ? weight.size(0) : 1;
  item.n = weight.size(rank - 2);
  item.k = weight.size(rank - 1);
  const Geometry geometry = target_geometry(shape, item);
  const bool bytes = geometry.scale_dtype == ScalarType::Byte;
  const int32_t data_dtype = target == kMxfp4 ? aoti_torch_dtype_uint8() : aoti_torch_dtype_float8_e4m3fn();
  const int32_t scale_dtype = bytes ? aoti_torch_dtype_uint8() : aoti_torch_dtype_float32();
  const std::vector<Tensor> tensors{
      weight,
      new_tensor(weight, rank, item.e, item.n, geometry.width, data_dtype),
      new_tensor(weight, rank, item.e, geometry.scale_rows, geometry.scale_cols, scale_dtype),
  };
  static const std::vector<int64_t> slots{0, -1, -1, -1, 1, 2, -1, -1, -1}, plain{0, 0, 0, 0};
  const Plan plan = read_plan(tensors, slots, plain, {target, rounding, kRowMajor, 0, 0, 0, 0});
  if (on_device) {
    run_on_device(plan, weight, stream);
  } else {
    run_on_cpu(plan);
  }
  return {tensors[1], tensors[2]};
}

Pair quantize_whole_cpu(Tensor weight, int64_t target, int64_t rounding, int64_t stream) {
  return quantize_whole(weight, target, rounding, stream, false);
}

Pair quantize_whole_device(Tensor weight, int64_t target, int64_t rounding, int64_t stream) {
  return quantize_whole(weight, target, rounding, stream, true);
}

// One whole quantized weight, under scales of blocks of rows x cols, into a new tensor of the dtype `through`.
Tensor dequantize_whole(const Tensor& data, const Tensor& scale, const std::optional<Tensor>& second, int64_t rows,
                        int64_t cols, int64_t through, int64_t stream, bool on_device) {
  const int64_t rank = data.dim();
  STD_TORCH_CHECK(rank == 2 || rank == 3, "data: ", rank, " dimensions, not 2 or 3");
  STD_TORCH_CHECK(through >= kF32 && through <= kBf16, "through: not a dtype of weights");
  const int64_t k = data.size(rank - 1) * (data.scalar_type() == ScalarType::Byte ? 2 : 1);
  const int32_t dtypes[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float16(), aoti_torch_dtype_bfloat16()};
  const Tensor out = new_tensor(data, rank, rank == 3 ? data.size(0) : 1, data.size(rank - 2), k, dtypes[through]);
  std::vector<Tensor> tensors{data, scale, out};
  std::vector<int64_t> slots{0, 1, -1, -1, 2, -1, -1, -1, -1};
  if (second.has_value()) {
    slots[kSourceSecond] = 3;
    tensors.push_back(*second);
  }
  const Plan plan = read_plan(tensors, slots, {rows, cols, 0, 0}, {kDense, 0, kRowMajor, 0, through, 0, 0});
  if (on_device) {
    run_on_device(plan, data, stream);
  } else {
    run_on_cpu(plan);
  }
  return out;
}

Tensor dequantize_whole_cpu(Tensor data, Tensor scale, std::optional<Tensor> second, int64_t rows, int64_t cols,
                            int64_t through, int64_t stream) {
  return dequantize_whole(data, scale, second, rows, cols, through, stream, false);
}

Tensor dequantize_whole_device(Tensor data, Tensor scale, std::optional<Tensor> second, int64_t rows, int64_t cols,
                               int64_t through, int64_t stream) {
  return dequantize_whole(data, scale, second, rows, cols, through, stream, true);
}

int64_t native_devices() { return 1 | (device_kernels_built() ? 2 : 0); }

int64_t native_cpu_isa() { return cpu_isa(); }

}  // namespace
}  // namespace qk

STABLE_TORCH_LIBRARY_FRAGMENT(quant_kernels, library) {
  library.def("_convert(Tensor(a!)[] tensors, int[] slots, int[] geometry, int[] parameters, int stream) -> ()");
  library.def("_quantize_whole(Tensor weight, int target, int rounding, int stream) -> (Tensor, Tensor)");
  library.def(
      "_dequantize_whole(Tensor data, Tensor scale, Tensor? second, int rows, int cols, int through, int stream) -> Tensor");
  library.def("_native_devices() -> int");
  library.def("_native_cpu_isa() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(quant_kernels, CPU, library) {
  library.impl("_convert", TORCH_BOX(&qk::convert_cpu));
  library.impl("_quantize_whole", TORCH_BOX(&qk::quantize_whole_cpu));
  library.impl("_dequantize_whole", TORCH_BOX(&qk::dequantize_whole_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(quant_kernels, CUDA, library) {
  library.impl("_convert", TORCH_BOX(&qk::convert_device));
  library.impl("_quantize_whole", TORCH_BOX(&qk::quantize_whole_device));
  library.impl("_dequantize_whole", TORCH_BOX(&qk::dequantize_whole_device));
}

STABLE_TORCH_LIBRARY_IMPL(quant_kernels, CompositeExplicitAutograd, library) {
  library.impl("_native_devices", TORCH_BOX(&qk::native_devices));
  library.impl("_native_cpu_isa", TORCH_BOX(&qk::native_cpu_isa));
}
