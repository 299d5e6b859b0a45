// The linear product's portable kernels, run on the host, as a function that a test calls.

#include <string.h>

#include <vector>

#include "linear.h"
#include "runtime.h"

namespace {

void (*product)(qk::LinearJob) = nullptr;
const qk::LinearJob* product_job = nullptr;

}  // namespace

namespace qk {

const char* start(void (*kernel)(LinearJob), int64_t blocks, int threads, const LinearJob& job, int64_t stream) {
  product = kernel;
  product_job = &job;
  return start([](WorkList) { product(*product_job); }, blocks, threads, WorkList{}, stream);
}

}  // namespace qk

extern "C" const char* qk_test_linear(const qk::LinearJob* given) {
  qk::LinearJob job = *given;
  if (job.m > qk::linear_tokens()) return "too many rows";
  std::vector<uint8_t> workspace(static_cast<size_t>(qk::linear_workspace(job)) + 16);
  memset(workspace.data(), 0xff, workspace.size());  // NaN, wherever it is read
  const auto address = reinterpret_cast<uintptr_t>(workspace.data());
  return qk::linear_on_device(job, workspace.data() + (16 - address % 16) % 16, 0);
}
