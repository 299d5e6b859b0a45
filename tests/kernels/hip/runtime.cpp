// A HIP runtime for tests: the launchers' own host code runs, and every launch is handed to a function of the test.

#include <hip/hip_runtime.h>

#include "device.h"

namespace {

using Launched = int (*)(const char* kernel, uint32_t blocks, uint32_t threads, const void* arguments);

struct Kernel {
  const void* function;
  const char* name;
};
constexpr int kMaxKernels = 4096;
Kernel kernels[kMaxKernels];
int kernel_count = 0;

const char* name_of(const void* function) {
  for (int i = 0; i < kernel_count; ++i) {
    if (kernels[i].function == function) return kernels[i].name;
  }
  return nullptr;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  hipStream_t stream;
};
Configuration configuration;
Launched launched = nullptr;
hipError_t last = hipSuccess;

}  // namespace

extern "C" {

// What clang's start-up code of a file with kernels refers to; there is no device code in the library.
char __hip_fatbin[64] = {};

void** __hipRegisterFatBinary(const void*) {
  static void* handle = nullptr;
  return &handle;
}
void __hipUnregisterFatBinary(void**) {}
void __hipRegisterFunction(void**, const void* function, char*, const char* name, unsigned, void*, void*, void*, void*,
                           int*) {
  if (kernel_count < kMaxKernels) kernels[kernel_count++] = {function, name};
}
void __hipRegisterVar(void**, void*, char*, const char*, int, size_t, int, int) {}

hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, hipStream_t stream) {
  configuration = {grid, block, shared, stream};
  return hipSuccess;
}
hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, hipStream_t* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *stream = configuration.stream;
  return hipSuccess;
}
hipError_t hipLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t, hipStream_t) {
  const char* name = name_of(function);
  const bool ready = name != nullptr && launched != nullptr && grid.y * grid.z * block.y * block.z == 1;
  last = ready && launched(name, grid.x, block.x, arguments[0]) == 0 ? hipSuccess : hipErrorLaunchFailure;
  return last;
}
hipError_t hipGetLastError() {
  const hipError_t found = last;
  last = hipSuccess;
  return found;
}
const char* hipGetErrorString(hipError_t) { return "the launch failed"; }

// The test's side: what is called for a launch, and the entry of the GPU kernels.
void qk_test_on_launch(Launched function) { launched = function; }
uint64_t qk_test_size(int what) { return what == 0 ? sizeof(qk::Job) : (what == 1 ? sizeof(qk::Item) : sizeof(qk::WorkList)); }
const char* qk_test_convert(const qk::Job* job, const qk::Item* items, int count) {
  return qk::convert_on_device(*job, items, count, 0);
}
}
