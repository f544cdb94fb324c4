// Operations on one token's row: embedding, norms, rope and KV write, the gate.
#include "common.cuh"

constexpr int ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / 32;

// residual[token] = scale * table[id]. Grid: tokens.
KERNEL __launch_bounds__(ROW_THREADS) embed(const int* counts, const int* token_src, const int* last_token, const bf16* table,
                                            float scale, float* residual, int hidden) {
    release_successor();
    wait_for_predecessor();
    const int token = blockIdx.x;
    if (token >= counts[N_TOKENS]) return;
    const int source = token_src[token];
    const int id = source >= 0 ? source : last_token[-source - 1];
    const bf16* row = table + (size_t)id * hidden;
    float* out = residual + (size_t)token * hidden;
    for (int i = threadIdx.x; i < hidden; i += ROW_THREADS) out[i] = scale * __bfloat162float(row[i]);
}

// What a thread holds of a row: four neighbours at a time. Wider rows are read again from memory.
constexpr int HELD = 8, HELD_WIDTH = HELD * 4 * ROW_THREADS;

struct Four {
    float x[4];
};

__device__ __forceinline__ Four read_four(const float* p) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    return {v.x, v.y, v.z, v.w};
}

__device__ __forceinline__ uint2 read_packed(const bf16* p) {
    return *reinterpret_cast<const uint2*>(p);
}

// Norms a row: `put(index, values)` gets four neighbours of norm(x) * weight at a time. Weights, which no kernel writes, are read
// before the kernel in front has ended. Widths are multiples of 4.
template <typename Source, typename Put>
__device__ __forceinline__ void norm_row(Source source, const bf16* weight, float eps, int width, Put put) {
    uint2 weights[HELD];
    Four values[HELD];
    const int first = threadIdx.x * 4, step = 4 * ROW_THREADS;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (first + k * step < width) weights[k] = read_packed(weight + first + k * step);
    }
    release_successor();
    wait_for_predecessor();
    const float* x = source();
    if (x == nullptr) return;
    float squares = 0.f;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (first + k * step >= width) break;
        values[k] = read_four(x + first + k * step);
#pragma unroll
        for (int c = 0; c < 4; c++) squares = fmaf(values[k].x[c], values[k].x[c], squares);
    }
    for (int i = first + HELD_WIDTH; i < width; i += step) {
        const Four more = read_four(x + i);
#pragma unroll
        for (int c = 0; c < 4; c++) squares = fmaf(more.x[c], more.x[c], squares);
    }
    const float factor = rsqrtf(block_sum<ROW_WARPS>(squares) / width + eps);
    auto finish = [&](int i, const Four& y, uint2 w) {
        const float by[4] = {low_half(w.x), high_half(w.x), low_half(w.y), high_half(w.y)};
        put(i, Four{y.x[0] * factor * by[0], y.x[1] * factor * by[1], y.x[2] * factor * by[2], y.x[3] * factor * by[3]});
    };
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (first + k * step >= width) break;
        finish(first + k * step, values[k], weights[k]);
    }
    for (int i = first + HELD_WIDTH; i < width; i += step) finish(i, read_four(x + i), read_packed(weight + i));
}

__device__ __forceinline__ void store_four(bf16* p, const Four& y) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack(y.x[0], y.x[1]), pack(y.x[2], y.x[3]));
}

// out = norm(x) * weight. Grid: tokens.
KERNEL __launch_bounds__(ROW_THREADS) rms_norm(const int* counts, const float* x, const bf16* weight, float eps, bf16* out, int width) {
    const size_t at = (size_t)blockIdx.x * width;
    norm_row([&] { return (int)blockIdx.x < counts[N_TOKENS] ? x + at : nullptr; }, weight, eps, width,
             [&](int i, const Four& y) { store_four(out + at + i, y); });
}

// The same for rows whose logits are wanted, one behind the other; without `rows` they stand so already. Grid: rows of the pass.
KERNEL __launch_bounds__(ROW_THREADS) rms_norm_rows(const int* counts, const LogitRow* rows, int first, const float* residual,
                                                    const bf16* weight, float eps, bf16* out, int width) {
    const int row = first + blockIdx.x;
    norm_row([&] { return row < counts[N_LOGIT_ROWS] ? residual + (size_t)(rows ? rows[row].token : row) * width : nullptr; }, weight, eps, width,
             [&](int i, const Four& y) { store_four(out + (size_t)blockIdx.x * width + i, y); });
}

// Rows whose logits are wanted, one behind the other: what attention gave them, and their residual. Grid: logit rows.
KERNEL __launch_bounds__(ROW_THREADS) narrow(const int* counts, const LogitRow* rows, const bf16* attended, const float* residual,
                                             bf16* attended_out, float* residual_out, int query, int hidden) {
    release_successor();
    wait_for_predecessor();
    const size_t to = blockIdx.x;
    if (to >= counts[N_LOGIT_ROWS]) return;
    const size_t from = rows[to].token;
    for (int i = threadIdx.x * 8; i < query; i += ROW_THREADS * 8) {
        *reinterpret_cast<uint4*>(attended_out + to * query + i) = *reinterpret_cast<const uint4*>(attended + from * query + i);
    }
    for (int i = threadIdx.x * 4; i < hidden; i += ROW_THREADS * 4) {
        *reinterpret_cast<float4*>(residual_out + to * hidden + i) = *reinterpret_cast<const float4*>(residual + from * hidden + i);
    }
}

