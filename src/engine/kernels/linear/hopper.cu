// bf16 GEMMs on Hopper with fused epilogues. Linear layers with GELU: the forward pass also stores the pre-activation;
// the backward pass multiplies the gradient with GELU's derivative and recomputes GELU's output. Logits: exponentials
// and their sums. cuBLASLt multiplies as fast, but its epilogue does not overlap with the GEMM, or the work takes a
// separate pass.
//
// A block computes output tiles of 128 x 256. One thread prefetches operands with TMA; two warpgroups of 128 threads
// own 64 rows each. A warpgroup keeps the rounded accumulators of a finished tile in registers and runs the epilogue in
// small steps while the tensor cores work on its next tile. Two blocks form a cluster with vertically adjacent tiles:
// each loads half of the `b` operand and multicasts it to both. Sums have a fixed order, so results are deterministic.
#include <cuda.h>
#include <type_traits>
#include <utility>

#include "cuda/activation.cuh"
#include "cuda/column_sums.cuh"
#include "cuda/cross_entropy.cuh"

// Needs Hopper's instructions, and a compiler that can handle this file: that of CUDA 12.4 was still busy after ten
// minutes.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && __CUDACC_VER_MAJOR__ >= 13
#define HOPPER
#endif

namespace {

constexpr int ROWS = 128, COLUMNS = 256, BLOCK_K = 64; // output tile, and K of an operand piece
constexpr int STAGES = 4;                           // operand pieces in flight
constexpr int PAIR = 2;                             // blocks per cluster
constexpr int GROUPS = 2, GROUP_THREADS = 128;              // warpgroups that multiply, and their threads
constexpr int GROUP_ROWS = ROWS / GROUPS;                  // rows of a warpgroup: M of one wgmma
constexpr int STRIP = 32;                           // columns per epilogue step

// - GELU_FORWARD: `pre` is the GEMM plus bias, `out` is its GELU.
// - GELU_BACKWARD: `out` is the GEMM times GELU's derivative at `pre`, and `pre` is overwritten with its GELU. Sums of
//   `out` over every 64 rows go to `sums`, if that is not null.
// - EXP_LOGITS: `out` is the exponential of the GEMM minus each row's `base`, and zero from `columns` on. Its sums over
//   the columns of every tile go to `sums`, (tiles, rows).
enum EpilogueMode { GELU_FORWARD, GELU_BACKWARD, EXP_LOGITS };

struct EpilogueArgs {
    bf16 *out, *pre; // (rows, stride)
    const bf16 *bias;
    float *sums;
    int stride;
    const float *base; // subtracted from each logit of the row, in units of log2
};

struct GemmShape {
    int rows, columns, k;
};

struct alignas(1024) Stage {
    bf16 a[ROWS * BLOCK_K], b[COLUMNS * BLOCK_K];
};

struct Shared {
    Stage stages[STAGES];
    bf16 pre[2][ROWS * STRIP];
    float sums[GROUPS][GROUP_THREADS / WARP][COLUMNS];
};

// K pieces of the two variants, at least: the epilogue of a tile overlaps with that many pieces of the next one.
constexpr int MANY_PIECES = 12, FEW_PIECES = 6;

#ifdef HOPPER

// Epilogue steps per tile, interleaved with the pieces of the next tile.
constexpr int STEPS = COLUMNS / STRIP * 2;

// Clamp of base-2 exponents, so that sums stay finite. NaN propagates.
constexpr float MAX_EXPONENT = 100;

__device__ __forceinline__ float clamp_exponent(float x) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(MAX_EXPONENT));
    return y;
}

__device__ __forceinline__ uint32_t address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

// An mbarrier: opens after `count` arrivals, once all expected bytes have landed.
struct MBarrier {
    uint64_t state;

    __device__ __forceinline__ void init(int count) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(this)), "r"(count));
    }
    __device__ __forceinline__ void expect(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(this)), "r"(bytes) : "memory");
    }
    // Arrives at the same barrier in a block of the cluster.
    __device__ __forceinline__ void arrive(int block) {
        asm volatile("{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n"
                     " mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(address(this)),
                     "r"(block)
                     : "memory");
    }
    __device__ __forceinline__ void wait(int parity) {
        asm volatile("{\n .reg .pred open;\n again:\n mbarrier.try_wait.parity.shared::cta.b64 open, [%0], %1;\n"
                     " @open bra gone;\n bra again;\n gone:\n}" ::"r"(address(this)),
                     "r"(parity)
                     : "memory");
    }
};

