// Derives the RNG key of each sample of a micro-batch for one layer, from the epoch and the sample ids uploaded with
// the batch. The ids live in device memory, so a replayed CUDA graph draws for the samples of the current batch.
#include "device.cuh"
#include "random.cuh"

namespace {

// `sample_info` holds the epoch, then the id of each sample.
__global__ void derive_keys(RngKey layer_key, const uint64_t *sample_info, RngKey *to, int samples) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < samples) to[i] = layer_key.fold_in(sample_info[0]).fold_in(sample_info[1 + i]);
}

} // namespace

extern "C" int sample_keys(const RngKey *layer_key, const uint64_t *sample_info, void *to, int samples, cudaStream_t stream) {
    if (samples == 0) return 0;
    derive_keys<<<blocks(samples, 256), 256, 0, stream>>>(*layer_key, sample_info, (RngKey *)to, samples);
    return cudaGetLastError();
}
