// The randomness of each sample of a micro-batch for one layer, from the epoch and the sample ids that were staged with it:
// a replayed graph draws for the samples that are there by then.
#include "device.cuh"
#include "random.cuh"

namespace {

// `staged` is an epoch, then the id of each sample.
__global__ void keys(Random layer, const uint64_t *staged, Random *to, int samples) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < samples) to[i] = layer.at(staged[0]).at(staged[1 + i]);
}

} // namespace

extern "C" int sample_keys(const Random *layer, const uint64_t *staged, void *to, int samples, cudaStream_t stream) {
    if (samples == 0) return 0;
    keys<<<blocks(samples, 256), 256, 0, stream>>>(*layer, staged, (Random *)to, samples);
    return cudaGetLastError();
}