__device__ __forceinline__ void tma_load(void *to, const CUtensorMap *tensor_map, MBarrier *barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(address(to)), "l"(tensor_map), "r"(address(barrier)), "r"(x), "r"(y)
                 : "memory");
}

// Loads into both blocks of the cluster.
__device__ __forceinline__ void tma_load_multicast(void *to, const CUtensorMap *tensor_map, MBarrier *barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(address(to)), "l"(tensor_map), "r"(address(barrier)), "r"(x), "r"(y), "h"(uint16_t((1 << PAIR) - 1))
                 : "memory");
}

// Like `tma_load_multicast`, with a `permuted_tensor_map`, from row `strip * STRIP` on.
__device__ __forceinline__ void tma_load_permuted_multicast(void *to, const CUtensorMap *tensor_map, MBarrier *barrier, int x, int strip) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %6, %6, %6, %4}], [%2], %5;"
                 ::"r"(address(to)), "l"(tensor_map), "r"(address(barrier)), "r"(x), "r"(strip), "h"(uint16_t((1 << PAIR) - 1)), "r"(0)
                 : "memory");
}

// wgmma descriptor of an operand in 128-byte swizzled rows; `beyond` is the distance in bytes from 64 values of a row
// to the next 64.
__device__ __forceinline__ uint64_t smem_descriptor(const void *at, int beyond) {
    constexpr uint64_t EIGHT_ROWS = 1024, SWIZZLED = 1ull << 62;
    return ((address(at) & 0x3ffff) >> 4) | uint64_t(beyond >> 4) << 16 | (EIGHT_ROWS >> 4) << 32 | SWIZZLED;
}

#define EIGHT(i)                                                                                              \
    "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
        "+f"(sums[i + 6]), "+f"(sums[i + 7])

// Starts `sums = a b` with a (64, 16) and b (16, 256), or `sums += a b` if `add`. `n_major`: `b` is stored by rows,
// else by columns.
template <int n_major> __device__ __forceinline__ void wgmma_m64n256k16(float (&sums)[128], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %130, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
                 "}, %128, %129, add, 1, 1, 0, %131;\n}"
                 : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56), EIGHT(64),
                   EIGHT(72), EIGHT(80), EIGHT(88), EIGHT(96), EIGHT(104), EIGHT(112), EIGHT(120)
                 : "l"(a), "l"(b), "r"(add), "n"(n_major));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int n> __device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}
__device__ __forceinline__ void sync_group(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(GROUP_THREADS) : "memory");
}
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Transposes among four adjacent lanes: each holds two columns of four groups of eight, and afterwards all columns of
// one group.
__device__ __forceinline__ void gather(uint32_t (&v)[4], int quarter) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        bool high = quarter & bit;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & bit) continue;
            uint32_t given = __shfl_xor_sync(0xffffffff, high ? v[i] : v[i + bit], bit);
            if (high) v[i] = given;
            else v[i + bit] = given;
        }
    }
}

__device__ __forceinline__ void store_streaming(bf16 *at, const Pack<bf16> &values) {
    __stcs(reinterpret_cast<uint4 *>(at), reinterpret_cast<const uint4 &>(values));
}

// Calls `f` with the constants from `from` up to, but excluding, `to`.
template <int from, int to, class F> __device__ __forceinline__ void each(F f) {
    if constexpr (from < to) {
        f(std::integral_constant<int, from>());
        each<from + 1, to>(f);
    }
}

