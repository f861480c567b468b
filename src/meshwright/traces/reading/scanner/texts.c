/* Texts that come again and again, each kept once and numbered. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef const unsigned char *text;

/* Distinct texts, numbered in the order in which they came; the first is the empty one. */
struct texts {
  unsigned char *bytes;
  int64_t used, room;
  int64_t *starts; /* of text i, and one more: the end of the last */
  int64_t count, many;
  int32_t *cells; /* open addressing: number + 1, 0 where free */
  uint64_t *hashes;
  int64_t size;
};

/* Up to 8 bytes as one number, without calling anything: most texts are this short. */
static inline uint64_t packed(text p, int64_t n) {
  uint64_t whole;
  uint32_t first, last;
  if (n >= 8) {
    memcpy(&whole, p, 8);
    return whole;
  }
  if (n >= 4) {
    memcpy(&first, p, 4), memcpy(&last, p + n - 4, 4);
    return first | (uint64_t)last << 32;
  }
  return n ? p[0] | (uint64_t)p[n / 2] << 8 | (uint64_t)p[n - 1] << 16 : 0;
}

static inline uint64_t mixed(uint64_t h) {
  h = (h ^ h >> 32) * 0xc4ceb9fe1a85ec53u;
  return h ^ h >> 29;
}

static uint64_t hash_of(text p, int64_t n) { /* two chains of products, which run side by side */
  uint64_t g = 0x9E3779B97F4A7C15u ^ (uint64_t)n, h = 0xC2B2AE3D27D4EB4Fu;
  for (; n > 16; p += 16, n -= 16) {
    g = (g ^ packed(p, 8)) * 0xff51afd7ed558ccdu;
    h = (h ^ packed(p + 8, 8)) * 0x9FB21C651E98DF25u;
    g ^= g >> 32, h ^= h >> 32;
  }
  g = (g ^ packed(p, n)) * 0xff51afd7ed558ccdu;
  if (n > 8) h = (h ^ packed(p + n - 8, 8)) * 0x9FB21C651E98DF25u;
  return mixed(g ^ (h << 31 | h >> 33));
}

static int grown(void **data, int64_t bytes) {
  void *more = realloc(*data, (size_t)bytes);
  if (!more) return 0;
  *data = more;
  return 1;
}

static int spread(struct texts *t) { /* twice the cells */
  int64_t size = t->size ? 2 * t->size : 1024;
  int32_t *cells = calloc((size_t)size, sizeof *cells);
  if (!cells || !grown((void **)&t->hashes, size * 8)) {
    free(cells);
    return 0;
  }
  for (int64_t i = 0; i < t->count; i++) {
    uint64_t at = t->hashes[i] & (uint64_t)(size - 1);
    while (cells[at]) at = (at + 1) & (uint64_t)(size - 1);
    cells[at] = (int32_t)i + 1;
  }
  free(t->cells);
  t->cells = cells;
  t->size = size;
  return 1;
}

/* The number of a text, -1 where memory ran out. */
static int64_t intern(struct texts *t, text p, int64_t n) {
  if (2 * t->count >= t->size && !spread(t)) return -1;
  uint64_t h = hash_of(p, n), mask = (uint64_t)t->size - 1, at = h & mask;
  for (; t->cells[at]; at = (at + 1) & mask) {
    int64_t i = t->cells[at] - 1;
    if (t->hashes[i] == h && t->starts[i + 1] - t->starts[i] == n && !memcmp(t->bytes + t->starts[i], p, (size_t)n)) return i;
  }
  if (t->count + 2 > t->many) {
    int64_t many = 2 * t->many + 64;
    if (!grown((void **)&t->starts, many * 8)) return -1;
    t->many = many;
    if (!t->count) t->starts[0] = 0;
  }
  if (t->used + n >= t->room) {
    int64_t room = 2 * t->room + n + 4096;
    if (!grown((void **)&t->bytes, room)) return -1;
    t->room = room;
  }
  memcpy(t->bytes + t->used, p, (size_t)n);
  t->used += n;
  t->hashes[t->count] = h;
  t->starts[t->count + 1] = t->used;
  t->cells[at] = (int32_t)++t->count;
  return t->count - 1;
}

static void forget(struct texts *t) {
  free(t->bytes), free(t->starts), free(t->cells), free(t->hashes);
}
