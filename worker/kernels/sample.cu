// From logits to tokens and logprobs, a block a row or, where rows are few, a cluster of blocks. Only the few candidates that a filter can keep are sorted; where they
// are too many, its threshold is searched for bit by bit. Weights are whole numbers of 2^-40: sums are exact in any order.
#include "candidates.cuh"
#include "search.cuh"

constexpr float GREEDY_BELOW = 1e-5f;

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011), the first 53 bits as a number in [0, 1).
__device__ __forceinline__ double uniform(u64 seed, int choice, int output_index) {
    unsigned counter[4] = {(unsigned)output_index, 0, (unsigned)choice, 0}, key[2] = {(unsigned)seed, (unsigned)(seed >> 32)};
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 a = (u64)0xd2511f53u * counter[0], b = (u64)0xcd9e8d57u * counter[2];
        const unsigned next[4] = {(unsigned)(b >> 32) ^ counter[1] ^ key[0], (unsigned)b, (unsigned)(a >> 32) ^ counter[3] ^ key[1], (unsigned)a};
        for (int i = 0; i < 4; i++) counter[i] = next[i];
        key[0] += 0x9e3779b9u;
        key[1] += 0xbb67ae85u;
    }
    const u64 bits = ((u64)counter[1] << 32 | counter[0]) >> 11;
    return bits * 0x1p-53;
}

// In the first block of the team, others may not know the token.
__device__ __forceinline__ int draw(const Logits& logits, const SlotParams& params, int output_index, Candidates& candidates) {
    const int likeliest = argmax(logits);
    const float largest = logits.at(likeliest);
    if (largest == -INFINITY) return 0;
    if (params.temperature < GREEDY_BELOW) return likeliest;
    const Weigh weigh = {largest, LOG2_E / params.temperature};
    const double random = uniform(params.seed, params.choice, output_index);
    u64 total = 0;
    float lowest = -INFINITY;
    if (params.top_k > 0 && params.top_k <= THREADS) {
        lowest = reached_by(logits, params.top_k, candidates);
    } else if (params.top_k == 0 && params.top_p < 1.f) {
        total = share_above(logits, weigh, params.top_p, lowest);
    } else if (params.top_k == 0 && params.min_p > 0.f) {
        lowest = largest + (log2f(params.min_p) - 1e-3f) / weigh.factor;
    }
    if (lowest > -INFINITY && collect(logits, lowest, candidates)) return part() == 0 ? draw_from(candidates, params, weigh, total, random) : 0;
    Kept kept;
    if (params.top_k > 0) kept = keep_top(logits, params.top_k);
    if (params.top_p < 1.f) kept = keep_share(logits, kept, weigh, params.top_p);
    auto measure = [&](float x, int id) { return kept.has(key_of(x), id) && weigh.weight(x) >= params.min_p ? weigh(x) : 0ull; };
    return find(logits, [&](u64 all) { return min((u64)(random * (double)all), all - 1); }, measure);
}

// Logprobs of raw logits.
struct Normal {
    float largest;
    double log_sum;

    __device__ __forceinline__ float logprob(float x) const { return (float)((double)x - (double)largest - log_sum); }
};

__device__ __noinline__ Normal normalise(const Logits& logits) {
    const float largest = logits.at(argmax(logits));
    u64 total = 0;
    each(logits, [&](float x, int) { total += __float2ull_rn(expf(x - largest) * ONE); });
    return Normal{largest, log((double)team_sum(total) / ONE)};
}

__device__ __noinline__ int rank_of(const Logits& logits, float x) {
    return 1 + (int)sum(logits, [&](float other, int) { return other > x ? 1ull : 0ull; });
}

// The likeliest tokens, most likely first, the lowest id first among equals; the first block lists them. Where no number is left there is nothing
// to list.
__device__ __noinline__ void list_top(const Logits& logits, const Normal& normal, int count, Candidates& candidates, Sampled* out) {
    if (count == 0) {
        if (part() == 0 && threadIdx.x == 0) out->n_top = 0;
        return;
    }
    if (!collect(logits, reached_by(logits, count, candidates), candidates)) {
        // Thousands of equals: the lowest ids are taken one by one.
        for (int i = 0; i < count; i++) {
            u64 best = 0;
            const u64 below = i > 0 ? candidates.entries[i - 1] : ~0ull;
            each(logits, [&](float x, int id) {
                const u64 entry = entry_of(x, id);
                if (entry < below && x > -INFINITY) best = max(best, entry);
            });
            best = team_max(best);
            if (threadIdx.x == 0) candidates.entries[i] = best;
            __syncthreads();
        }
        if (threadIdx.x == 0) candidates.n = count;
        __syncthreads();
    }
    if (part() > 0) return;
    const int n = min(candidates.n, count);
    if (threadIdx.x < n) {
        const u64 entry = candidates.entries[threadIdx.x];
        out->top_ids[threadIdx.x] = id_of(entry);
        out->top_logprobs[threadIdx.x] = normal.logprob(value_of(entry));
    }
    if (threadIdx.x == 0) out->n_top = n;
    __syncthreads();
}

// What a list of edits replaced, so that a drawn token's raw logit is known.
struct Replaced {
    float bias[BIAS_MAX], end[END_IDS_MAX];
};

