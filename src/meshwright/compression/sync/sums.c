/* The mean of numbers and of so many others, added one after the other: each is read once. */
#include <stdint.h>

void mean_of(float *restrict into, const float *const *others, int64_t many, int64_t count) {
    enum { TILE = 1024 };
    const float part = 1.0f / (float)(many + 1);
    for (int64_t from = 0; from < count; from += TILE) {
        const int64_t length = count - from < TILE ? count - from : TILE;
        float *restrict here = into + from;
        for (int64_t k = 0; k < many; k++) {
            const float *restrict other = others[k] + from;
            for (int64_t i = 0; i < length; i++) here[i] += other[i];
        }
        for (int64_t i = 0; i < length; i++) here[i] *= part;
    }
}
