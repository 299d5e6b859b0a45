// The linear product for up to 16 rows of x: weights stream through shared memory once and meet x on the matrix units. Here is
// how the work is cut, and the launches; the kernels are in linear_kernel.h (tensor cores) and linear_plain.h.

#include "linear.h"

#include "launch.h"
#include "linear_kernel.h"
#include "linear_plain.h"

#if defined(QK_CUDA)
#include <algorithm>
#include <atomic>
#include <cmath>
#endif

namespace qk {

#if defined(QK_CUDA)

namespace {

int multiprocessors() {
  static const int count = [] {
    int device = 0, found = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device);
    return found > 0 ? found : 1;
  }();
  return count;
}

// Devices on which a kernel may already use all shared memory, one bit each.
template <WeightFormat format, int tiles, bool quantized>
std::atomic<uint64_t> allowed{0};

const char* allow_shared(const void* kernel, std::atomic<uint64_t>& devices) {
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (devices.load(std::memory_order_relaxed) & bit) return nullptr;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  devices.fetch_or(bit, std::memory_order_relaxed);
  return nullptr;
}

int64_t pieces(int64_t size, int64_t step) { return (size + step - 1) / step; }

template <WeightFormat format, int tiles>
Shape shape_of_job(const LinearJob& job) {
  return shape_of<format, tiles>(job.m, job.row_groups, static_cast<int>(pieces(job.chunks, job.splits)));
}

// Fitted to the times of every cut of 15 layers on an H200, in microseconds: a launch; a round of blocks; 256 x 8 values of x
// to make ready; a chunk of a warp; a cluster, and each doubling of it; how the work slows down as blocks crowd a
// multiprocessor (exponents); a KiB of scales.
struct Costs {
  float launch, round, x, chunk, cluster, doubling, crowd_x, crowd_chunk, scales;
};

// Time that a job takes as it is cut.
template <WeightFormat format, int tiles>
float cost(const LinearJob& job) {
  constexpr Costs fp8[2] = {{0.05f, 2.53f, 0.204f, 0.835f, 1.55f, 0.457f, 0.957f, 0.896f, 0.0028f},
                            {0.0f, 4.27f, 0.146f, 1.21f, 1.44f, 0.328f, 1.57f, 0.174f, 0.0069f}};
  constexpr Costs fp4[2] = {{0.13f, 2.67f, 0.178f, 0.945f, 0.956f, 0.445f, 3.21f, 0.347f, 0.0463f},
                            {0.19f, 3.34f, 0.0757f, 1.45f, 0.319f, 0.243f, 0.108f, 0.173f, 0.241f}};
  constexpr Costs costs = (format == kGroupFp4 ? fp4 : fp8)[tiles - 1];
  const Shape shape = shape_of_job<format, tiles>(job);
  const float slice = static_cast<float>(pieces(job.chunks, job.splits));
  // A block takes 1 KiB beside its own. Clusters leave multiprocessors over.
  const int together = shape.total + 1024 <= kSharedOfAll / 2 ? 2 : 1;
  const float usable = job.splits < 4 ? 1.0f : (job.splits == 4 ? 0.91f : 0.79f);
  const float at_once = usable * static_cast<float>(multiprocessors() * together);
  const float blocks = static_cast<float>(pieces(job.n, kWarpRows * job.row_groups) * job.splits);
  const float rounds = std::ceil(blocks / at_once);
  const float crowd = std::max(1.0f, blocks / (static_cast<float>(multiprocessors()) * rounds));
  const float x = costs.x * static_cast<float>(job.m) * slice * kElements<format> / 2048.0f;
  const float chunk = costs.chunk * std::ceil(slice * static_cast<float>(job.row_groups) / kWarps);
  const float scales = costs.scales * static_cast<float>(shape.scale_bytes + kWarpRows * job.row_groups * shape.byte_stride) / 1024.0f;
  const float cluster = job.splits > 1 ? costs.cluster + costs.doubling * std::log2(static_cast<float>(job.splits)) : 0.0f;
  return costs.launch + cluster + rounds * (costs.round + x * std::pow(crowd, costs.crowd_x) + chunk * std::pow(crowd, costs.crowd_chunk) + scales);
}

// Choose what was left open as what costs least; false if x fits in no way.
template <WeightFormat format, int tiles>
bool choose(LinearJob& job) {
  LinearJob best = job;
  float least = -1.0f;
  for (int row_groups = 1; row_groups <= kWarps; row_groups *= 2) {
    for (int splits = 1; splits <= 8; splits *= 2) {
      LinearJob one = job;
      if (one.row_groups == 0) one.row_groups = row_groups;
      if (one.splits == 0) one.splits = splits;
      while (one.splits > 1 && one.splits > one.chunks) one.splits /= 2;
      if (shape_of_job<format, tiles>(one).total > kMostShared) continue;
      const float found = cost<format, tiles>(one);
      if (least >= 0.0f && found >= least) continue;
      least = found;
      best = one;
    }
  }
  job = best;
  return least >= 0.0f;
}

template <WeightFormat format, int tiles, bool quantized>
const char* launch_product(const LinearJob& job, int64_t stream) {
  const auto kernel = linear_kernel<format, tiles, quantized>;
  if (const char* error = allow_shared(reinterpret_cast<const void*>(kernel), allowed<format, tiles, quantized>)) return error;
  const int64_t blocks = pieces(job.n, kWarpRows * job.row_groups) * job.splits;
  if (blocks > 0x7fffffff) return "the weight has too many rows";
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shape_of_job<format, tiles>(job).total);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  // The kernel waits itself for what precedes it: it may be brought to the device before that has ended.
  attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  if (job.splits > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = static_cast<unsigned>(job.splits);
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, job);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <WeightFormat format, int tiles>
const char* launch_linear(LinearJob job, int64_t stream) {
  job.chunks = static_cast<int32_t>(pieces(job.k, kElements<format>));
  if (!choose<format, tiles>(job)) return "the input side is too long";
  if (job.activation == kAsIs) return launch_product<format, tiles, false>(job, stream);
  return launch_product<format, tiles, true>(job, stream);
}

template <WeightFormat format>
const char* launch_format(const LinearJob& job, int64_t stream) {
  return job.m <= 8 ? launch_linear<format, 1>(job, stream) : launch_linear<format, 2>(job, stream);
}

}  // namespace

