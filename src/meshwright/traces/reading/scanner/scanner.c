/* Events of a profiler trace, from JSON text straight into columns.

   The caller hands over text piece by piece, followed by at least 64 zero bytes, and which keys it wants: each goes to
   a slot of one kind. Whole events are taken; the position after the last whole one is given back, and the caller
   brings the rest again with more behind it. Nothing is copied but names, each once.

   Stands behind texts.c, numbers.c and event.c. */

static int more_rows(struct scanner *s) {
  int64_t room = s->room ? 2 * s->room : 1 << 16;
  if (!grown((void **)&s->phase, room) || !grown((void **)&s->category, room * 4) || !grown((void **)&s->name, room * 4) ||
      !grown((void **)&s->track, room * 4) || !grown((void **)&s->ts, room * 8) || !grown((void **)&s->dur, room * 8) ||
      !grown((void **)&s->link, room * 8) || !grown((void **)&s->external, room * 8))
    return 0;
  s->room = room;
  return 1;
}

static inline int64_t got(const struct scanner *s, int slot, int64_t otherwise) {
  return s->seen >> slot & 1 ? s->values[slot] : otherwise;
}

static int64_t new_track(struct scanner *s) {
  int32_t pair[2];
  for (int i = 0; i < 2; i++) {
    int known = s->seen >> (PID + i) & 1;
    int64_t word = intern(&s->words, known ? s->raw[i] : (text) "", known ? s->raw_length[i] : 0);
    if (word < 0) return -1;
    pair[i] = (int32_t)word;
  }
  return intern(&s->tracks, (text)pair, sizeof pair);
}

/* The number of the event's track: nearly always one that was just there. */
static int64_t track_of(struct scanner *s) {
  if (~s->seen >> PID & 3 || s->raw_length[0] > 8 || s->raw_length[1] > 8) return new_track(s);
  uint64_t pid = packed(s->raw[0], s->raw_length[0]), tid = packed(s->raw[1], s->raw_length[1]);
  struct recent *r = &s->recent[mixed(pid ^ tid * 31) & (RECENT - 1)];
  if (r->words[0] == pid && r->words[1] == tid && r->lengths[0] == s->raw_length[0] && r->lengths[1] == s->raw_length[1])
    return r->track;
  int64_t track = new_track(s);
  if (track >= 0) *r = (struct recent){{pid, tid}, {s->raw_length[0], s->raw_length[1]}, track};
  return track;
}

static int to_table(struct scanner *s, struct table *t) {
  if (t->count == t->room) {
    int64_t room = t->room ? 2 * t->room : 4096;
    for (int i = 0; i < t->width; i++)
      if (!grown(&t->columns[i], room * (i && s->kinds[t->slots[i]] != WHOLE ? 4 : 8))) return 0;
    t->room = room;
  }
  ((int64_t *)t->columns[0])[t->count] = s->rows;
  for (int i = 1; i < t->width; i++) {
    if (s->kinds[t->slots[i]] == WHOLE) ((int64_t *)t->columns[i])[t->count] = got(s, t->slots[i], NONE);
    else ((int32_t *)t->columns[i])[t->count] = (int32_t)got(s, t->slots[i], 0);
  }
  t->count++;
  return 1;
}

/* The event that was read, as a row. */
static int append(struct scanner *s) {
  int64_t phase = got(s, PH, 0), ts = got(s, TS, NONE), dur = got(s, DUR, NONE);
  if (phase == 'X' && ts == NONE) {
    s->without_time++;
    return 1;
  }
  if (phase == 'X' && dur == NONE) s->without_duration++;
  if (dur != NONE && dur < 0) s->negative++;
  int64_t track = track_of(s);
  if (track < 0 || (s->rows == s->room && !more_rows(s))) return 0;
  int64_t row = s->rows;
  s->phase[row] = (uint8_t)phase;
  s->category[row] = (int32_t)got(s, CAT, 0);
  s->name[row] = (int32_t)got(s, NAME, 0);
  s->track[row] = (int32_t)track;
  s->ts[row] = ts;
  s->dur[row] = dur < 0 ? 0 : dur;
  s->link[row] = got(s, CORRELATION, got(s, ID, NONE));
  s->external[row] = got(s, EXTERNAL, NONE);
  if (s->seen >> FIRST_OF_TABLES)
    for (int i = 0; i < s->table_count; i++)
      if (s->seen & s->tables[i].mask && !to_table(s, &s->tables[i])) return 0;
  s->rows++;
  return 1;
}

