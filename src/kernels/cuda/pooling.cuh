// A pooling window: `Window` in pool.rs, as its card.rs hands it on.
#pragma once

#include <cstdint>

struct Window {
    int batch, height, width, channels, out_height, out_width, size, stride, padding;
};

// A pixel of a picture and N neighbouring channels of it, as thread `i` has them.
template <int N> struct Spot {
    int64_t picture;
    int y, x, channel;
    __device__ __forceinline__ Spot(int64_t i, int height, int width, int channels) {
        int packs = channels / N;
        int64_t pixel = i / packs, line = pixel / width;
        channel = int(i - pixel * packs) * N;
        x = int(pixel - line * width);
        picture = line / height;
        y = int(line - picture * height);
    }
};

// Runs `body` for every window that sees the pixel (y, x), with the window's place and the cell that sees it.
template <class F> __device__ __forceinline__ void for_windows(const Window &w, int y, int x, F body) {
    for (int ky = 0; ky < w.size; ky++) {
        int oy = y + w.padding - ky;
        if (oy < 0 || oy % w.stride != 0 || oy / w.stride >= w.out_height) continue;
        for (int kx = 0; kx < w.size; kx++) {
            int ox = x + w.padding - kx;
            if (ox < 0 || ox % w.stride != 0 || ox / w.stride >= w.out_width) continue;
            body(oy / w.stride, ox / w.stride, ky * w.size + kx);
        }
    }
}
