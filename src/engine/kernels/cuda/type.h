// The dtype codes of launchers: `cuda::dtype_code` in Rust.
#pragma once

enum Type : int { F32 = 0, F64 = 1, BF16 = 2, F16 = 3 };
