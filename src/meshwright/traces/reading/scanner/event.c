/* One event of a trace: from JSON text to the values of slots. Which key goes to which slot is asked for beforehand.
   Stands behind texts.c and numbers.c. */

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define NONE INT64_MIN /* no such value in this event; equals columns.NONE */
#define SLOTS 64
#define KEYS 256 /* cells for known keys, a power of two */
#define RECENT 64 /* tracks that are found at once, a power of two */
enum { MORE, DONE, BAD, NO_MEMORY }; /* why scanning stopped; as in compiled.py */
enum { WHOLE, TEXT, TIME, RAW, PHASE, ARGS, LIST }; /* kinds of slots; as in columns.py */
enum { PH, CAT, NAME, PID, TID, TS, DUR, ID, ARGS_SLOT, CORRELATION, EXTERNAL, FIRST_OF_TABLES }; /* slots; as in columns.py */

/* Values of some events only: a column for each slot, the event's row first. Numbers have 8 bytes, texts 4. */
struct table {
  int64_t count, room;
  uint64_t mask;
  int32_t width, slots[SLOTS];
  void *columns[SLOTS];
};

struct keys {
  const char *words[KEYS];
  int32_t lengths[KEYS], slots[KEYS];
};

/* A track whose pid and tid have at most 8 bytes each, as one number; a length of 0 where there is none. */
struct recent {
  uint64_t words[2];
  int64_t lengths[2], track;
};

struct scanner {
  text end;
  int status;
  /* the event that is being read */
  uint64_t seen;
  int64_t values[SLOTS];
  text raw[2];
  int64_t raw_length[2];
  /* what is known of slots */
  int32_t kinds[SLOTS];
  uint64_t outer_mask;
  struct keys keys[2]; /* of events, and of their args */
  /* columns */
  int64_t rows, room;
  uint8_t *phase;
  int32_t *category, *name, *track;
  int64_t *ts, *dur, *link, *external;
  struct texts texts, words, tracks, lists;
  struct recent recent[RECENT];
  struct table tables[SLOTS];
  int32_t table_count;
  /* what was changed or left out */
  int64_t negative, without_time, without_duration, not_objects;
};

static uint32_t key_cell(text p, int64_t n) {
  return ((uint32_t)n * 31 + p[0] * 7u + p[n - 1] * 13u + p[n / 2] * 3u) & (KEYS - 1);
}

static void know(struct keys *k, const char *word, int32_t slot) {
  int32_t n = (int32_t)strlen(word);
  uint32_t at = key_cell((text)word, n);
  while (k->words[at]) at = (at + 1) & (KEYS - 1);
  k->words[at] = word;
  k->lengths[at] = n;
  k->slots[at] = slot;
}

static int32_t slot_of(const struct keys *k, text p, int64_t n) {
  if (!n) return -1;
  for (uint32_t at = key_cell(p, n); k->words[at]; at = (at + 1) & (KEYS - 1))
    if (k->lengths[at] == n && !memcmp(k->words[at], p, (size_t)n)) return k->slots[at];
  return -1;
}

/* A key or phase with escapes, as far as it is ASCII (what is wanted, is); its length, 0 where it is not. */
static int64_t plain(text p, int64_t n, unsigned char *out, int64_t room) {
  static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
  int64_t made = 0;
  for (text q = p + n; p < q; made++) {
    if (made == room) return 0;
    if (*p != '\\') {
      out[made] = *p++;
    } else if (p[1] == 'u' && q - p >= 6 && p[2] == '0' && p[3] == '0') {
      char digits[3] = {(char)p[4], (char)p[5], 0};
      if (strspn(digits, "0123456789abcdefABCDEF") != 2 || digits[0] > '7') return 0;
      out[made] = (unsigned char)strtol(digits, NULL, 16);
      p += 6;
    } else {
      const char *found = p[1] ? strchr(from, p[1]) : NULL;
      if (!found) return 0;
      out[made] = (unsigned char)to[found - from];
      p += 2;
    }
  }
  return made;
}

static inline text blank(text p) {
  while (*p == ' ' || *p == '\n' || *p == '\t' || *p == '\r') p++;
  return p;
}

static text stop(struct scanner *s, text p) { /* the text ends here, or is no JSON */
  s->status = p >= s->end ? MORE : BAD;
  return NULL;
}