// A thread's part of its warpgroup's last tile until the epilogue is done: two rows, eight apart, and of each eight
// columns per strip.
template <int epilogue_mode, int n_major> struct EpilogueTile {
    // Base-2 exponents are at most MAX_EXPONENT, so f16 can hold them, with three more bits than bf16; very negative
    // ones become -infinity.
    using Packed = std::conditional_t<epilogue_mode == EXP_LOGITS, f16, bf16>;
    uint32_t values[COLUMNS / 4];
    float total[8];
    int64_t at; // index of the first value
    int row, column;
    bool inside[2];

    // The column of the value pair `i` within its tile.
    __device__ __forceinline__ static int pair_column(int i) {
        int quarter = threadIdx.x % 4;
        return n_major ? i * 8 + quarter * 2 : i / 4 * STRIP + quarter * 8 + i % 4 * 2;
    }

    // Stores the accumulators of the tile at `row` and `column`, rounded: plus bias, or as base-2 exponents.
    __device__ __forceinline__ void store_accumulators(const float (&sums)[128], const Pack<bf16, 2> (&bias)[32], const EpilogueArgs &epilogue,
                                         const GemmShape &sizes) {
        int mine = first_row();
        inside[0] = mine < sizes.rows, inside[1] = mine + 8 < sizes.rows;
        at = int64_t(mine) * epilogue.stride + column + threadIdx.x % 4 * 8;
        float base[2];
        if constexpr (epilogue_mode == EXP_LOGITS) {
#pragma unroll
            for (int half = 0; half < 2; half++) base[half] = inside[half] ? epilogue.base[mine + half * 8] : 0;
        }
#pragma unroll
        for (int i = 0; i < 32; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float x = sums[i * 4 + half * 2], y = sums[i * 4 + half * 2 + 1];
                if constexpr (epilogue_mode == GELU_FORWARD) x += to_acc(bias[i].v[0]), y += to_acc(bias[i].v[1]);
                if constexpr (epilogue_mode == EXP_LOGITS) {
                    x = clamp_exponent(fmaf(x, LOG2_E, -base[half])), y = clamp_exponent(fmaf(y, LOG2_E, -base[half]));
                }
                Pack<Packed, 2> pair{{from_acc<Packed>(x), from_acc<Packed>(y)}};
                uint32_t &value = values[i / 4 * 8 + half * 4 + i % 4];
                value = reinterpret_cast<uint32_t &>(pair);
                // Forces the conversion to happen now: when the value is read, the next wgmma already overwrites the
                // accumulators.
                asm volatile("" : "+r"(value));
            }
        }
        if (epilogue_mode == EXP_LOGITS && column + COLUMNS > sizes.columns) mask_columns_from(sizes.columns);
    }

    // Sets exponents from a column on to -infinity, so that their exponentials are zero.
    __device__ __forceinline__ void mask_columns_from(int columns) {
        constexpr uint32_t LOW = 0xfc00, HIGH = LOW << 16; // -infinity in either half
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; i++) {
            int left = columns - column - pair_column(i / 8 * 4 + i % 4);
            if (left < 1) values[i] = HIGH | LOW;
            else if (left < 2) values[i] = HIGH | (values[i] & 0xffff);
        }
    }

    __device__ __forceinline__ int first_row() const {
        return row + threadIdx.x % GROUP_THREADS / WARP * 16 + threadIdx.x % WARP / 4;
    }

    // One epilogue step: one row of a strip. `read` and `done` are the barriers of the two halves of `shared.pre`.
    template <int step>
    __device__ __forceinline__ void epilogue_step(const EpilogueArgs &epilogue, const GemmShape &sizes, Shared &shared, MBarrier *read, MBarrier *done,
                                                int group, int &parity) {
        constexpr int strip = step / 2, half = step % 2, side = strip % 2;
        int lane = threadIdx.x % WARP, warp = threadIdx.x % GROUP_THREADS / WARP;
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = values[step * 4 + i];
        if constexpr (n_major) gather(v, lane % 4);
        LazyPack<bf16, 8> sum{{v[0], v[1], v[2], v[3]}}, given;
        Pack<bf16> out, pre = reinterpret_cast<Pack<bf16> &>(v);
        if constexpr (epilogue_mode == GELU_FORWARD) {
#pragma unroll
            for (int k = 0; k < 8; k++) out.v[k] = from_acc<bf16>(GeluTanh<float>::at<true>(sum[k]).value);
        } else if constexpr (epilogue_mode == EXP_LOGITS) {
            if constexpr (strip == 0) total[half] = 0;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float e = exp2_approx(to_acc(reinterpret_cast<Pack<f16> &>(v).v[k]));
                total[half] += e, out.v[k] = from_acc<bf16>(e);
            }
        } else {
            if constexpr (half == 0) read[side].wait(parity);
            int row = group * GROUP_ROWS + warp * 16 + lane / 4 + half * 8;
            given.load(shared.pre[side] + row * STRIP + lane % 4 * 8);
            if constexpr (half == 1) {
                __syncwarp();
                if (lane == 0) done[side].arrive(blockIdx.x % PAIR);
                if (side == 1) parity ^= 1;
            }
#pragma unroll
            for (int k = 0; k < 8; k++) {
                auto gelu = GeluTanh<float>::at<true>(given[k]);
                float d = sum[k] * gelu.slope();
                total[k] = half == 0 ? d : total[k] + d;
                out.v[k] = from_acc<bf16>(d), pre.v[k] = from_acc<bf16>(gelu.value);
            }
        }
        if (inside[half] && (epilogue_mode != EXP_LOGITS || column + strip * STRIP < epilogue.stride)) {
            int64_t place = at + half * 8 * epilogue.stride + strip * STRIP;
            store_streaming(epilogue.out + place, out);
            if constexpr (epilogue_mode != EXP_LOGITS) store_streaming(epilogue.pre + place, pre);
        }
        if constexpr (epilogue_mode == EXP_LOGITS && strip == COLUMNS / STRIP - 1) {
            float all = total[half];
            all += __shfl_xor_sync(0xffffffff, all, 1);
            all += __shfl_xor_sync(0xffffffff, all, 2);
            if (lane % 4 == 0 && inside[half])
                epilogue.sums[int64_t(column / COLUMNS) * sizes.rows + first_row() + half * 8] = all;
        }
        if constexpr (epilogue_mode == GELU_BACKWARD && half == 1) {
            add_rows(shared.sums[group][warp] + strip * STRIP + lane % 4 * 8, lane);
            if constexpr (step == STEPS - 1) add_warps(epilogue, sizes, shared.sums[group], group);
        }
    }

    // Reduces over the lanes that hold the same eight columns; each step halves the columns per lane, so each lane
    // writes one.
    __device__ __forceinline__ void add_rows(float *into, int lane) {
        int column = 0;
#pragma unroll
        for (int bit = 16, left = 4; left > 0; bit /= 2, left /= 2) {
            bool high = lane & bit;
            column += high ? left : 0;
#pragma unroll
            for (int k = 0; k < left; k++) {
                float given = __shfl_xor_sync(0xffffffff, high ? total[k] : total[k + left], bit);
                total[k] = (high ? total[k + left] : total[k]) + given;
            }
        }
        into[column] = total[0];
    }

    __device__ __forceinline__ void add_warps(const EpilogueArgs &epilogue, const GemmShape &sizes, float (*sums)[COLUMNS], int group) {
        sync_group(group);
        if (epilogue.sums && row < sizes.rows) {
#pragma unroll
            for (int i = 0; i < COLUMNS / GROUP_THREADS; i++) {
                int c = threadIdx.x % GROUP_THREADS + i * GROUP_THREADS;
                float all = 0;
#pragma unroll
                for (int warp = 0; warp < GROUP_THREADS / WARP; warp++) all += sums[warp][c];
                epilogue.sums[int64_t(row / GROUP_ROWS) * sizes.columns + column + c] = all;
            }
        }
        sync_group(group);
    }
};

