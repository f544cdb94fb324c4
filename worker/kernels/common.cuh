// What all kernels share: types of the step buffer (worker/src/backend/cuda/abi.rs has the same), loads, reductions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;

#define KERNEL extern "C" __global__ void

constexpr int BLOCK_TOKENS = 16;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;

// Places in `counts`. Those of a KV group are followed by the other group's.
constexpr int N_TOKENS = 0, N_LOGIT_ROWS = 1, N_SPLIT = 2, N_MERGE = 4, N_WHOLE = 6, N_SLOT_INITS = 8, N_DECODE = 9, N_SHARED = 11,
              N_POOLED = 13;
// Query rows that a partial result has room for.
constexpr int PARTIAL_ROWS = 16;

struct RowMeta {
    int start, len, context, slot;
    int table_offset[2], table_first[2];
};

struct AttnItem {
    int row, q_start, chunk, partial;
};

struct MergeItem {
    int row, q_start, partial_first, n_partials;
};

struct DecodeItem {
    // Of the row, as RowMeta has them; where its table would begin if it had all blocks.
    int row, start, len, context, table, key_begin, key_end;
    // Where its result goes, -1: it is the row's only run, and what it meets is written. All parts of the row, those of its runs last
    // (of an only run there is none); runs whose blocks meet.
    int partial, partial_first, n_partials, n_runs, reserved;
};

// One-token rows that stand one behind the other, and keys that all of them have: whole tiles. The first row's result goes to `partial`,
// the next one's `stride` behind it.
struct SharedItem {
    int row, n_rows, key_begin, key_end, partial, stride;
};

struct LogitRow {
    int token, slot, target, top, output_index, mask;
};

struct PooledRow {
    int start, len, slot, goes_on, vector;
};

struct SlotParams {
    float temperature;
    int top_k;
    float top_p, min_p, presence, frequency, repetition;
    int choice;
    unsigned long long seed;
    int min_tokens, n_bias, n_end, has_penalty;
    int reserved[2];

    // Whether logits are changed before this output is drawn.
    __device__ __forceinline__ bool edits(int output_index) const { return n_bias > 0 || (n_end > 0 && output_index < min_tokens); }
};

struct Bias {
    int id;
    float value;
};

struct SlotInit {
    int slot, last_token, tokens_offset, n_prompt, n_output, bias_offset, end_offset, reserved;
    SlotParams params;
};

constexpr int BIAS_MAX = 1024, END_IDS_MAX = 272, TOP_MAX = 20;

struct Sampled {
    int token;
    float logprob;
    int rank;
    float target_logprob;
    int target_rank, n_top;
    int top_ids[TOP_MAX];
    float top_logprobs[TOP_MAX];
};

static_assert(sizeof(RowMeta) == 32 && sizeof(AttnItem) == 16 && sizeof(MergeItem) == 16 && sizeof(DecodeItem) == 48 && sizeof(SharedItem) == 24);
static_assert(sizeof(LogitRow) == 24 && sizeof(PooledRow) == 20 && sizeof(SlotParams) == 64 && sizeof(SlotInit) == 96 && sizeof(Sampled) == 184);

// Waits until the kernel before this one has ended and its writes are seen. Does nothing for a launch that was not
// asked to overlap, or before Hopper.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel behind this one start; it still waits for this one's end before it reads.
__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes, or zeros. Weights are read once a step: past L1.
__device__ __forceinline__ uint4 load_stream(const void* p, bool real) {
    uint4 v;
    asm volatile(
        "{.reg .pred real; setp.ne.s32 real, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
        "@real ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "r"((int)real));
    return v;
}

// The same for what other kernels write.
__device__ __forceinline__ uint4 load_plain(const void* p, bool real) {
    uint4 v;
    asm volatile(
        "{.reg .pred real; setp.ne.s32 real, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
        "@real ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "r"((int)real));
    return v;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes to shared memory, or zeros; not waited for.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t address, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// c[16][8] += a[16][16] b[8][16]^T. A lane has rows lane / 4 and lane / 4 + 8, columns lane % 4 * 2 and + 1 of c.
__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Eight rows of eight 16-bit numbers: a lane gives two neighbours of row lane / 4, and gets two of column lane / 4.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
    uint32_t turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ float low_half(uint32_t pair) {
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float high_half(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float inverse_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// GELU by tanh (Hendrycks and Gimpel, arXiv 1606.08415) is x times the logistic function of x * (GELU_LINEAR + GELU_CUBIC * x * x).
constexpr float GELU_LINEAR = 2.f * 0.7978845608028654f, GELU_CUBIC = GELU_LINEAR * 0.044715f;

__device__ __forceinline__ float activate(float x, int activation) {
    const float z = activation == 0 ? x : x * fmaf(GELU_CUBIC, x * x, GELU_LINEAR);
    return x * inverse_fast(1.f + exp2_fast(-LOG2_E * z));
}

// Rope of one pair of a head, by cosine and sine of its angle: the same bits in all kernels, whatever the compiler would contract.
__device__ __forceinline__ void turn(float& low, float& high, float2 angle) {
    const float turned = fmaf(low, angle.x, -__fmul_rn(high, angle.y));
    high = fmaf(high, angle.x, __fmul_rn(low, angle.y));
    low = turned;
}

// Where a head of one token stands in a layer's keys or values; `place` is block * BLOCK_TOKENS + offset.
__device__ __forceinline__ size_t kv_index(int place, int kv_head, int kv_heads, int head_dim) {
    const size_t block = place / BLOCK_TOKENS, offset = place % BLOCK_TOKENS;
    return ((block * kv_heads + kv_head) * BLOCK_TOKENS + offset) * head_dim;
}

__device__ __forceinline__ void store_kv(void* cache, size_t index, float x, int dtype) {
    if (dtype == 0) {
        static_cast<bf16*>(cache)[index] = __float2bfloat16(x);
    } else {
        const __nv_fp8_interpretation_t kind = dtype == 1 ? __NV_E4M3 : __NV_E5M2;
        static_cast<__nv_fp8_storage_t*>(cache)[index] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, kind);
    }
}

// Two neighbours, of which the first has an even index.
__device__ __forceinline__ void store_kv_pair(void* cache, size_t index, uint32_t pair, int dtype) {
    if (dtype == 0) {
        *reinterpret_cast<uint32_t*>(static_cast<bf16*>(cache) + index) = pair;
    } else {
        const __nv_fp8_interpretation_t kind = dtype == 1 ? __NV_E4M3 : __NV_E5M2;
        const float2 values = make_float2(low_half(pair), high_half(pair));
        *reinterpret_cast<__nv_fp8x2_storage_t*>(static_cast<__nv_fp8_storage_t*>(cache) + index) = __nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, kind);
    }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// Sum over a block of WARPS warps, the same in every thread and in every run.
template <int WARPS>
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float sums[WARPS];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) total += sums[warp];
    __syncthreads();
    return total;
}