/* The quote that ends a string which began before p. */
static inline text string_end(struct scanner *s, text p, int *escaped) {
  for (;;) {
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\'), zero = _mm_setzero_si128();
    for (;; p += 16) {
      __m128i v = _mm_loadu_si128((const __m128i *)p);
      int hit = _mm_movemask_epi8(
          _mm_or_si128(_mm_or_si128(_mm_cmpeq_epi8(v, quote), _mm_cmpeq_epi8(v, slash)), _mm_cmpeq_epi8(v, zero)));
      if (hit) {
        p += __builtin_ctz((unsigned)hit);
        break;
      }
    }
#else
    while (*p != '"' && *p != '\\' && *p) p++;
#endif
    if (p >= s->end) return stop(s, s->end);
    if (*p == '"') return p;
    if (*p == '\\') {
      *escaped = 1;
      if (++p >= s->end) return stop(s, s->end);
    }
    p++;
  }
}

static inline int in_word(unsigned char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '+' || c == '.';
}

/* The end of a value of any kind. */
static text value_end(struct scanner *s, text p) {
  int escaped;
  if (*p == '"') {
    p = string_end(s, p + 1, &escaped);
    return p ? p + 1 : NULL;
  }
  if (*p != '{' && *p != '[') {
    text q = p;
    while (in_word(*q)) q++;
    return q == p || q >= s->end ? stop(s, q) : q;
  }
  for (int64_t depth = 0;; p++) {
    switch (*p) {
      case '{': case '[': depth++; break;
      case '}': case ']':
        if (!--depth) return p + 1;
        break;
      case '"':
        if (!(p = string_end(s, p + 1, &escaped))) return NULL;
        break;
      case 0:
        if (p >= s->end) return stop(s, p);
    }
  }
}

static int all_digits(text p, text q) {
  text start = p;
  while (p < q && *p >= '0' && *p <= '9') p++;
  return p == q && p > start;
}

/* Puts the value [p, q) of a slot into the event; one of another kind than wanted is as none. */
static void take(struct scanner *s, int32_t slot, text p, text q) {
  uint64_t bit = (uint64_t)1 << slot;
  int64_t value = NONE;
  int ok = 0;
  switch (s->kinds[slot]) {
    case WHOLE: ok = number(p, q, 0, &value); break;
    case TIME: ok = number(p, q, 3, &value); break;
    case TEXT:
      ok = *p == '"' || all_digits(p + (*p == '-'), q);
      if (ok) value = *p == '"' ? intern(&s->texts, p + 1, q - p - 2) : intern(&s->texts, p, q - p);
      if (ok && value < 0) s->status = NO_MEMORY;
      break;
    case LIST: /* with its quotes where it is a string: its escapes mean something else than those in a list */
      ok = *p == '[' || *p == '"';
      if (ok) value = intern(&s->lists, p, q - p);
      if (ok && value < 0) s->status = NO_MEMORY;
      break;
    case RAW:
      s->raw[slot - PID] = p;
      s->raw_length[slot - PID] = q - p;
      ok = 1;
      break;
    case PHASE: {
      unsigned char made[8];
      ok = *p == '"' && plain(p + 1, q - p - 2, made, 8) == 1 && made[0] >= '!' && made[0] <= '~';
      if (ok) value = made[0];
    }
  }
  s->values[slot] = value;
  s->seen = ok ? s->seen | bit : s->seen & ~bit;
}

/* The members of the object at p, of an event (level 0) or of its args; the place after it. */
static text members(struct scanner *s, text p, int level) {
  p = blank(p + 1);
  if (*p == '}' && p < s->end) return p + 1;
  for (;;) {
    if (*p != '"') return stop(s, p);
    unsigned char made[64];
    int escaped = 0;
    text key = p + 1, q = string_end(s, key, &escaped);
    if (!q) return NULL;
    int32_t slot = escaped ? slot_of(&s->keys[level], made, plain(key, q - key, made, 64)) : slot_of(&s->keys[level], key, q - key);
    p = blank(q + 1);
    if (*p != ':') return stop(s, p);
    p = blank(p + 1);
    if (slot == ARGS_SLOT && level == 0) s->seen &= s->outer_mask; /* of args that come twice the last count */
    if (slot == ARGS_SLOT && level == 0 && *p == '{') {
      p = members(s, p, 1);
      if (!p) return NULL;
    } else {
      text value = p;
      p = value_end(s, p);
      if (!p) return NULL;
      if (slot >= 0 && slot != ARGS_SLOT) take(s, slot, value, p);
    }
    p = blank(p);
    if (*p == '}') return p + 1;
    if (*p != ',') return stop(s, p);
    p = blank(p + 1);
  }
}