#endif

// `a` is (rows, k) in pieces of 64 x ROWS. `b` is (k, columns) in pieces of 64 x 64 if `n_major`, else (columns, k)
// with permuted rows, in pieces of 64 x COLUMNS / PAIR. `pre` is that of `epilogue`, in pieces of STRIP x ROWS.
template <int epilogue_mode, int n_major, int min_pieces>
__global__ void __launch_bounds__(GROUP_THREADS *(GROUPS + 1), 1)
    linear_epilogue(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                const __grid_constant__ CUtensorMap pre, EpilogueArgs epilogue, GemmShape sizes) {
#ifdef HOPPER
    extern __shared__ uint8_t memory[];
    Shared &shared = *(Shared *)(memory + (-address(memory) & (alignof(Stage) - 1)));
    __shared__ MBarrier full[STAGES], empty[STAGES], read[2], done[2];
    int block = blockIdx.x % PAIR, group = __shfl_sync(0xffffffff, threadIdx.x / GROUP_THREADS, 0), thread = threadIdx.x % GROUP_THREADS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) full[i].init(1), empty[i].init(PAIR * GROUPS);
        for (int i = 0; i < 2; i++) read[i].init(1), done[i].init(GROUPS * GROUP_THREADS / WARP);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    sync_cluster();
    int pieces = sizes.k / BLOCK_K, stage = 0, parity = 0;
    auto next_stage = [&] {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    };
    // Calls `f` with row and column of every tile of the block. Traverses the smaller operand completely before it
    // advances in the larger, so that the smaller one stays in the L2 cache.
    auto each_tile = [&](auto f) {
        int wide = (sizes.columns + COLUMNS - 1) / COLUMNS, high = (sizes.rows + PAIR * ROWS - 1) / (PAIR * ROWS);
        for (int pair = blockIdx.x / PAIR; pair < high * wide; pair += gridDim.x / PAIR) {
            int y = wide < high ? pair / wide : pair % high, x = wide < high ? pair % wide : pair / high;
            f((y * PAIR + block) * ROWS, x * COLUMNS);
        }
    };
    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (thread == 0) {
            each_tile([&](int row, int column) {
                for (int piece = 0; piece < pieces; piece++, next_stage()) {
                    empty[stage].wait(parity ^ 1);
                    full[stage].expect(sizeof(Stage));
                    Stage &into = shared.stages[stage];
                    tma_load(into.a, &a, &full[stage], piece * BLOCK_K, row);
                    constexpr int HALF = COLUMNS / PAIR;
                    bf16 *half = into.b + block * HALF * BLOCK_K;
                    int from = column + block * HALF;
                    if constexpr (n_major) {
                        for (int i = 0; i < HALF; i += BLOCK_K)
                            tma_load_multicast(half + i * BLOCK_K, &b, &full[stage], from + i, piece * BLOCK_K);
                    } else tma_load_permuted_multicast(half, &b, &full[stage], piece * BLOCK_K, from / STRIP);
                }
            });
        } else if (epilogue_mode == GELU_BACKWARD && thread == WARP) {
            each_tile([&](int row, int column) {
                for (int strip = 0; strip < COLUMNS / STRIP; strip++) {
                    int side = strip % 2;
                    done[side].wait(parity ^ 1);
                    read[side].expect(sizeof shared.pre[side]);
                    tma_load(shared.pre[side], &pre, &read[side], column + strip * STRIP, row);
                    parity ^= side;
                }
            });
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        float sums[128];
        EpilogueTile<epilogue_mode, n_major> pending_tile;
        bool has_pending = false;
        int last = 0, read_parity = 0;
        auto begin_k_block = [&](int piece) {
            full[stage].wait(parity);
            Stage &from = shared.stages[stage];
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < BLOCK_K; k += 16) {
                uint64_t left = smem_descriptor(from.a + group * GROUP_ROWS * BLOCK_K + k, 16);
                uint64_t right = n_major ? smem_descriptor(from.b + k * BLOCK_K, BLOCK_K * BLOCK_K * sizeof(bf16)) : smem_descriptor(from.b + k, 16);
                wgmma_m64n256k16<n_major>(sums, left, right, piece + k);
            }
            wgmma_commit();
        };
        auto release = [&] {
            if (thread < PAIR) empty[last].arrive(thread);
        };
        auto end_k_block = [&](int piece) {
            wgmma_wait_group<1>();
            if (piece > 0) release();
            last = stage;
            next_stage();
        };
        auto epilogue_step = [&](auto step) {
            pending_tile.template epilogue_step<step>(epilogue, sizes, shared, read, done, group, read_parity);
        };
        each_tile([&](int row, int column) {
            each<0, min_pieces>([&](auto piece) {
                begin_k_block(piece);
                if (has_pending) each<piece * STEPS / min_pieces, (piece + 1) * STEPS / min_pieces>(epilogue_step);
                end_k_block(piece);
            });
            for (int piece = min_pieces; piece < pieces; piece++) begin_k_block(piece), end_k_block(piece);
            Pack<bf16, 2> bias[32];
            if constexpr (epilogue_mode == GELU_FORWARD) {
#pragma unroll
                for (int i = 0; i < 32; i++) bias[i] = Pack<bf16, 2>::load(epilogue.bias + column + pending_tile.pair_column(i));
            }
            wgmma_wait_group<0>();
            release();
            pending_tile.row = row + group * GROUP_ROWS, pending_tile.column = column, has_pending = true;
            pending_tile.store_accumulators(sums, bias, epilogue, sizes);
        });
        if (has_pending) each<0, STEPS>(epilogue_step);
    }
    sync_cluster(); // a block must not exit while its peer may still arrive at its barriers
