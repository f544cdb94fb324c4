// Filling, converting and copying memory; slots.
#include "common.cuh"

__device__ __forceinline__ uint64_t first_index() {
    return blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
}

__device__ __forceinline__ uint64_t stride() {
    return (uint64_t)gridDim.x * blockDim.x;
}

// splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014).
__device__ __forceinline__ uint64_t scramble(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Uniform in [-scale, scale), a function of seed and index.
KERNEL fill_random(bf16* out, unsigned long long n, unsigned long long seed, float scale) {
    wait_for_predecessor();
    const uint64_t key = scramble(seed + 0x9e3779b97f4a7c15ull);
    for (uint64_t i = first_index(); i < n; i += stride()) {
        const int bits = (int)(scramble(key + i * 0x9e3779b97f4a7c15ull) >> 32);
        out[i] = __float2bfloat16(scale * (bits * (1.f / 2147483648.f)));
    }
}

KERNEL fill_value(bf16* out, unsigned long long n, float value) {
    wait_for_predecessor();
    for (uint64_t i = first_index(); i < n; i += stride()) out[i] = __float2bfloat16(value);
}

KERNEL f32_to_bf16(const float* in, bf16* out, unsigned long long n) {
    wait_for_predecessor();
    for (uint64_t i = first_index(); i < n; i += stride()) out[i] = __float2bfloat16(in[i]);
}

KERNEL f16_to_bf16(const __half* in, bf16* out, unsigned long long n) {
    wait_for_predecessor();
    for (uint64_t i = first_index(); i < n; i += stride()) out[i] = __float2bfloat16(__half2float(in[i]));
}

// Copies whole blocks of one layer's keys and values, pair after pair: a later pair may read what an earlier one wrote,
// at the same bytes, which are the same thread's.
KERNEL copy_blocks(char* k, char* v, unsigned long long block_bytes, const int2* pairs, int n) {
    wait_for_predecessor();
    for (int pair = 0; pair < n; pair++) {
        const uint64_t from = pairs[pair].x * block_bytes, to = pairs[pair].y * block_bytes;
        for (uint64_t i = first_index() * 16; i < block_bytes; i += stride() * 16) {
            *reinterpret_cast<uint4*>(k + to + i) = *reinterpret_cast<const uint4*>(k + from + i);
            *reinterpret_cast<uint4*>(v + to + i) = *reinterpret_cast<const uint4*>(v + from + i);
        }
    }
}

// Words of a step to where kernels read it, or of its results to where the host does: one of both is host memory. Grid: a thread a word.
KERNEL copy_words(const unsigned long long* from, unsigned long long* to, int n) {
    wait_for_predecessor();
    const uint64_t i = first_index();
    if (i < n) to[i] = from[i];
}

constexpr unsigned IN_PROMPT = 0x80000000u;

// Hands slots to new sequences. Grid: at least the step's new slots.
KERNEL slots_init(const int* counts, const SlotInit* inits, const int* tokens, const Bias* init_bias, const int* init_end,
                  SlotParams* params, Bias* slot_bias, int* slot_end, int* last_token, unsigned* seen, int vocab) {
    wait_for_predecessor();
    if (blockIdx.x >= counts[N_SLOT_INITS]) return;
    const SlotInit& init = inits[blockIdx.x];
    const int slot = init.slot;
    if (threadIdx.x == 0) {
        params[slot] = init.params;
        last_token[slot] = init.last_token;
    }
    for (int i = threadIdx.x; i < init.params.n_bias; i += blockDim.x) slot_bias[slot * BIAS_MAX + i] = init_bias[init.bias_offset + i];
    for (int i = threadIdx.x; i < init.params.n_end; i += blockDim.x) slot_end[slot * END_IDS_MAX + i] = init_end[init.end_offset + i];
    if (!init.params.has_penalty) return;
    unsigned* row = seen + (size_t)slot * vocab;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) row[i] = 0;
    __syncthreads();
    const int* ids = tokens + init.tokens_offset;
    for (int i = threadIdx.x; i < init.n_prompt; i += blockDim.x) atomicOr(row + ids[i], IN_PROMPT);
    for (int i = threadIdx.x; i < init.n_output; i += blockDim.x) atomicAdd(row + ids[init.n_prompt + i], 1u);
}
