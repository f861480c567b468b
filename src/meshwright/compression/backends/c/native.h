/* What every generated codec shares: numbers of 16 bits, tiles that stay in a cache, packing. Loops are written so that
   compilers vectorise them without being allowed to reorder sums or to forget about infinities. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 32
/* Arrays of tiles are 64 longer than tiles: packing works in whole words. */

enum { ALL, MEASURE, REST }; /* encode; only find what processes agree on; encode once they have agreed */

typedef union { float f; uint32_t u; } Bits;
INLINE uint32_t bits_of(float x) { Bits b; b.f = x; return b.u; }
INLINE float float_of(uint32_t x) { Bits b; b.u = x; return b.f; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t aligned(int64_t bytes) { return (bytes + 15) / 16 * 16; }

INLINE int64_t capacity(int64_t n, double part) {
    int64_t k = (int64_t)((double)n * part);
    return least(n, k > 1 ? k : 1);
}

/* Half precision without tables or branches: below 2^-14 its numbers are multiples of 2^-24. */
INLINE float from_f16(uint16_t h) {
    uint32_t rest = h & 0x7fffu, top = h & 0x7c00u;
    uint32_t normal = (rest << 13) + (112u << 23) + (top == 0x7c00u ? 112u << 23 : 0);
    uint32_t small = bits_of((float)(int32_t)rest * 0x1p-24f);
    return float_of((top ? normal : small) | ((uint32_t)(h & 0x8000u) << 16));
}
INLINE uint16_t to_f16(float x) {
    uint32_t u = bits_of(x) & 0x7fffffffu, sign = (bits_of(x) >> 16) & 0x8000u;
    float a = float_of(u);
    uint32_t normal = ((u + 0xfffu + ((u >> 13) & 1u)) >> 13) - (112u << 10);
    uint32_t small = bits_of(a + 0.5f) - bits_of(0.5f);
    uint32_t h = a < 0x1p-14f ? small : normal;
    h = u >= 0x477ff000u ? 0x7c00u : h; /* 65520 and beyond */
    h = u > 0x7f800000u ? 0x7e00u : h;
    return (uint16_t)(h | sign);
}
INLINE float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }
INLINE uint16_t to_bf16(float x) {
    uint32_t u = bits_of(x), r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : r);
}
INLINE float from_f32(float x) { return x; }
INLINE float to_f32(float x) { return x; }

INLINE uint32_t hashed(uint32_t index, uint32_t seed) {
    uint32_t x = index * 0x9E3779B1u + seed * 0x85EBCA77u;
    x ^= x >> 16; x *= 0x7FEB352Du;
    x ^= x >> 15;
    return x * 0x846CA68Bu; /* the first bits are the best */
}
INLINE float uniform_at(uint32_t index, uint32_t seed) {
    return (float)(int32_t)(hashed(index, seed) >> 9) * 0x1p-23f;
}

/* Reductions of a tile: so many at once, in an order that is always the same. */
#define REDUCED(NAME, TYPE, ACC, FIRST, STEP)                                             \
    static ACC NAME(const TYPE *e, int64_t m, ACC first) {                                \
        ACC a[LANES];                                                                     \
        int64_t i = 0;                                                                    \
        for (int l = 0; l < LANES; l++) a[l] = FIRST;                                     \
        for (; i + LANES <= m; i += LANES)                                                \
            for (int l = 0; l < LANES; l++) { ACC x = (ACC)e[i + l], y = a[l]; a[l] = STEP; } \
        for (int l = 0; i + l < m; l++) { ACC x = (ACC)e[i + l], y = a[l]; a[l] = STEP; } \
        ACC y = first;                                                                    \
        for (int l = 0; l < LANES; l++) { ACC x = a[l]; y = STEP; }                       \
        return y;                                                                         \
    }
REDUCED(total_float, float, double, 0.0, x + y)
REDUCED(largest_float, float, float, -INFINITY, x > y ? x : y)
REDUCED(smallest_float, float, float, INFINITY, x < y ? x : y)
REDUCED(total_int, int32_t, int64_t, 0, x + y)
REDUCED(largest_int, int32_t, int32_t, INT32_MIN, x > y ? x : y)
REDUCED(smallest_int, int32_t, int32_t, INT32_MAX, x < y ? x : y)

/* Thresholds. */
static int64_t positive(const float *e, int64_t m) {
    int32_t c = 0;
    for (int64_t i = 0; i < m; i++) c += e[i] > 0;
    return c;
}
static void reached(const float *e, int64_t m, const float *tries, int64_t *counts) {
    for (int j = 0; j < 15; j++) {
        int32_t c = 0;
        float t = tries[j];
        for (int64_t i = 0; i < m; i++) c += e[i] >= t;
        counts[j] += c;
    }
}
static void attempts(float low, float high, int turn, float *tries) {
    for (int j = 1; j < 16; j++) {
        float step = (high - low) * ((float)j / 16.0f);
        tries[j - 1] = turn ? low + step : ldexpf(high, j - 16);
    }
}
static void narrowed(float *low, float *high, const float *tries, const int64_t *counts, int64_t k) {
    for (int j = 14; j >= 0 && counts[j] <= k; j--) *high = tries[j];
    for (int j = 0; j < 15 && counts[j] > k; j++) *low = tries[j];
}