#endif
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's `cuTensorMapEncodeTiled`; null if it has none.
Encode tensor_map_encoder() {
    static Encode found = [] {
        void *at = nullptr;
        cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
        auto code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &at, 12000, cudaEnableDefault, &result);
#else
        auto code = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &at, cudaEnableDefault, &result);
#endif
        return code == cudaSuccess && result == cudaDriverEntryPointSuccess ? Encode(at) : nullptr;
    }();
    return found;
}

template <int rank>
int encode(CUtensorMap *out, const void *data, const cuuint64_t (&sizes)[rank], const cuuint64_t *strides,
           const cuuint32_t (&piece)[rank]) {
    cuuint32_t steps[rank];
    for (cuuint32_t &step : steps) step = 1;
    bool whole = piece[0] * sizeof(bf16) == 128;
    return tensor_map_encoder()(out, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void *>(data), sizes, strides, piece, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, whole ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// Tensor map of a row-major matrix in boxes of `wide` x `high`.
int tensor_map(CUtensorMap *out, const void *data, cuuint64_t rows, cuuint64_t columns, cuuint32_t wide, cuuint32_t high) {
    cuuint64_t strides[] = {columns * sizeof(bf16)};
    return encode<2>(out, data, {columns, rows}, strides, {wide, high});
}

// Like `tensor_map`, with the rows of every strip permuted: a thread that holds columns 0, 1, 8, 9, 16, 17, 24 and 25
// of a result (its neighbours 2, 3, 10, 11 and so on) holds the results of eight consecutive rows. The last strip is
// read in full.
int permuted_tensor_map(CUtensorMap *out, const void *data, cuuint64_t rows, cuuint64_t columns, cuuint32_t wide, cuuint32_t high) {
    cuuint64_t row = columns * sizeof(bf16), strides[] = {row, 8 * row, 2 * row, STRIP * row};
    return encode<5>(out, data, {columns, 2, 4, 4, (rows + STRIP - 1) / STRIP}, strides, {wide, 2, 4, 4, high / STRIP});
}

// Dynamic shared memory per block, including alignment slack.
constexpr int BYTES = sizeof(Shared) + alignof(Stage);

// Blocks to launch: one per SM, in pairs; 0 if this kernel was not compiled for the GPU.
template <int epilogue_mode, int n_major, int min_pieces> int grid_blocks() {
    static int blocks = [] {
        cudaFuncAttributes found{};
        int device = 0, processors = 0;
        // A kernel compiled with an empty body has no barriers, and so no static shared memory.
        auto *kernel = linear_epilogue<epilogue_mode, n_major, min_pieces>;
        bool compiled = cudaFuncGetAttributes(&found, kernel) == cudaSuccess && found.sharedSizeBytes > 0;
        bool supported = compiled && tensor_map_encoder() &&
                    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES) == cudaSuccess &&
                    cudaGetDevice(&device) == cudaSuccess &&
                    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
        cudaGetLastError(); // clears the error: an unsupported GPU is not a failure
        return supported ? processors / PAIR * PAIR : 0;
    }();
    return blocks;
}

template <int epilogue_mode, int n_major, int min_pieces = MANY_PIECES>
int launch(const void *x, const void *w, const EpilogueArgs &epilogue, const GemmShape &sizes, cudaStream_t stream) {
    if (sizes.k < FEW_PIECES * BLOCK_K || sizes.k % BLOCK_K != 0) return cudaErrorInvalidValue;
    if constexpr (min_pieces == MANY_PIECES)
        if (sizes.k < MANY_PIECES * BLOCK_K) return launch<epilogue_mode, n_major, FEW_PIECES>(x, w, epilogue, sizes, stream);
    CUtensorMap a, b, pre{};
    int code = tensor_map(&a, x, sizes.rows, sizes.k, BLOCK_K, ROWS);
    if (!code && epilogue_mode == GELU_BACKWARD) code = tensor_map(&pre, epilogue.pre, sizes.rows, sizes.columns, STRIP, ROWS);
    if (!code && n_major) code = tensor_map(&b, w, sizes.k, sizes.columns, BLOCK_K, BLOCK_K);
    if (!code && !n_major) code = permuted_tensor_map(&b, w, sizes.columns, sizes.k, BLOCK_K, COLUMNS / PAIR);
    if (code) return code;
    cudaLaunchAttribute pair{};
    pair.id = cudaLaunchAttributeClusterDimension;
    pair.val.clusterDim = {PAIR, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = grid_blocks<epilogue_mode, n_major, min_pieces>(); // 0, a launch error, on an unsupported GPU
    config.blockDim = GROUP_THREADS * (GROUPS + 1);
    config.dynamicSmemBytes = BYTES, config.stream = stream, config.attrs = &pair, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, linear_epilogue<epilogue_mode, n_major, min_pieces>, a, b, pre, epilogue, sizes);
}

} // namespace

