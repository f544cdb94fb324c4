// Products of 13 to 64 rows.
#include "gemm_cluster.cuh"

#define BY_CLUSTERS(NAME, FEATURES, SPLITS, MODE)                                                                                                    \
    KERNEL __launch_bounds__(CLUSTER_THREADS, 1)                                                                                                     \
        gemm_cluster_##NAME##_##FEATURES##_##SPLITS(void* C, int N, int K, int m_cap, const int* m_ptr, int mode, const float* squares, int parts,   \
                                                    float eps, const bf16* next_weight, bf16* next_rows, float* next_squares,                        \
                                                    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs) {           \
        const Product p{nullptr, nullptr, C, N, K, mode};                                                                                            \
        by_clusters<FEATURES, SPLITS, MODE>(weights, inputs, p, {squares, parts, eps}, {next_weight, next_rows, next_squares}, m_cap, m_ptr);        \
    }

#define OF(FEATURES, SPLITS)                                                                                                                         \
    BY_CLUSTERS(bf16, FEATURES, SPLITS, STORE_BF16)                                                                                                  \
    BY_CLUSTERS(f32, FEATURES, SPLITS, STORE_F32)                                                                                                    \
    BY_CLUSTERS(add, FEATURES, SPLITS, STORE_ADD)                                                                                                    \
    BY_CLUSTERS(gated, FEATURES, SPLITS, STORE_GATED)                                                                                                \
    KERNEL __launch_bounds__(CLUSTER_THREADS, 1) gemm_cluster_qkv_##FEATURES##_##SPLITS(                                                             \
        void* C, int N, int K, int m_cap, const int* m_ptr, const int* positions, const int* places, const bf16* bias, const float2* rope,           \
        void* k_cache, void* v_cache, int q_heads, int kv_heads, int head_dim, int kv_dtype, const float* squares, int parts, float eps,             \
        const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs) {                                                       \
        const Heads heads{positions, places, bias, rope, k_cache, v_cache, q_heads, kv_heads, head_dim / 2, kv_dtype};                               \
        const Product p{nullptr, nullptr, C, N, K, STORE_HEADS, heads};                                                                              \
        by_clusters<FEATURES, SPLITS, STORE_HEADS>(weights, inputs, p, {squares, parts, eps}, {}, m_cap, m_ptr);                                     \
    }

OF(4, 1)
OF(2, 2)
OF(2, 3)