int64_t linear_tokens() {
  // Clusters came with compute capability 9.0.
  static const bool able = [] {
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major >= 9;
  }();
  return able ? kMostTokens : 0;
}

int64_t linear_workspace(const LinearJob&) { return 0; }

const char* linear_on_device(const LinearJob& job, void*, int64_t stream) {
  switch (job.format) {
    case kRowFp8: return launch_format<kRowFp8>(job, stream);
    case kGroupFp8: return launch_format<kGroupFp8>(job, stream);
    case kGroupFp4: return launch_format<kGroupFp4>(job, stream);
    default: return "unknown format";
  }
}

#elif defined(QK_LAUNCHERS)

int64_t linear_tokens() { return kPlainTokens; }

int64_t linear_workspace(const LinearJob& job) { return 4 * kPlainTokens + 2 * job.m * job.k; }

#if defined(QK_EMULATE)

// Run a kernel on the host; provided by the emulation.
const char* start(void (*kernel)(LinearJob), int64_t blocks, int threads, const LinearJob& job, int64_t stream);

#else

namespace {

const char* start(void (*kernel)(LinearJob), int64_t blocks, int threads, const LinearJob& job, int64_t stream) {
  if (blocks > 0x7fffffff) return "the weight has too many rows";
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, reinterpret_cast<Stream>(stream)>>>(job);
  const hipError_t error = hipGetLastError();
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
}

}  // namespace

#endif

const char* linear_on_device(const LinearJob& given, void* workspace, int64_t stream) {
  LinearJob job = given;
  job.factors = static_cast<float*>(workspace);
  job.ready_x = reinterpret_cast<uint16_t*>(job.factors + kPlainTokens);
  if (const char* error = start(linear_x_kernel, job.m, kPlainThreads, job, stream)) return error;
  const int64_t blocks = ceil_div(job.n, kPlainRows);
  switch (job.format) {
    case kRowFp8: return start(plain_linear_kernel<kRowFp8>, blocks, kPlainThreads, job, stream);
    case kGroupFp8: return start(plain_linear_kernel<kGroupFp8>, blocks, kPlainThreads, job, stream);
    case kGroupFp4: return start(plain_linear_kernel<kGroupFp4>, blocks, kPlainThreads, job, stream);
    default: return "unknown format";
  }
}

#else

// Device code alone: name the kernels, so that they are compiled.
template __attribute__((global)) void plain_linear_kernel<kRowFp8>(const LinearJob);
template __attribute__((global)) void plain_linear_kernel<kGroupFp8>(const LinearJob);
template __attribute__((global)) void plain_linear_kernel<kGroupFp4>(const LinearJob);

#endif

}  // namespace qk
