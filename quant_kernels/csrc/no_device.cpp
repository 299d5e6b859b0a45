// What a library without GPU kernels answers.

#include "device.h"
#include "linear.h"

namespace qk {

bool device_kernels_built() { return false; }

const char* convert_on_device(const Job&, const Item*, int, int64_t) { return "built without GPU kernels"; }

int64_t linear_tokens() { return 0; }

int64_t linear_workspace(const LinearJob&) { return 0; }

const char* linear_on_device(const LinearJob&, void*, int64_t) { return "built without GPU kernels"; }

}  // namespace qk
