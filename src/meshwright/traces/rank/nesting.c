/* Which of the spans of a thread encloses which, in one walk over them. */

#include <stdint.h>

/* Spans by start, the longer first. Of each: the place of the innermost span around it (-1 for none), and one more than
   the place of the last span inside it; what sticks out of the span around it is cut off at its end. `open` has room for
   all of them. */
void enclose(int64_t count, const int64_t *starts, int64_t *stops, int64_t *parent, int64_t *last, int64_t *open) {
  int64_t depth = 0;
  for (int64_t i = 0; i < count; i++) {
    while (depth && stops[open[depth - 1]] <= starts[i]) last[open[--depth]] = i;
    parent[i] = depth ? open[depth - 1] : -1;
    if (depth && stops[i] > stops[parent[i]]) stops[i] = stops[parent[i]];
    open[depth++] = i;
  }
  while (depth) last[open[--depth]] = count;
}
