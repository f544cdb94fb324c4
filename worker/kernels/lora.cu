// LoRA: y += B (scale * A x) for the tokens whose row has an adapter. A token's sums are the same whatever stands beside it.
#include "common.cuh"

// What an adapter adds to some of a product's outputs; worker/src/backend/cuda/lora.rs has the same. `a` is null where it adds nothing.
struct LoraPart {
    const bf16* a;  // [rank][k]
    const bf16* b;  // [outputs][rank]
    int rank, first, outputs;
    float scale;
};
static_assert(sizeof(LoraPart) == 32);

constexpr int TILE_MAX = 8, RANK_MAX = 512, WARPS = 8;

// Tokens from `first` on, at most `most`, that have the same adapter as it.
__device__ __forceinline__ int run_length(const int* slots, int first, int most) {
    int length = 1;
    while (length < most && slots[first + length] == slots[first]) length++;
    return length;
}

__device__ __forceinline__ float dot8(uint4 x, uint4 a, float sum) {
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, as[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum = fmaf(low_half(xs[i]), low_half(as[i]), sum);
        sum = fmaf(high_half(xs[i]), high_half(as[i]), sum);
    }
    return sum;
}

// low[token][part][rank] = scale * A x. A block has `tile` tokens and eight rows of A of one part, a warp each. k is a multiple of 8.
KERNEL lora_shrink(const int* counts, const int* slots, const LoraPart* parts, int n_parts, const bf16* x, int k, float* low, int max_rank, int tile) {
    wait_for_predecessor();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int groups = (max_rank + WARPS - 1) / WARPS;
    const int part = blockIdx.y / groups, r = blockIdx.y % groups * WARPS + warp;
    const int begin = blockIdx.x * tile, end = min(begin + tile, counts[N_TOKENS]);
    for (int first = begin; first < end;) {
        const int run = run_length(slots, first, end - first), slot = slots[first];
        const LoraPart p = slot > 0 ? parts[(slot - 1) * n_parts + part] : LoraPart{};
        if (p.a != nullptr && r < p.rank) {
            float sums[TILE_MAX] = {};
            const bf16* row = p.a + (size_t)r * k;
            for (int at = lane * 8; at < k; at += 32 * 8) {
                const uint4 a = *reinterpret_cast<const uint4*>(row + at);
#pragma unroll
                for (int t = 0; t < TILE_MAX; t++) {
                    if (t < run) sums[t] = dot8(*reinterpret_cast<const uint4*>(x + (size_t)(first + t) * k + at), a, sums[t]);
                }
            }
#pragma unroll
            for (int t = 0; t < TILE_MAX; t++) {
                if (t >= run) break;
                const float sum = warp_sum(sums[t]);
                if (lane == 0) low[((size_t)(first + t) * n_parts + part) * max_rank + r] = p.scale * sum;
            }
        }
        first += run;
    }
}

// y[token][first + j] += B[j] low, in f32 and rounded once more where y is bf16. A block has `tile` tokens and 256 outputs of one part.
KERNEL lora_expand(const int* counts, const int* slots, const LoraPart* parts, int n_parts, const float* low, int max_rank, void* y, int n, int is_bf16, int tile) {
    __shared__ float lows[TILE_MAX][RANK_MAX];
    wait_for_predecessor();
    const int part = blockIdx.y % n_parts, j = blockIdx.y / n_parts * blockDim.x + threadIdx.x;
    const int begin = blockIdx.x * tile, end = min(begin + tile, counts[N_TOKENS]);
    for (int first = begin; first < end;) {
        const int run = run_length(slots, first, end - first), slot = slots[first];
        const LoraPart p = slot > 0 ? parts[(slot - 1) * n_parts + part] : LoraPart{};
        if (p.a != nullptr) {
            __syncthreads();
            for (int i = threadIdx.x; i < run * p.rank; i += blockDim.x)
                lows[i / p.rank][i % p.rank] = low[((size_t)(first + i / p.rank) * n_parts + part) * max_rank + i % p.rank];
            __syncthreads();
            if (j < p.outputs) {
                float sums[TILE_MAX] = {};
                const bf16* row = p.b + (size_t)j * p.rank;
                for (int r = 0; r < p.rank; r++) {
                    const float b = __bfloat162float(row[r]);
#pragma unroll
                    for (int t = 0; t < TILE_MAX; t++) sums[t] = fmaf(b, lows[t][r], sums[t]);
                }
#pragma unroll
                for (int t = 0; t < TILE_MAX; t++) {
                    if (t >= run) break;
                    const size_t at = (size_t)(first + t) * n + p.first + j;
                    if (is_bf16) {
                        bf16* out = static_cast<bf16*>(y) + at;
                        *out = __float2bfloat16(__bfloat162float(*out) + sums[t]);
                    } else {
                        static_cast<float*>(y)[at] += sums[t];
                    }
                }
            }
        }
        first += run;
    }
}
