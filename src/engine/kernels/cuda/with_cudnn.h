// cuDNN, loaded with dlopen on first use and never linked. The front-end headers build its graphs and call the library
// through that handle.
#pragma once

#include <cuda_runtime.h>

// The library's version, 90700 for 9.7.0. 0 if the library is missing, if its major version differs from the headers',
// or if the crate was built without the headers. Does not touch the GPU.
extern "C" int cudnn_available();

#ifdef TRAINER_CUDNN
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
// The front end uses these headers without including them.
#include <cstring>
#include <unordered_map>

#include <cudnn_frontend.h>
#include <mutex>

#include "type.h"

namespace cudnn {

// Error codes from here on are those of the front end.
constexpr int ERRORS = 20000;

// The library's handle, bound to a stream; null if the library is missing or fails to initialize. There is one handle:
// use it only under `lock`.
cudnnHandle_t handle(cudaStream_t stream);
std::mutex &lock();

inline cudnn_frontend::DataType_t cudnn_dtype(int type) {
    switch (type) {
    case F64: return cudnn_frontend::DataType_t::DOUBLE;
    case BF16: return cudnn_frontend::DataType_t::BFLOAT16;
    case F16: return cudnn_frontend::DataType_t::HALF;
    default: return cudnn_frontend::DataType_t::FLOAT;
    }
}

} // namespace cudnn

// In a function that returns an error code: returns the front end's error, if any.
#define TRY_CUDNN(call)                                                                                       \
    if (auto status = (call); status.is_bad()) return cudnn::ERRORS + int(status.get_code())
#endif