/* Takes whole events of a list from base[at:end]; gives back the place up to which it came. Commas are as blanks: one too
   few or too many loses nothing. */
int64_t scan(struct scanner *s, text base, int64_t at, int64_t end) {
  text p = base + at;
  s->end = base + end;
  for (;;) {
    while (*(p = blank(p)) == ',') p++;
    if (p >= s->end) {
      s->status = MORE;
      return end;
    }
    if (*p == ']') {
      s->status = DONE;
      return p + 1 - base;
    }
    text q;
    if (*p == '{') {
      s->seen = 0;
      s->status = DONE;
      q = members(s, p, 0);
      if (q && (s->status == NO_MEMORY || !append(s))) {
        s->status = NO_MEMORY;
        return p - base;
      }
    } else if ((q = value_end(s, p))) {
      s->not_objects++;
    }
    if (!q) return p - base;
    p = q;
  }
}

int status(const struct scanner *s) { return s->status; }
int64_t rows(const struct scanner *s) { return s->rows; }

void finish(struct scanner *s) {
  free(s->phase), free(s->category), free(s->name), free(s->track);
  free(s->ts), free(s->dur), free(s->link), free(s->external);
  for (int i = 0; i < s->table_count; i++)
    for (int j = 0; j < s->tables[i].width; j++) free(s->tables[i].columns[j]);
  forget(&s->texts), forget(&s->words), forget(&s->tracks), forget(&s->lists);
  free(s);
}

struct scanner *begin(void) {
  struct scanner *s = calloc(1, sizeof *s);
  if (s && (intern(&s->texts, (text) "", 0) < 0 || intern(&s->lists, (text) "", 0) < 0)) {
    finish(s);
    return NULL;
  }
  return s;
}

/* Asks for a key; `word` must outlive the scanner. Table -1: a column of every event. */
void want(struct scanner *s, const char *word, int32_t slot, int32_t kind, int32_t level, int32_t table) {
  know(&s->keys[level], word, slot);
  s->kinds[slot] = kind;
  if (level == 0) s->outer_mask |= (uint64_t)1 << slot;
  if (table < 0) return;
  struct table *t = &s->tables[table];
  if (table >= s->table_count) s->table_count = table + 1;
  if (!t->width) t->width = 1;
  t->slots[t->width++] = slot;
  t->mask |= (uint64_t)1 << slot;
}

static void *given(void **data) {
  void *it = *data;
  *data = NULL;
  return it;
}

/* A column of all events, which is the caller's from now on, to be released: scanning is over. */
void *column(struct scanner *s, int which) {
  void **all[] = {(void **)&s->phase, (void **)&s->category, (void **)&s->name, (void **)&s->track,
                  (void **)&s->ts,    (void **)&s->dur,      (void **)&s->link, (void **)&s->external};
  return given(all[which]);
}

/* A column of a table, likewise. */
void *table_column(struct scanner *s, int table, int which) { return given(&s->tables[table].columns[which]); }
int64_t table_rows(const struct scanner *s, int table) { return s->tables[table].count; }
void release(void *column) { free(column); }

/* Texts of names (0), of pids and tids (1), pairs of these (2), lists (3): bytes, and where each begins. */
void *texts_of(const struct scanner *s, int which, int64_t *count, int64_t **starts) {
  const struct texts *all[] = {&s->texts, &s->words, &s->tracks, &s->lists}, *t = all[which];
  *count = t->count;
  *starts = t->starts;
  return t->bytes;
}

int64_t counted(const struct scanner *s, int which) {
  const int64_t all[] = {s->negative, s->without_time, s->without_duration, s->not_objects};
  return all[which];
}
