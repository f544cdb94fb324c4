// Weights on Hopper stream through a ring in shared memory: one warp sends for them, the others multiply.
#pragma once

#include "barrier.cuh"
#include "gemm_small.cuh"

#if __CUDA_ARCH__ >= 900

// Bytes of a row and stage; the pitch keeps eight rows in different banks.
constexpr int RING = 3, ROUND_BYTES = ROUND * K_BLOCK * 2, PITCH = ROUND_BYTES + 64, STAGE_BYTES = SMALL_N * PITCH, RING_BYTES = RING * STAGE_BYTES;

// kernels/load.rs says the same.
static_assert(RING_BYTES == 101376);

// Threads that multiply meet here, without the warp that fetches.
__device__ __forceinline__ void sync_multiplying() {
    asm volatile("bar.sync 1, %0;" ::"n"(32 * SEGMENTS) : "memory");
}

__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint64_t& barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(shared_address(&barrier)), "l"(policy)
                 : "memory");
}

struct Ring {
    uint64_t full[RING], empty[RING];

    // By all threads of the block.
    __device__ __forceinline__ void init() {
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < RING; stage++) {
                barrier_init(full[stage], 1);
                barrier_init(empty[stage], SEGMENTS);
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
    }
};

// The warp that fetches.
struct Fetcher {
    Ring& ring;
    const uint32_t memory;
    int index = 0;

    // Weights of the product's tiles from this one on that are this block's. The ring is first filled stage by stage: all at once they
    // would not come sooner, but what the kernels in front still read would wait behind them.
    __device__ __forceinline__ void fetch(const Product& p, int first_tile) {
        const int lane = threadIdx.x % 32, blocks = p.blocks(), rounds = p.rounds(), tiles = p.tiles();
        uint64_t policy;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        for (int tile = first_tile; tile < tiles; tile += gridDim.x) {
            const int row = lane < SMALL_N ? p.row(tile, lane) : -1, rows = __popc(__ballot_sync(ALL_LANES, row >= 0));
            const char* from = reinterpret_cast<const char*>(p.W + (size_t)max(row, 0) * p.K);
            for (int round = 0; round < rounds; round++, index++) {
                const int bytes = min(ROUND_BYTES, (blocks - round * ROUND) * K_BLOCK * 2), stage = index % RING;
                if (index > 0 && index < RING) barrier_wait(ring.full[index - 1], 0);
                barrier_wait(ring.empty[stage], (index / RING & 1) ^ 1);
                if (lane == 0) barrier_expect(ring.full[stage], rows * bytes);
                __syncwarp();
                if (row >= 0) copy_bulk(memory + stage * STAGE_BYTES + lane * PITCH, from + round * ROUND_BYTES, bytes, ring.full[stage], policy);
            }
        }
    }
};

// The warps that multiply.
template <int GROUPS>
struct Multiplier {
    Ring& ring;
    Sums<GROUPS>& sums;
    const uint32_t memory;
    int stage = 0, phase = 0;

    // The product's tiles from this one on that are this block's; `beside` is at the first. `WITHIN`: A is one row, in shared memory at `inputs`.
    template <bool WITHIN>
    __device__ __forceinline__ void multiply(const Product& p, Beside& beside, int first_tile, int m, uint32_t inputs) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int blocks = p.blocks(), rounds = p.rounds(), tiles = p.tiles();
        // One group's inputs are loaded a round before they are used: while weights stream, even what is in L2 takes long to come. For
        // two there are no registers.
        constexpr bool AHEAD = GROUPS == 1 && !WITHIN;
        uint4 next[1][SLICE];
        if constexpr (AHEAD) load_inputs(next, p.A, p.K, m, warp * SLICE);
        for (int tile = first_tile; tile < tiles; tile += gridDim.x) {
            if (tile != first_tile) beside.go_to(p, tile);
            beside.load_before(p);
            float c[GROUPS][4] = {};
            for (int round = 0; round < rounds; round++) {
                const int first_block = round * ROUND + warp * SLICE;
                uint4 x[GROUPS][SLICE], upper[SLICE], lower[SLICE];
                if constexpr (AHEAD) {
#pragma unroll
                    for (int b = 0; b < SLICE; b++) x[0][b] = next[0][b];
                    load_inputs(next, p.A, p.K, m, round + 1 < rounds ? first_block + ROUND : warp * SLICE);
                } else if constexpr (WITHIN) {
                    // All rows of the second matrix are the one: what the others come to is not looked at.
#pragma unroll
                    for (int b = 0; b < SLICE; b++) x[0][b] = read_shared(inputs + ((first_block + b) * K_BLOCK + t * 8) * 2);
                } else {
                    load_inputs(x, p.A, p.K, m, first_block);
                }
                barrier_wait(ring.full[stage], phase);
                const uint32_t at = memory + stage * STAGE_BYTES + g * PITCH + warp * (SLICE * K_BLOCK * 2) + t * 16;
#pragma unroll
                for (int b = 0; b < SLICE; b++) {
                    upper[b] = read_shared(at + b * (K_BLOCK * 2));
                    lower[b] = read_shared(at + 8 * PITCH + b * (K_BLOCK * 2));
                }
#pragma unroll
                for (int b = 0; b < SLICE; b++) {
                    if (first_block + b >= blocks) break;
#pragma unroll
                    for (int i = 0; i < GROUPS; i++) multiply_block(c[i], upper[b], lower[b], x[i][b]);
                }
                // Not before the loads have arrived: the barrier does not wait for them.
                __syncwarp();
                if (lane == 0) barrier_arrive(ring.empty[stage]);
                if (++stage == RING) {
                    stage = 0;
                    phase ^= 1;
                }
            }
            keep_sums<GROUPS>(sums, c);
            sync_multiplying();
            store_tile<GROUPS>(sums, p, beside);
            sync_multiplying();
        }
    }
};

#endif
