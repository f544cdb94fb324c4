// Products of up to 16 rows, where reading the weights is all that counts. Rows of W are the first matrix, so that 16 of them meet 8
// rows of A at once; a warp has one segment.
#pragma once

#include "gemm.cuh"

constexpr int SMALL_THREADS = 32 * (SEGMENTS + 1), SMALL_N = 16;

// Queries, keys and values as they are to be: what the kernel qkv_finish does, but for norms of heads.
struct Heads {
    const int *positions, *places;
    const bf16* bias;
    const float2* rope;
    void *k_cache, *v_cache;
    int q_heads, kv_heads, half, kv_dtype;
};

struct Product {
    const bf16 *W, *A;
    void* C;
    // Gated: columns of the result; W has rows of as many gates, then of as many factors.
    int N, K, mode;
    Heads heads;

    __device__ __forceinline__ bool gated() const { return mode >= STORE_GATED && mode < STORE_HEADS; }
    // Whether rows of a tile are pairs: of a gate and its factor, or of what rope turns together.
    __device__ __forceinline__ bool paired() const { return mode >= STORE_GATED; }
    // Columns of the result that a tile makes; of heads, as many and their partners.
    __device__ __forceinline__ int columns() const { return paired() ? SMALL_N / 2 : SMALL_N; }
    __device__ __forceinline__ int tiles() const { return mode == STORE_HEADS ? N / SMALL_N : (N + columns() - 1) / columns(); }
    __device__ __forceinline__ int blocks() const { return K / K_BLOCK; }
    __device__ __forceinline__ int rounds() const { return (blocks() + ROUND - 1) / ROUND; }
    // First column of a tile. Of heads it is in a head's lower half.
    __device__ __forceinline__ int first_column(int tile) const {
        if (mode != STORE_HEADS) return tile * columns();
        const int in_head = heads.half / columns();
        return tile / in_head * (2 * heads.half) + tile % in_head * columns();
    }
    // Row of the weights that is row `i` of a tile; past the end there is none.
    __device__ __forceinline__ int row(int tile, int i) const {
        const int column = first_column(tile) + i % columns();
        if (mode == STORE_HEADS) return column + i / columns() * heads.half;
        return column < N ? column + i / columns() * N : -1;
    }
};

template <int GROUPS>
struct Sums {
    float of[SEGMENTS][SMALL_N][8 * GROUPS + 1];
};

// The tree over the segments' sums.
template <int GROUPS>
__device__ __forceinline__ float meet(const Sums<GROUPS>& sums, int column, int row) {
    float level[SEGMENTS];
#pragma unroll
    for (int s = 0; s < SEGMENTS; s++) level[s] = sums.of[s][column][row];
#pragma unroll
    for (int width = 1; width < SEGMENTS; width *= 2) {
#pragma unroll
        for (int s = 0; s < SEGMENTS; s += 2 * width) level[s] += level[s + width];
    }
    return level[0];
}

__device__ __forceinline__ float rounded(float x) {
    return __bfloat162float(__float2bfloat16(x));
}

// What a sum of a tile, or of a pair, meets when it is there: a thread has one, of 16 rows and 16 columns at most.
struct Beside {
    // Row -1: none.
    int row, column, n = 0;
    // What it is added to.
    float before = 0.f;
    // Of heads: where the row stands, where its keys and values go, cosine and sine.
    int position = 0, place = -1;
    float2 angle = {1.f, 0.f};

    // Of heads it reads what was there before the step began.
    __device__ __forceinline__ Beside(const Product& p, int m, int m_cap) : row(threadIdx.x / p.columns()), column(threadIdx.x % p.columns()) {
        if (p.mode == STORE_HEADS && row < m_cap) position = p.heads.positions[row], place = p.heads.places[row];
        if (row >= m) row = -1;
    }

    __device__ __forceinline__ void go_to(const Product& p, int tile) {
        const Heads& h = p.heads;
        n = p.first_column(tile) + column;
        if (p.mode == STORE_HEADS && row >= 0 && n / (2 * h.half) < h.q_heads + h.kv_heads) angle = h.rope[(size_t)position * h.half + n % (2 * h.half)];
    }

    __device__ __forceinline__ void load_before(const Product& p) {
        if (p.mode == STORE_ADD && row >= 0 && n < p.N) before = static_cast<const float*>(p.C)[(size_t)row * p.N + n];
    }
};

// A pair of one head, and where it goes.
__device__ __forceinline__ void store_pair(const Product& p, const Beside& beside, float low, float high) {
    const Heads& h = p.heads;
    const int column = beside.n, head = column / (2 * h.half), i = column % (2 * h.half);
    const bool is_q = head < h.q_heads, is_v = head >= h.q_heads + h.kv_heads;
    if (!is_q && beside.place < 0) return;
    if (h.bias) low += __bfloat162float(h.bias[column]), high += __bfloat162float(h.bias[column + h.half]);
    if (!is_v) turn(low, high, beside.angle);
    if (is_q) {
        bf16* to = static_cast<bf16*>(p.C) + (size_t)beside.row * p.N + column;
        to[0] = __float2bfloat16(low), to[h.half] = __float2bfloat16(high);
        return;
    }
    const size_t at = kv_index(beside.place, head - h.q_heads - (is_v ? h.kv_heads : 0), h.kv_heads, 2 * h.half) + i;
    void* cache = is_v ? h.v_cache : h.k_cache;
    store_kv(cache, at, low, h.kv_dtype), store_kv(cache, at + h.half, high, h.kv_dtype);
}

// Sums of the segments to C. Those of a pair are rounded before they meet, as they are where a kernel of its own does that.
template <int GROUPS>
__device__ __forceinline__ void store_tile(const Sums<GROUPS>& sums, const Product& p, const Beside& beside) {
    if (beside.row < 0 || beside.n >= p.N) return;
    const size_t at = (size_t)beside.row * p.N + beside.n;
    const float x = meet<GROUPS>(sums, beside.column, beside.row);
    if (p.mode == STORE_ADD) {
        static_cast<float*>(p.C)[at] = beside.before + x;
        return;
    }
    if (!p.paired()) return put(p.C, at, x, p.mode);
    const float y = rounded(meet<GROUPS>(sums, beside.column + p.columns(), beside.row));
    if (p.gated()) {
        put(p.C, at, activate(rounded(x), p.mode - STORE_GATED) * y, STORE_BF16);
    } else {
        store_pair(p, beside, rounded(x), y);
    }
}

template <int GROUPS>
__device__ __forceinline__ void keep_sums(Sums<GROUPS>& sums, const float (&c)[GROUPS][4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
#pragma unroll
        for (int k = 0; k < 4; k++) sums.of[warp][g + k / 2 * 8][i * 8 + t * 2 + k % 2] = c[i][k];
    }
}

// Rows of A for one slice; zeros past M and past K.
template <int GROUPS>
__device__ __forceinline__ void load_inputs(uint4 (&x)[GROUPS][SLICE], const bf16* A, int K, int m, int first_block) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < SLICE; c++) {
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            const int row = i * 8 + g, k = (first_block + c) * K_BLOCK + t * 8;
            x[i][c] = load_plain(A + (size_t)row * K + k, row < m && k < K);
        }
    }
}
