// Geometry of a pooling: `PoolGeometryFfi` in pool/gpu.rs.
#pragma once

#include <cstdint>

struct PoolGeometry {
    int batch, height, width, channels, out_height, out_width, size, stride, padding;
};

// The pixel and the N adjacent channels that thread `i` processes.
template <int N> struct PixelPosition {
    int64_t image;
    int y, x, channel;
    __device__ __forceinline__ PixelPosition(int64_t i, int height, int width, int channels) {
        int packs = channels / N;
        int64_t pixel = i / packs, line = pixel / width;
        channel = int(i - pixel * packs) * N;
        x = int(pixel - line * width);
        image = line / height;
        y = int(line - image * height);
    }
};

// Calls `body` for every window that covers the pixel (y, x), with the window's position and the pixel's index within
// it.
template <class F> __device__ __forceinline__ void for_windows(const PoolGeometry &w, int y, int x, F body) {
    // In padded coordinates: windows that start at or before the pixel and end after it.
    y += w.padding, x += w.padding;
    int top = y < w.size ? 0 : (y - w.size) / w.stride + 1, left = x < w.size ? 0 : (x - w.size) / w.stride + 1;
    int bottom = min(y / w.stride, w.out_height - 1), right = min(x / w.stride, w.out_width - 1);
    for (int oy = top; oy <= bottom; oy++)
        for (int ox = left; ox <= right; ox++) body(oy, ox, (y - oy * w.stride) * w.size + x - ox * w.stride);
}
