// Geometry of a convolution: `ConvGeometryFfi` in conv/gpu.rs.
#pragma once

struct ConvGeometry {
    int height, width, inputs, out_height, out_width, outputs, kernel, stride, padding, dilation, groups;
    __host__ __device__ int depth() const { return inputs / groups; }
    __host__ __device__ int cells() const { return kernel * kernel; }
};
