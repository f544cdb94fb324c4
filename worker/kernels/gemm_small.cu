// Products of up to 16 rows.
#include "gemm_ring.cuh"

// Inputs that are a row's norm: the row, and the norm's weight; none where there is no weight.
struct Norm {
    const float* x;
    const bf16* weight;
    float eps;
};

#if __CUDA_ARCH__ >= 900

// Widest row whose norm every block makes for itself, in shared memory beside the ring.
constexpr int WITHIN_K = 4096, HELD = WITHIN_K / 4 / (32 * SEGMENTS);

// Norm of one row to shared memory, with the bits of the kernel rms_norm. Weights, which no kernel writes, are read before the kernel
// in front has ended.
__device__ __forceinline__ void put_norm(const Norm& norm, int width, uint32_t to) {
    __shared__ float sums[SEGMENTS];
    uint2 weights[HELD];
    float4 values[HELD];
    const int first = threadIdx.x * 4, step = 4 * 32 * SEGMENTS;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        if (first + i * step < width) weights[i] = *reinterpret_cast<const uint2*>(norm.weight + first + i * step);
    }
    wait_for_predecessor();
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        values[i] = first + i * step < width ? *reinterpret_cast<const float4*>(norm.x + first + i * step) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        squares = fmaf(values[i].x, values[i].x, squares), squares = fmaf(values[i].y, values[i].y, squares);
        squares = fmaf(values[i].z, values[i].z, squares), squares = fmaf(values[i].w, values[i].w, squares);
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
    sync_multiplying();
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < SEGMENTS; warp++) total += sums[warp];
    const float factor = rsqrtf(total / width + norm.eps);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        if (first + i * step >= width) break;
        const uint32_t low = pack(values[i].x * factor * low_half(weights[i].x), values[i].y * factor * high_half(weights[i].x));
        const uint32_t high = pack(values[i].z * factor * low_half(weights[i].y), values[i].w * factor * high_half(weights[i].y));
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + (first + i * step) * 2), "r"(low), "r"(high) : "memory");
    }
    sync_multiplying();
}

// The first stages are under way before the kernel in front has ended. `WITHIN`: there is one row at most, the norm.
template <int GROUPS, bool WITHIN>
__device__ __forceinline__ void small(const Product& p, const Norm& norm, int m_cap, const int* m_ptr) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Ring ring;
    __shared__ Sums<GROUPS> sums;
    const uint32_t weights = shared_address(memory), inputs = weights + RING_BYTES;
    ring.init();
    release_successor();
    if (threadIdx.x / 32 == SEGMENTS) return Fetcher{ring, weights}.fetch(p, blockIdx.x);
    const int m = rows_of(m_ptr, m_cap);
    Beside beside(p, m, m_cap);
    beside.go_to(p, blockIdx.x);
    if constexpr (WITHIN) {
        put_norm(norm, p.K, inputs);
    } else {
        wait_for_predecessor();
    }
    Multiplier<GROUPS>{ring, sums, weights}.template multiply<WITHIN>(p, beside, blockIdx.x, m, inputs);
}

#else

// Before Hopper the weights come straight to registers, and norms from a kernel of their own.
template <int GROUPS, bool WITHIN>
__device__ __forceinline__ void small(const Product& p, const Norm&, int m_cap, const int* m_ptr) {
    if (WITHIN) return;
    __shared__ Sums<GROUPS> sums;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int blocks = p.blocks(), tiles = p.tiles(), m = rows_of(m_ptr, m_cap);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float c[GROUPS][4] = {};
        const int above = p.row(tile, g), below = p.row(tile, g + 8);
        const bf16 *from_above = p.W + (size_t)max(above, 0) * p.K + t * 8, *from_below = p.W + (size_t)max(below, 0) * p.K + t * 8;
        for (int first = warp * SLICE; warp < SEGMENTS && first < blocks; first += ROUND) {
            uint4 x[GROUPS][SLICE], upper[SLICE], lower[SLICE];
#pragma unroll
            for (int b = 0; b < SLICE; b++) {
                const bool real = first + b < blocks;
                upper[b] = load_stream(from_above + (first + b) * K_BLOCK, real && above >= 0);
                lower[b] = load_stream(from_below + (first + b) * K_BLOCK, real && below >= 0);
            }
            load_inputs(x, p.A, p.K, m, first);
#pragma unroll
            for (int b = 0; b < SLICE; b++) {
                if (first + b >= blocks) break;
#pragma unroll
                for (int i = 0; i < GROUPS; i++) multiply_block(c[i], upper[b], lower[b], x[i][b]);
            }
        }
        if (warp < SEGMENTS) keep_sums<GROUPS>(sums, c);
        __syncthreads();
        if (warp < SEGMENTS) {
            Beside beside(p, m, m_cap);
            beside.go_to(p, tile), beside.load_before(p);
            store_tile<GROUPS>(sums, p, beside);
        }
        __syncthreads();
    }
}

#endif

#define SMALL(ROWS)                                                                                                                        \
    KERNEL __launch_bounds__(SMALL_THREADS, 2) gemm_small_##ROWS(const bf16* W, const bf16* A, void* C, int N, int K, int m_cap,           \
                                                                 const int* m_ptr, int mode) {                                             \
        small<ROWS / 8, false>({W, A, C, N, K, mode}, {}, m_cap, m_ptr);                                                                   \
    }

SMALL(8)
SMALL(16)

// One row, A being the norm of x.
KERNEL __launch_bounds__(SMALL_THREADS, 2) gemm_normed(const bf16* W, const float* x, const bf16* norm, float eps, void* C, int N, int K,
                                                       const int* m_ptr, int mode) {
    small<1, true>({W, nullptr, C, N, K, mode}, {x, norm, eps}, 1, m_ptr);
}

#define HEADS                                                                                                                            \
    void *C, int N, int K, int m_cap, const int *m_ptr, const int *positions, const int *places, const bf16 *bias, const float2 *rope,   \
        void *k_cache, void *v_cache, int q_heads, int kv_heads, int head_dim, int kv_dtype
#define HEADS_OF {positions, places, bias, rope, k_cache, v_cache, q_heads, kv_heads, head_dim / 2, kv_dtype}
#define QKV(ROWS)                                                                                         \
    KERNEL __launch_bounds__(SMALL_THREADS, 2) gemm_qkv_##ROWS(const bf16* W, const bf16* A, HEADS) {     \
        small<ROWS / 8, false>({W, A, C, N, K, STORE_HEADS, HEADS_OF}, {}, m_cap, m_ptr);                 \
    }

QKV(8)
QKV(16)

KERNEL __launch_bounds__(SMALL_THREADS, 2) gemm_qkv_normed(const bf16* W, const float* x, const bf16* norm, float eps, HEADS) {
    small<1, true>({W, nullptr, C, N, K, STORE_HEADS, HEADS_OF}, {x, norm, eps}, m_cap, m_ptr);
}