// Bias, then end tokens masked until min_tokens are out: vLLM's order. Penalties come on reading.
__device__ __forceinline__ void edit(float* values, const Logits& raw, const SlotParams& params, const Bias* bias, const int* end,
                                     int output_index, Replaced& replaced) {
    for (int i = threadIdx.x; i < params.n_bias; i += THREADS) {
        const int id = bias[i].id;
        if (id >= raw.vocab) continue;
        replaced.bias[i] = raw.at(id);
        values[id] = replaced.bias[i] + bias[i].value;
    }
    __syncthreads();
    const int masked = output_index < params.min_tokens ? params.n_end : 0;
    for (int i = threadIdx.x; i < masked; i += THREADS) {
        if (end[i] >= raw.vocab) continue;
        replaced.end[i] = raw.at(end[i]);
        values[end[i]] = -INFINITY;
    }
    __syncthreads();
}

__device__ __forceinline__ void undo(float* values, int vocab, const SlotParams& params, const Bias* bias, const int* end, int output_index,
                                     const Replaced& replaced) {
    const int masked = output_index < params.min_tokens ? params.n_end : 0;
    for (int i = threadIdx.x; i < masked; i += THREADS) {
        if (end[i] < vocab) values[end[i]] = replaced.end[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < params.n_bias; i += THREADS) {
        if (bias[i].id < vocab) values[bias[i].id] = replaced.bias[i];
    }
    __syncthreads();
}

// What there is for the draws of a step.
struct Drawing {
    const Bias* bias;
    const int* end;
    int* last_token;
    unsigned* seen;
    const unsigned* masks;
};

__device__ __forceinline__ void tell(Sampled* result, int token, float logprob, int rank) {
    if (part() > 0 || threadIdx.x > 0) return;
    result->token = token;
    result->logprob = logprob;
    result->rank = rank;
}

// Of one row, whatever is wanted of it.
__device__ __noinline__ void sample_row(const LogitRow& row, const SlotParams& params, const Drawing& d, float* values, int vocab, Sampled* result) {
    __shared__ Replaced replaced;
    __shared__ Candidates candidates;
    const bool tells = part() == 0 && threadIdx.x == 0;
    const Logits raw = {values, nullptr, 1.f, 0.f, 0.f, vocab, nullptr};
    Normal normal = {};
    if (row.top >= 0) {
        normal = normalise(raw);
        list_top(raw, normal, min(row.top, TOP_MAX), candidates, result);
        const float x = row.target >= 0 && row.target < vocab ? raw.at(row.target) : -INFINITY;
        const int rank = rank_of(raw, x);
        if (tells) {
            result->target_logprob = normal.logprob(x);
            result->target_rank = rank;
        }
    }
    if (row.output_index < 0) {
        if (tells) result->token = -1;
        return;
    }
    unsigned* counts = params.has_penalty ? d.seen + (size_t)row.slot * vocab : nullptr;
    const unsigned* mask = row.mask < 0 ? nullptr : d.masks + (size_t)row.mask * ((vocab + 31) / 32);
    const Logits edited = {values, counts, params.repetition, params.frequency, params.presence, vocab, mask};
    const Bias* bias = d.bias + (size_t)row.slot * BIAS_MAX;
    const int* end = d.end + (size_t)row.slot * END_IDS_MAX;
    const bool edits = params.edits(row.output_index);
    if (edits) {
        if (part() == 0) edit(values, raw, params, bias, end, row.output_index, replaced);
        team_sync();
    }
    int token = draw(edited, params, row.output_index, candidates);
    if (edits) {
        team_sync();
        if (part() == 0) undo(values, vocab, params, bias, end, row.output_index, replaced);
    }
    int rank = 0;
    if (row.top >= 0) {
        // Others learn the token; what was undone is seen by all.
        token = (int)team_max(part() == 0 ? token : 0);
        rank = rank_of(raw, raw.at(token));
    }
    tell(result, token, row.top >= 0 ? normal.logprob(raw.at(token)) : NAN, rank);
    if (tells) {
        d.last_token[row.slot] = token;
        if (counts) counts[token] += 1;
    }
}

// Grid: rows of the pass times blocks of a cluster.
KERNEL __launch_bounds__(THREADS, 2) sample(const int* counts, const LogitRow* rows, int first, float* logits, int vocab, const SlotParams* slots,
                                         const Bias* slot_bias, const int* slot_end, int* last_token, unsigned* seen, const unsigned* masks, Sampled* out) {
    // Nobody writes to a block that has not begun.
    if (parts() > 1) team_sync();
    const int index = blockIdx.x / parts();
    if (first + index >= counts[N_LOGIT_ROWS]) return wait_for_predecessor();
    // Of rows and slots nothing has changed since the step began.
    const LogitRow row = rows[first + index];
    const SlotParams params = slots[row.slot];
    wait_for_predecessor();
    Sampled* result = out + first + index;
    float* values = logits + (size_t)index * vocab;
    const bool is_greedy = params.temperature < GREEDY_BELOW && !params.has_penalty && !params.edits(row.output_index);
    if (is_greedy && row.top < 0 && row.output_index >= 0 && row.mask < 0 && vocab % 4 == 0) {
        const int token = plain_argmax(values, vocab);
        tell(result, token, NAN, 0);
        if (part() == 0 && threadIdx.x == 0) last_token[row.slot] = token;
        return;
    }
    sample_row(row, params, {slot_bias, slot_end, last_token, seen, masks}, values, vocab, result);
}