/* Which numbers of a tile are chosen at random: one of each of `many` strata, the first of which may be longer by one. */
static void drawn(uint8_t *keep, int64_t base, int64_t m, int64_t n, int64_t many, uint32_t seed) {
    const int64_t wide = n / many, longer = n % many, both = longer * (wide + 1);
    int64_t s = base < both ? base / (wide + 1) : longer + (base - both) / wide;
    memset(keep, 0, (size_t)m);
    for (; s < many; s++) {
        const int64_t begin = s * wide + least(s, longer), length = wide + (s < longer);
        if (begin >= base + m) return;
        const int64_t at = begin + (int64_t)((hashed((uint32_t)s, seed) * (uint64_t)length) >> 32) - base;
        if (at >= 0 && at < m) keep[at] = 1;
    }
}

/* The places of the numbers that pass a test, while there is room; those that find none do not pass. */
static int64_t collected(uint8_t *keep, int64_t m, int64_t room, int32_t *places) {
    int64_t found = 0;
    memset(keep + m, 0, 8);
    for (int64_t i = 0; i < m; i += 8) {
        uint64_t eight;
        memcpy(&eight, keep + i, 8);
        if (!eight) continue;
        for (int64_t j = i; j < i + 8; j++)
            if (keep[j]) { if (found < room) places[found++] = (int32_t)j; else keep[j] = 0; }
    }
    return found;
}

/* Codes of 1, 2 and 4 bits, low bits first; eight codes, one in each byte of a word, are pushed together. */
static void pack_1(uint8_t *c, int64_t m, uint8_t *out) {
    memset(c + m, 0, 8);
    for (int64_t i = 0; i < (m + 7) / 8; i++) {
        uint64_t x;
        memcpy(&x, c + 8 * i, 8);
        out[i] = (uint8_t)((x * 0x0102040810204080u) >> 56);
    }
}
static void pack_2(uint8_t *c, int64_t m, uint8_t *out) {
    memset(c + m, 0, 8);
    for (int64_t i = 0; i < (m + 3) / 4; i++) {
        uint32_t x;
        memcpy(&x, c + 4 * i, 4);
        out[i] = (uint8_t)(x | x >> 6 | x >> 12 | x >> 18);
    }
}
static void pack_4(uint8_t *c, int64_t m, uint8_t *out) {
    memset(c + m, 0, 8);
    for (int64_t i = 0; i < (m + 1) / 2; i++) {
        uint16_t x;
        memcpy(&x, c + 2 * i, 2);
        out[i] = (uint8_t)(x | x >> 4);
    }
}
/* These read and write up to a word more than they must: messages and tiles are padded. */
static void unpack_1(const uint8_t *in, int64_t m, uint8_t *c) {
    for (int64_t i = 0; i < (m + 7) / 8; i++) { /* byte j gets bit j, then anything but 0 becomes 1 */
        uint64_t x = (in[i] * 0x0101010101010101u) & 0x8040201008040201u;
        x = ((x + 0x7f7f7f7f7f7f7f7fu) >> 7) & 0x0101010101010101u;
        memcpy(c + 8 * i, &x, 8);
    }
}
static void unpack_2(const uint8_t *in, int64_t m, uint8_t *c) {
    for (int64_t i = 0; i < (m + 3) / 4; i++) {
        uint32_t b = in[i], x = (b | b << 6 | b << 12 | b << 18) & 0x03030303u;
        memcpy(c + 4 * i, &x, 4);
    }
}
static void unpack_4(const uint8_t *in, int64_t m, uint8_t *c) {
    for (int64_t i = 0; i < (m + 1) / 2; i++) {
        uint16_t x = (uint16_t)((in[i] | in[i] << 4) & 0x0f0f);
        memcpy(c + 2 * i, &x, 2);
    }
}

/* What a tile with a bad number (infinite or none) is encoded as: 0 for those, and the gradient alone where the residual is
   bad. Which numbers are good, and the residual that the others keep, are left aside: few tiles are bad, none need be fast. */
static void mended(const NUMBER *flat, const float *kept, float *v, int64_t m, uint8_t *good, float *old) {
    for (int64_t i = 0; i < m; i++) {
        float x = FROM(flat[i]);
        old[i] = kept && isfinite(kept[i]) ? kept[i] : 0;
        x = x + old[i] + 0.0f;
        good[i] = isfinite(x) != 0;
        v[i] = good[i] ? x : 0;
    }
}
/* A tile of what is to be encoded; whether it has been mended. */
INLINE int loaded(const NUMBER *flat, const float *kept, float *v, int64_t m, uint8_t *good, float *old) {
    int32_t worst = 0;
    for (int64_t i = 0; i < m; i++) {
        float x = FROM(flat[i]);
        if (kept) x = x + kept[i];
        x = x + 0.0f; /* of -0 and 0, either could be the smallest */
        int32_t top = (int32_t)(bits_of(x) & 0x7f800000u);
        worst = top > worst ? top : worst;
        v[i] = x;
    }
    if (worst == 0x7f800000) mended(flat, kept, v, m, good, old);
    return worst == 0x7f800000;
}