// Whether this GPU supports the kernels below.
extern "C" int linear_hopper_available() {
    return grid_blocks<GELU_FORWARD, 0, MANY_PIECES>(); // needs what all of them need
}

// `pre = x w + bias` and `out = gelu(pre)`; `w` is (k, columns) if `n_major`, else (columns, k).
extern "C" int linear_hopper_gelu(const void *x, const void *w, int n_major, const void *bias, void *out, void *pre, int rows,
                                  int columns, int k, cudaStream_t stream) {
    EpilogueArgs epilogue{(bf16 *)out, (bf16 *)pre, (const bf16 *)bias, nullptr, columns, nullptr};
    GemmShape sizes{rows, columns, k};
    return n_major ? launch<GELU_FORWARD, 1>(x, w, epilogue, sizes, stream) : launch<GELU_FORWARD, 0>(x, w, epilogue, sizes, stream);
}

// `out = (x w) gelu'(pre)` and `pre = gelu(pre)`. If `bias` is not null, the column sums of `out` accumulate into it,
// through `sums`: (ceil(rows / 64), columns).
extern "C" int linear_hopper_gelu_backward(const void *x, const void *w, int n_major, void *out, void *pre, void *sums, void *bias,
                                   int rows, int columns, int k, cudaStream_t stream) {
    EpilogueArgs epilogue{(bf16 *)out, (bf16 *)pre, nullptr, bias ? (float *)sums : nullptr, columns, nullptr};
    GemmShape sizes{rows, columns, k};
    int code = n_major ? launch<GELU_BACKWARD, 1>(x, w, epilogue, sizes, stream) : launch<GELU_BACKWARD, 0>(x, w, epilogue, sizes, stream);
    if (code || !bias) return code;
    launch_add_partials<float>((float *)sums, GradTargets<float>{{(float *)bias}, 1}, (rows + GROUP_ROWS - 1) / GROUP_ROWS, columns, stream);
    return cudaGetLastError();
}

// `out = exp(x w' - base)`, with w (columns, k) and one `base` per row, in rows of `stride` values, zero from `columns`
// on, and its sums over every 256 columns. Rows of `w` are read up to the next multiple of 32. `stride` is a multiple
// of 32 and at least `columns`.
extern "C" int linear_hopper_exp_logits(const void *x, const void *w, const float *base, void *out, int stride, float *sums, int rows,
                                    int columns, int k, cudaStream_t stream) {
    EpilogueArgs epilogue{(bf16 *)out, nullptr, nullptr, sums, stride, base};
    return launch<EXP_LOGITS, 0>(x, w, epilogue, GemmShape{rows, columns, k}, stream);
}
