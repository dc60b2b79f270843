// The sizes of a convolution: `ConvGeometry` in windows.rs, as `Raw` in conv/card.rs hands it on.
#pragma once

struct ConvGeometry {
    int height, width, inputs, out_height, out_width, outputs, kernel, stride, padding, dilation, groups;
    __host__ __device__ int depth() const { return inputs / groups; }
    __host__ __device__ int cells() const { return kernel * kernel; }
};
