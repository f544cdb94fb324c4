// Hidden states of prompts, normed and added up in f32.
#include "common.cuh"

constexpr int NORM_THREADS = 256, COLUMN_THREADS = 64;
// Tokens whose states are asked for before the first of them is added.
constexpr int AHEAD = 16;

// What a token's norm scales it by, before the weight. Grid: tokens.
KERNEL __launch_bounds__(NORM_THREADS) pool_scales(const int* counts, const float* residual, float eps, float* scales, int width) {
    release_successor();
    wait_for_predecessor();
    if ((int)blockIdx.x >= counts[N_TOKENS]) return;
    const float* x = residual + (size_t)blockIdx.x * width;
    float squares = 0.f;
    for (int i = threadIdx.x; i < width; i += NORM_THREADS) squares = fmaf(x[i], x[i], squares);
    const float mean = block_sum<NORM_THREADS / 32>(squares) / width;
    if (threadIdx.x == 0) scales[blockIdx.x] = rsqrtf(mean + eps);
}

// A thread adds one number of a row's tokens in the order of the prompt, behind what the slot keeps of the tokens before: one chain,
// never contracted, and so the same bits however the prompt was cut. Grid: pooled rows, columns.
KERNEL __launch_bounds__(COLUMN_THREADS) pool_rows(const int* counts, const PooledRow* rows, const float* residual, const float* scales,
                                                   const bf16* weight, float* sums, float* vectors, int width) {
    release_successor();
    wait_for_predecessor();
    const int column = blockIdx.y * COLUMN_THREADS + threadIdx.x;
    if ((int)blockIdx.x >= counts[N_POOLED] || column >= width) return;
    const PooledRow row = rows[blockIdx.x];
    const float by = __bfloat162float(weight[column]);
    const float* x = residual + (size_t)row.start * width + column;
    const float* scale = scales + row.start;
    auto add = [&](float& sum, float state, int token) { sum = __fadd_rn(sum, __fmul_rn(__fmul_rn(state, scale[token]), by)); };
    float* kept = sums + (size_t)row.slot * width + column;
    float sum = row.goes_on ? *kept : 0.f;
    int token = 0;
    for (; token + AHEAD <= row.len; token += AHEAD) {
        float states[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) states[i] = x[(size_t)(token + i) * width];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) add(sum, states[i], token + i);
    }
    for (; token < row.len; token++) add(sum, x[(size_t)token * width], token);
    *(row.vector < 0 ? kept : vectors + (size_t)row.vector * width + column) = sum;
}
