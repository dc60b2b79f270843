// The types launchers may be given, as `cuda::code` in Rust has them.
#pragma once

enum Type : int { F32 = 0, F64 = 1, BF16 = 2, F16 = 3 };
