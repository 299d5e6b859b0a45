// What a library without GPU kernels answers.

#include "device.h"

namespace qk {

bool device_kernels_built() { return false; }

const char* convert_on_device(const Job&, const Item*, int, int64_t) { return "built without GPU kernels"; }

}  // namespace qk
