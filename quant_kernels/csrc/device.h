// Entry of the GPU kernels. A library built without a GPU compiler links no_device.cpp in their place.
#pragma once

#include "job.h"

namespace qk {

bool device_kernels_built();

// Launch the conversion of all items on `stream` (a cudaStream_t or hipStream_t as an integer) of the current device.
// Returns nullptr, or what went wrong.
const char* convert_on_device(const Job& job, const Item* items, int count, int64_t stream);

}  // namespace qk
