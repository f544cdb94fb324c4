// Operations on one token's row: embedding, norms, rope and KV write, the gate.
#include "common.cuh"

constexpr int ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / 32;

// residual[token] = scale * table[id]. Grid: tokens. Widths are multiples of 4.
KERNEL __launch_bounds__(ROW_THREADS) embed(const int* counts, const int* token_src, const int* last_token, const bf16* table,
                                            float scale, float* residual, int hidden) {
    release_successor();
    wait_for_predecessor();
    const int token = blockIdx.x;
    if (token >= counts[N_TOKENS]) return;
    const int source = token_src[token];
    const int id = source >= 0 ? source : last_token[-source - 1];
    const uint2* row = reinterpret_cast<const uint2*>(table + (size_t)id * hidden);
    float4* out = reinterpret_cast<float4*>(residual + (size_t)token * hidden);
    // Loads of what no kernel writes need not wait for stores.
#pragma unroll 4
    for (int i = threadIdx.x; i < hidden / 4; i += ROW_THREADS) {
        const uint2 x = __ldg(row + i);
        out[i] = make_float4(scale * low_half(x.x), scale * high_half(x.x), scale * low_half(x.y), scale * high_half(x.y));
    }
}

// What a thread holds of a row: four neighbours at a time. Wider rows are read again from memory.
constexpr int HELD = 8, HELD_WIDTH = HELD * 4 * ROW_THREADS;
// Norms that a multiprocessor has room for.
constexpr int NORMS = 4;

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

// Weights that are held too.
constexpr int HELD_WEIGHTS = 4;

// Norms a row: `put(index, values)` gets four neighbours of norm(x) * weight at a time. The first weights, which no kernel writes, are
// read before the kernel in front has ended. Widths are multiples of 4.
template <typename Source, typename Put>
__device__ __forceinline__ void norm_row(Source source, const bf16* weight, float eps, int width, Put put) {
    uint2 weights[HELD_WEIGHTS];
    Four values[HELD];
    const int first = threadIdx.x * 4, step = 4 * ROW_THREADS;
#pragma unroll
    for (int k = 0; k < HELD_WEIGHTS; k++) {
        if (first + k * step < width) weights[k] = read_packed(weight + first + k * step);
    }
    release_successor();
    wait_for_predecessor();
    const float* x = source();
    if (x == nullptr) return;
    // All on their way before the first is needed.
#pragma unroll
    for (int k = 0; k < HELD; k++) values[k] = first + k * step < width ? read_four(x + first + k * step) : Four{};
    float squares = 0.f;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
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
        const int i = first + k * step;
        finish(i, values[k], k < HELD_WEIGHTS ? weights[k] : read_packed(weight + i));
    }
    for (int i = first + HELD_WIDTH; i < width; i += step) finish(i, read_four(x + i), read_packed(weight + i));
}

__device__ __forceinline__ void store_four(bf16* p, const Four& y) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack(y.x[0], y.x[1]), pack(y.x[2], y.x[3]));
}

// out = norm(x) * weight. Grid: tokens.
KERNEL __launch_bounds__(ROW_THREADS, NORMS) rms_norm(const int* counts, const float* x, const bf16* weight, float eps, bf16* out, int width) {
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
KERNEL __launch_bounds__(ROW_THREADS, NORMS) add_rms_norm(const int* counts, const float* y, const bf16* weight, float eps, float* residual, int width) {
    const size_t at = (size_t)blockIdx.x * width;
    norm_row([&] { return (int)blockIdx.x < counts[N_TOKENS] ? y + at : nullptr; }, weight, eps, width, [&](int i, const Four& z) {
        float4* to = reinterpret_cast<float4*>(residual + at + i);
        const float4 before = *to;
        *to = make_float4(before.x + z.x[0], before.y + z.x[1], before.z + z.x[2], before.w + z.x[3]);
    });
}

// Of a head a lane has eight neighbours of the first half and those that they turn with.
constexpr int EIGHT = 8;

struct Eights {
    float low[EIGHT], high[EIGHT];
};

__device__ __forceinline__ void read_eight(float (&to)[EIGHT], const bf16* from) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; k++) to[2 * k] = low_half(pairs[k]), to[2 * k + 1] = high_half(pairs[k]);
}

