// Loads cuDNN and owns its handle.
#include "with_cudnn.h"

#ifdef TRAINER_CUDNN
#include <dlfcn.h>

// The handle through which the front end resolves the library's symbols.
namespace cudnn_frontend {
void *cudnn_dlhandle = nullptr;
}

namespace {

int load() {
    for (const char *name : {"libcudnn.so.9", "libcudnn.so"}) {
        void *library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
        if (!library) continue;
        cudnn_frontend::cudnn_dlhandle = library;
        // The front end throws if a symbol is missing.
        try {
            size_t version = cudnn_frontend::detail::get_backend_version();
            if (version / 10000 == CUDNN_MAJOR) return int(version);
        } catch (...) {
        }
    }
    return 0;
}

} // namespace

std::mutex &cudnn::lock() {
    // Never destroyed: execution plans freed at process exit may still lock it.
    static auto *lock = new std::mutex;
    return *lock;
}

cudnnHandle_t cudnn::handle(cudaStream_t stream) {
    if (!cudnn_available()) return nullptr;
    try {
        // Created under the lock. A failure for lack of memory is not final.
        static cudnnHandle_t handle = nullptr;
        if (!handle && cudnn_frontend::detail::create_handle(&handle) != CUDNN_STATUS_SUCCESS) handle = nullptr;
        bool bound = handle && cudnn_frontend::detail::set_stream(handle, stream) == CUDNN_STATUS_SUCCESS;
        return bound ? handle : nullptr;
    } catch (...) {
        return nullptr;
    }
}

extern "C" int cudnn_available() {
    static int version = load();
    return version;
}
#else
extern "C" int cudnn_available() { return 0; }
#endif
