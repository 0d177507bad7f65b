// Random numbers: a stream that depends only on (seed, offset), like the counter-based generator of
// the hardware. The numbers themselves differ from the hardware's.
#pragma once

#include "op.h"

namespace cannsim {

at::Generator generator(int64_t seed, int64_t offset);

// Dropout masks are bits, least significant first; 1 keeps the element.
at::Tensor unpack_mask(const at::Tensor& packed, int64_t count, int64_t first = 0);

}  // namespace cannsim