__device__ __forceinline__ void store_eight(bf16* to, const float (&x)[EIGHT]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

__device__ __forceinline__ void store_kv_eight(void* cache, size_t index, const float (&x)[EIGHT], int dtype) {
    if (dtype == 0) return store_eight(static_cast<bf16*>(cache) + index, x);
#pragma unroll
    for (int k = 0; k < EIGHT; k++) store_kv(cache, index + k, x[k], dtype);
}

__device__ __forceinline__ void add_bias(float (&x)[EIGHT], const bf16* bias) {
    float more[EIGHT];
    read_eight(more, bias);
#pragma unroll
    for (int k = 0; k < EIGHT; k++) x[k] += more[k];
}

// `lanes` of a warp have the head.
__device__ __forceinline__ void norm_head(Eights& head, const bf16* low_weight, const bf16* high_weight, float eps, int lanes) {
    float squares = 0.f, low[EIGHT], high[EIGHT];
    read_eight(low, low_weight), read_eight(high, high_weight);
#pragma unroll
    for (int k = 0; k < EIGHT; k++) squares += head.low[k] * head.low[k] + head.high[k] * head.high[k];
    for (int offset = lanes / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(ALL_LANES, squares, offset);
    const float factor = rsqrtf(squares / (2 * EIGHT * lanes) + eps);
#pragma unroll
    for (int k = 0; k < EIGHT; k++) head.low[k] *= factor * low[k], head.high[k] *= factor * high[k];
}

__device__ __forceinline__ void rotate_head(Eights& head, const float2* angles) {
    const float4* pairs = reinterpret_cast<const float4*>(angles);
#pragma unroll
    for (int k = 0; k < EIGHT / 2; k++) {
        const float4 two = pairs[k];
        turn(head.low[2 * k], head.high[2 * k], make_float2(two.x, two.y));
        turn(head.low[2 * k + 1], head.high[2 * k + 1], make_float2(two.z, two.w));
    }
}

// Biases, q/k norm, rope; q in place, k and v to the cache. Grid: as many blocks as run at once; a warp takes one unit after the other:
// the heads of a token that its lanes have room for, HEAD_DIM / 16 lanes a head. Heads are of 64, 128 or 256.
KERNEL __launch_bounds__(ROW_THREADS) qkv_finish(const int* counts, const int* positions, const int* kv_places, bf16* qkv, const bf16* bias,
                                                 const bf16* q_norm, const bf16* k_norm, float eps, const float2* rope, int q_heads,
                                                 int kv_heads, int head_dim, void* k_cache, void* v_cache, int kv_dtype) {
    release_successor();
    wait_for_predecessor();
    const int half = head_dim / 2, heads = q_heads + 2 * kv_heads, lanes = half / EIGHT, at_once = 32 / lanes;
    const int units = (heads + at_once - 1) / at_once, i = threadIdx.x % lanes * EIGHT;
    const int all = counts[N_TOKENS] * units, warps = gridDim.x * ROW_WARPS;
    for (int unit = blockIdx.x * ROW_WARPS + threadIdx.x / 32; unit < all; unit += warps) {
        const int token = unit / units, index = unit % units * at_once + threadIdx.x % 32 / lanes;
        // All lanes of a warp take part in a norm.
        const bool is_real = index < heads, is_q = index < q_heads, is_v = index >= q_heads + kv_heads;
        const int place = kv_places[token], at = min(index, heads - 1) * head_dim + i;
        bf16* row = qkv + (size_t)token * heads * head_dim + at;
        Eights head;
        read_eight(head.low, row), read_eight(head.high, row + half);
        if (bias) add_bias(head.low, bias + at), add_bias(head.high, bias + at + half);
        if (q_norm) {
            const bf16* norm = is_q ? q_norm : k_norm;
            Eights normed = head;
            norm_head(normed, norm + i, norm + i + half, eps, lanes);
            if (!is_v) head = normed;
        }
        if (!is_v) rotate_head(head, rope + (size_t)positions[token] * half + i);
        if (!is_real) continue;
        if (is_q) {
            store_eight(row, head.low), store_eight(row + half, head.high);
        } else if (place >= 0) {
            const size_t base = kv_index(place, index - q_heads - (is_v ? kv_heads : 0), kv_heads, head_dim) + i;
            void* cache = is_v ? v_cache : k_cache;
            store_kv_eight(cache, base, head.low, kv_dtype), store_kv_eight(cache, base + half, head.high, kv_dtype);
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
