// cuDNN, where it is: loaded when it is first asked for, never linked. Its graphs are built with the front-end
// headers, which call the library through what is loaded here.
#pragma once

#include <cuda_runtime.h>

// The version of the library, 90700 for 9.7.0; 0 where there is none, or none of the headers' major version, or the
// crate was built without its headers. Touches no card.
extern "C" int cudnn_available();

#ifdef TRAINER_CUDNN
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
// The front end uses these and does not ask for them.
#include <cstring>
#include <unordered_map>

#include <cudnn_frontend.h>
#include <mutex>

#include "type.h"

namespace cudnn {

// Codes from here on are the front end's own.
constexpr int ERRORS = 20000;

// The library's handle, bound to a stream; null where there is no library or it cannot work here. To be used under
// `lock` alone: there is one.
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

// For functions that return a code: what the front end returned, if that is an error.
#define TRY_CUDNN(call)                                                                                       \
    if (auto status = (call); status.is_bad()) return cudnn::ERRORS + int(status.get_code())
#endif
