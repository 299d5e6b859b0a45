// Host kernels for any machine of this architecture.
#define QK_ISA baseline
#include "kernels_impl.h"