// residual += norm(y) * weight. Grid: tokens.
KERNEL __launch_bounds__(ROW_THREADS) add_rms_norm(const int* counts, const float* y, const bf16* weight, float eps, float* residual, int width) {
    const size_t at = (size_t)blockIdx.x * width;
    norm_row([&] { return (int)blockIdx.x < counts[N_TOKENS] ? y + at : nullptr; }, weight, eps, width, [&](int i, const Four& z) {
        float4* to = reinterpret_cast<float4*>(residual + at + i);
        const float4 before = *to;
        *to = make_float4(before.x + z.x[0], before.y + z.x[1], before.z + z.x[2], before.w + z.x[3]);
    });
}

constexpr int HEAD_DIM_MAX = 256, PAIRS_MAX = HEAD_DIM_MAX / 2 / 32;

// One head in registers: lane l has pairs l, l + 32, ... of (i, i + head_dim / 2).
struct Head {
    float low[PAIRS_MAX], high[PAIRS_MAX];
};

__device__ __forceinline__ Head read_head(const bf16* row, const bf16* bias, int half) {
    Head head = {};
#pragma unroll
    for (int p = 0; p < PAIRS_MAX; p++) {
        const int i = threadIdx.x + 32 * p;
        if (i >= half) break;
        head.low[p] = __bfloat162float(row[i]) + (bias ? __bfloat162float(bias[i]) : 0.f);
        head.high[p] = __bfloat162float(row[i + half]) + (bias ? __bfloat162float(bias[i + half]) : 0.f);
    }
    return head;
}

__device__ __forceinline__ void norm_head(Head& head, const bf16* weight, float eps, int half) {
    float squares = 0.f;
#pragma unroll
    for (int p = 0; p < PAIRS_MAX; p++) squares += head.low[p] * head.low[p] + head.high[p] * head.high[p];
    const float factor = rsqrtf(warp_sum(squares) / (2 * half) + eps);
#pragma unroll
    for (int p = 0; p < PAIRS_MAX; p++) {
        const int i = threadIdx.x + 32 * p;
        if (i >= half) break;
        head.low[p] *= factor * __bfloat162float(weight[i]);
        head.high[p] *= factor * __bfloat162float(weight[i + half]);
    }
}

__device__ __forceinline__ void rotate_head(Head& head, const float2* rope, int half) {
#pragma unroll
    for (int p = 0; p < PAIRS_MAX; p++) {
        const int i = threadIdx.x + 32 * p;
        if (i >= half) break;
        turn(head.low[p], head.high[p], rope[i]);
    }
}

// Biases, q/k norm, rope; q in place, k and v to the cache. Grid: tokens x groups of heads; block: 32 x warps, a warp a head.
KERNEL __launch_bounds__(ROW_THREADS) qkv_finish(const int* counts, const int* positions, const int* kv_places, bf16* qkv, const bf16* bias,
                                                 const bf16* q_norm, const bf16* k_norm, float eps, const float2* rope, int q_heads,
                                                 int kv_heads, int head_dim, void* k_cache, void* v_cache, int kv_dtype) {
    release_successor();
    wait_for_predecessor();
    const int token = blockIdx.x;
    if (token >= counts[N_TOKENS]) return;
    const int place = kv_places[token], half = head_dim / 2, heads = q_heads + 2 * kv_heads;
    bf16* row = qkv + (size_t)token * heads * head_dim;
    const float2* angles = rope + (size_t)positions[token] * half;
    for (int index = blockIdx.y * blockDim.y + threadIdx.y; index < heads; index += gridDim.y * blockDim.y) {
        const bool is_q = index < q_heads, is_v = index >= q_heads + kv_heads;
        if (!is_q && place < 0) continue;
        Head head = read_head(row + index * head_dim, bias ? bias + index * head_dim : nullptr, half);
        const bf16* norm = is_q ? q_norm : k_norm;
        if (!is_v && norm) norm_head(head, norm, eps, half);
        if (!is_v) rotate_head(head, angles, half);
        const int kv_head = is_q ? 0 : index - q_heads - (is_v ? kv_heads : 0);
        const size_t base = kv_index(place, kv_head, kv_heads, head_dim);
        void* cache = is_v ? v_cache : k_cache;
#pragma unroll
        for (int p = 0; p < PAIRS_MAX; p++) {
            const int i = threadIdx.x + 32 * p;
            if (i >= half) break;
            if (is_q) {
                row[index * head_dim + i] = __float2bfloat16(head.low[p]);
                row[index * head_dim + i + half] = __float2bfloat16(head.high[p]);
            } else {
                store_kv(cache, base + i, head.low[p], kv_dtype);
                store_kv(cache, base + i + half, head.high[p], kv_dtype);
            }
        }
    }
}

// out = activation(gate) * up, 8 values a thread. Grid: tokens x pieces of a row. mlp is a multiple of 8.
KERNEL __launch_bounds__(ROW_THREADS) gate_act(const int* counts, const bf16* gate_up, bf16* out, int mlp, int activation) {
    release_successor();
    wait_for_predecessor();
    const size_t token = blockIdx.x;
    const int i = (blockIdx.y * ROW_THREADS + threadIdx.x) * 8;
    if (token >= counts[N_TOKENS] || i >= mlp) return;
    const uint4 gates = *reinterpret_cast<const uint4*>(gate_up + token * 2 * mlp + i);
    const uint4 ups = *reinterpret_cast<const uint4*>(gate_up + token * 2 * mlp + mlp + i);
    const uint32_t g[4] = {gates.x, gates.y, gates.z, gates.w}, u[4] = {ups.x, ups.y, ups.z, ups.w};
    uint32_t y[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        y[k] = pack(activate(low_half(g[k]), activation) * low_half(u[k]), activate(high_half(g[k]), activation) * high_half(u[k]));
    }
    *reinterpret_cast<uint4*>(out + token * mlp + i) = make_uint4(y[0], y[1], y[2], y[3]);
}
